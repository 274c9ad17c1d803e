"""What users are told while they wait."""

from __future__ import annotations

import io
import itertools
import sys

import pytest

from vlcache_jax.common import progress
from vlcache_jax.common.progress import Progress, shown_waiting


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_a_line_at_once_and_then_now_and_then(clock, capsys):
    with Progress("answering", 9) as bar:
        for second in (1, 1, 0.5, 0.6, 1, 1):
            clock[0] += second
            bar.update()
    assert capsys.readouterr().err == "answering\nanswering 4 of 9\n"


def test_work_of_another_kind_has_its_line(clock, capsys):
    with Progress("answering", 2) as bar:
        for program in ("layer(64, 64)", "layer(128, 64)"):
            with Progress(f"compiling {program}"):
                clock[0] += 1
            bar.update()
    with Progress("compiling", 40) as bar:
        clock[0] += 3
        bar.update(12)
    lines = ["answering", "answering: compiling layer(64, 64)", "compiling", "compiling 12 of 40"]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("answering", 2) as bar:
        with Progress("compiling layer(64, 64)"):
            pass
        bar.update(2)
    with Progress("asking"):
        pass
    states = sys.stderr.getvalue().split("\r")
    assert states[1].startswith("answering:   0%")
    assert any(state.startswith("answering: compiling layer(64, 64):") for state in states)
    assert any(state.startswith("answering: 100%") and "2/2" in state for state in states)
    assert states[-1].startswith("asking")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal(), None])
def test_what_is_not_shown_is_silent_and_so_is_what_is_within(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("answering", 1, show=stream is None) as bar:
        with Progress("compiling"):
            pass
        bar.update()
    assert not stream or not stream.getvalue()


def test_after_an_error_the_next_one_stands_alone(capsys):
    with pytest.raises(RuntimeError), Progress("answering"):
        raise RuntimeError
    with Progress("scoring"):
        pass
    assert capsys.readouterr().err == "answering\nscoring\n"


def test_a_note_stands_after_the_numbers(clock, capsys):
    with Progress("compiling", 40) as bar:
        clock[0] += 3
        bar.reach(0, "programs, 3 s, now window(1)")
        clock[0] += 3
        bar.reach(12, "programs, 6 s, now window(4)")
    lines = [
        "compiling",
        "compiling 0 of 40 programs, 3 s, now window(1)",
        "compiling 12 of 40 programs, 6 s, now window(4)",
    ]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_terminal_gets_the_note_too(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("compiling", 4) as bar:
        bar.reach(1, "programs, 6 s, now window(4)")
    assert "compiling programs, 6 s, now window(4):  25%" in sys.stderr.getvalue()


def test_the_longer_a_wait_the_fewer_its_lines(clock, capsys):
    """Seven minutes of a server's warm-up that reports every second."""
    with Progress("compiling", 420) as bar:
        for second in range(420):
            clock[0] += 1
            bar.reach(second)
    lines = capsys.readouterr().err.splitlines()
    seconds = [int(line.split()[1]) for line in lines[1:]]
    gaps = [after - before for before, after in itertools.pairwise(seconds)]
    assert gaps[0] == 3
    assert gaps == sorted(gaps)
    assert 25 <= gaps[-1] <= 30
    assert len(lines) < 45


def test_loading_is_shown_beside_something_and_not_alone(clock, capsys):
    with shown_waiting("loading programs"):
        pass
    with shown_waiting("compiling window(1)"):
        pass
    with Progress("answering"), shown_waiting("loading programs"):
        pass
    assert capsys.readouterr().err.splitlines() == ["compiling window(1)", "answering", "answering: loading programs"]

"""What users are told while they wait."""

from __future__ import annotations

import io
import sys

import pytest

from vlcache_jax import progress
from vlcache_jax.progress import Progress


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

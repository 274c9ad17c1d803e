"""XLA's message about slow compilations stays out of users' sight, and the log has its level again afterwards."""

import threading

import jax
import pytest

from tests.helper import SIZES
from vlcache_jax import LLM
from vlcache_jax.device.programs import table


@pytest.fixture
def levels(monkeypatch):
    """The levels that XLA's log is given."""
    found = []
    monkeypatch.setattr(table, "_set_level", found.append)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    return found


def test_errors_are_hidden_while_any_thread_compiles(levels):
    own, inside, go = table.Alarm(), threading.Event(), threading.Event()

    def compile_long():
        with own.hidden():
            inside.set()
            go.wait()

    thread = threading.Thread(target=compile_long)
    thread.start()
    inside.wait()
    with own.hidden():
        pass
    assert levels == [3]
    go.set()
    thread.join()
    assert levels == [3, 1]


def test_the_level_comes_back_after_an_error(levels):
    own = table.Alarm()
    with pytest.raises(ValueError, match="wrong"), own.hidden():
        raise ValueError("wrong")
    assert levels == [3, 1]


@pytest.mark.parametrize("level", ["0", "2", "3"])
def test_a_level_that_a_user_set_stays(levels, monkeypatch, level):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with table.Alarm().hidden():
        pass
    assert not levels


def test_jax_logging_level_stays(levels):
    before = jax.config.jax_logging_level
    jax.config.update("jax_logging_level", "ERROR")
    try:
        with table.Alarm().hidden():
            pass
    finally:
        jax.config.update("jax_logging_level", before)
    assert not levels


def test_this_jaxlib_has_the_function():
    from jax._src.lib import utils

    assert callable(utils.absl_set_min_log_level)


@pytest.mark.slow
def test_programs_compile_with_the_alarm_hidden(levels, checkpoints, monkeypatch):
    compile_program, seen = jax.stages.Lowered.compile, []
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda *given: seen.append(list(levels)) or compile_program(*given)
    )
    sizes = SIZES | {"max_model_len": 640}  # sizes of its own, whose programs no other test has compiled
    with LLM(checkpoints("qwen3_vl"), use_tqdm=False, **sizes) as llm:
        llm.generate("a")
    assert seen
    assert all(one[-1] == 3 for one in seen)
    assert levels[-1] == 1

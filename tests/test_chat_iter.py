"""Answers without end: what is taken of an iterable, what comes of it, and what is left where it stops."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import vlcache_jax.common.progress as progress
from tests.helper import SIZES, WITHIN, assert_nothing_left, user
from vlcache_jax import LLM, RequestError, SamplingParams

DECODE_SLOTS = SIZES["buckets"].max_sequences
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
AHEAD = 8 * DECODE_SLOTS  # rows taken of the iterable and not yielded yet, at most
TOO_LONG = "w " * 600


@pytest.fixture(scope="module")
def pictures(textured_image):
    return [textured_image(64, 64 + 32 * (seed % 3), seed) for seed in range(4)]


@pytest.fixture(scope="module")
def engine(checkpoints):
    with LLM(checkpoints("qwen3_vl"), use_tqdm=False, **SIZES) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    """It is empty at first, and nothing may be left behind in the end."""
    engine.reset_mm_cache()
    hook = sys.unraisablehook
    yield engine
    assert_nothing_left(engine)
    stays = progress._innermost.get(), sys.unraisablehook
    progress._innermost.set(None)  # it is this test's fault, not the next one's
    sys.unraisablehook = hook
    assert stays == (None, hook)


def chat_iter(llm, conversations, params=GREEDY, **options):
    return llm.chat_iter(conversations, params, **{"use_tqdm": False} | options)


def tokens(output):
    return [one.token_ids for one in output.outputs]


def alone(llm, conversations, params=GREEDY):
    return [tokens(llm.chat([one], params, use_tqdm=False)[0]) for one in conversations]


def rows_of(pictures, count):
    return [user(f"{i}", *pictures[i % 5 : i % 5 + 1]) for i in range(count)]


class Counted:
    """Says how many rows have been taken."""

    def __init__(self, rows):
        self.rows, self.taken = iter(rows), 0

    def __iter__(self):
        return self

    def __next__(self):
        row = next(self.rows)
        self.taken += 1
        return row


@pytest.mark.parametrize(
    ("kind", "count"), [(list, 0), (iter, 0), (list, 4), (iter, 1), (list, 19), (tuple, 9), (Counted, 19)]
)
def test_each_row_comes_once_and_as_chat_answers_it(llm, pictures, kind, count):
    rows = rows_of(pictures, count)
    expected = [tokens(output) for output in llm.chat(rows, GREEDY, use_tqdm=False)]
    llm.reset_mm_cache()
    found = list(chat_iter(llm, kind(rows)))
    assert sorted(index for index, _ in found) == list(range(count))
    assert [tokens(output) for _, output in sorted(found, key=lambda pair: pair[0])] == expected
    assert all(output.finished and output.error is None for _, output in found)


def test_reports_are_those_of_rows_one_by_one(llm, pictures):
    rows = [user("same start", pictures[i % 2], f"{i}") for i in range(10)]
    expected = [llm.chat([row], GREEDY, use_tqdm=False)[0].cache for row in rows]
    llm.reset_mm_cache()
    found = dict(chat_iter(llm, rows))
    for i, report in enumerate(expected):
        assert [one.match for one in found[i].cache.images] == [one.match for one in report.images]
        assert found[i].cache.request_known == report.request_known


def test_only_so_many_are_taken_as_are_needed(llm):
    rows = Counted(user(f"{i % 50}") for i in itertools.count())
    answers = chat_iter(llm, rows)
    assert rows.taken == 0  # nothing has been asked for
    with contextlib.closing(answers):
        for done in range(60):
            next(answers)
            assert rows.taken - done <= AHEAD


def test_who_does_not_ask_takes_nothing(llm):
    rows = Counted(user(f"{i}") for i in range(60))
    with contextlib.closing(chat_iter(llm, rows)) as answers:
        next(answers)
        taken = rows.taken
        with llm.service.loop._changed:
            assert llm.service.loop._changed.wait_for(lambda: llm.service.loop._thread is None, WITHIN)
        assert rows.taken == taken
        assert len(list(answers)) == 59


@pytest.mark.parametrize("how", ["break", "close", "del", "raise"])
def test_what_runs_ends_where_it_is_stopped(llm, pictures, how):
    rows = Counted(user(f"{i}", pictures[i % 4]) for i in range(100))
    before = llm.stats().generated_tokens
    answers = chat_iter(llm, rows, LONG)
    if how == "raise":
        with contextlib.suppress(KeyError):
            for _ in answers:
                raise KeyError
    else:
        for _ in answers:
            break
    if how == "close":
        answers.close()
        assert list(answers) == []
    del answers
    assert_nothing_left(llm)
    assert rows.taken <= AHEAD
    assert llm.stats().generated_tokens - before <= AHEAD * LONG.max_tokens
    assert alone(llm, [user("a")])


def test_one_that_was_never_asked_runs_nothing(llm):
    rows = Counted([user("a")])
    chat_iter(llm, rows).close()
    chat_iter(llm, rows)
    assert rows.taken == 0


# --- wrong rows -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(pictures):
    """Rows, some of them wrong, and by index what is wrong with these."""
    rows = rows_of(pictures, 23)
    wrong = {
        3: (user(TOO_LONG), "must fit in max_model_len"),
        9: (user("x", b"%!PS-Adobe-3.0"), "images[0] must be an image that Pillow can read"),
        10: ([{"role": "robot", "content": "x"}], "messages[0] must have the role"),
        16: (7, "conversations[16]"),
        22: (user("\ud800"), "must be text"),
    }
    for index, (row, _) in wrong.items():
        rows[index] = row
    return rows, {index: message for index, (_, message) in wrong.items()}


def test_wrong_rows_come_back(llm, mixed):
    rows, wrong = mixed
    pairs = list(chat_iter(llm, iter(rows), on_error="return"))
    assert sorted(index for index, _ in pairs) == list(range(23))
    found = dict(pairs)
    good = [i for i in range(23) if i not in wrong]
    assert [tokens(found[i]) for i in good] == alone(llm, [rows[i] for i in good])
    for index, message in wrong.items():
        assert message in found[index].error
        assert found[index].error.startswith(f"conversations[{index}]")
        assert found[index].outputs == ()


def test_a_wrong_row_ends_the_job_behind_what_runs(llm, mixed):
    rows, _ = mixed
    del rows[3]
    taken, found = Counted(rows), {}
    with pytest.raises(RequestError) as caught:
        found.update(chat_iter(llm, taken))
    # The second eight hold the first wrong ones, which are named together. The first eight have been answered.
    assert caught.value.errors.keys() == {8, 9, 15}
    assert sorted(found) == list(range(8))
    assert caught.value.outputs == []
    assert taken.taken <= 2 * DECODE_SLOTS
    assert [tokens(found[i]) for i in range(8)] == alone(llm, rows[:8])


def test_a_picture_that_breaks_when_it_is_decoded(llm, pictures, tmp_path):
    from PIL import Image

    path = tmp_path / "a.png"
    Image.fromarray(pictures[1]).save(path)
    rows = [user(f"{i}", path.read_bytes()[:-600] if i == 6 else pictures[0]) for i in range(30)]
    found = dict(chat_iter(llm, rows, on_error="return"))
    assert sorted(found) == list(range(30))
    assert [i for i, output in found.items() if output.error] == [6]
    found.clear()
    llm.reset_mm_cache()
    with pytest.raises(RequestError, match=r"^conversations\[6\] images\[0\] must be an image") as caught:
        found.update(chat_iter(llm, rows))
    assert caught.value.errors.keys() == {6}
    assert set(range(6)) <= found.keys() <= set(range(30)) - {6}


# --- iterables that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("mine"), RuntimeError("mine"), KeyboardInterrupt("mine")])
def test_an_error_of_the_iterable_comes_through(llm, pictures, error):
    def rows():
        for i in range(10):
            yield user(f"{i}", pictures[i % 4])
        raise error

    found = []
    with pytest.raises(type(error), match="mine") as caught:
        found.extend(index for index, _ in chat_iter(llm, rows(), LONG))
    assert caught.value is error
    assert len(found) == len(set(found))
    assert_nothing_left(llm)
    assert alone(llm, [user("a")])


def test_an_iterable_may_use_the_engine(llm):
    """Each row follows from an answer."""
    expected = alone(llm, [user(f"{i}") for i in range(6)])

    def rows():
        for i in range(6):
            llm.chat([user("why")], GREEDY, use_tqdm=False)
            yield user(f"{i}")

    found = dict(chat_iter(llm, rows()))
    assert [tokens(found[i]) for i in range(6)] == expected


def test_an_error_of_the_engine_comes_through(llm, monkeypatch):
    run, calls = llm.service.device.runner.run, itertools.count()

    def broken(key, *given):
        if next(calls) == 60:
            raise OSError("the device is gone")
        return run(key, *given)

    rows = [user(f"{i}") for i in range(80)]
    expected = alone(llm, rows[:1])
    with monkeypatch.context() as context:
        context.setattr(llm.service.device.runner, "run", broken)
        with pytest.raises(OSError, match="the device is gone"):
            list(chat_iter(llm, rows))
    assert_nothing_left(llm)
    assert alone(llm, rows[:1]) == expected


def test_closing_ends_it(checkpoints, llm):
    with LLM(checkpoints("qwen3_vl"), use_tqdm=False, **SIZES) as closing:
        closing.service.device.runner.programs, closing.service.device.runner.run = (
            llm.service.device.runner.programs,
            llm.service.device.runner.run,
        )
        answers = chat_iter(closing, (user(f"{i}") for i in itertools.count()), LONG)
        next(answers)
        threading.Timer(0.05, closing.close).start()
        with pytest.raises(RuntimeError, match=r"^this LLM is closed$"):
            for _ in answers:
                pass
        with pytest.raises(RuntimeError, match=r"^this LLM is closed$"):
            chat_iter(closing, [user("a")])


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conversations": "a"}, "conversations must be an iterable of conversations, got str"),
        ({"conversations": {"role": "user"}}, "conversations must be an iterable of conversations, got dict"),
        ({"conversations": 3}, "conversations must be an iterable of conversations, got int"),
        ({"params": "greedy"}, "sampling_params must be SamplingParams, an iterable of them or None, got 'greedy'"),
        ({"params": 3}, "sampling_params must be SamplingParams, an iterable of them or None, got 3"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"cache_salt": 1}, "cache_salt must be"),
        ({"use_tqdm": 1}, "use_tqdm must be"),
        ({"mm_processor_kwargs": {"max_pixel": 1}}, "mm_processor_kwargs"),
        ({"reuse": "some"}, "reuse"),
    ],
)
def test_a_bad_argument_is_named_at_once(llm, options, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        chat_iter(llm, **{"conversations": [user("a")]} | options)  # nobody has asked for a row yet
    assert not isinstance(caught.value, RequestError)


def test_one_conversation_is_no_list_of_them(llm):
    found = dict(chat_iter(llm, user("a"), on_error="return"))
    assert found[0].error.startswith("conversations[0]")


# --- several of them --------------------------------------------------------------------------------------------------


def test_several_in_one_thread_may_take_turns(llm, pictures):
    """Whichever ends first, nothing of it stays with the thread."""
    rows = rows_of(pictures, 13)
    expected = alone(llm, rows)
    found = ({}, {})
    jobs = [chat_iter(llm, rows), chat_iter(llm, rows[:7])]
    for pairs in itertools.zip_longest(*jobs):
        for mine, pair in zip(found, pairs, strict=True):
            if pair is not None:
                mine[pair[0]] = tokens(pair[1])
    assert [found[0][i] for i in range(13)] == expected
    assert [found[1][i] for i in range(7)] == expected[:7]


def test_the_first_may_end_before_the_second(llm):
    first, second = chat_iter(llm, [user("a")] * 9), chat_iter(llm, [user("b")] * 9)
    next(first)
    next(second)
    first.close()
    second.close()
    # The fixture looks at what stays with the thread.


def test_each_row_may_be_asked_for_elsewhere(llm):
    """As servers do that iterate in threads: each row in another thread, in a context of its own."""
    answers = chat_iter(llm, [user(f"{i}") for i in range(9)])
    done = object()
    found = []
    with ThreadPoolExecutor(2) as threads:
        while True:
            context = contextvars.copy_context()
            pair = threads.submit(context.run, next, answers, done).result()
            if pair is done:
                break
            found.append(pair[0])
    assert sorted(found) == list(range(9))


def test_jobs_in_several_threads(llm, pictures):
    rows = rows_of(pictures, 11)
    expected = alone(llm, rows)
    llm.reset_mm_cache()
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: dict(chat_iter(llm, iter(rows))), range(4)):
            assert [tokens(found[i]) for i in range(11)] == expected


def test_a_long_job_keeps_nothing_of_what_it_yielded(llm, textured_image, monkeypatch):
    """What is compiled ahead is found from answered requests; a job has more of them than memory."""
    ahead = llm.service.ahead
    monkeypatch.setattr(ahead, "_stopped", False)
    monkeypatch.setattr(ahead._programs, "program", lambda key: None)  # which programs does not matter
    rows = (user("a", textured_image(64, 64, 100 + seed)) for seed in range(40))
    kept = [sum(len(own) for _, own in ahead._answered) for _ in chat_iter(llm, rows)]
    ahead.wait()
    ahead._answered.clear()
    assert max(kept) <= 3 * DECODE_SLOTS

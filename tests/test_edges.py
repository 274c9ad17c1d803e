"""What wrong rows, hostile pictures and damaged weights do to a call, and to the rows beside them."""

from __future__ import annotations

import gc
import io
import itertools
import pickle
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from PIL import Image

import vlcache_jax.calls.groups as serving
import vlcache_jax.preparation.identification as identification
import vlcache_jax.preparation.recognition as recognition
from tests.helper import SIZES, WITHIN, user
from vlcache_jax import LLM, BucketSizes, CacheConfig, RequestError, SamplingParams
from vlcache_jax.cache.record import Why
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.inputs.processor import ImageProcessor

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def pictures(textured_image):
    return [png(textured_image(64, 64 + 32 * (seed % 3), seed)) for seed in range(8)]


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, **SIZES) as engine:
        yield engine


@pytest.fixture(autouse=True)
def forget(llm):
    llm.reset_mm_cache()


def chat(llm, conversations, params=GREEDY, **options):
    """Silent, and greedy unless said otherwise."""
    return llm.chat(conversations, params, use_tqdm=False, **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# --- rows that arguments and heads tell to be wrong -------------------------------------------------------------------


@pytest.fixture
def wrong_rows(pictures, tmp_path):
    """Conversations, and by row what is wrong with them."""
    big = io.BytesIO()
    Image.new("1", (9000, 9000)).save(big, "PNG")
    conversations = [user("a"), user("b", pictures[0])] + [user("c")] * 9
    wrong = {
        2: (user("w " * 600), "prompt and output must fit in max_model_len = 1024 tokens"),
        3: (user("x", tmp_path / "missing.png"), "images[0] must be the path of a readable file"),
        4: (user("\ud800"), "must be text, got '\\ud800' at character"),
        5: ([{"role": "robot", "content": "x"}], "messages[0] must have the role"),
        6: (user("x", pictures[1], big.getvalue()), "images[1] must have at most 50000000 pixels, got 9000x9000"),
        7: (user("x", b"%!PS-Adobe-3.0 EPSF-3.0"), "images[0] must be an image that Pillow can read"),
        9: (user("x", png(np.zeros((2, 402), np.uint8))), "images[0] must have an aspect ratio of at most 200"),
    }
    for row, (conversation, _) in wrong.items():
        conversations[row] = conversation
    return conversations, {row: message for row, (_, message) in wrong.items()}


def test_all_wrong_rows_are_named_before_anything_runs(llm, wrong_rows, monkeypatch):
    conversations, wrong = wrong_rows
    monkeypatch.setattr(ImageSource, "decode", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(llm.service.device.runner, "run", lambda *_: pytest.fail("ran"))
    params = [GREEDY] * len(conversations)
    params[10] = SamplingParams(stop_token_ids=[10**6])
    wrong = {**wrong, 10: "sampling_params[10] stop_token_ids must be below"}
    with pytest.raises(RequestError, match=f"^{len(wrong)} requests failed:\n") as caught:
        chat(llm, conversations, params)
    assert caught.value.errors.keys() == wrong.keys()
    assert caught.value.outputs == []
    lines = str(caught.value).splitlines()[1:]
    for (row, message), line in zip(wrong.items(), lines, strict=True):
        assert message in line
        assert line == caught.value.errors[row]
        assert line.startswith((f"conversations[{row}]", f"sampling_params[{row}]"))


def test_an_error_goes_from_process_to_process():
    error = RequestError({3: "prompts[3] is wrong", 1: "prompts[1] is wrong"}, [None, 2])
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), found.errors, found.outputs) == (
        RequestError, str(error), error.errors, error.outputs,
    )  # fmt: skip


def test_wrong_rows_come_back_and_the_others_are_answered(llm, wrong_rows):
    conversations, wrong = wrong_rows
    outputs = chat(llm, conversations, on_error="return")
    assert len(outputs) == len(conversations)
    good = [row for row in range(len(conversations)) if row not in wrong]
    assert tokens([outputs[row] for row in good]) == [tokens(chat(llm, [conversations[row]]))[0] for row in good]
    assert all(outputs[row].error is None for row in good)
    for row, message in wrong.items():
        assert message in outputs[row].error
        assert outputs[row].outputs == ()
        assert not outputs[row].cache.exact


def test_other_calls_name_and_return_rows_too(llm, pictures):
    prompts = ["a", {"prompt": "no place", "multi_modal_data": {"image": pictures[0]}}, "b", "\udfff"]
    with pytest.raises(RequestError, match=r"(?s)2 requests failed:.*prompts\[1\] must have one.*prompts\[3\] must"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True, False]
    rows, texts = [user("a"), user("b"), user("c")], ["x", [10**6], "\ud800"]
    with pytest.raises(RequestError, match=r"(?s)continuations\[1\] must be a text or token ids.*continuations\[2\]"):
        llm.score(rows, texts, use_tqdm=False)
    llm.reset_prefix_cache()
    scores = llm.score(rows, texts, use_tqdm=False, on_error="return")
    llm.reset_prefix_cache()  # as many rows are computed again
    assert [score.error is None for score in scores] == [True, False, False]
    assert scores[0].total == llm.score(rows[:1], texts[:1], use_tqdm=False)[0].total
    assert len(scores[1].logprobs) == 0


def test_one_wrong_row_is_one_line(llm):
    with pytest.raises(RequestError, match=r"^conversations\[1\]: prompt and output must fit") as caught:
        chat(llm, [user("a"), user("w " * 600)])
    assert "\n" not in str(caught.value)


def test_many_wrong_rows_make_a_short_message(llm):
    with pytest.raises(RequestError) as caught:
        chat(llm, [user("\ud800")] * 100)
    assert len(caught.value.errors) == 100
    assert len(str(caught.value).splitlines()) == 22


@pytest.mark.parametrize("options", [{"on_error": "ignore"}, {"on_error": None}, {"cache_salt": "\ud800"}])
def test_what_all_rows_share_is_no_row(llm, options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be") as caught:
        chat(llm, [user("a")], **options)
    assert not isinstance(caught.value, RequestError)


def test_limits_that_ask_for_too_much_name_the_image(llm, pictures):
    with pytest.raises(
        RequestError, match=r"conversations\[1\] images\[0\] must .* or those of mm_processor_kwargs, or open"
    ):
        chat(llm, [user("a"), user(pictures[0])], mm_processor_kwargs={"min_pixels": 2**40})
    huge = {"type": "image", "image": pictures[0], "resized_height": 9000, "resized_width": 9000}
    with pytest.raises(
        RequestError, match=r"conversations\[0\] images\[0\] must .* lower resized_height or resized_wid"
    ):
        chat(llm, [[{"role": "user", "content": [huge]}]])


def test_one_picture_in_several_sizes_has_a_key_for_each(llm, pictures):
    """Limits that stand beside an image are its own, and part of its key where its pixels change."""

    def shown(**asked):
        return {"type": "image", "image": pictures[0], **asked}

    block = 2 * llm.service.preparation.processor.patch_size
    sizes = [
        {},
        {"max_pixels": 6 * block**2},
        {"resized_height": 2 * block, "resized_width": 3 * block},
        {"max_pixels": 1},
    ]
    content = [*(shown(**size) for size in sizes), shown()]
    [output] = chat(llm, [[{"role": "user", "content": content}]])
    images = output.cache.images
    assert [image.tokens for image in images][2:] == [6, 1, images[0].tokens]
    assert len({image.key for image in images}) == 4
    assert images[0].key == images[4].key == llm.cache.key(pictures[0])
    alone = chat(llm, [[{"role": "user", "content": [one]}] for one in content])
    assert [one.cache.images[0].key for one in alone] == [image.key for image in images]
    off = chat(llm, [[{"role": "user", "content": content}]], reuse="off")
    assert tokens(off) == tokens([output])


def test_what_a_transparent_file_was_taken_for_before_is_not_found(llm):
    """A record of it lies under the key of other pixels."""
    ink = np.zeros((64, 96, 4), np.uint8)
    ink[20:40, 20:60, 3] = 255
    file = png(ink)
    [black, white] = chat(llm, [user(np.zeros((64, 96, 3), np.uint8)), user(ink)])
    [seen] = chat(llm, [user(file)])
    assert seen.cache.images[0].key == white.cache.images[0].key != black.cache.images[0].key
    assert seen.cache.images[0].match == "exact"
    assert tokens([seen]) == tokens([white])
    with Image.open(io.BytesIO(file)) as opened:
        assert llm.cache.key(opened) == llm.cache.key(ink) == llm.cache.key(file)


def test_a_text_that_is_too_long_for_sure_is_not_tokenised(llm, monkeypatch):
    long = "a" * (20 << 20)
    monkeypatch.setattr(type(llm.service.renderer.tokenizer), "__call__", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(RequestError, match=r"conversations\[0\] must be short enough for max_model_len = 1024 tokens"):
        chat(llm, [user(long)])


def test_token_ids_that_are_too_many_are_not_made_an_array(llm, monkeypatch):
    monkeypatch.setattr("vlcache_jax.inputs.prompt._token_ids", lambda *_: pytest.fail("made an array"))
    with pytest.raises(
        RequestError, match="prompt_token_ids must be short enough for max_model_len = 1024 tokens, got 2"
    ):
        llm.generate([{"prompt_token_ids": [1] * 2_000_000}])


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "10", 2**40])
def test_the_limit_of_pixels_is_checked_first(bad):
    with pytest.raises(ValueError, match="max_image_pixels must be an integer from 1"):
        LLM("no/such/model", max_image_pixels=bad)


def test_the_limit_of_pixels_can_be_set(directory, pictures):
    with LLM(directory, **SIZES, max_image_pixels=5000) as small:
        outputs = chat(small, [user(pictures[0]), user(pictures[1])], on_error="return")
        assert outputs[0].error is None
        assert "must have at most 5000 pixels" in outputs[1].error


# --- pictures that break when they are decoded ------------------------------------------------------------------------


def test_a_broken_picture_ends_its_row_or_stops_the_call(llm, pictures):
    rows = [user("a", pictures[0]), user("b"), user("c", pictures[1][:-600]), user("d", pictures[2]), user("e")]
    expected = tokens(chat(llm, [rows[i] for i in (0, 1, 3, 4)]))
    llm.reset_mm_cache()
    outputs = chat(llm, rows, on_error="return")
    assert tokens([outputs[i] for i in (0, 1, 3, 4)]) == expected
    assert "conversations[2] images[0] must be an image that Pillow can read" in outputs[2].error
    llm.reset_mm_cache()
    with pytest.raises(RequestError, match=r"^conversations\[2\] images\[0\] must be an image that Pillow") as caught:
        chat(llm, rows)
    assert caught.value.errors.keys() == {2}
    assert tokens(caught.value.outputs) == expected[:2]
    llm.cache.flush()
    assert llm.cache.stats().kv_records == 1  # what stands behind the broken row has not run


def test_each_row_of_a_broken_picture_is_named_itself(llm, pictures):
    broken, large = pictures[1][:-600], io.BytesIO()
    Image.new("1", (9000, 9000)).save(large, "PNG")
    rows = [user("a"), user("b", broken), user("c", pictures[0], broken), user("d", large.getvalue())] * 2
    outputs = chat(llm, rows, on_error="return")
    for row, image in ((1, 0), (2, 1), (3, 0), (5, 0), (6, 1), (7, 0)):
        assert outputs[row].error.startswith(f"conversations[{row}] images[{image}] must")
    assert tokens([outputs[0], outputs[4]]) == tokens(chat(llm, [rows[0]])) * 2


def test_a_refused_picture_is_not_decoded_again(llm, pictures, monkeypatch):
    decoded = []
    decode = ImageSource.decode
    monkeypatch.setattr(ImageSource, "decode", lambda self, *a: decoded.append(self.name) or decode(self, *a))
    broken = user("a", pictures[1][:-600])
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^conversations\[0\] images\[0\] must be an image that Pillow"):
            chat(llm, [broken])
    [output] = llm.generate(
        {"prompt": "<|image_pad|>a", "multi_modal_data": {"image": pictures[1][:-600]}}, GREEDY, on_error="return"
    )
    assert output.error.startswith("prompts images[0] must be an image that Pillow")
    assert len(decoded) == 1
    with pytest.raises(RequestError):  # another tenant learns nothing from it
        chat(llm, [broken], cache_salt="other")
    assert len(decoded) == 2


def test_pixels_are_decoded_a_window_ahead_and_then_forgotten(directory, pictures, monkeypatch):
    """One picture a window: while row i runs, that of row i + 1 is decoded, and no other."""
    with LLM(directory, **SIZES, cache=CacheConfig(host_bytes=0)) as plain:
        conversations = [user("a", picture) for picture in pictures]
        expected = tokens(chat(plain, conversations))
        monkeypatch.setattr(identification, "WINDOW_BYTES", 1)
        events = []
        lock = threading.Lock()
        cut, hear = ImageProcessor.patches, serving.Job._hear

        def note(event):
            with lock:
                events.append(event)

        monkeypatch.setattr(ImageProcessor, "patches", lambda *args: (note("decoded"), cut(*args))[1])
        monkeypatch.setattr(serving.Job, "_hear", lambda job, one: (job.has_begun or note("ran"), hear(job, one)))
        seen = []
        identify = identification.Arrivals._finish
        monkeypatch.setattr(
            identification.Arrivals,
            "_finish",
            lambda *args: seen.append(identify(*args)) or seen[-1],
        )
        assert tokens(chat(plain, conversations)) == expected
        assert events.count("ran") == events.count("decoded") == len(pictures)
        for done in range(len(pictures)):
            place = [i for i, event in enumerate(events) if event == "ran"][done]
            assert events[:place].count("decoded") <= done + 2
        assert not any("patches" in request.images[0].__dict__ for request in seen)


def test_a_picture_in_two_windows_is_decoded_once(llm, pictures, monkeypatch):
    monkeypatch.setattr(identification, "WINDOW_BYTES", 1)
    decoded = []
    decode = ImageSource.decode
    monkeypatch.setattr(ImageSource, "decode", lambda self, *a: decoded.append(self.name) or decode(self, *a))
    outputs = chat(llm, [user("a", pictures[i % 2]) for i in range(6)])
    assert len(decoded) == 2
    assert [output.cache.images[0].match for output in outputs] == ["miss", "miss", *["exact"] * 4]


def test_a_text_request_does_not_wait_for_pixels(llm, pictures, monkeypatch):
    expected = tokens(chat(llm, [user("text")]))
    decoding, go_on = threading.Event(), threading.Event()
    decode = ImageSource.decode

    def slow(self, *args):
        decoding.set()
        assert go_on.wait(60)
        return decode(self, *args)

    monkeypatch.setattr(ImageSource, "decode", slow)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(chat(llm, [user("picture", pictures[0])])))
    thread.start()
    assert decoding.wait(60)
    steps = []
    run = llm.service.device.runner.run
    monkeypatch.setattr(
        llm.service.device.runner, "run", lambda one, *args: (steps.append(one.name), run(one, *args))[1]
    )
    assert tokens(chat(llm, [user("text")])) == expected  # while the other call is still decoding
    assert not answers
    assert steps.count("embed") == 1
    assert steps.count("window") == 1
    go_on.set()
    thread.join(60)
    assert answers[0][0].error is None


def test_closing_ends_a_call_between_its_windows(directory, pictures, monkeypatch):
    monkeypatch.setattr(identification, "WINDOW_BYTES", 1)
    with LLM(directory, **SIZES) as closing:
        finish = identification.Arrivals._finish

        def close_then(arrivals, row, *args):
            if row == 2:
                closing.close()  # as another thread would, while pixels are decoded
            return finish(arrivals, row, *args)

        monkeypatch.setattr(identification.Arrivals, "_finish", close_then)
        with pytest.raises(RuntimeError, match=r"^this LLM is closed$"):
            chat(closing, [user("a", picture) for picture in pictures])
        with pytest.raises(RuntimeError, match=r"^this LLM is closed$"):
            chat(closing, [user("a", pictures[0])])


def test_decoding_has_a_budget_that_is_given_in_order():
    budget = recognition.DecodingBudget(100)
    running, most, order = [], [], []

    def work(amount):
        with budget.take(amount):
            order.append(amount)
            running.append(amount)
            most.append(sum(running))
            running.remove(amount)

    with budget.take(60):
        threads = [threading.Thread(target=work, args=(amount,)) for amount in (90, 20)]
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(budget._waiting) < count:
                time.sleep(0.001)
        assert not order  # 20 would fit, but 90 came first
    for thread in threads:
        thread.join(10)
    assert order == [90, 20]
    assert max(most) <= 100
    work(1000)  # alone, anything may run
    assert most[-1] == 1000


_PEAK = """
import io, itertools, resource, sys, zlib, struct
import numpy as np
from PIL import Image
from vlcache_jax.inputs.images import read_image
from vlcache_jax.inputs.processor import ImageProcessor

def encoded(mode, width, height, suffix, cut=0):
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, suffix)
    return file.getvalue()[: -cut or None]

bombs = []
for mode, width, height, suffix, cut in eval(sys.argv[1]):
    bombs.append(encoded(mode, width, height, suffix, cut))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
for bomb in bombs:
    before = peak()
    try:
        read_image(bomb).decode()
        print("accepted")
    except ValueError:
        print(peak() - before)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
"""


@pytest.mark.slow
def test_refused_pictures_take_little_memory():
    bombs = [
        ("1", 13000, 13000, "PNG", 0),
        ("1", 13000, 13000, "TIFF", 0),
        ("RGB", 7000, 7000, "PNG", 100),
        ("RGB", 7000, 7000, "JPEG", 1000),
        ("RGB", 7000, 7000, "BMP", 1000),
    ]
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, repr(bombs)], capture_output=True, text=True, timeout=120, check=True
    )
    peaks = result.stdout.split()
    assert len(peaks) == len(bombs)
    assert max(map(int, peaks)) <= 200


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_not_lost_in_the_garbage_collector(llm, monkeypatch):
    """jax has a callback there, and what is raised in such a callback is dropped."""
    expected = tokens(chat(llm, [user("a")]))
    pressed, interrupted, abort = [], threading.Event(), llm.service.loop.abort

    def attend(phase, info):
        if not pressed:
            pressed.append(phase)
            raise KeyboardInterrupt

    def slow(program, *args):
        gc.collect()
        if not interrupted.wait(WITHIN):
            pytest.fail("the signal was lost")
        raise RuntimeError("whoever asked is gone")

    with monkeypatch.context() as context:
        context.setattr(llm.service.loop, "abort", lambda sequences: interrupted.set() or abort(sequences))
        context.setattr(llm.service.device.runner, "run", slow)
        gc.callbacks.append(attend)
        hook = sys.unraisablehook
        try:
            with pytest.raises(KeyboardInterrupt):
                chat(llm, [user("a")])
        finally:
            gc.callbacks.remove(attend)
    assert pressed
    assert sys.unraisablehook is hook
    assert tokens(chat(llm, [user("a")])) == expected


# --- records and weights that fail ------------------------------------------------------------------------------------


def test_a_trusted_picture_that_is_broken_ends_its_row_alone(directory, pictures, monkeypatch):
    """Its record cannot be read, so it has to be computed, and there are no pixels."""

    def prompt(image):
        return {
            "prompt": "<|image_pad|>a",
            "multi_modal_data": {"image": image},
            "multi_modal_uuids": {"image": "known"},
        }

    with LLM(directory, **SIZES, cache=CacheConfig(trust_uuids=True)) as trusting:
        [first] = trusting.generate(prompt(pictures[0]), GREEDY, use_tqdm=False)
        text = tokens(trusting.generate("b", GREEDY, use_tqdm=False))
        assert tokens(trusting.generate(prompt(b"broken"), GREEDY, use_tqdm=False)) == tokens([first])
        for record in trusting.service.cache.store.tier.records():
            record.lose(Why.load_failed, spoiled=True)
        trusting.reset_prefix_cache()  # pages need no pixels
        outputs = trusting.generate([prompt(b"broken"), "b"], GREEDY, use_tqdm=False, on_error="return")
        assert "prompts[0] images[0] must be an image that Pillow" in outputs[0].error
        assert outputs[0].outputs[0].finish_reason == "error"
        assert tokens(outputs[1:]) == text
        with pytest.raises(RequestError, match=r"prompts\[1\] images\[0\] must be an image"):
            trusting.generate(["b", prompt(b"broken")], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1, max_tokens=4, logprobs=2, seed=1)])
def test_logits_that_are_not_finite_end_their_request_alone(llm, params, monkeypatch):
    rows = [user("a"), user("b"), user("c")]
    expected = chat(llm, rows, params)
    window, steps = llm.service.device.runner.window, itertools.count()

    def damaged(*given):
        [sampled] = window(*given)
        # The third token of the second row, the window's second.
        return [sampled._replace(token=sampled.token.at[1, 1].set(-1)) if next(steps) == 0 else sampled]

    monkeypatch.setattr(llm.service.device.runner, "window", damaged)
    outputs = chat(llm, rows, params, on_error="return")
    assert tokens([outputs[0], outputs[2]]) == tokens([expected[0], expected[2]])
    assert outputs[1].error == (
        "conversations[1]: logits must be finite, got NaN or inf: the weights or a cache entry of "
        "an image may be damaged"
    )
    [answer] = outputs[1].outputs
    assert answer.finish_reason == "error"
    assert answer.token_ids == expected[1].outputs[0].token_ids[:2]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_damaged_weights_are_told(directory, value, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True)
    with LLM(directory, **SIZES) as damaged:
        norm = damaged.service.device.runner.text["norm"]
        norm["scale"] = norm["scale"].at[3].set(value)
        with pytest.raises(RequestError, match=r"^conversations\[0\]: logits must be finite, got NaN or inf"):
            chat(damaged, [user("a")], params)
        [output] = chat(damaged, [user("a")], params, on_error="return", verify=True)
        assert output.outputs[0].token_ids == ()
        assert output.outputs[0].text == ""
        assert output.verification is None
        with pytest.raises(RequestError, match=r"^conversations\[0\]: logits must be finite"):
            damaged.score([user("a")], ["b"], use_tqdm=False)


def test_what_a_request_with_damaged_logits_made_is_not_kept(llm, pictures, monkeypatch):
    expected = chat(llm, [user("a", pictures[0]), user("b", pictures[1]), user("a", pictures[0], "more")])
    llm.reset_mm_cache()
    head, steps = llm.service.device.runner.head, itertools.count()

    def damaged(*given):
        logits, first = head(*given)
        return logits.at[0].set(np.nan) if next(steps) == 0 else logits, first

    monkeypatch.setattr(llm.service.device.runner, "head", damaged)
    outputs = chat(llm, [user("a", pictures[0]), user("b", pictures[1])], on_error="return")
    assert outputs[0].error.startswith("conversations[0]: logits must be finite")
    llm.cache.flush()
    assert [record.meta.entry for record in llm.service.cache.store.tier.records()] == [
        outputs[1].cache.images[0].key
    ] * 2
    [again] = chat(llm, [user("a", pictures[0], "more")])
    assert (again.cache.images[0].match, again.cache.request_known) == ("miss", False)
    assert tokens([again]) == tokens([expected[2]])


def test_damaged_logits_stop_a_call_with_their_step(llm, monkeypatch):
    rows = [user(text) for text in "abcdefghijkl"]  # of which eight run together
    head, waves = llm.service.device.runner.head, []

    def damaged(*given):
        waves.append(given)
        logits, first = head(*given)
        return logits.at[1].set(np.nan) if len(waves) == 1 else logits, first

    monkeypatch.setattr(llm.service.device.runner, "head", damaged)
    with pytest.raises(RequestError, match=r"^conversations\[1\]: logits must be finite") as caught:
        chat(llm, rows)
    assert len(waves) == 1
    assert [output is None for output in caught.value.outputs] == [False, True, *[False] * 6]
    waves.clear()
    outputs = chat(llm, rows, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, *[True] * 10]


@pytest.mark.slow
def test_a_request_that_cannot_choose_its_rows_blocks_nobody(checkpoints, textured_image):
    """It never runs, so who would link what it was to compute has to compute that."""
    a, b = (png(textured_image(64, 64, seed)) for seed in (1, 2))
    small = SIZES | {"buckets": BucketSizes(rows=(32, 64), patches=(64, 256), sequences=(1, 4))}
    with LLM(checkpoints("qwen3_vl"), **small) as choosing:
        chat(choosing, [user("z", a)])
        rows = [user("some words before", a, "y" * 90, b, "q"), user("other", b, "z")]
        outputs = chat(choosing, rows, on_error="return", reuse="cacheblend-0.1")
        assert "conversations[0]: reuse cacheblend-0.1 must compute a prompt in one prefill chunk" in outputs[0].error
        assert outputs[1].error is None
        assert tokens([outputs[1]]) == tokens(chat(choosing, [rows[1]], reuse="off"))


def test_a_score_that_failed_is_no_number(llm):
    scores = llm.score([user("a"), user("\ud800")], ["b", "b"], use_tqdm=False, on_error="return")
    assert np.isfinite(scores[0].total)
    assert np.isnan(scores[1].total)


def test_an_answer_that_cannot_be_verified_is_told_alone(directory, pictures):
    prompt = {"prompt": "<|image_pad|>a", "multi_modal_data": {"image": pictures[0]}}
    prompt["multi_modal_uuids"] = {"image": "known"}
    with LLM(directory, **SIZES, cache=CacheConfig(trust_uuids=True)) as trusting:
        trusting.generate(prompt, GREEDY, use_tqdm=False)
        junk = {**prompt, "multi_modal_data": {"image": b"junk"}}
        outputs = trusting.generate([junk, "b"], GREEDY, use_tqdm=False, on_error="return", verify=True)
        assert "prompts[0]: the output cannot be verified: prompts[0] images[0] must be an image" in outputs[0].error
        assert outputs[1].error is None
        assert outputs[1].verification.max_logit_difference < 1e-4
        # Nor does its lie touch a row that shows the true picture.
        trusting.cache.evict(pictures[0])
        honest = {"prompt": "<|image_pad|>a", "multi_modal_data": {"image": pictures[0]}}
        outputs = trusting.generate([junk, honest], GREEDY, use_tqdm=False, on_error="return")
        assert outputs[0].error is not None
        assert outputs[1].error is None


def test_a_callers_own_objects_may_raise_anything(llm):
    class Path:
        def __fspath__(self):
            raise KeyError("evil")

    outputs = chat(llm, [user("a"), user("b", Path())], on_error="return")
    assert outputs[0].error is None
    assert outputs[1].error.startswith("conversations[1]")


def test_arguments_are_checked_before_anything_is_fetched(llm, monkeypatch):
    monkeypatch.setattr(llm.service.renderer, "image", lambda *_: pytest.fail("read"))
    picture = [user("a", b"x")]
    for bad in ({"on_error": "x"}, {"reuse": "x"}, {"cache_salt": 1}, {"params": [GREEDY] * 2}):
        with pytest.raises(ValueError, match="must be"):
            chat(llm, picture, **bad)
    with pytest.raises(ValueError, match="continuations must have one entry"):
        llm.score(picture, [], use_tqdm=False)


def test_what_passes_is_not_remembered(llm, pictures, monkeypatch):
    decode = ImageSource.decode

    def starved(self, *args):
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError(f"{self.name} must be an image") from error

    monkeypatch.setattr(ImageSource, "decode", starved)
    with pytest.raises(RequestError):
        chat(llm, [user("a", pictures[0])])
    monkeypatch.setattr(ImageSource, "decode", decode)
    assert chat(llm, [user("a", pictures[0])])[0].error is None


def test_an_open_picture_may_be_in_several_calls_at_once(llm, pictures):
    for _ in range(5):
        shown = Image.open(io.BytesIO(pictures[2]))
        outputs = []
        threads = [threading.Thread(target=lambda: outputs.extend(chat(llm, [user("a", shown)]))) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outputs) == 4
        assert len({output.outputs[0].token_ids for output in outputs}) == 1
        llm.reset_mm_cache()


def test_a_closed_engine_keeps_no_weights(directory):
    engine = LLM(directory, **SIZES)
    chat(engine, [user("a")])
    runner = weakref.ref(engine.service.device.runner)
    engine.close()
    gc.collect()
    assert runner() is None

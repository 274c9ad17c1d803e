"""Prompts that stay in the pool's pages. The reference is a cold run of the same engine."""

from __future__ import annotations

import dataclasses
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

from research.compiled import abstract_runner
from tests.helper import SIZES, damage_first_forward_pass, give_pages, spoil, user
from vlcache_jax import LLM, BucketSizes, RequestError, SamplingParams
from vlcache_jax.benchmarks.floor import MODELS
from vlcache_jax.cache import keys
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.pallas_kernels import PAGE, make_work, shared_prefixes
from vlcache_jax.reuse.policies import Spread
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.testing import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def open_llm(directory, **changes):
    return LLM(directory, use_tqdm=False, **SIZES | changes)


def page_bytes(llm):
    return PAGE * KVShape.of(llm.service.device.runner.config, np.float32).slot_bytes


def chat(llm, *conversations, params=GREEDY, **options):
    return llm.chat(list(conversations), params, use_tqdm=False, **options)


def tokens(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory) as llm:
        yield llm


@pytest.fixture
def llm(engine, monkeypatch):
    engine.reset_mm_cache()
    spoil(engine, monkeypatch)
    return engine


@pytest.fixture(scope="module")
def picture(textured_image):
    return [textured_image(150, 210, 1), textured_image(190, 120, 2)]


LONG = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade. " * 3


def test_a_repeat_computes_one_row(llm, picture, monkeypatch):
    request = user("See ", picture[0], LONG)
    [cold] = chat(llm, request, reuse="off")
    before = llm.stats()
    [first] = chat(llm, request)
    launched = []
    run = llm.service.device.runner.run
    with monkeypatch.context() as context:
        context.setattr(
            llm.service.device.runner,
            "run",
            lambda one, *args: (launched.append(one.name), run(one, *args))[1],
        )
        [again] = chat(llm, request)
    length = len(again.prompt_token_ids)
    assert tokens([again]) == tokens([first]) == tokens([cold])
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, length - 1)
    assert set(again.cache.rows) == {1}
    [image] = again.cache.images
    assert (image.kv, image.encoder, image.match, image.bytes_moved, image.why) == (
        "kv_pool",
        "none",
        "exact",
        0,
        None,
    )
    assert not {"encode", "link", "stage"} & set(launched)
    stats = llm.stats()
    assert (stats.hits - before.hits, stats.hit_tokens - before.hit_tokens) == (1, length - 1)
    assert stats.in_use == 0
    assert stats.resident == -(-(length + 5) // PAGE)  # the last token that was generated has no K, V


def test_a_prompt_of_whole_pages_computes_a_row_that_writes_nowhere(llm):
    words = "a b c d e f g h " * 100
    tokenizer = llm.service.renderer.tokenizer
    prompt = tokenizer.decode(tokenizer(words)["input_ids"][: 2 * PAGE])
    assert len(tokenizer(prompt)["input_ids"]) == 2 * PAGE
    ask = lambda **options: llm.generate(prompt, GREEDY, use_tqdm=False, **options)  # noqa: E731
    cold = ask(reuse="off")
    for found in (0, 2 * PAGE - 1, 2 * PAGE - 1):
        again = ask()
        assert again[0].num_cached_tokens == found
        assert tokens(again) == tokens(cold)
    assert llm.stats().resident == 3  # its own two, and that of the answer


def test_requests_of_one_call_share_before_any_has_run(llm, picture):
    requests = [user(picture[0], LONG, question) for question in ("What?", "Who?", "Where?")] + [user(picture[1], LONG)]
    cold = tokens(chat(llm, *requests, reuse="off"))
    together = chat(llm, *requests)
    assert tokens(together) == cold
    lengths = [len(output.prompt_token_ids) for output in together]
    begin = len(chat(llm, user(picture[0], LONG), reuse="off")[0].prompt_token_ids)
    assert [output.num_cached_tokens > begin - 20 for output in together] == [False, True, True, False]
    assert [output.cache.images[0].kv for output in together] == ["none", "kv_pool", "kv_pool", "none"]
    assert len({output.metrics.wave for output in together}) == 1
    rows = [output.cache.rows[0] for output in together]
    assert rows == [n - output.num_cached_tokens for n, output in zip(lengths, together, strict=True)]


def test_a_call_runs_together_while_the_one_before_it_ends(llm, monkeypatch):
    loop, is_let_go = llm.service.loop, threading.Event()
    step, submit = loop.engine.step, loop.submit

    def step_and_stay():
        step()
        if not loop.engine.has_requests:  # the last answer has been told; the pass is not over yet
            assert is_let_go.wait(60)

    def submit_and_wait(*arguments):
        submit(*arguments)
        is_let_go.set()
        with loop._changed:  # the pass ends, and the first row does not begin without the others
            assert loop._changed.wait_for(lambda: loop._thread is None, 60)

    with monkeypatch.context() as context:
        context.setattr(loop.engine, "step", step_and_stay)
        chat(llm, user("Before."))
        context.setattr(loop, "submit", submit_and_wait)
        outputs = chat(llm, user("One?"), user("Two?"), user("Three?"))
    assert len({output.metrics.wave for output in outputs}) == 1


def test_who_neither_takes_nor_leaves(llm, directory, picture):
    request = user(picture[0], LONG)
    chat(llm, request, reuse="off")
    assert llm.stats().resident == 0
    [first] = chat(llm, request, verify=True)  # its cold side, and what is forced, too
    assert first.verification.tokens_agree == first.verification.tokens
    assert first.num_cached_tokens == 0
    assert chat(llm, request, reuse="off")[0].num_cached_tokens == 0
    [again] = chat(llm, request, verify=True)
    assert again.num_cached_tokens > 0
    assert again.verification.max_logit_difference < 1e-4
    with open_llm(directory, enable_prefix_caching=False) as other:
        for is_again in (False, True):
            [output] = chat(other, request)
            assert output.num_cached_tokens == is_again * output.cache.images[0].tokens  # linked from its record
            assert other.stats().resident == 0


def test_salts_share_nothing_not_even_text(llm, picture):
    request = user(LONG)
    for salt in (None, "", "one", "two"):
        assert chat(llm, request, cache_salt=salt)[0].num_cached_tokens == 0
        assert chat(llm, request, cache_salt=salt)[0].num_cached_tokens > PAGE


def test_an_image_exchanged_under_equal_text_is_never_found(llm, picture):
    one, other = picture[0], 255 - picture[0]
    [first] = chat(llm, user(LONG, one, LONG))
    [second] = chat(llm, user(LONG, other, LONG))
    np.testing.assert_array_equal(first.prompt_token_ids, second.prompt_token_ids)
    place = first.prompt_token_ids.tolist().index(llm.service.renderer.image_token_id)
    assert place - PAGE < second.num_cached_tokens <= place
    assert tokens([second]) == tokens(chat(llm, user(LONG, other, LONG), reuse="off"))


@pytest.mark.slow
def test_images_that_alternate_under_one_text(llm, picture, textured_image, monkeypatch):
    """Over 200 pages, in a pool of 12, and though their hashes in the tree of pages collide: each answer is that of its
    own image."""
    alike = types.SimpleNamespace(sha256=lambda _: types.SimpleNamespace(digest=lambda: bytes(32)))
    monkeypatch.setattr("vlcache_jax.engine.page_tree.hashlib", alike)
    requests = [user(LONG, image, LONG) for image in (picture[0], textured_image(150, 210, 3))]
    cold = [tokens(chat(llm, request, reuse="off")) for request in requests]
    assert cold[0] != cold[1]
    have, passed, turn, found = llm.service.cache.pages.count, 0, 0, [set(), set()]
    try:
        give_pages(llm, 12)
        while passed <= 200:
            for own, request in enumerate(requests):
                other = user(f"{turn} {own} ", picture[1], LONG)  # takes pages from what stays
                [output, _] = chat(llm, request, other)
                [image] = output.cache.images
                assert tokens([output]) == cold[own]
                assert image.match == ("exact" if turn else "miss")
                found[own].add(image.key)
                passed += 2 * -(-len(output.prompt_token_ids) // PAGE)
            turn += 1
        assert [len(own) for own in (*found, found[0] | found[1])] == [1, 1, 2]
        assert llm.stats().evictions > 0
    finally:
        give_pages(llm, have)


def test_keys_that_begin_alike_are_told_apart(llm, picture, monkeypatch):
    """All but the last four digits of every key are the same; whole keys are compared."""
    digest, made = keys._digest, set()
    monkeypatch.setattr(keys, "_digest", lambda *parts: made.add(key := "0" * 60 + digest(*parts)[-4:]) or key)
    requests = [user(LONG, image, "?") for image in (picture[0], 255 - picture[0], picture[1])]
    cold = [tokens(chat(llm, request, reuse="off")) for request in requests]
    for match in ("miss", "exact"):
        for request, own in zip(requests, cold, strict=True):
            [output] = chat(llm, request)
            assert (tokens([output]), output.cache.images[0].match) == (own, match)
        llm.cache.flush()
        llm.reset_prefix_cache()
    assert len(made) > 6


def test_an_entry_of_another_grid_is_not_used(llm, picture, monkeypatch):
    """Even where all of its key is the same."""
    monkeypatch.setattr("vlcache_jax.preparation.recognition.content_key", lambda *_: "0" * 64)
    requests = [user(LONG, image, "?") for image in picture]  # of two sizes
    cold = [tokens(chat(llm, request, reuse="off")) for request in requests]
    assert cold[0] != cold[1]
    for own, match in ((0, "miss"), (0, "exact"), (1, "miss"), (1, "exact"), (0, "miss")):
        [output] = chat(llm, requests[own])
        assert (tokens([output]), output.cache.images[0].match) == (cold[own], match)
        llm.cache.flush()
        llm.reset_prefix_cache()


def test_what_is_told_to_go_goes(llm, picture):
    shown, other = user(LONG, picture[0], "?"), user(LONG, picture[1], "?")

    def found():
        return [output.num_cached_tokens for output in chat(llm, shown, other)]

    def kv():
        return [output.cache.images[0].kv for output in chat(llm, shown, other)]

    found()
    assert kv() == ["kv_pool"] * 2
    assert llm.cache.evict(picture[0]) > 0
    assert kv() == ["none", "kv_pool"]
    llm.reset_prefix_cache()
    assert kv() == ["host"] * 2
    llm.reset_mm_cache()
    assert kv() == ["none"] * 2


def test_a_chain_that_ends_inside_an_image_goes_on_from_its_record_or_before_it(llm, textured_image):
    large = textured_image(500, 500, 5)
    request = user("x", large, "?")
    cold = tokens(chat(llm, request, reuse="off"))
    [first] = chat(llm, request)
    span = first.cache.images[0].tokens
    assert span > 1.5 * PAGE
    llm.cache.flush()
    pages = llm.service.cache.pages
    tail = [page for page in pages._residents if page.piece.images and page.children == []]
    for page in tail:
        pages._free_residents(pages._tree.cut_off(page))
    [linked] = chat(llm, request)
    assert linked.num_cached_tokens == PAGE + span - (
        PAGE - first.prompt_token_ids.tolist().index(llm.service.renderer.image_token_id)
    )
    assert (linked.cache.images[0].kv, linked.cache.images[0].match) == ("host", "exact")
    assert tokens([linked]) == cold
    llm.cache.flush()
    for record in list(llm.service.cache.store.tier.records()):
        llm.service.cache.store.remove(record)
    for page in [page for page in pages._residents if page.piece.images and page.children == []]:
        pages._free_residents(pages._tree.cut_off(page))
    [computed] = chat(llm, request)
    assert computed.cache.images[0].recomputed[0] == span  # whole, so that it is saved
    assert tokens([computed]) == cold
    llm.reset_prefix_cache()
    assert chat(llm, request)[0].cache.images[0].match == "exact"


def test_memory_never_turns_approximate_reuse_into_exact(llm, picture):
    """The record of this context has gone, another one is there; so it is linked, whatever is in pages."""
    request = user("here ", picture[0], "?")
    chat(llm, request)
    llm.cache.flush()
    [key] = {record.meta.entry for record in llm.service.cache.store.tier.records()}
    [mine] = [record for record in llm.service.cache.store.records(key) if record.meta.context is not None]
    llm.service.cache.store.remove(mine)
    chat(llm, user("there, and further away ", picture[0]))
    [output] = chat(llm, request, reuse="full")
    assert output.cache.images[0].match == "approximate"
    assert output.num_cached_tokens <= output.prompt_token_ids.tolist().index(llm.service.renderer.image_token_id)


@pytest.mark.slow_for("cacheblend-0.2", "shift-0.2", "full-two-pass")
@pytest.mark.parametrize("reuse", ["exact", "0.2", "shift-0.2", "cacheblend-0.2", "full-two-pass"])
def test_answers_to_one_request_share_its_pages(llm, picture, reuse):
    chat(llm, user("Elsewhere: ", picture[1], picture[0]))
    llm.reset_prefix_cache()
    request = user("Here ", picture[0], picture[1], LONG)
    one = SamplingParams(temperature=1, seed=7, max_tokens=20, ignore_eos=True)
    several = dataclasses.replace(one, n=3)
    seeds = [7, *(int(np.random.SeedSequence([7, i]).generate_state(1)[0]) for i in (1, 2))]
    apart = [
        chat(llm, request, params=dataclasses.replace(one, seed=seed), reuse=reuse)[0].outputs[0].token_ids
        for seed in seeds
    ]
    llm.reset_prefix_cache()
    most = []
    window = llm.service.device.runner.window
    llm.service.device.runner.window = lambda *args: (most.append(llm.stats().in_use), window(*args))[1]
    try:
        [output] = chat(llm, request, params=several, reuse=reuse)
    finally:
        del llm.service.device.runner.window
    assert [answer.token_ids for answer in output.outputs] == apart
    length = len(output.prompt_token_ids)
    own = -(-(length % PAGE + 20) // PAGE)
    assert max(most) <= length // PAGE + 3 * own


EVERY_KIND = [
    "exact",
    "cacheblend-0.2",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("0.2", "shift-0.2", "full-two-pass")),
]


@pytest.mark.slow_for("cacheblend-0.2")
@pytest.mark.parametrize("reuse", EVERY_KIND)
def test_tiny_pools(llm, directory, picture, reuse, monkeypatch):
    """Pages run out while answers grow: who is preempted goes on as if nothing had been."""
    requests = [
        user("One ", picture[0], "?"), user("Two ", picture[1], "and so on"), user("Three"), user("Four ", picture[0]),
        user("One ", picture[0], "?"), user(picture[1], picture[0]), user("Two ", picture[1], "and so on, and more"),
    ]  # fmt: skip
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=150, n=1 + (i == 2), ignore_eos=True, logprobs=1)
        for i in range(len(requests))
    ]
    chat(llm, user("Elsewhere: ", picture[1], picture[0]))
    one_by_one = [chat(llm, request, params=own, reuse=reuse)[0] for request, own in zip(requests, params, strict=True)]
    with open_llm(directory) as tiny:
        give_pages(tiny, 5)
        spoil(tiny, monkeypatch)
        assert tiny.stats().pages == 5
        chat(tiny, user("Elsewhere: ", picture[1], picture[0]))
        together = chat(tiny, *requests, params=params, reuse=reuse)
        stats = tiny.stats()
    assert stats.preemptions > 0
    assert stats.evictions > 0
    assert tokens(together) == tokens(one_by_one)
    for one, other in zip(one_by_one, together, strict=True):
        assert (one.cache.exact, one.cache.policy) == (other.cache.exact, other.cache.policy)
        for mine, its in zip(one.cache.images, other.cache.images, strict=True):
            assert (mine.key, mine.match, mine.why) == (its.key, its.match, its.why)
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            np.testing.assert_allclose(
                [p.chosen for p in mine.logprobs], [p.chosen for p in its.logprobs], atol=2e-5, rtol=0
            )


def damage_first_prefill(monkeypatch):
    """The first row whose logits are wanted is not finite."""

    def damage(forward_pass):
        forward_pass.x = forward_pass.x.at[0].set(jnp.nan)

    damage_first_forward_pass(monkeypatch, damage)


@pytest.mark.parametrize("n", [1, 3])
def test_who_counts_on_one_that_fails_computes(llm, picture, monkeypatch, n):
    requests = [user(LONG, picture[0]), user(LONG, picture[1]), user(LONG, "?")]
    params = dataclasses.replace(GREEDY, n=n)
    cold = tokens(chat(llm, *requests[1:], params=params, reuse="off"))
    with monkeypatch.context() as context:
        damage_first_prefill(context)
        outputs = chat(llm, *requests, params=params, on_error="return")
    assert "logits must be finite" in outputs[0].error
    assert tokens(outputs[1:]) == cold
    assert len({output.metrics.wave for output in outputs}) == 1  # they were preempted, and went on
    assert outputs[2].num_cached_tokens > PAGE  # of the second, which was computed again
    llm.reset_mm_cache()
    with monkeypatch.context() as context:
        damage_first_prefill(context)
        with pytest.raises(RequestError, match=r"conversations\[0\]: logits must be finite"):
            chat(llm, *requests, params=params)
    assert tokens(chat(llm, *requests[1:], params=params)) == cold


def test_who_failed_takes_no_pages_from_who_runs(directory, monkeypatch):
    with open_llm(directory) as tiny:
        give_pages(tiny, 4)
        params = [GREEDY, SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)]
        damage_first_prefill(monkeypatch)
        outputs = chat(tiny, user(LONG), user("b"), params=params, on_error="return")
        assert "logits must be finite" in outputs[0].error
        assert outputs[1].error is None
        assert outputs[1].metrics.wave == outputs[0].metrics.wave
        assert len(outputs[1].outputs[0].token_ids) == 450
        assert tiny.stats().preemptions == 0


def test_scores_take_and_leave_pages(llm, picture):
    request = user(LONG, picture[0], LONG)
    before = llm.stats().hits
    scores = [llm.score([request], ["and so on"], keep_logits=True, use_tqdm=False)[0] for _ in range(2)]
    [cold] = llm.score([request], ["and so on"], keep_logits=True, reuse="off", use_tqdm=False)
    assert scores[1].cache.images[0].kv == "kv_pool"
    assert scores[1].cache.rows[0] == 1 + len(scores[1].token_ids)
    for score in scores:
        np.testing.assert_allclose(score.logits, cold.logits, atol=1e-5)
    chat(llm, request)
    assert llm.stats().hits == before + 2


@pytest.mark.parametrize("reuse", ["exact", "full", "0.2", "shift-0.2", "cacheblend-0.2", "full-two-pass"])
@pytest.mark.parametrize("more", [0, 1])
def test_forks_of_prompts_that_end_with_an_image(llm, picture, reuse, more):
    """Also where nothing of their own follows the pages that they share."""

    def prompt(text, images):
        return {"prompt": text + ",".join(["<|image_pad|>"] * len(images)), "multi_modal_data": {"image": images}}

    def ask(n, **options):
        params = SamplingParams(temperature=0, max_tokens=4, n=n, ignore_eos=True, logprobs=1)
        return llm.generate(own, params, use_tqdm=False, **options)[0]

    tokenizer = llm.service.renderer.tokenizer
    ids = tokenizer("a b c d e f g h " * 200)["input_ids"]
    llm.generate(prompt("elsewhere ", picture[::-1]), GREEDY, use_tqdm=False)
    images = sum(image.tokens for image in llm.generate(prompt("x", picture), GREEDY, use_tqdm=False)[0].cache.images)
    text = tokenizer.decode(ids[: 3 * PAGE + more - images - 1])
    own = prompt(text, picture)
    apart = ask(1, reuse=reuse)
    assert len(apart.prompt_token_ids) == 3 * PAGE + more
    together = ask(3, reuse=reuse)
    for answer in together.outputs:
        assert answer.token_ids == apart.outputs[0].token_ids
        got, expected = ([p.chosen for p in one.logprobs] for one in (answer, apart.outputs[0]))
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_youngest_is_put_back(directory, llm, monkeypatch):
    with open_llm(directory) as tiny:
        give_pages(tiny, 7)
        requeue = []
        put = tiny.service.engine.scheduler.requeue
        monkeypatch.setattr(tiny.service.engine.scheduler, "requeue", lambda one: (requeue.append(one), put(one)))
        requests = [user(LONG), user(LONG, "?"), user("another one")]
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        outputs = chat(tiny, *requests, params=params)
        assert len({output.metrics.wave for output in outputs}) == 1
    assert requeue[0].progress.arrived == 2
    assert tokens(outputs) == tokens(chat(llm, *requests, params=params))


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "questions"), [(10, 16), pytest.param(64, 64, marks=pytest.mark.thorough)])
def test_questions_about_a_document_hold_it_once(engine, tmp_path, monkeypatch, pages, questions):
    directory = make_checkpoint(tmp_path, model_type="qwen3_vl", seed=4, text={"max_position_embeddings": 9000})
    buckets = BucketSizes(rows=(2048,), patches=(64,), sequences=(64,))
    size, answer = pages * PAGE, 20
    with open_llm(
        directory, buckets=buckets, max_model_len=size + 2 * PAGE, kv_cache_bytes=200 * page_bytes(engine)
    ) as llm:
        tokenizer = llm.service.renderer.tokenizer
        ids = tokenizer("lorem ipsum dolor sit amet " * 2000)["input_ids"][:size]
        document = tokenizer.decode(ids)
        prompts = [f"{document} {i} what is it?" for i in range(questions)]
        most = []
        window = llm.service.device.runner.window
        monkeypatch.setattr(
            llm.service.device.runner, "window", lambda *args: (most.append(llm.stats().in_use), window(*args))[1]
        )
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.prompt_token_ids[:size].tolist() == ids for output in outputs)
    own = [len(output.prompt_token_ids) - size for output in outputs]
    # They ran together, eight tokens a window, though some begin later than those on whose pages they count.
    assert len(most) <= 3 - (-(answer - 1) // 8)
    assert max(most) <= size // PAGE + sum(-(-(n + answer) // PAGE) for n in own) + 1
    computed = [output.cache.rows[0] for output in outputs]
    assert computed[0] == size + own[0]
    assert all(rows <= n for rows, n in zip(computed[1:], own[1:], strict=True))


def test_a_shared_prefix_is_read_once():
    """Bytes of K, V that the work list of a decode step reads at 8B: 32 pages shared by 64 requests, or their own."""
    config = abstract_runner(MODELS["Qwen3-VL-8B"]).shapes.work_config(64, decode=True)
    pages = np.arange(1, 1 + 64 * 32)
    visited = []
    for tables in ([pages[:32]] * 64, list(pages.reshape(64, 32))):
        end = np.full(64, 32 * PAGE)
        work = make_work(np.arange(64), 0 * end, end, tables, config, shared=shared_prefixes(tables))
        parts = work.parts()
        items = parts.items[: parts.ctas[-1]]
        visited.append(int((items[:, 5] - items[:, 4]).sum()))
    assert visited[1] >= 20 * visited[0]


def test_programs_are_few():
    runner = abstract_runner(MODELS["Qwen3-VL-8B"])
    layers = MODELS["Qwen3-VL-8B"].text.num_layers
    levels = [int(60 * 0.9**layer) for layer in range(layers)]
    schedule = Schedule(tuple(levels), "any", "any", allow_other_model=True)
    together = 40  # for what is launched together
    for reuse in ("off", "exact", "full", "0.1"):
        assert len(runner.programs.family_of(parse_policy(reuse))) <= 92 + together
    for shift, apart in ((False, 169), (True, 188)):
        assert len(runner.programs.family_of(Spread(schedule=schedule, shift=shift))) <= apart + together

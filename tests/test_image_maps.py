"""Images of other contexts in models with states: linked as maps of the states."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from tests.helper import SIZES, compilations, user
from tests.hybrids import BUCKETS, GREEDY, ask, found, small_images_are_stored, values  # noqa: F401
from vlcache_jax import LLM, BucketSizes, CacheConfig, SamplingParams
from vlcache_jax.cache.record import Why
from vlcache_jax.reuse.edges import Edges
from vlcache_jax.reuse.policies import EPIC
from vlcache_jax.reuse.selection import APPROXIMATE_WITH_STATES, parse_policy


@pytest.fixture(scope="module")
def directory(hybrid):
    return hybrid


def open_llm(directory, **changes):
    sizes = SIZES | {"buckets": BUCKETS, "use_tqdm": False, "reuse": "ends-0.5", "state_snapshots": 16}
    return LLM(directory, **sizes | changes)


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory) as engine:
        yield engine


@pytest.fixture
def llm(engine):
    """An engine that knows nothing."""
    engine.reset_mm_cache()
    return engine


@pytest.fixture(scope="module")
def cold(directory):
    """An engine that keeps nothing. It cuts images where maps begin and end, as the others do."""
    with open_llm(directory, enable_prefix_caching=False) as engine:
        yield engine


def ask_cold(cold, *conversations, **options):
    return ask(cold, *conversations, reuse="off", **options)


LINKED = ("approximate", "host", Why.other_context)


@pytest.fixture
def images(textured_image):
    return [textured_image(90, 130, 1), textured_image(64, 96, 2), textured_image(64, 64, 3)]


@pytest.fixture
def questions(images):
    """Two images, and the same ones in another order and context."""
    first, second, _ = images
    return user("Look: ", first, " and here ", second, " what?"), user("A ", second, " then ", first, " how?")


def test_images_of_other_contexts_are_linked(llm, cold, questions):
    """Half of their tokens are computed. The answer depends on nothing but the entries."""
    ask(llm, questions[0])
    [linked] = ask(llm, questions[1])
    assert found(linked) == [LINKED] * 2
    counts = [sum(Edges(parse_policy("ends-0.5"), 3).counts(image.tokens)) for image in linked.cache.images]
    assert [image.recomputed for image in linked.cache.images] == [(count,) * 4 for count in counts]
    [expected] = ask_cold(cold, questions[1])
    assert values([linked]) != values([expected])
    llm.reset_prefix_cache()
    assert values(ask(llm, questions[1])) == values([linked])
    [exact] = ask(llm, questions[1], reuse="exact")
    assert {one[0] for one in found(exact)} == {"miss"}
    assert values([exact]) == values([expected])
    assert values(ask(llm, questions[1])) == values([expected])  # now there are entries of this context


def test_a_policy_that_computes_all_tokens_is_cold(directory, questions):
    with open_llm(directory, reuse="1") as llm:
        ask(llm, questions[0])
        [output] = ask(llm, questions[1])
        assert {one[2] for one in found(output)} == {Why.no_state}
        llm.reset_prefix_cache()
        assert values([output]) == values(ask(llm, questions[1], reuse="off"))


def test_prompts_together_are_as_one_by_one(llm, images):
    """From the same entries. Some link, some compute, and one links exactly."""
    first, second, third = images
    prompts = [
        user("A ", first, " b ", second, "?"),
        user("Look: ", first, " what?"),  # known in this context
        user("C ", third, " d ", second, " how many?"),
        user("Only text."),
        user("E ", second, second, " the same?"),
        user("F ", third, "?"),
    ]

    def known(llm):
        llm.reset_mm_cache()
        ask(llm, user("Look: ", first, " what is it?"), user("There: ", second, "!"))
        llm.reset_prefix_cache()

    known(llm)
    alone = []
    for prompt in prompts:
        alone += ask(llm, prompt)
        llm.reset_prefix_cache()
    known(llm)
    together = ask(llm, *prompts)
    assert [found(output) for output in together] == [found(output) for output in alone]
    assert values(together) == values(alone)
    matches = [one[0] for output in together for one in found(output)]
    assert {*matches} == {"exact", "approximate", "miss"}


@pytest.mark.slow
def test_steps_of_any_size_make_and_link_the_same_maps(directory, questions):
    """To the last bit, in the entries and in the answers; the images are cut into several steps."""
    made, answers = [], []
    for rows in ((64,), (256,), (64, 128, 256)):
        with open_llm(directory, buckets=BucketSizes(rows=rows, patches=(256,), sequences=(4,), window=4)) as llm:
            ask(llm, questions[0])
            llm.cache.flush()
            records = [one for one in llm.service.cache.store.tier.records() if one.meta.states]
            made.append({one.meta.entry: one.states.copy() for one in records})
            [output] = ask(llm, questions[1])
            assert found(output) == [LINKED] * 2
            answers.append(values([output]))
    assert len(made[0]) == 2
    for entries in made[1:]:
        for entry, states in entries.items():
            np.testing.assert_array_equal(states, made[0][entry])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow_for("2", "3", "5")
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_images_without_slots_for_their_maps_are_computed(directory, cold, questions, slots):
    """An image takes two, and one more to be stored with the states after it."""
    with open_llm(directory) as llm:
        ask(llm, questions[0])
        llm.cache.flush()
        records = [one for one in llm.service.cache.store.tier.records() if one.meta.states]
        with open_llm(directory, state_snapshots=slots) as other:
            for record in records:
                [made] = other.service.cache.store.reserve([record.meta])
                for buffer, own in zip(made.buffers, record.buffers, strict=True):
                    buffer[:] = own
                other.service.cache.store.publish(made)
            [output] = ask(other, questions[1])
            linked = min(2, slots // 2)
            assert found(output)[:linked] == [LINKED] * linked
            assert [why for _, _, why in found(output)[linked:]] == [Why.no_state] * (2 - linked)
            if not linked:
                assert values([output]) == values(ask_cold(cold, questions[1]))
            assert other.stats().snapshots <= slots
            states = other.service.cache.pages.states
            assert len(states._free) + len(states) == BUCKETS.max_sequences + slots


def test_a_restart_links_from_the_disk_and_another_policy_does_not(directory, images, tmp_path):
    """Entries whose maps stand for other tokens serve encoder output only, and stay."""
    cache, question = CacheConfig(disk=tmp_path), user("Then. ", images[0], "?")
    with open_llm(directory, cache=cache) as llm:
        ask(llm, user("Look: ", images[0], " what?"))
        llm.cache.flush()
        [expected] = ask(llm, question)
        llm.cache.flush()
    for policy in ("ends-0.25", "exact", "shift-ends-0.5", "ends-0.5"):
        with open_llm(directory, cache=cache, reuse=policy) as llm:
            [output] = ask(llm, question)
            is_linked = policy.endswith("ends-0.5")
            other = "miss", "none", Why.other_policy
            assert found(output) == [("approximate", "disk", Why.other_context) if is_linked else other]
            assert output.cache.images[0].encoder == "disk"
            assert not llm.cache.stats().tiers["disk"].damaged
            llm.reset_prefix_cache()
            if not is_linked:
                assert values([output]) == values(ask(llm, question, reuse="off"))
            llm.cache.flush()
    assert values([output]) == values([expected])


def test_a_deleted_image_leaves_nothing_of_other_engines(directory, images, tmp_path):
    cache = CacheConfig(disk=tmp_path)
    with open_llm(directory, cache=cache) as llm:
        ask(llm, user("Look: ", images[0], " what?"))
        llm.cache.flush()
    with open_llm(directory, cache=cache, reuse="exact") as llm:
        assert list(tmp_path.rglob("*.safetensors"))
        assert llm.cache.delete(images[0])
        llm.cache.flush()
        assert not list(tmp_path.rglob("*.safetensors"))


def test_one_sequence_has_slots_for_an_image(directory, images):
    with open_llm(directory, state_snapshots=None, max_num_seqs=1) as llm:
        ask(llm, user("Look: ", images[0], " what?"))
        [linked] = ask(llm, user("Then: ", images[0], "?"))
        assert found(linked) == [LINKED]


def test_an_image_after_a_linked_one_is_stored(llm, cold, images):
    """Its entry was computed after approximate states, so it serves other contexts only, also those like its own."""
    ask(llm, user("Look: ", images[0], " what?"))
    question = user("A ", images[0], " and ", images[1], "?")
    [first] = ask(llm, question)
    assert [one[0] for one in found(first)] == ["approximate", "miss"]
    for prompt in (user("B ", images[1], "?"), question):
        llm.reset_prefix_cache()
        [again] = ask(llm, prompt)
        assert {one[0] for one in found(again)} == {"approximate"}
    [exact] = ask(llm, question, reuse="exact")
    assert {one[0] for one in found(exact)} == {"miss"}
    assert values([exact]) == values(ask_cold(cold, question))


def test_an_image_without_slots_says_so_when_it_returns(directory, images):
    with open_llm(directory, state_snapshots=2) as llm:
        ask(llm, user("Look: ", images[0], " what?"))
        [again] = ask(llm, user("Then: ", images[0], "?"))
        assert found(again) == [("miss", "none", Why.no_state)]


def test_close_ratios_have_maps_of_their_own():
    one, other = (Edges(parse_policy(f"ends-0.1000000{digit}"), 3) for digit in (1, 2))
    assert one.name == other.name
    assert one.computed != other.computed
    assert (
        Edges(parse_policy("shift-ends-0.1"), 3).computed == Edges(parse_policy("ends-0.1"), 3).computed == "ends-0.1"
    )


@pytest.mark.slow
def test_damaged_maps_are_not_linked(directory, cold, questions, tmp_path):
    cache = CacheConfig(disk=tmp_path)
    with open_llm(directory, cache=cache) as llm:
        ask(llm, questions[0])
        llm.cache.flush()
    damaged = 0
    for path in tmp_path.rglob("*.safetensors"):
        whole = bytearray(path.read_bytes())
        if b"states.0" in whole:
            whole[-5] ^= 1
            path.write_bytes(whole)
            damaged += 1
    assert damaged == 2
    with open_llm(directory, cache=cache) as llm:
        [output] = ask(llm, questions[1])
        assert {why for _, _, why in found(output)} == {Why.corrupt}
        assert values([output]) == values(ask_cold(cold, questions[1]))
        assert llm.cache.stats().corrupt == 2


@pytest.mark.slow
def test_maps_that_are_not_finite_are_not_stored(llm, questions, monkeypatch):
    pool = llm.service.device.runner.pool
    stored, calls = pool.stored_map, []

    def broken(*slots):
        calls.append(slots)
        floats, maps = stored(*slots)
        return floats, maps.at[-1, -1].set(np.nan)

    monkeypatch.setattr(pool, "stored_map", broken)
    ask(llm, questions[0])
    llm.cache.flush()
    assert len(calls) == 2
    assert not [one for one in llm.service.cache.store.tier.records() if one.meta.context is not None]


@pytest.mark.slow
def test_several_outputs_and_preemption(directory, questions):
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=150, ignore_eos=True)
    answers = []
    for pages in (40, 5):
        with open_llm(directory, max_model_len=512, kv_cache_bytes=pages * 2**16) as llm:
            ask(llm, questions[0])
            llm.reset_prefix_cache()
            outputs = ask(llm, questions[1], questions[1], params=params)
            assert bool(llm.stats().preemptions) == (pages == 5)
            assert found(outputs[0]) == [LINKED] * 2
            answers.append([one.token_ids for output in outputs for one in output.outputs])
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_an_image_at_the_end_of_a_prompt_is_computed(llm, images):
    """Its last token is needed for its logits, and the map would stand for it, too, or the tokens before it."""
    token = llm.service.checkpoint.config.image_token_id
    ask(llm, user("Look: ", images[1], " what?"))
    prompt = {"prompt_token_ids": [9, 10, token], "multi_modal_data": {"image": [images[1]]}}
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert found(output) == [LINKED]  # its last tokens are computed by this policy


@pytest.mark.slow
def test_exact_and_approximate_images_in_one_prompt(llm, images):
    """The answer is the same whether the first image is computed or linked in its own context."""
    first, second, _ = images
    ask(llm, user("Other: ", second, "."))
    question = user("Look: ", first, " and ", second, " what?")
    [computed] = ask(llm, question)
    assert [one[0] for one in found(computed)] == ["miss", "approximate"]
    llm.reset_prefix_cache()
    [linked] = ask(llm, question)
    assert [one[0] for one in found(linked)] == ["exact", "approximate"]
    assert values([linked]) == values([computed])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "0.25", "mpic-4", "epic-1-both", "shift-first-0.25", "shift-ends-0.5"])
def test_each_policy_links(directory, cold, questions, policy):
    parsed = EPIC(1, "both") if policy == "epic-1-both" else parse_policy(policy)
    with open_llm(directory, reuse=parsed) as llm:
        ask(llm, questions[0])
        [output] = ask(llm, questions[1])
        assert found(output) == [LINKED] * 2
        edges = Edges(parsed, 3)
        counts = [sum(edges.counts(image.tokens)) for image in output.cache.images]
        assert [image.recomputed for image in output.cache.images] == [(count,) * 4 for count in counts]
        [expected] = ask_cold(cold, questions[1])
        difference = output.outputs[0].logprobs[0].chosen - expected.outputs[0].logprobs[0].chosen
        assert 0 < abs(difference) < 1


@pytest.mark.parametrize("policy", ["shift-0.1", "spread-0.1", "cacheblend-0.1", "full-two-pass"])
def test_policies_that_compute_other_tokens_are_refused(directory, llm, policy):
    with pytest.raises(ValueError, match=r"reuse must be 'exact', 'off', or a policy that computes the first or"):
        open_llm(directory, reuse=policy)
    with pytest.raises(ValueError, match=r"reuse must be 'exact', 'off', or a policy that computes the first or"):
        ask(llm, user("Hello."), reuse=policy)


def test_a_request_has_the_policy_of_its_engine(directory, llm, questions):
    ask(llm, questions[0])
    [plain] = ask(llm, questions[1])
    llm.reset_mm_cache()
    ask(llm, questions[0])
    [shifted] = ask(llm, questions[1], reuse="shift-ends-0.5")
    assert found(shifted) == [LINKED] * 2
    assert values([shifted]) != values([plain])
    with pytest.raises(ValueError, match=r"reuse of a request must be 'ends-0.5', 'exact' or 'off', got '0.1'"):
        ask(llm, questions[1], reuse="0.1")
    with open_llm(directory, reuse="exact") as exact, pytest.raises(ValueError, match=r"must be 'exact' or 'off', got"):
        ask(exact, questions[1], reuse="ends-0.5")


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_maps_are_stored_and_loaded_layer_by_layer(directory, codec):
    """In the dtype of the KV, or with a scale for each row of B and A."""
    with open_llm(directory, cache=CacheConfig(codec=codec)) as llm:
        runner = llm.service.device.runner
        pool, kv, rng = runner.pool, runner.shapes.kv, np.random.default_rng(0)
        states = [
            runner.devices.put([rng.normal(size=one.shape).astype(one.dtype) for one in arrays])
            for arrays in pool.make()
        ]
        before = jax.tree.map(np.asarray, states)
        pool.arrays = states
        floats, maps = map(np.asarray, pool.stored_map(1, 2))
        assert floats.shape == (kv.layers, kv.map_states)
        assert (maps.shape, maps.dtype) == ((kv.layers, kv.entry_maps), kv.map_dtype)
        for group in runner.shapes.link_groups:
            pool.load_map(group.parts, *jax.device_put((floats[group.parts], maps[group.parts])), 3, 4)
        for layer, (arrays, own) in enumerate(zip(pool.make(), before, strict=True)):
            kind = runner.config.text.kind_of(layer)
            for one, array, was in zip(kind.states, arrays, own, strict=False):
                array, rest = np.asarray(array), [i for i in range(len(was)) if i not in (3, 4)]
                np.testing.assert_array_equal(array[rest], was[rest])
                expected = was[1:3]
                if one.is_linear and codec == "int8":
                    scale = np.abs(expected).max(-1, keepdims=True) / 127
                    np.testing.assert_allclose(array[3:5], expected, rtol=0, atol=0.501 * scale.max())
                    assert (array[3:5] != expected).any()
                elif one.is_linear:
                    np.testing.assert_array_equal(array[3:5], expected)
                else:
                    np.testing.assert_array_equal(array[3], was[1])
                    np.testing.assert_array_equal(array[4], was[4])


def test_only_what_a_link_needs_is_transferred(directory, questions, monkeypatch):
    """A map needs no states after the image, and an exact link no map."""
    with open_llm(directory) as llm:
        runner = llm.service.device.runner
        monkeypatch.setattr(type(runner), "reads_in_place", False)
        kv, sent = runner.shapes.kv, []
        put = type(runner.devices).put

        def counted(devices, arrays):
            sent.append(sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))
            return put(devices, arrays)

        monkeypatch.setattr(type(runner.devices), "put", counted)
        ask(llm, questions[0])
        for question, values in (
            (questions[1], 4 * kv.map_states + kv.map_dtype.itemsize * kv.entry_maps),
            (questions[0], 4 * kv.own_states),
        ):
            llm.reset_prefix_cache()
            sent.clear()
            [output] = ask(llm, question)
            assert [kv for _, kv, _ in found(output)] == ["host"] * 2
            assert sent.count(kv.layers * values) == 2
            assert not [size for size in sent if size > kv.layers * values]
            padded = [record.meta.padded for record in llm.service.cache.store.tier.records() if record.meta.maps]
            moved = [image.bytes_moved for image in output.cache.images]
            assert min(moved) - kv.layers * values >= min(padded) * kv.stored_bytes
            assert max(moved) - kv.layers * values < 2 * max(padded) * kv.stored_bytes


@pytest.mark.parametrize("codec", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_coded_entries_have_coded_maps(directory, questions, codec):
    """And no states after images, because they are not linked exactly. Their answers differ little from others."""
    answers, sizes = [], []
    for name in ("auto", codec):
        with open_llm(directory, cache=CacheConfig(codec=name)) as llm:
            ask(llm, questions[0])
            [output] = ask(llm, questions[1])
            assert found(output) == [LINKED] * 2
            llm.reset_prefix_cache()
            [again] = ask(llm, questions[0])
            assert {(one[0], one[2]) for one in found(again)} == {
                ("exact", None) if name == "auto" else ("approximate", Why.coded)
            }
            answers.append([x.chosen for one in (output, again) for x in one.outputs[0].logprobs[:1]])
            sizes.append(sum(one.meta.nbytes for one in llm.service.cache.store.tier.records() if one.meta.maps))
    np.testing.assert_allclose(answers[1], answers[0], atol=0.01)
    assert 0 < sizes[1] < sizes[0] / 3


def test_the_recommended_policy_is_that_of_these_layers(directory, llm, questions):
    """A request for it has the engine's policy."""
    with open_llm(directory, reuse="approximate") as recommended:
        assert recommended.service.policy.name == APPROXIMATE_WITH_STATES
    ask(llm, questions[0])
    [output] = ask(llm, questions[1], reuse="approximate")
    assert output.cache.policy == "ends-0.5"
    assert found(output) == [LINKED] * 2


def test_keys_and_values_of_different_width_have_no_maps(checkpoints):
    with pytest.raises(ValueError, match=r"linear_key_head_dim 8 and linear_value_head_dim 12, which differ"):
        open_llm(checkpoints("qwen3_5-tied"))


@pytest.mark.slow
def test_compressed_prompts_link_only_exactly(directory, questions):
    """The observation computes states once more, which maps do not allow."""
    with open_llm(directory, compressed_kv_bytes=2**22, max_model_len=512) as llm:
        ask(llm, questions[0])
        [output] = ask(llm, questions[1], compress="snapkv-0.5")
        assert {one[0] for one in found(output)} == {"miss"}
        llm.reset_prefix_cache()
        [again] = ask(llm, questions[1], compress="snapkv-0.5")
        assert {one[0] for one in found(again)} == {"exact"}
        assert values([again]) == values([output])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ends-0.5", "shift-ends-0.5"])
def test_nothing_compiles_after_warmup(directory, textured_image, policy):
    rng = np.random.default_rng(0)
    images = [textured_image(*rng.integers(60, 200, 2), seed=i) for i in range(8)]
    buckets = BucketSizes(rows=(64, 128), patches=(256,), sequences=(4,))  # steps end inside images
    with open_llm(directory, buckets=buckets, reuse=policy) as llm:
        llm.warmup(verbose=False)
        count, linked = llm.service.device.runner.programs.num_programs, 0
        with compilations() as compiled:
            for _ in range(6):
                chosen = [images[i] for i in rng.integers(0, 8, rng.integers(1, 4))]
                parts = [part for image in chosen for part in ("x" * int(rng.integers(1, 30)), image)]
                for output in ask(llm, user(*parts, "?"), user("y", chosen[0], "!")):
                    linked += any(one[0] == "approximate" for one in found(output))
        assert linked > 3
        assert not compiled
        assert llm.service.device.runner.programs.num_programs == count


@pytest.mark.slow
def test_neutral_donors_are_made_and_linked(directory, questions):
    with open_llm(directory, cache=CacheConfig(donors="neutral")) as llm:
        [output] = ask(llm, questions[1])
        assert [image.donor for image in output.cache.images] == ["neutral"] * 2
        assert found(output) == [LINKED] * 2
        llm.reset_prefix_cache()
        assert values(ask(llm, questions[1])) == values([output])


def test_precomputed_images_are_linked(llm, cold, images):
    llm.cache.precompute(images[:2])
    question = user("A ", images[1], " then ", images[0], " how?")
    [output] = ask(llm, question)
    assert found(output) == [LINKED] * 2
    assert [image.donor for image in output.cache.images] == ["neutral"] * 2
    assert values([output]) != values(ask_cold(cold, question))


@pytest.mark.slow
def test_random_loads_with_aborts_resets_and_few_slots(directory, textured_image, tmp_path):
    """No slot is lost, and each request whose images are all computed or exact has the tokens of a cold run."""
    rng = np.random.default_rng(3)
    images = [textured_image(96, 96 + 32 * (seed % 2), seed) for seed in range(3)]
    prompts = []
    for i in range(6):
        parts = ["Page ", images[i % 3], " and ", images[rng.integers(3)], f" {i}?"]
        prompts.append(user(*parts[: 2 + 3 * (i % 2)]))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_llm(directory, enable_prefix_caching=False, reuse="off") as cold:
        expected = [output.outputs[0].token_ids for output in ask(cold, *prompts, params=params)]
    cache, linked = CacheConfig(disk=tmp_path, host_bytes=2**21), 0
    with open_llm(directory, cache=cache, state_snapshots=10, max_model_len=512, kv_cache_bytes=2**18) as llm:
        for _ in range(25):
            chosen = rng.integers(0, len(prompts), rng.integers(1, 7)).tolist()
            for number, output in zip(chosen, ask(llm, *(prompts[i] for i in chosen), params=params), strict=True):
                is_linked = any(one[0] == "approximate" and one[2] is not Why.no_state for one in found(output))
                linked += is_linked
                assert is_linked or output.outputs[0].token_ids == expected[number]
            with contextlib.suppress(ValueError):
                [llm.reset_prefix_cache, llm.reset_mm_cache, llm.cache.flush, lambda: llm.cache.delete(images[0])][
                    int(rng.integers(4))
                ]()
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.in_use) == (0, 0, 0)
        assert linked > 5, llm.cache.stats()
        states = llm.service.cache.pages.states
        assert len(states._free) + len(states) == BUCKETS.max_sequences + 10

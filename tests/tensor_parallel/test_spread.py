"""Engines spread over several devices: the answers and records of one, and what their programs exchange.

JAX_NUM_CPU_DEVICES=4 uv run --group test pytest -n0 -m devices
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading

import jax
import numpy as np
import pytest

from research.compiled import exchanged
from tests.helper import some_seeds, user
from tests.models import float8
from vlcache_jax import LLM, BucketSizes, CacheConfig, SamplingParams
from vlcache_jax.commands.doctor import _together
from vlcache_jax.device import mesh
from vlcache_jax.device.mesh import Devices, find_devices
from vlcache_jax.device.programs import answer, compress, encode, layers, memory, window
from vlcache_jax.pallas_kernels.split import AXIS
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.testing import make_checkpoint

pytestmark = pytest.mark.devices

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
BUCKETS = BucketSizes(rows=(96,), patches=(32, 64), sequences=(2,), window=4)
# No two sizes are alike, so that shapes tell what an array is.
HEADS = {"hidden_size": 136, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2}
TEXTS = {
    "qwen2_vl": HEADS | {"intermediate_size": 232, "hidden_size": 160},
    "qwen2_5_vl": HEADS | {"intermediate_size": 232, "hidden_size": 160},
    "qwen3_vl": HEADS | {"intermediate_size": 232, "head_dim": 20},
    "qwen3_vl_moe": HEADS | {"intermediate_size": 232, "head_dim": 20, "num_experts": 8, "mlp_only_layers": [1]},
}
# In 8 bits, of which neither blocks of outputs nor groups of inputs fall on a device's part.
TEXTS |= {f"{kind}-fp8": TEXTS[kind] for kind in ("qwen3_vl", "qwen3_vl_moe")}
# Products of which some matrices are in 8 bits; each KV head is on two of four devices.
APART = [
    f"model.language_model.layers.{name}" for name in ("0.self_attn.q_proj", "1.self_attn.v_proj", "2.mlp.up_proj")
]
EIGHT_BITS = ("qwen3_vl-fp8", 4), ("qwen3_vl_moe-fp8", 4)
OVER = [
    ("qwen3_vl", 2), ("qwen3_vl_moe", 4),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in (("qwen2_vl", 2), ("qwen2_5_vl", 4), ("qwen3_vl", 4), ("qwen3_vl_moe", 2), *EIGHT_BITS)
    ),
]  # fmt: skip
# What is asked of one engine after the other, each time with another way of reuse.
ASKED = (
    ("a", "exact"), ("look at this", 0.3), ("now and again", "shift-0.3"), ("here is", "cacheblend-0.3"),
    ("a", "exact"), ("so", "full"), ("and", "off"),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def four_devices():
    if len(jax.devices()) != 4:
        pytest.fail("JAX_NUM_CPU_DEVICES must be 4, in a process of its own")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def made(kind):
        if kind == "qwen3_vl-fp8-apart":
            return float8.left_out(made("qwen3_vl-fp8"), root / kind, APART)
        bits = {"quantization": "fp8", "block": 32} if kind.endswith("-fp8") else {}
        return make_checkpoint(root / kind, kind.removesuffix("-fp8"), seed=7, text=TEXTS[kind], **bits)

    return made


@pytest.fixture(scope="module")
def opened(directory):
    """(kind, count=1, **options) -> an engine; the same one every time."""
    engines = {}

    def open_(kind, count=1, **options):
        key = kind, count, repr(options)
        if key not in engines:
            engines[key] = open_llm(directory(kind), count, **options)
        return engines[key]

    yield open_
    for llm in engines.values():
        llm.close()


def open_llm(directory, count, cache=CacheConfig(load="kv"), **options):  # noqa: B008
    sizes = {"buckets": BUCKETS, "max_model_len": 256, "kv_cache_bytes": 2**21, "dtype": "float32", "use_tqdm": False}
    return LLM(directory, tensor_parallel_size=count, cache=cache, **sizes | options)


def pictures(count=1):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, size, dtype=np.uint8) for size in ((64, 96, 3), (56, 56, 3))[:count]]


def run(llm, asked=ASKED, **options):
    """Tokens, log-probabilities and how the picture was found, of one question after the other."""
    llm.reset_mm_cache()
    found = []
    for text, reuse in asked:
        conversation = user(text, *pictures(), "what?")
        [output] = llm.chat([conversation], GREEDY, reuse=reuse, use_tqdm=False, **options)
        own = output.outputs[0]
        chosen = [[choice.logprob for choice in of.values()] for of in own.logprobs]
        found.append((own.token_ids, np.array(chosen), output.cache.images[0].match, output.cache.rows))
    return found


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for (tokens, chosen, *rest), (same_tokens, same_chosen, *same) in zip(found, expected, strict=True):
        assert (tokens, rest) == (same_tokens, same)
        np.testing.assert_allclose(chosen, same_chosen, atol=2e-5)


@pytest.mark.parametrize(("kind", "count"), OVER)
def test_answers_are_those_of_one_device(opened, kind, count):
    expected = run(opened(kind))
    assert [match for _, _, match, _ in expected] == ["miss", *["approximate"] * 3, "exact", "approximate", "miss"]
    assert_equal(run(opened(kind, count)), expected)


@pytest.mark.parametrize("kind", ["qwen3_vl-fp8", "qwen3_vl-fp8-apart"])
def test_a_model_in_8_bits_answers_as_on_one_device(opened, kind):
    assert_equal(*(run(opened(kind, count), ASKED[:1]) for count in (4, 1)))


def test_answers_together_and_scores(opened):
    """Several pictures at once, which devices encode apart; what is scored; what is drawn."""
    outputs = []
    for count in (1, 4):
        llm = opened("qwen3_vl", count)
        llm.reset_mm_cache()
        conversations = [user("See", *pictures(2), "?"), user("Or", *pictures(2)[::-1])]
        drawn = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6, seed=3, n=2, ignore_eos=True)
        answers = llm.chat(conversations, drawn, use_tqdm=False)
        scores = llm.score(conversations, ["the one", "another"], reuse="off", keep_logits=True, use_tqdm=False)
        outputs.append(([[own.token_ids for own in one.outputs] for one in answers], [one.logits for one in scores]))
    (tokens, logits), (same, others) = outputs
    assert tokens == same
    for own, other in zip(logits, others, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5)
    ran = {one.name for one in opened("qwen3_vl", 4).service.device.runner.programs.kernels}
    assert "encode_apart" in ran


@pytest.mark.parametrize("codec", some_seeds("auto", "int8", buckets=(), thorough=("int4",)))
def test_records_are_those_of_one_device(directory, tmp_path, codec):
    """Written by four, read by one, and back; also by a device tier."""
    asked = ASKED[1:3]
    found = {}
    for writes, reads in ((1, 4), (4, 1), (1, 2)):
        folder = tmp_path / f"{writes}-{reads}"
        for count in (writes, reads):
            cache = CacheConfig(codec=codec, disk=folder, load="kv", device_bytes=2**22 * (count != writes))
            with open_llm(directory("qwen3_vl"), count, cache) as llm:
                if count == writes:
                    llm.chat([user("a", *pictures(), "what?")], GREEDY, use_tqdm=False)
                    llm.service.cache.writer.flush()
                    llm.service.cache.store.flush()
                    continue
                for text, reuse in asked * 2:
                    [output] = llm.chat([user(text, *pictures(), "what?")], GREEDY, reuse=reuse, use_tqdm=False)
                    image = output.cache.images[0]
                    found.setdefault((text, reuse), []).append(output.outputs[0].token_ids)
                    assert image.match == "approximate"
    for tokens in found.values():
        assert len(tokens) == 6
        assert len(set(map(tuple, tokens))) == 1


@pytest.mark.parametrize("compressor", ["vl-cache-0.4", "snapkv-0.4", "postvision-0.4"])
@pytest.mark.parametrize("count", some_seeds(4, buckets=(), thorough=(2,)))
def test_compressed_answers_are_those_of_one_device(opened, count, compressor):
    expected, found = (
        run(opened("qwen3_vl", own, compressed_kv_bytes=2**20), (("a", "exact"), ("a", "exact")), compress=compressor)
        for own in (1, count)
    )
    assert_equal(found, expected)


# What programs exchange, and what they hold.


def compiled(llm, program):
    return llm.service.device.runner.programs.program(program)


@pytest.mark.parametrize(("kind", "count"), OVER)
def test_what_programs_exchange(opened, kind, count):
    """Two sums a layer, one of embeddings, one gathering of logits; the pool never, and no weight."""
    llm = opened(kind, count, compressed_kv_bytes=2**20, cache=CacheConfig(device_bytes=2**22))
    runner = llm.service.device.runner
    shapes, L = runner.shapes, runner.config.text.num_layers
    family = runner.programs.family_of(parse_policy("shift-0.3"))
    of = {type(one): [other for other in family if type(other) is type(one)] for one in family}
    sums = {"all-reduce": 2}
    expected = {
        layers.Embed: {"all-reduce": 1}, layers.Layer: sums, layers.Block: {"all-reduce": 8},
        answer.OutputHead: {"all-gather": 1}, answer.SampleFirst: {}, answer.ScoreTokens: {},
        window.Window: {"all-reduce": 2 * L + 1, "all-gather": 1},
        compress.Observe: {"all-reduce": 2 * (L - 1) + 1}, memory.CopyPages: {}, encode.Encode: {},
        encode.EncodeApart: {"all-gather": 1}, encode.Stage: {}, memory.KeepLayer: {}, memory.Recall: {},
    }  # fmt: skip
    for kind_of, collectives in expected.items():
        for program in of.get(kind_of, []):
            assert exchanged(compiled(llm, program).as_text()) == collectives, program
    for program in of[memory.Link]:
        assert exchanged(compiled(llm, program).as_text()) == {"all-to-all": program.count}, program
    for program in of[compress.Compact]:  # scores of tokens, and which each head keeps, but no K, V
        lines = re.findall(r"^.* = (.*) all-\w+\(", compiled(llm, program).as_text(), re.MULTILINE)
        assert lines, program
        assert not re.findall(r"f32\[\d+,\d+,\d+\]", " ".join(lines)), program
    # Nothing anywhere of the pool's whole shape, or of a shared weight's.
    whole = {shapes.pool.shape, shapes.compressed.shape, *(buffer.shape for buffer in shapes.kept[0])}
    whole |= {leaf.shape for leaf in jax.tree.leaves(shapes.text) if AXIS in str(leaf.sharding.spec)}
    for program in family:
        shown = set(re.findall(r"[a-z0-9]+\[([\d,]+)\]", compiled(llm, program).as_text()))
        assert shown & {",".join(map(str, shape)) for shape in whole} == set(), program


def test_pools_are_updated_in_place(opened):
    llm = opened("qwen3_vl", 4)
    shapes = llm.service.device.runner.shapes
    each = int(np.prod(shapes.pool.shape)) * 4 // 4
    for program, halves in ((layers.Layer(96, 96, False), 2), (window.Window(2), 2 * shapes.kv.layers)):
        assert compiled(llm, program).memory_analysis().alias_size_in_bytes >= halves * each


def test_what_each_device_holds(opened):
    llm = opened("qwen3_vl", 4)
    weights = jax.tree.leaves(llm.service.device.runner.text)
    one = sum(leaf.nbytes for leaf in jax.tree.leaves(opened("qwen3_vl").service.device.runner.text))
    for device in find_devices(4):
        own = sum(part.data.nbytes for leaf in weights for part in leaf.addressable_shards if part.device == device)
        assert own < 0.3 * one  # two KV heads stand on four devices: each has a copy


def test_what_the_device_tier_takes(opened):
    llm = opened("qwen3_vl_moe", 4, compressed_kv_bytes=2**20, cache=CacheConfig(device_bytes=2**22))
    held = jax.tree.leaves(llm.service.device.runner.run(memory.EmptyTier()))
    assert sum(part.data.nbytes for array in held for part in array.addressable_shards) <= 2**22


def test_what_cannot_be_spread_is_refused_before_it_is_loaded(directory, monkeypatch):
    monkeypatch.setattr("vlcache_jax.service._load", lambda *_: pytest.fail("it is loaded"))
    with pytest.raises(
        ValueError, match="tensor_parallel_size must be one of 1, 2, 4, 8 for this model, got 3: 8 query"
    ):
        open_llm(directory("qwen3_vl"), 3)
    with pytest.raises(ValueError, match="must be at most 4, the number of devices visible to JAX, got 8"):
        open_llm(directory("qwen3_vl"), 8)


def test_ladders_whose_records_do_not_divide(directory):
    """Tokens of a picture that devices cannot share out come whole to each."""
    found = []
    for count in (1, 4):
        buckets = dataclasses.replace(BUCKETS, patches=(24, 36))
        with open_llm(directory("qwen3_vl"), count, buckets=buckets) as llm:
            found.append(run(llm, ASKED[:2]))
    assert_equal(found[1], found[0])


def test_devices_that_do_not_reach_each_other(directory, monkeypatch):
    """It is told before anything is loaded, and nothing waits for ever."""
    assert 0 < mesh.check_exchange(Devices.over(jax.devices())) < 60
    for happens, told in (
        (lambda *_: threading.Event().wait(60), "did not end within 0.1 s"),
        (lambda *_: (_ for _ in ()).throw(RuntimeError("NCCL: unhandled")), "failed: NCCL: unhandled"),
    ):
        monkeypatch.setattr(mesh, "_measure", happens)
        with pytest.raises(
            RuntimeError, match=f"4 devices like .* must be able to reach each other, but .* {told}.*NCCL_DEBUG"
        ):
            mesh.check_exchange(Devices.over(jax.devices()), limit=0.1)
    problems = []
    assert _together(jax.devices(), problems) == [("devices", "4, unable to communicate")]
    assert len(problems) == 1
    monkeypatch.setattr("vlcache_jax.service._load", lambda *_: pytest.fail("it is loaded"))
    with pytest.raises(RuntimeError, match="must be able to reach each other"):
        open_llm(directory("qwen3_vl"), 4)


def test_vectors_and_scores_are_those_of_one_device(tmp_path):
    text = {**TEXTS["qwen3_vl"], "vocab_size": 304}
    model = make_checkpoint(tmp_path / "model", "qwen3_vl", seed=7, text=text, corpus=["yes", "no"] * 50)
    part = {"type": "image", "image": pictures()[0]}
    found = []
    for count in (1, 4):
        with open_llm(model, count, max_model_len=512) as llm:
            vectors = [one.outputs.embedding for one in llm.embed([part, "a"], use_tqdm=False)]
            scores = [one.score for one in llm.rerank("a", [part, "b"], use_tqdm=False)]
            found.append((np.stack(vectors), np.array(scores)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=0)

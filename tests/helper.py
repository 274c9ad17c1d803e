"""What several tests of the engine need."""

import contextlib
import dataclasses
import inspect
import itertools
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vlcache_jax import BucketSizes
from vlcache_jax.cache.keys import TenantSalt
from vlcache_jax.engine.completions import RequestMetrics
from vlcache_jax.engine.prefilling import ForwardPass
from vlcache_jax.engine.request import Planned, Request
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.selection import parse_policy

# Programs are compiled for the sizes of an engine, and compiling is most of what tests take: whoever needs no sizes of
# its own opens an engine of these, whose programs are compiled once for all. One answer takes the programs of eight.
# Windows are short, so that most answers come in several parts.
BUCKETS = BucketSizes(rows=(16, 64, 512), patches=(64, 256, 1024), sequences=(8,), window=4)
SIZES = {"buckets": BUCKETS, "max_model_len": 8 * PAGE, "kv_cache_bytes": 2**24, "dtype": "float32"}
# An answer that is alone has programs of its own, as by default: for tests that compare it with answers together.
ALONE = dataclasses.replace(BUCKETS, sequences=(1, 8))
# For a model that nothing else opens: prompts take several steps, and one program of a kind does for all.
FEW = BucketSizes(rows=(64,), patches=(256,), sequences=(4,))
WORDS = (
    *("--max-model-len", str(SIZES["max_model_len"]), "--kv-cache-bytes", str(SIZES["kv_cache_bytes"])),
    *("--dtype", SIZES["dtype"]),
)
"""`SIZES` but for the bucket sizes, as commands take them."""
WITHIN = 180  # seconds, for what would hang otherwise
ATOL = {"float32": 2e-6, "bfloat16": 1e-2}  # of attention, against float64


# For a test that depends on the vision tower: `family_checkpoint` of every family. Those whose decoder another family
# has, too, run in full only.
each_family = pytest.mark.parametrize(
    "family_checkpoint",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_vl-flat-tied", "qwen3_vl_moe-tied")),
        "qwen2_5_vl-flat-tied",
        "qwen3_vl",
    ],
    indirect=True,
    scope="session",
)

# The same for a test that depends on the decoder's layers: experts are chosen in some of them, and not in others.
each_decoder = pytest.mark.parametrize(
    "family_checkpoint",
    ["qwen2_5_vl-flat-tied", "qwen3_vl-tied", pytest.param("qwen3_vl_moe-tied", marks=pytest.mark.slow)],
    indirect=True,
    scope="session",
)


# For tests that count the bytes of one device or look inside it, and those that know as many KV heads as the model has,
# of which four devices have copies; see `conftest.spread_over_devices`.
SPREAD = int(os.environ.get("VLCACHE_TENSOR_PARALLEL", "1"))
one_device = pytest.mark.skipif(SPREAD > 1, reason="is about one device")
one_copy = pytest.mark.skipif(SPREAD > 2, reason="is about KV heads that are there once")


def some_seeds(*quick, buckets, thorough):
    """For `parametrize`: those that run with all tests, those that CI adds, and the others, for hours by hand."""
    added = [pytest.param(seed, marks=pytest.mark.slow) for seed in buckets]
    rest = [seed for seed in thorough if seed not in quick and seed not in buckets]
    return [*quick, *added, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in rest)]


def some_cases(short, whole):
    """For `parametrize`: a run that CI makes, and the whole of it, by hand."""
    return [pytest.param(short, marks=pytest.mark.slow), pytest.param(whole, marks=pytest.mark.thorough)]


def give_pages(llm, count):
    """The pool is as if it were of so many pages, and empty. (A smaller one has programs of its own.)"""
    llm.service.cache.pages.count = count
    llm.service.cache.pages.reset()


def give_compressed_pages(llm, count=None):
    """The pool for compressed prompts is as if it were of so many pages, and empty; None: of all that it has."""
    pages = llm.service.engine.scheduler.compressed
    pages.count = llm.service.device.memory.compressed_pages if count is None else count
    pages.reset()


def give_decode_slots(llm, count):
    """At most so many answers run together. (A bucket sizes of fewer has programs of its own.)"""
    del llm.service.engine.scheduler._decode_slots[count:]


def with_thinking_tags(directory, target):
    """A copy of a checkpoint whose tags of thinking are tokens, as those of Qwen3 are."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(directory, target)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save_pretrained(target)
    return target


def user(*parts):
    """Return a conversation of texts, images, and parts as they are."""
    kinds = [(part, "text" if isinstance(part, str) else "image") for part in parts]
    content = [part if isinstance(part, dict) else {"type": kind, kind: part} for part, kind in kinds]
    return [{"role": "user", "content": content}]


class Oracle:
    """transformers on the requests of an engine, each alone: prefill, then token by token."""

    def __init__(self, model, llm):
        self.model, self.llm = model, llm
        # The argument was called past_key_values before transformers 5.24, which warns about that.
        names = inspect.signature(model.forward).parameters
        self.cache = "cache" if "cache" in names else "past_key_values"

    def answer(self, conversation, steps):
        """Greedy tokens, and the logits that chose them, float32 [steps, V]."""
        torch = pytest.importorskip("torch")
        inputs = self._inputs(self.llm.service.renderer.from_conversation(conversation))
        tokens, logits = [], []
        with torch.no_grad():
            out = self.model(use_cache=True, **inputs)
            deltas = self.model.model.rope_deltas
            start = inputs["input_ids"].shape[1] + (0 if deltas is None else int(deltas.flatten()[0]))
            for i in range(steps):
                logits.append(out.logits[0, -1].float().numpy())
                tokens.append(int(logits[-1].argmax()))
                out = self.model(
                    input_ids=torch.tensor([tokens[-1:]]),
                    position_ids=torch.full((3, 1, 1), start + i),
                    **{self.cache: out.past_key_values},
                )
        return tuple(tokens), np.stack(logits)

    def logits(self, conversation, tokens):
        """What predicts each token of a given answer, and the one behind it, float32 [1 + n, V]."""
        torch = pytest.importorskip("torch")
        inputs = self._inputs(self.llm.service.renderer.from_conversation(conversation))
        given = torch.tensor(np.array(tokens, np.int64))[None]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], given], 1)
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(given).int()], 1)
        with torch.no_grad():
            return self.model(**inputs).logits[0, -1 - len(tokens) :].float().numpy()

    def last_hidden(self, prompt):
        """Of its last token, behind the last norm, float32 [M]."""
        torch = pytest.importorskip("torch")
        with torch.no_grad():
            return self.model.model(**self._inputs(prompt)).last_hidden_state[0, -1].float().numpy()

    def _inputs(self, prompt):
        torch = pytest.importorskip("torch")
        processor = self.llm.service.preparation.processor
        patches = [processor.patches(image.decode()) for image in prompt.images]
        counts = [processor.num_tokens(p.grid) for p in patches]
        expanded, *_ = self.llm.service.renderer.expander.expand(prompt.token_ids, counts)
        ids = torch.tensor(expanded.astype(np.int64))[None]
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == self.model.config.image_token_id).int()}
        if patches:
            pixels = np.concatenate([processor.pixel_values(p) for p in patches])
            inputs["pixel_values"] = torch.tensor(pixels).to(torch.promote_types(self.model.dtype, torch.float32))
            inputs["image_grid_thw"] = torch.tensor([p.grid for p in patches])
        self.model.model.rope_deltas = None
        return inputs


def drawn(make):
    """The module that `make` makes, of numpy's weights: to draw its own, nnx compiles a program for each shape."""
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        if "scale" in name or "bias" in name:  # as nnx has them at first
            return jax.device_put(np.full(leaf.shape, "scale" in name, leaf.dtype))
        return jax.device_put((rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5).astype(leaf.dtype))

    graph, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, state))


@contextlib.contextmanager
def compilations():
    """Events of what is traced or compiled within, eager operations included."""
    found = []
    listener = lambda event, *_, **__: found.append(event) if event.startswith("/jax/core/compile") else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def spoil(llm, monkeypatch):
    """Fills pages with NaN when they become free. (V must be finite: a flaw is carried by K.)"""
    give_back = llm.service.cache.pages._give_back

    def spoiled(page):
        give_back(page)
        slots = slice(page.number * PAGE, (page.number + 1) * PAGE)
        for layer in llm.service.device.runner.pool.arrays or ():
            layer[:] = layer[0].at[slots].set(jnp.nan), layer[1].at[slots].set(1e30)

    monkeypatch.setattr(llm.service.cache.pages, "_give_back", spoiled)


def spoil_compressed(llm, monkeypatch):
    """The same of the pool for compressed prompts."""
    pages = llm.service.engine.scheduler.compressed

    def spoiled(give_back):
        def given_back(block_table, *held):
            give_back(block_table, *held)
            pool = llm.service.device.runner.compressed
            is_free = np.zeros(len(pool.make()[0][0]) // PAGE, bool)
            is_free[pages._free] = True
            is_free = jnp.asarray(is_free.repeat(PAGE)[:, None, None])
            pool.arrays = [
                [jnp.where(is_free, x, half) for x, half in zip((jnp.nan, 1e4), pool.arrays[0], strict=True)]
            ]

        return given_back

    for name in ("end", "swap_out"):
        monkeypatch.setattr(pages, name, spoiled(getattr(pages, name)))


def damage_first_forward_pass(monkeypatch, damage):
    """Lets what the first step leaves behind its layers be damaged."""
    advance, ended = ForwardPass.advance, itertools.count()

    def damaged(self, stop):
        advance(self, stop)
        if self.is_done and next(ended) == 0:
            damage(self)

    monkeypatch.setattr(ForwardPass, "advance", damaged)


def eventually(is_true):
    """Return whether it becomes true within `WITHIN` seconds."""
    end = time.monotonic() + WITHIN
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(is_true())


def assert_nothing_left(llm):
    """Every request has given back its decode slot, its pages and its cache entries.

    The thread that prepares a cancelled request ends it once it is prepared, so this may take a moment.
    """
    with llm.service.loop._changed:
        assert llm.service.loop._changed.wait_for(lambda: llm.service.loop._thread is None, WITHIN)
    llm.cache.flush()

    def in_use():
        stats = llm.stats()
        held = sum(record.held for record in llm.service.cache.store.tier.records())
        return stats.running, stats.waiting, stats.in_use, held

    eventually(lambda: not any(in_use()))
    assert in_use() == (0, 0, 0, 0)
    assert all(record.is_settled for record in llm.service.cache.store.tier.records())
    assert not llm.service.cache.store._left


def planned(layout, plan, *, tenant=None, priority=0, **more):
    """A planned request of which nothing but its layout and its plan matters."""
    request = Request(None, layout.token_ids, (), (), (), "", RequestMetrics())
    salt = None if tenant is None else TenantSalt(tenant, "")
    options = ResolvedOptions(reuse=parse_policy("exact"), cache_salt=salt, priority=priority)
    return Planned(request, options, layout, plan, **more)

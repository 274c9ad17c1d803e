"""A kind of layer that the package does not know, whose state is a running mean, through the engine and its memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.helper import user
from tests.test_hybrids import BUCKETS, GREEDY, answers, open_llm
from vlcache_jax.device.programs.base import Shapes
from vlcache_jax.models import decoder, qwen3_5
from vlcache_jax.models.layer_kinds import BLOCK, LayerKind, StateArray, TokenStates
from vlcache_jax.models.layers import linear
from vlcache_jax.testing import make_checkpoint

WIDTH = 64
KIND = LayerKind(
    "linear_attention",
    (StateArray("total", (WIDTH,), np.dtype(np.float32)), StateArray("count", (1,), np.dtype(np.float32))),
)


class RunningMean(nnx.Module):
    """The mean of all tokens so far, projected."""

    def __init__(self, config, layer=0, *, dtype, rngs):
        self.out_proj = linear(config.hidden_size, config.hidden_size, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, y, memory, runs, *, keep, implementation=None):
        totals, counts = memory
        if isinstance(runs, TokenStates):
            total, count = totals[runs.source] + y, counts[runs.source] + 1
            write = {"mode": "drop", "unique_indices": True}
            memory = [totals.at[runs.target].set(total, **write), counts.at[runs.target].set(count, **write)]
            return self.out_proj(total / count), memory
        order = jnp.zeros(len(y), jnp.int32).at[runs.place].set(jnp.arange(len(y), dtype=jnp.int32))
        rows = jnp.pad(y[order], ((0, BLOCK), (0, 0)))
        inside = jnp.arange(1, BLOCK + 1)[:, None]

        def one(i, carry):
            means, totals, counts = carry
            start, length, source, target = (field[i] for field in (runs.start, runs.length, runs.source, runs.target))
            own = jnp.where(inside <= length, jax.lax.dynamic_slice_in_dim(rows, start, BLOCK), 0)
            sums = totals[source] + jnp.cumsum(own, 0)
            means = jax.lax.dynamic_update_slice_in_dim(means, sums / (counts[source] + inside), start, 0)
            return means, totals.at[target].set(sums[-1]), counts.at[target].set(counts[source] + length)

        means, *memory = jax.lax.fori_loop(0, runs.count, one, (jnp.zeros_like(rows), totals, counts))
        return self.out_proj(means[runs.place[:keep]]), memory


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as context:
        context.setitem(decoder.MIXERS, KIND.name, ("linear_attn", RunningMean))
        context.setattr(qwen3_5, "layer_kind", lambda sizes: KIND)
        directory = make_checkpoint(tmp_path_factory.mktemp("toy") / "toy", "qwen3_5", seed=3)
        with open_llm(directory) as engine:
            yield engine


def test_its_answers_are_the_same_alone_together_and_as_a_prompt(llm, textured_image):
    conversations = [user("A", textured_image(90, 130), "and many words. " * 9), user("Few."), user("Others? " * 30)]
    together = answers(llm.chat(conversations, GREEDY, use_tqdm=False))
    assert [answers(llm.chat([one], GREEDY, use_tqdm=False))[0] for one in conversations] == together
    scores = llm.score(conversations, [one[0][0] for one in together], use_tqdm=False)
    assert all(score.greedy.all() for score in scores)
    four = dataclasses.replace(GREEDY, n=4)
    assert answers(llm.chat(conversations, four, use_tqdm=False)) == [4 * one for one in together]


def test_its_bytes_are_planned_and_allocated(llm):
    config, runner = llm.service.checkpoint.config, llm.service.device.runner
    assert [kind.keeps_kv for kind in config.text.layer_kinds] == [False, False, False, True]
    assert config.text.sequence_bytes(np.float32) == 3 * 4 * (WIDTH + 1)
    shapes: Shapes = runner.shapes
    assert shapes.num_states == 1 + BUCKETS.max_sequences + shapes.num_snapshots
    assert shapes.num_snapshots == 4 * BUCKETS.max_sequences
    states = [one for layer in runner.pool.make()[:3] for one in layer]
    assert sum(one.nbytes for one in states) == shapes.num_states * config.text.sequence_bytes(np.float32)
    assert shapes.kv.layers == 1
    assert [half.shape for half in runner.pool.make()[3]] == 2 * [shapes.pool.shape]

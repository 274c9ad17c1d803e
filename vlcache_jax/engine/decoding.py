"""What answers that grow hand to the device for their next token, and what they get from it (host, numpy)."""

from __future__ import annotations

from collections import abc

import numpy as np
import numpy.typing as npt

from vlcache_jax.engine.request import Generation, Logprob
from vlcache_jax.engine.sampling import MAX_BANNED, Sampled, SamplerInputs
from vlcache_jax.models import Rows
from vlcache_jax.pallas_kernels import PAGE


def next_rows(active: abc.Sequence[Generation], tables: abc.Sequence[npt.NDArray[np.int32]]) -> Rows:
    """The rows of the tokens chosen last.

    Args:
      tables: pages of each answer.
    """
    index = np.array([sequence.length - 1 for sequence in active], np.int32)
    page = np.array([table[i // PAGE] for table, i in zip(tables, index, strict=True)], np.int32)
    delta = np.array([sequence.layout.delta for sequence in active], np.int32)
    token = np.array([sequence.token_ids[-1] for sequence in active], np.int32)
    position = np.tile(index + delta, (3, 1))
    return Rows(page * PAGE + index % PAGE, position, np.zeros_like(index), index + 1, token)


def sampler_inputs(sequences: abc.Sequence[Generation], size: int, vocab_size: int, *, no_lane: int) -> SamplerInputs:
    """How each token is to be chosen.

    Args:
      size: rows; those beyond the sequences are padding.
      no_lane: the lane of padding.
    """
    inputs = SamplerInputs(
        temperature=np.zeros(size, np.float32),
        top_k=np.zeros(size, np.int32),
        top_p=np.ones(size, np.float32),
        penalty=np.ones(size, np.float32),
        seed=np.zeros(size, np.uint32),
        step=np.zeros(size, np.int32),
        banned=np.full((size, MAX_BANNED), vocab_size, np.int32),
        sequence=np.full(size, no_lane, np.int32),
        logprobs=np.zeros(size, np.bool_),
    )
    for row, sequence in enumerate(sequences):
        params = sequence.params
        inputs.temperature[row], inputs.top_k[row], inputs.top_p[row] = params.temperature, params.top_k, params.top_p
        inputs.penalty[row] = params.repetition_penalty
        inputs.seed[row], inputs.step[row] = sequence.seed, len(sequence.token_ids)
        inputs.sequence[row] = sequence.lane
        inputs.logprobs[row] = params.logprobs is not None
        if len(sequence.token_ids) < params.min_tokens:
            end = sorted(sequence.end_tokens)
            inputs.banned[row, : len(end)] = end
    return inputs


def append(sequences: abc.Sequence[Generation], sampled: Sampled) -> None:
    """Lets each sequence go on with its row's token."""
    for row, sequence in enumerate(sequences):
        if sequence.params.logprobs is not None and sampled.token[row] >= 0:
            top = slice(sequence.params.logprobs)
            pairs = zip(sampled.top_token[row, top].tolist(), sampled.top_logprob[row, top].tolist(), strict=True)
            sequence.logprobs.append(Logprob(float(sampled.logprob[row]), dict(pairs)))
        sequence.append(int(sampled.token[row]))

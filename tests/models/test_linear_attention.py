"""Linear attention alone: the rule against float64, and what the engine relies on when it cuts prompts into steps."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.helper import drawn
from vlcache_jax.models.layer_kinds import BLOCK, BlockKind, LinearAttentionConfig, Runs, TokenStates
from vlcache_jax.models.linear_attention import GatedDeltaNet, layer_kind, unit_inverse, update, update_block

SIZES = LinearAttentionConfig(key_heads=2, value_heads=6, key_width=8, value_width=12, taps=4)
WIDTH, ROWS, STATES, BLOCKS = 24, 192, 6, 12
LENGTHS = [23, BLOCK, 41, 1, 20, 1]  # of a prompt's blocks


class Text:
    """The part of a decoder's configuration that the module reads."""

    linear_attention, hidden_size, rms_norm_eps = SIZES, WIDTH, 1e-6

    @staticmethod
    def quantizations_of(layer, product):
        return (None, None) if product == "in_proj_vz" else (None,)


class Layer:
    """A module with weights of trained models' decays, and its step, which compiles once for all prompts."""

    def __init__(self, dtype="float32", text=Text):
        module = drawn(lambda: GatedDeltaNet(text, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
        rng = np.random.default_rng(1)
        module.A_log[...] = jnp.asarray(np.log(rng.uniform(0.02, 16, module.A_log.shape)).astype(np.float32))
        module.dt_bias[...] = jnp.asarray(rng.uniform(-6, -2, module.dt_bias.shape).astype(np.float32))
        self.dtype, self.kind = jnp.dtype(dtype), layer_kind(text.linear_attention)
        self._step = jax.jit(functools.partial(module, keep=ROWS))
        self._token = jax.jit(functools.partial(module, keep=4))

    def memory(self, fill=np.nan):
        """States of all slots, of which the first one is zero."""
        arrays = [np.full((STATES, *one.shape), fill, one.dtype or self.dtype) for one in self.kind.states]
        for array in arrays:
            array[0] = 0
        return arrays

    def run(self, x, memory, runs):
        """Output and memory of a step whose rows after x are padding."""
        rows = np.full((ROWS, WIDTH), 3, self.dtype)
        rows[: len(x)] = x
        out, memory = self._step(rows, list(memory), runs)
        return np.asarray(out)[: len(x)], [np.asarray(array) for array in memory]

    def token(self, x, memory, source, target):
        """Output and memory of a decode step of four rows."""
        states = TokenStates(np.array(source, np.int32), np.array(target, np.int32))
        out, memory = self._token(np.asarray(x, self.dtype), list(memory), states)
        return np.asarray(out), [np.asarray(array) for array in memory]


@pytest.fixture(scope="module")
def layer():
    return Layer()


def make_runs(blocks, order=None):
    """The runs of blocks (start, length, source, target); `order[i]` is the row of token i."""
    place = np.arange(ROWS, dtype=np.int32)
    if order is not None:
        place[order] = np.arange(len(order))
    fields = np.zeros((4, BLOCKS), np.int32)
    fields[:, : len(blocks)] = np.array(blocks, np.int32).T
    return Runs(place, *fields, np.int32(len(blocks)))


def blocks_of(lengths, slot, first=0, begun=False):
    starts = first + np.cumsum([0, *lengths[:-1]])
    sources = [slot if begun or i else 0 for i in range(len(lengths))]
    return [(start, length, source, slot) for start, length, source in zip(starts, lengths, sources, strict=True)]


@pytest.fixture(scope="module")
def whole(layer):
    """A prompt and its output and states, computed in one step."""
    x = np.random.default_rng(2).standard_normal((sum(LENGTHS), WIDTH)).astype(np.float32)
    out, memory = layer.run(x, layer.memory(), make_runs(blocks_of(LENGTHS, 2)))
    assert np.isfinite(out).all()
    assert np.abs(out).max() > 0.1
    return x, out, [array[2] for array in memory]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# The rule.


def reference(q, k, v, beta, decay, state):
    """The rule token by token in float64, of one head: q, k [C, dk], v [C, dv], beta and decay [C], state [dk, dv]."""
    q, k, v, beta, decay, state = (np.asarray(x, np.float64) for x in (q, k, v, beta, decay, state))
    out = []
    for i in range(len(q)):
        state = np.exp(decay[i]) * state
        state = state + np.outer(k[i], beta[i] * (v[i] - state.T @ k[i]))
        out.append(state.T @ q[i])
    return np.stack(out), state


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rule_inputs(alike, decay, size=BLOCK, seed=0):
    """Inputs of a block of one key head and three value heads; `alike` is the cosine of two keys."""
    rng = np.random.default_rng(seed)
    common, width = unit(rng.standard_normal(16)), 16
    k = unit(np.sqrt(alike) * common + np.sqrt(1 - alike) * unit(rng.standard_normal((size, width))))
    q = unit(rng.standard_normal((size, width))) * width**-0.5
    v = rng.standard_normal((1, 3, size, 12))
    beta = rng.uniform(0.5, 1, (1, 3, size))
    low, high = decay
    decays = -np.exp(rng.uniform(np.log(low), np.log(high), (1, 3, size)))
    state = rng.standard_normal((1, 3, width, 12))
    return [x.astype(np.float32) for x in (q[None], k[None], v, beta, decays, state)]


@pytest.mark.parametrize("alike", [0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("decay", [(1e-9, 1e-8), (1e-3, 1e-1), (1e-3, 359), (350, 359)], ids=str)
def test_a_block_follows_the_rule(alike, decay):
    """Keys that are unlike or nearly the same, and heads that forget nothing, slowly, or everything at once."""
    q, k, v, beta, decays, state = rule_inputs(alike, decay)
    out, after = jitted_block(q, k, v, beta, decays, state)
    for head in range(3):
        wanted, wanted_state = reference(q[0], k[0], v[0, head], beta[0, head], decays[0, head], state[0, head])
        scale = max(1, np.abs(v).max(), np.abs(wanted_state).max())
        assert np.abs(out[0, head] - wanted).max() <= 1e-5 * scale
        assert np.abs(after[0, head] - wanted_state).max() <= 1e-5 * scale


jitted_block = jax.jit(update_block)


@pytest.mark.parametrize("alike", [0, 0.5, 0.9, 0.999])
def test_what_a_large_state_foretells_cancels_no_digits(alike):
    """Values close to those that the state holds along their keys. Solving for values and keys apart loses a digit."""
    errors = []
    for seed in range(5):
        q, k, v, beta, decays, state = rule_inputs(alike, (1e-9, 1e-8), seed=seed)
        state *= 100
        v += np.einsum("hgde,hcd->hgce", state, k)
        out, after = jitted_block(q, k, v, beta, decays, state)
        for head in range(3):
            wanted = reference(q[0], k[0], v[0, head], beta[0, head], decays[0, head], state[0, head])
            errors.append([np.abs(one[0, head] - other).max() for one, other in zip((out, after), wanted, strict=True)])
    assert np.max(errors, axis=1).mean() < 3.5e-5


def test_a_token_follows_the_rule():
    q, k, v, beta, decays, state = rule_inputs(0.5, (1e-3, 359), size=1)
    out, after = jax.jit(update)(q[:, 0], k[:, 0], v[:, :, 0], beta[..., 0], decays[..., 0], state)
    for head in range(3):
        wanted, wanted_state = reference(q[0], k[0], v[0, head], beta[0, head], decays[0, head], state[0, head])
        np.testing.assert_allclose(out[0, head], wanted[0], atol=1e-6)
        np.testing.assert_allclose(after[0, head], wanted_state, atol=1e-6)


def test_tokens_without_rate_and_decay_change_nothing():
    q, k, v, beta, decays, state = rule_inputs(0.5, (1e-3, 1e-1))
    q[:, 40:] = k[:, 40:] = beta[..., 40:] = decays[..., 40:] = 0
    out, after = jitted_block(q, k, v, beta, decays, state)
    np.testing.assert_array_equal(out[:, :, 40:], 0)
    beta[:], decays[:], k[:] = 0, 0, 0
    np.testing.assert_array_equal(jitted_block(q, k, v, beta, decays, state)[1], state)
    assert not np.array_equal(after, state)


@pytest.mark.parametrize("size", [1, 2, 3, 33, 64])
def test_the_inverse_of_a_unit_triangular_matrix(size):
    """Its entries are at most about 1 if keys are alike, but those of the matrix's powers are not."""
    rng = np.random.default_rng(size)
    for alike in (0, 0.9, 0.999):
        common, own = unit(rng.standard_normal(16)), unit(rng.standard_normal((size, 16)))
        k = unit(np.sqrt(alike) * common + np.sqrt(1 - alike) * own)
        system = np.tril(k @ k.T * rng.uniform(0, 1, (size, 1)), -1).astype(np.float32)
        above = np.triu(np.full((size, size), 7, np.float32))  # not read
        wanted = np.linalg.inv(np.eye(size) + system.astype(np.float64))
        found = np.asarray(unit_inverse(jnp.asarray(system + above)), np.float64)
        assert np.abs(found - wanted).max() <= 2e-6 * max(1, np.abs(wanted).max())


# Steps.


def test_a_prompt_in_two_steps_is_the_same_to_the_last_bit(layer, whole):
    """Cut after any of its blocks."""
    x, out, states = whole
    for cut in range(1, len(LENGTHS)):
        count = sum(LENGTHS[:cut])
        first, memory = layer.run(x[:count], layer.memory(), make_runs(blocks_of(LENGTHS[:cut], 2)))
        second, memory = layer.run(x[count:], memory, make_runs(blocks_of(LENGTHS[cut:], 2, begun=True)))
        assert_same([np.concatenate([first, second]), *(array[2] for array in memory)], [out, *states])


def test_the_order_of_rows_changes_no_bit(layer, whole):
    x, out, states = whole
    order = np.random.default_rng(3).permutation(len(x))
    shuffled = np.empty_like(x)
    shuffled[order] = x
    found, memory = layer.run(shuffled, layer.memory(), make_runs(blocks_of(LENGTHS, 2), order))
    assert_same([found[order], *(array[2] for array in memory)], [out, *states])


def test_other_sequences_change_no_bit(layer, whole):
    """The rows of another one in the same step are NaN, in an order of their own, and so are all other states."""
    x, out, states = whole
    other = np.full((30, WIDTH), np.nan, np.float32)
    rows = np.random.default_rng(4).permutation(len(x) + 30)
    both = np.empty((len(rows), WIDTH), np.float32)
    for blocks, parts in (
        ([*blocks_of(LENGTHS, 2), *blocks_of([20, 10], 4, len(x))], [x, other]),
        ([*blocks_of([20, 10], 4), *blocks_of(LENGTHS, 2, 30)], [other, x]),
    ):
        both[rows] = np.concatenate(parts)
        found, memory = layer.run(both, layer.memory(), make_runs(blocks, rows))
        own = found[rows][: len(x)] if parts[0] is x else found[rows][30:]
        assert_same([own, *(array[2] for array in memory)], [out, *states])
        for array in memory:
            assert np.isnan(array[[1, 3, 5]]).all()
            np.testing.assert_array_equal(array[0], 0)
        assert np.isnan(memory[1][4]).any()


def test_blocks_without_tokens_copy_states(layer, whole):
    """Before the last token, to two more sequences. The outputs of all tokens stay."""
    x, out, states = whole
    *before, last = blocks_of(LENGTHS, 2)
    start = before[-1][0]
    for place in (start, start + LENGTHS[-2]):
        copies = [(place, 0, 2, 1), (place, 0, 2, 5)]
        found, memory = layer.run(x, layer.memory(), make_runs([*before, *copies, last]))
        assert_same([found, *(array[2] for array in memory)], [out, *states])
        _, wanted = layer.run(x[:-1], layer.memory(), make_runs(before))
        for array, expected in zip(memory, wanted, strict=True):
            assert_same([array[1], array[5]], [expected[2]] * 2)
            assert not np.array_equal(array[1], array[2])


def test_a_new_sequence_begins_with_nothing(layer, whole):
    """Whatever its slot had; a prompt of one token is a block of its own."""
    x, out, _ = whole
    found, memory = layer.run(x[:1], layer.memory(), make_runs([(0, 1, 0, 3)]))
    np.testing.assert_allclose(found, out[:1], atol=1e-6)
    tail, _ = memory
    np.testing.assert_array_equal(tail[3, :, :-1], 0)
    assert tail[3, :, -1].all()


def test_tokens_one_by_one_equal_blocks(layer, whole):
    """Almost: the sums run in another order. The other rows of the steps are NaN."""
    x, out, states = whole
    memory, found = layer.memory(), []
    for i in range(len(x)):
        rows = np.full((4, WIDTH), np.nan, np.float32)
        rows[1] = x[i]
        one, memory = layer.token(rows, memory, [0, 2 if i else 0, 0, 0], [STATES, 2, STATES + 1, STATES + 2])
        found.append(one[1])
    scale = np.abs(out).max()
    assert np.abs(np.stack(found) - out).max() <= 2e-6 * scale
    for array, expected in zip(memory, states, strict=True):
        assert np.abs(array[2] - expected).max() <= 2e-6 * max(1, np.abs(expected).max())


def test_rows_that_have_ended_change_no_state(layer, whole):
    x, _, states = whole
    memory = layer.memory(5)
    for array, state in zip(memory, states, strict=True):
        array[2] = array[4] = state
    rows = np.stack([x[3], x[4], x[3], x[5]])
    out, after = layer.token(rows, memory, [2, 0, 4, 0], [2, STATES + 1, 4, STATES + 3])
    np.testing.assert_array_equal(out[0], out[2])
    for array, before in zip(after, memory, strict=True):
        np.testing.assert_array_equal(array[2], array[4])
        assert not np.array_equal(array[2], before[2])
        np.testing.assert_array_equal(array[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


@pytest.mark.slow
def test_states_of_bfloat16_models(whole):
    """The rule's states are in float32, the convolution's inputs are not. Cuts change no bit here, either."""
    layer, (x, exact, _) = Layer("bfloat16"), whole
    x = x.astype(jnp.bfloat16)
    out, memory = layer.run(x, layer.memory(), make_runs(blocks_of(LENGTHS, 2)))
    assert [array.dtype for array in memory] == ["bfloat16", "float32"]
    count = sum(LENGTHS[:3])
    first, half = layer.run(x[:count], layer.memory(), make_runs(blocks_of(LENGTHS[:3], 2)))
    second, half = layer.run(x[count:], half, make_runs(blocks_of(LENGTHS[3:], 2, begun=True)))
    found, wanted = ([array[2] for array in arrays] for arrays in (half, memory))
    assert_same([np.concatenate([first, second]), *found], [out, *wanted])
    assert np.linalg.norm(out.astype(np.float32) - exact) <= 0.02 * np.linalg.norm(exact)


# Maps.


class Square(Text):
    """Keys and values of one width, so that A and B have the form of a state."""

    linear_attention = dataclasses.replace(SIZES, value_width=SIZES.key_width)


@pytest.fixture(scope="module")
def square():
    return Layer(text=Square)


def make_kinds(blocks):
    """The runs of blocks (start, length, source, target, kind, tail, factor)."""
    fields = np.zeros((7, 2 * BLOCKS), np.int32)
    fields[:, : len(blocks)] = np.array(blocks, np.int32).T
    start, length, source, target, *kinds = fields
    return Runs(np.arange(ROWS, dtype=np.int32), start, length, source, target, np.int32(len(blocks)), *kinds)


def computing(start, length, source, target):
    return start, length, source, target, BlockKind.COMPUTE, source, 0


LEFT, ADDED, PASSED = 3, 4, 5  # first tokens of an image that are computed, and slots of its map


def capturing(x, lengths):
    """Blocks of a prompt in slot 2, and of the map of its tokens after the first `LEFT`, in pieces of `lengths`."""
    blocks, start = [computing(0, LEFT, 0, 2)], LEFT
    for length in lengths:
        for slot, kind in ((ADDED, BlockKind.ADDED), (PASSED, BlockKind.PASSED)):
            blocks.append((start, length, slot if start > LEFT else 0, slot, kind, 2, 0))
        blocks.append(computing(start, length, 2, 2))
        start += length
    assert start == len(x)
    return blocks


@pytest.mark.parametrize("lengths", [[1], [60], [BLOCK, 33, 1, 20]], ids=str)
def test_a_map_changes_a_state_as_its_tokens_do(square, lengths):
    """In another sequence, with the same inputs after the first tokens. The outputs and the first state stay."""
    rng = np.random.default_rng(5)
    image = rng.standard_normal((LEFT + sum(lengths), WIDTH)).astype(np.float32)
    blocks = capturing(image, lengths)
    out, memory = square.run(image, square.memory(), make_kinds(blocks))
    plain = [block for block in blocks if block[4] == BlockKind.COMPUTE]
    expected, alone = square.run(image, square.memory(), make_kinds(plain))
    assert_same([out, *(array[2] for array in memory)], [expected, *(array[2] for array in alone)])

    # Another prompt: text, the image, more text. It is computed as a whole, and with the map in place of the image.
    text, more = (rng.standard_normal((count, WIDTH)).astype(np.float32) for count in (30, 9))
    whole = [computing(0, 30, 0, 2), computing(30, LEFT, 2, 2)]
    start = 30 + LEFT
    for length in (*lengths, 9):
        whole.append(computing(start, length, 2, 2))
        start += length
    expected, after = square.run(np.concatenate([text, image, more]), square.memory(), make_kinds(whole))
    memory = [np.array(array) for array in memory]
    for array in memory:
        array[2] = np.nan
    first = [computing(0, 30, 0, 2), computing(30, LEFT, 2, 2)]
    linked = [*first, (30 + LEFT, 0, 2, 2, BlockKind.LINK, ADDED, PASSED), computing(30 + LEFT, 9, 2, 2)]
    found, memory = square.run(np.concatenate([text, image[:LEFT], more]), memory, make_kinds(linked))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found[: 30 + LEFT], expected[: 30 + LEFT], atol=0)
    np.testing.assert_allclose(found[30 + LEFT :], expected[-9:], atol=2e-6 * scale)
    for array, other in zip(memory, after, strict=True):
        np.testing.assert_allclose(array[2], other[2], atol=2e-6 * max(1, np.abs(other[2]).max()))
        assert np.isfinite(array[ADDED]).all()


def test_a_map_in_two_steps_is_the_same_to_the_last_bit(square):
    lengths = [BLOCK, 33, 1, 20]
    image = np.random.default_rng(6).standard_normal((LEFT + sum(lengths), WIDTH)).astype(np.float32)
    blocks = capturing(image, lengths)
    _, expected = square.run(image, square.memory(), make_kinds(blocks))
    for cut in range(1, len(lengths)):
        count, own = LEFT + sum(lengths[:cut]), 1 + 3 * cut
        _, memory = square.run(image[:count], square.memory(), make_kinds(blocks[:own]))
        later = [(start - count, *rest) for start, *rest in blocks[own:]]
        _, memory = square.run(image[count:], memory, make_kinds(later))
        for array, other in zip(memory, expected, strict=True):
            np.testing.assert_array_equal(array[[2, ADDED]], other[[2, ADDED]])
        np.testing.assert_array_equal(memory[1][PASSED], expected[1][PASSED])


def test_heads_that_forget_pass_nothing(square):
    """A of a head is smaller the more it decays, and is the identity where no token has a rate."""
    image = np.random.default_rng(7).standard_normal((LEFT + 60, WIDTH)).astype(np.float32)
    _, memory = square.run(image, square.memory(), make_kinds(capturing(image, [60])))
    norms = np.linalg.norm(memory[1][PASSED], 2, (-2, -1))
    assert norms.max() <= 1 + 1e-5
    assert norms.min() < 0.5

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.device.sampler import (
    COLUMNS,
    FIXED,
    MAX_BAD_LENGTH,
    MAX_BAD_WORDS,
    NO_ANSWER,
    NO_DECODE_SLOT,
    NOT_ALLOWED,
    NOT_FINITE,
    ONCE,
    Choosing,
    _draw_by,
    _top_one_by_one,
    choice_of,
    empty_decode_state,
    hold_decode_slots,
    open_decode_slot,
    sample,
    score,
)
from vlcache_jax.engine.decode_slots import bad_word_tokens, bias_row, marks_row, recent_tokens, words_array
from vlcache_jax.sampling import SamplingParams

pytestmark = pytest.mark.slow  # every parameter; tests of the engine show that they are at work

V = 50
FEW, MANY = 8, 2048  # rows of a step: few shapes, because each is compiled
PROMPT, ANSWER, ENDS = [3, 7, 7, 11, 20], [11, 4, 8, 4, 30, 1, 2], [13, 14]
WORDS = [[5], [2, 6], [1, 2, 9], [4, 2, 10], [30, 1, 2, 12], list(range(40, 48))]  # some begun, and one that cannot be
BIAS = {0: 2.5, 4: -3.0, 21: 1.0}
ALLOWED = list(range(1, V, 3))


@jax.jit
def run(logits, decode_slots, packed):
    return sample(logits, decode_slots, Choosing.unpack(packed))


opened = jax.jit(open_decode_slot)


def padded(rows):
    packed = np.zeros((FEW, COLUMNS), np.int32)
    packed[:, 0] = NO_DECODE_SLOT
    packed[: len(rows)] = rows
    return packed


def noise(rows, seed=0):
    return 3 * jax.random.normal(jax.random.key(seed), (rows, V))


def params_of(**options):
    return SamplingParams(**{"temperature": 0, "ignore_eos": True} | options).resolve({})


def decode_slots_of(answers):
    """Decode slots with answers (decode slot, params, tokens so far)."""
    decode_slots = empty_decode_state(FEW, V)
    for decode_slot, params, tokens in answers:
        bias = bias_row(params, V)
        decode_slots = opened(
            decode_slots, decode_slot, marks_row(PROMPT, tokens, ENDS, V), np.zeros(V, np.float32) if bias is None else
            bias, words_array(WORDS if params.bad_words else [], V), recent_tokens(tokens),
        )  # fmt: skip
        last = tokens[-1] if tokens else 0
        decode_slots = decode_slots._replace(
            token=decode_slots.token.at[decode_slot].set(last), step=decode_slots.step.at[decode_slot].set(len(tokens))
        )
    return decode_slots


def in_many_rows(params, logits, max_tokens=100):
    """The token of each row, all with these parameters behind the same prompt and answer; the seed is the row's."""
    one = decode_slots_of([(0, params, ANSWER)])
    decode_slots = jax.tree.map(lambda x: jnp.repeat(x[:1], MANY, axis=0), one)
    packed = np.stack([Choosing.row(params, decode_slot=i, seed=i, max_tokens=max_tokens) for i in range(MANY)])
    sampled, _ = run(logits, decode_slots, packed)
    return np.asarray(sampled.token)


def bias_reference(x):
    for token, bias in BIAS.items():
        x[:, token] += bias
    return x


def allowed_reference(x):
    x[:, [token for token in range(V) if token not in ALLOWED]] = -np.inf
    return x


def penalties_reference(x, presence, frequency):
    count = np.bincount(ANSWER, minlength=V)
    return x - np.float32(frequency) * count - np.float32(presence) * (count > 0)


def by_library(processor, ids):
    torch = pytest.importorskip("torch")
    return lambda x: processor(torch.tensor([ids] * len(x)), torch.tensor(x)).numpy()


def processors():
    """Parameters, and what they do to logits: in the order in which they are applied."""
    pytest.importorskip("torch")
    from transformers.generation import logits_process as library

    return {
        "allowed_token_ids": (ALLOWED, allowed_reference),
        "bad_words": (["x"], by_library(library.NoBadWordsLogitsProcessor(WORDS), ANSWER)),
        "min_tokens": (
            len(ANSWER) + 1,
            by_library(library.MinNewTokensLengthLogitsProcessor(len(PROMPT), len(ANSWER) + 1, ENDS), PROMPT + ANSWER),
        ),
        "logit_bias": (BIAS, bias_reference),
        "repetition_penalty": (1.7, by_library(library.RepetitionPenaltyLogitsProcessor(1.7), PROMPT + ANSWER)),
        "frequency_penalty": (1.5, lambda x: penalties_reference(x, 0, 1.5)),
        "presence_penalty": (-2.0, lambda x: penalties_reference(x, -2.0, 0)),
    }


@pytest.mark.parametrize(
    "names",
    [
        ["allowed_token_ids"], ["bad_words"], ["min_tokens"], ["logit_bias"], ["repetition_penalty"],
        ["frequency_penalty"], ["presence_penalty"], ["frequency_penalty", "presence_penalty"],
        ["allowed_token_ids", "bad_words", "min_tokens", "logit_bias", "repetition_penalty", "frequency_penalty",
         "presence_penalty"],
    ],
    ids=lambda names: "+".join(names)[:30],
)  # fmt: skip
def test_what_is_done_to_logits_is_the_librarys(names):
    known = processors()
    logits = noise(MANY)
    x = np.array(logits)
    for name in names:
        x = known[name][1](x)
    expected = x.argmax(axis=1)
    assert (expected != logits.argmax(axis=1)).sum() > 20  # it matters
    token = in_many_rows(params_of(**{name: known[name][0] for name in names}), logits)
    np.testing.assert_array_equal(token, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.04, "top_k": 9, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.7, "bad_words": ["x"]},
    ],
    ids=lambda options: "+".join(options),
)  # fmt: skip
def test_draws_are_from_the_librarys_distribution(options):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as library

    logits = noise(1, seed=5)
    x = np.array(logits)
    for name, (value, process) in processors().items():
        if name in options:
            assert options[name] == value
            x = process(x)
    x = torch.tensor(x)
    for name, warper in (
        ("temperature", library.TemperatureLogitsWarper), ("min_p", library.MinPLogitsWarper),
        ("top_k", library.TopKLogitsWarper), ("top_p", library.TopPLogitsWarper),
    ):  # fmt: skip
        if name in options:
            x = warper(options[name])(None, x)
    expected = torch.softmax(x, -1)[0].numpy()
    token = in_many_rows(params_of(**{"temperature": 1.0} | options), jnp.repeat(logits, MANY, axis=0))
    frequency = np.bincount(token, minlength=V) / MANY
    assert set(np.flatnonzero(expected > 0.003)) <= set(np.flatnonzero(frequency)) <= set(np.flatnonzero(expected))
    np.testing.assert_allclose(frequency, expected, atol=0.04)


def test_a_draw_is_of_its_seed_and_step():
    """Answers that were drawn once can be drawn again."""
    logits = noise(MANY, seed=3)
    token = in_many_rows(params_of(temperature=0.7, top_k=20), logits)
    for row in range(12):
        key = jax.random.fold_in(jax.random.key(row), len(ANSWER))
        likely = np.isin(np.arange(V), np.argsort(-logits[row], kind="stable")[:20])
        x = jnp.where(likely, logits[row] / jnp.float32(0.7), -jnp.inf)
        assert token[row] == jax.random.categorical(key, x)


def test_a_draw_does_not_hang_on_the_order_of_tokens_that_are_almost_equal():
    """What is computed again differs in its last bits."""
    logits = np.round(noise(MANY, seed=3))  # many are equal
    again = logits + noise(MANY, seed=4) * np.float32(1e-6)
    params = params_of(temperature=0.7)
    np.testing.assert_array_equal(in_many_rows(params, again), in_many_rows(params, logits))


def draw_by_sorting(x, ask, step):
    """The tokens that stay, found as the parameters say it."""
    x = x / jnp.maximum(ask.temperature, 1e-6)[:, None]
    order = jnp.argsort(x, axis=-1, descending=True, stable=True)
    x = jnp.take_along_axis(x, order, axis=-1)
    x = jnp.where(x < x[:, :1] + jnp.log(ask.min_p)[:, None], -jnp.inf, x)
    k = jnp.where(ask.top_k > 0, ask.top_k, x.shape[1])[:, None]
    x = jnp.where(jnp.arange(x.shape[1]) < k, x, -jnp.inf)
    p = jax.nn.softmax(x, axis=-1)
    x = jnp.where((jnp.cumsum(p, axis=-1) - p < ask.top_p[:, None]) | (ask.top_p[:, None] >= 1), x, -jnp.inf)
    keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(ask.seed, step)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, x.shape[1:]))(keys)
    choice = jnp.argmax(x + jnp.take_along_axis(noise, order, axis=-1), axis=-1)
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("decimals", [7, 0])
def test_draws_need_no_sorted_rows(width, decimals):
    """Many tokens are equal, zeros have both signs, and some are not allowed."""
    rng = np.random.default_rng(decimals)
    logits = np.round(3 * rng.standard_normal((MANY, V)), decimals).astype(np.float32)
    logits[:, 3] = -np.inf
    options = [
        {"temperature": float(rng.choice([0.3, 0.7, 1.0, 2.0])), "top_k": int(rng.choice([-1, 1, 2, 5, 20, V])),
         "top_p": float(rng.choice([0.01, 0.3, 0.8, 0.95, 1.0])), "min_p": float(rng.choice([0.0, 0.02, 0.2]))}
        for _ in range(MANY)
    ]  # fmt: skip
    rows = np.stack(
        [Choosing.row(params_of(**one), decode_slot=0, seed=i, max_tokens=9) for i, one in enumerate(options)]
    )
    ask, step = jax.jit(Choosing.unpack)(rows), np.arange(MANY, dtype=np.int32)
    expected = jax.jit(draw_by_sorting)(logits, ask, step)
    found = jax.jit(functools.partial(_draw_by, width=width))(logits, ask, step)
    np.testing.assert_array_equal(found, expected)


def test_the_most_likely_tokens_one_after_the_other():
    """As `jax.lax.top_k` has them: of equals the first, and what is not allowed last."""
    x = (jnp.round(noise(FEW, seed=3)) + 0.0).at[:, 5:40].set(-jnp.inf)  # no zero of another sign
    for found, expected in zip(jax.jit(_top_one_by_one, static_argnums=1)(x, 20), jax.lax.top_k(x, 20), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_held_lanes_choose_among_what_is_allowed():
    """By bits, with their biases; what decode slots held before that does not matter, and others stay as they are."""
    allowed = np.random.default_rng(0).random((2, V)) < 0.3
    words = np.packbits(np.pad(allowed, [(0, 0), (0, 64 - V)], constant_values=True), axis=1, bitorder="little")
    token, bias = np.full((3, 4), V, np.int32), np.zeros((3, 4), np.float32)
    token[1, : len(BIAS)], bias[1, : len(BIAS)] = list(BIAS), list(BIAS.values())
    before = decode_slots_of([(5, params_of(allowed_token_ids=ALLOWED), [])])
    decode_slots = jax.jit(hold_decode_slots)(
        before, np.array([2, 5, NO_DECODE_SLOT], np.int32), np.pad(words.view(np.int32), [(0, 1), (0, 0)]), token, bias
    )
    expected = np.array(before.bias)
    expected[[2, 5]] = np.where(allowed, bias_reference(np.zeros((2, V), np.float32)), -np.inf)
    expected[2][allowed[0]] = 0
    np.testing.assert_array_equal(decode_slots.bias, expected)
    assert all(
        one is other or np.array_equal(one, other) for one, other in zip(decode_slots[:4], before[:4], strict=True)
    )


MIXED = (
    {}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.7, "logprobs": 3}, {"bad_words": ["x"]},
    {"logit_bias": BIAS, "allowed_token_ids": ALLOWED, "temperature": 1.3}, {"min_tokens": 9, "logprobs": 0},
    {"frequency_penalty": 1.0, "min_p": 0.1, "temperature": 0.9, "top_k": 7, "presence_penalty": -1.0, "logprobs": 20},
)  # fmt: skip


def mixed():
    """Parameters, tokens so far and packed row of answers that differ in everything; their decode slots are in
    reverse."""
    params = [params_of(**options) for options in MIXED]
    tokens = [ANSWER[: i % 3 + 5] for i in range(len(MIXED))]
    rows = [Choosing.row(p, decode_slot=len(MIXED) - 1 - i, seed=50 + i, max_tokens=10) for i, p in enumerate(params)]
    return params, tokens, rows


def test_a_row_depends_on_itself_alone():
    params, tokens, rows = mixed()
    count = len(rows)
    decode_slots = decode_slots_of([(count - 1 - i, params[i], tokens[i]) for i in range(count)])
    logits = noise(FEW, seed=7)
    together = []
    for _ in range(3):
        sampled, decode_slots = run(logits, decode_slots, padded(rows))
        together.append(sampled)
    for i in range(count):
        decode_slot = count - 1 - i
        by_itself = decode_slots_of([(decode_slot, params[i], tokens[i])])
        for step in range(3):
            alone, by_itself = run(logits[i : i + 1], by_itself, np.stack(rows[i : i + 1]))
            for one, several in zip(alone, together[step], strict=True):
                np.testing.assert_array_equal(one[0], several[i])
        for one, several in zip(by_itself, decode_slots, strict=True):
            np.testing.assert_array_equal(one[decode_slot], several[decode_slot])


def test_steps_in_one_program_are_the_same_steps():
    """Decode slots end in the middle, by a token, by their length, and by logits that are not finite."""
    params, tokens, rows = mixed()
    count, steps = len(rows), 8
    table = noise(V, seed=11).at[17].set(jnp.nan)
    decode_slots = decode_slots_of([(count - 1 - i, params[i], tokens[i]) for i in range(count)])
    decode_slots = decode_slots._replace(token=decode_slots.token.at[0].set(17))
    packed = padded(rows)

    def logits(decode_slots):
        return table[decode_slots.token.at[packed[:, 0]].get(mode="clip")]

    @jax.jit
    def window(decode_slots, packed):
        def body(state):
            i, decode_slots, tokens = state
            sampled, decode_slots = sample(logits(decode_slots), decode_slots, Choosing.unpack(packed))
            return i + 1, decode_slots, tokens.at[i].set(sampled.token)

        nothing = jnp.zeros((steps, FEW), jnp.int32)
        return jax.lax.while_loop(lambda state: state[0] < steps, body, (0, decode_slots, nothing))[1:]

    after, together = window(decode_slots, packed)
    chosen = []
    for _ in range(steps):
        sampled, decode_slots = run(logits(decode_slots), decode_slots, packed)
        chosen.append(sampled.token)
    np.testing.assert_array_equal(together, chosen)
    for x, y in zip(after, decode_slots, strict=True):
        np.testing.assert_array_equal(x, y)
    assert after.is_ended.all()
    assert (after.step <= 10).all()
    assert NOT_FINITE in np.asarray(together)
    assert (together[-1] == NO_ANSWER).all()
    assert (together[:, -1] == NO_ANSWER).all()


def choosing(choice):
    return jax.jit(
        lambda logits, decode_slots, rows: sample(logits, decode_slots, Choosing.unpack(rows), choice=choice)
    )


def test_a_choice_has_all_that_rows_ask_for():
    *_, rows = mixed()
    choices = ["greedy", "drawn", "any", "any", "any", "any", "any"]
    assert [choice_of(row[None]) for row in rows] == choices
    assert choice_of(np.stack(rows[:2])) == "drawn"
    assert choice_of(padded(rows[:1])) == "greedy"
    held = params_of(structured_outputs={"choice": ["a"]})
    assert choice_of(Choosing.row(held, decode_slot=0, seed=0, max_tokens=9)[None]) == "any"


@pytest.mark.parametrize("choice", FIXED)
def test_a_choice_changes_nothing_of_what_its_rows_ask_for(choice):
    params, tokens, rows = mixed()
    count = {"greedy": 1, "drawn": 2, "any": len(rows)}[choice]
    decode_slots = {
        of: decode_slots_of([(len(rows) - 1 - i, params[i], tokens[i]) for i in range(count)])
        for of in ("dynamic", choice)
    }
    chosen = {of: choosing(of) for of in decode_slots}
    for step in range(4):
        logits, found = noise(FEW, seed=step), {}
        if step == 2:
            logits = logits.at[0].set(jnp.nan)
        for of in decode_slots:
            found[of], decode_slots[of] = chosen[of](logits, decode_slots[of], padded(rows[:count]))
        asked, fixed = found.values()
        assert (fixed.logprob is None) == (choice != "any")
        for one, other in zip(asked, fixed if choice == "any" else fixed[:1], strict=choice == "any"):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(*decode_slots.values(), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("choice", FIXED)
def test_a_fixed_choice_asks_the_host_nothing(choice):
    """No branch, no loop but of a known number of turns, and no sort in what a GPU is given."""

    def names(jaxpr):
        for equation in jaxpr.eqns:
            inner = [x for x in jax.tree.leaves(tuple(equation.params.values())) if hasattr(x, "jaxpr")]
            if equation.params.get("branches_platforms"):  # one of them is compiled, a GPU's the last
                inner = inner[-1:]
            else:
                yield equation.primitive.name
            for x in inner:
                yield from names(x.jaxpr)

    _, _, rows = mixed()
    found = set(names(choosing(choice).trace(noise(FEW), empty_decode_state(FEW, V), padded(rows)).jaxpr.jaxpr))
    assert not found & {"cond", "while", "sort", "top_k", "approx_top_k", "cumsum"}
    assert ("scan" in found) == (choice != "greedy")
    of_all = set(names(choosing("dynamic").trace(noise(FEW), empty_decode_state(FEW, V), padded(rows)).jaxpr.jaxpr))
    assert {"cond", "scan"} <= of_all


def test_it_does_not_matter_how_logits_lie():
    params, tokens, rows = mixed()
    decode_slots = decode_slots_of([(len(rows) - 1 - i, params[i], tokens[i]) for i in range(len(rows))])
    logits = noise(FEW, seed=7).at[1, 3].set(jnp.nan).at[2, 5:9].set(9)  # of equals the first is chosen
    plain = [Choosing.row(params_of(), decode_slot=i, seed=i, max_tokens=20) for i in range(FEW)]
    for packed in (padded(rows), np.stack(plain)):
        one = run(logits, decode_slots, packed)
        turned = jax.jit(lambda x, decode_slots, rows: sample(x, decode_slots, Choosing.unpack(rows), axis=0))(
            logits.T, decode_slots, packed
        )
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(turned), strict=True):
            np.testing.assert_array_equal(x, y)
    assert turned[0].token[1:3].tolist() == [NOT_FINITE, 5]


def test_where_an_answer_ends():
    """At an end token unless it comes too early, and where it is as long as it may be."""
    logits = jnp.zeros((FEW, V)).at[:, ENDS[0]].set(9).at[:, 2].set(5).at[3, 2].set(20)
    params = [params_of(), params_of(min_tokens=3), params_of(), params_of()]
    rows = [Choosing.row(p, decode_slot=i, seed=0, max_tokens=3 if i > 1 else 9) for i, p in enumerate(params)]
    decode_slots = decode_slots_of([(i, p, []) for i, p in enumerate(params)])
    said = []
    for _ in range(5):
        sampled, decode_slots = run(logits, decode_slots, padded(rows))
        said.append(sampled.token[:4].tolist())
    assert [list(row) for row in zip(*said, strict=True)] == [
        [13, *[NO_ANSWER] * 4], [2, 2, 2, 13, NO_ANSWER], [13, *[NO_ANSWER] * 4], [2, 2, 2, *[NO_ANSWER] * 2],
    ]  # fmt: skip
    assert decode_slots.step[:4].tolist() == [1, 4, 1, 3]
    assert decode_slots.token[:4].tolist() == [13, 13, 13, 2]


def test_lanes_that_ended_and_padding_change_nothing():
    params, tokens, rows = mixed()
    count = len(rows)
    decode_slots = decode_slots_of([(count - 1 - i, params[i], tokens[i]) for i in range(count)])
    decode_slots = decode_slots._replace(is_ended=jnp.ones(FEW, bool))
    logits = noise(FEW).at[0].set(jnp.nan)
    sampled, after = run(logits, decode_slots, padded(rows))
    assert (sampled.token == NO_ANSWER).all()
    assert not any(np.any(np.asarray(x)) for x in sampled[1:])
    for x, y in zip(after, decode_slots, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_rows_without_a_token(temperature):
    """Damaged logits, and parameters that forbid everything; the third row is sound."""
    nothing = params_of(allowed_token_ids=[5], bad_words=["x"], temperature=temperature)
    params = [params_of(temperature=temperature), nothing, params_of()]
    decode_slots = decode_slots_of([(i, p, ANSWER) for i, p in enumerate(params)])
    logits = noise(FEW).at[0, 9].set(jnp.inf)
    rows = [Choosing.row(p, decode_slot=i, seed=0, max_tokens=20) for i, p in enumerate(params)]
    sampled, after = run(logits, decode_slots, padded(rows))
    assert sampled.token[:3].tolist() == [NOT_FINITE, NOT_ALLOWED, int(logits[2].argmax())]
    assert after.is_ended[:3].tolist() == [True, True, False]
    assert after.step[:3].tolist() == [7, 7, 8]
    assert after.token[:2].tolist() == [ANSWER[-1]] * 2


def test_an_answer_that_goes_on_elsewhere():
    """What the device counted is what the host counts: a decode slot opened with the answer so far is the decode slot
    it left."""
    params = params_of(frequency_penalty=2.0, repetition_penalty=1.2, bad_words=["x"], temperature=1.0)
    tokens, packed = [], padded([Choosing.row(params, decode_slot=1, seed=9, max_tokens=99)])
    decode_slots = decode_slots_of([(1, params, [])])
    for i in range(12):
        sampled, decode_slots = run(noise(FEW, seed=i), decode_slots, packed)
        tokens.append(int(sampled.token[0]))
    for left, opened_anew in zip(decode_slots, decode_slots_of([(1, params, tokens)]), strict=True):
        np.testing.assert_array_equal(left, opened_anew)
    assert (decode_slots.marks[1] // ONCE).sum() == 12


def test_a_lane_without_bias_and_words_ignores_what_was_there():
    before = params_of(logit_bias={2: 100.0}, bad_words=["x"])
    held = bias_row(before, V), words_array(WORDS, V), recent_tokens(ANSWER)
    decode_slots = opened(empty_decode_state(FEW, V), 0, marks_row(PROMPT, [], ENDS, V), *held)
    logits = jnp.zeros((FEW, V)).at[0, 5].set(1.0)
    rows = [Choosing.row(params_of(repetition_penalty=1.1), decode_slot=0, seed=0, max_tokens=9)]
    sampled, decode_slots = run(logits, decode_slots, padded(rows))
    assert (sampled.token[0], decode_slots.step[0]) == (5, 1)


def test_log_probabilities_are_of_raw_logits():
    logits = noise(FEW)
    params = [params_of(logprobs=5, logit_bias={i: 100.0}) if i < 3 else params_of() for i in range(4)]
    rows = [Choosing.row(p, decode_slot=i, seed=0, max_tokens=9) for i, p in enumerate(params)]
    sampled, _ = run(logits, decode_slots_of([(i, p, []) for i, p in enumerate(params)]), padded(rows))
    expected = np.asarray(jax.nn.log_softmax(logits))[:3]
    np.testing.assert_array_equal(sampled.token[:3], range(3))
    np.testing.assert_allclose(sampled.logprob[:3], expected[range(3), range(3)], atol=1e-6)
    np.testing.assert_array_equal(sampled.rank[:3], [1 + (expected[i] > expected[i, i]).sum() for i in range(3)])
    np.testing.assert_allclose(sampled.top_logprob[:3], -np.sort(-expected, axis=1)[:, :20], atol=1e-6)
    np.testing.assert_array_equal(sampled.top_token[:3], np.argsort(-expected, axis=1)[:, :20])
    assert not any(np.any(x[3]) for x in sampled[1:])  # it wants none


def test_scores():
    logits = noise(4)
    target = np.array([1, 2, int(logits[2].argmax()), 4], np.int32)
    expected = np.asarray(jax.nn.log_softmax(logits))
    for wants_top in (False, True):
        logprob, greedy, rank, top_logprob, top_token = jax.jit(score)(logits, target, wants_top)
        np.testing.assert_allclose(logprob, expected[range(4), target], atol=1e-6)
        np.testing.assert_array_equal(rank, [1 + (expected[i] > expected[i, target[i]]).sum() for i in range(4)])
        np.testing.assert_array_equal(greedy, rank == 1)
        best = wants_top * np.argsort(-expected, axis=1)[:, :20]
        np.testing.assert_array_equal(top_token, best)
        assert wants_top == bool(top_logprob.any())
    np.testing.assert_allclose(top_logprob, -np.sort(-expected, axis=1)[:, :20], atol=1e-6)


def test_a_small_vocabulary():
    _, _, rank, _, top_token = score(jnp.arange(6.0)[None], jnp.array([5]), True)
    assert top_token.tolist() == [[5, 4, 3, 2, 1, 0]]
    assert rank.tolist() == [1]


def test_the_most_likely_token_costs_no_more_than_that():
    """Whatever sorts, adds up or reads decode slots over the whole vocabulary lies in a branch."""

    def outside(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond":
                continue
            inner = [x.jaxpr for x in equation.params.values() if hasattr(x, "jaxpr")]
            yield from [equation] if not inner else []
            for x in inner:
                yield from outside(x)

    _, _, rows = mixed()
    jaxpr = jax.make_jaxpr(lambda *args: sample(args[0], args[1], Choosing.unpack(args[2])))(
        noise(FEW), empty_decode_state(FEW, V), padded(rows)
    )
    wide = {e.primitive.name for e in outside(jaxpr.jaxpr) for v in e.outvars if v.aval.shape[-1:] == (V,)}
    assert wide <= {"is_finite", "scatter"}


def test_what_lanes_cannot_hold():
    for given in ([V], [-1], [10**30]):
        for name, call in (
            ("prompt", lambda ids: marks_row(ids, [], [], V)),
            ("token_ids of the output", lambda ids: marks_row([], ids, [], V)),
            ("end tokens", lambda ids: marks_row([], [], ids, V)),
            ("bad_words", lambda ids: words_array([ids], V)),
        ):
            with pytest.raises(ValueError, match=f"{name}.* must be token ids below {V}"):
                call(given)
    for options in ({"logit_bias": {V: 1.0}}, {"allowed_token_ids": [1, V]}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be token ids below {V}"):
            bias_row(params_of(**options), V)
    for words in ([[1] * (MAX_BAD_LENGTH + 1)], [[]], [[1]] * (MAX_BAD_WORDS + 1)):
        with pytest.raises(ValueError, match=r"bad_words must (be|have)"):
            words_array(words, V)


def test_what_lanes_hold():
    params = params_of(logit_bias={1: 5.0, 2: -3.0}, allowed_token_ids=[2, 3])
    assert bias_row(params, 5).tolist() == [-np.inf, -np.inf, -3, 0, -np.inf]
    assert bias_row(params_of(), 5) is None
    assert marks_row([1, 1, 2], [2, 3, 3], [3, 4], 5).tolist() == [0, 1, 5, 10, 2]
    assert words_array([[7, 8]], V)[0].tolist() == [-1] * 6 + [7, 8]
    assert recent_tokens([1, 2]).tolist() == [-1] * 5 + [1, 2]
    assert recent_tokens(range(20)).tolist() == list(range(13, 20))


def test_bad_words_as_tokens(checkpoints):
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    from vlcache_jax.testing import make_checkpoint

    directory = make_checkpoint(
        checkpoints("qwen3_vl").parent / "words", text={"vocab_size": 400}, weights=False, corpus=["the cat sat"] * 9
    )
    tokenizer = TokenizersBackend.from_pretrained(directory)
    found = bad_word_tokens(tokenizer, ["cat", "  cat", "q"])
    assert [tokenizer.decode(ids) for ids in found] == ["cat", " cat", "cat", " cat", "q"]
    for word in ("   ", "x" * 20):
        with pytest.raises(ValueError, match="bad_words must have 1 to 8 tokens"):
            bad_word_tokens(tokenizer, [word])

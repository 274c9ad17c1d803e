"""Plans: the worked examples of the specification, and what `reuse` may be."""

from __future__ import annotations

import pathlib
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.reuse.policies import (
    EPIC,
    MPIC,
    Ends,
    Exact,
    Off,
    Plan,
    Scheduled,
    Spread,
    StaticRatio,
    TwoPass,
    make_plan,
    spread_ranks,
)
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import APPROXIMATE, computing, decide, parse_policy


def layout(*states):
    """t0 t1 | A: 2..11 | t12 | B: 13..17 | t18 t19 t20 (specification, A.3)."""
    images = [ImageRef("a", (1, 4, 10), 10, lambda: None), ImageRef("b", (1, 2, 10), 5, lambda: None)]
    return make_layout(np.zeros(21, np.int32), [2, 13], images, 2, states)


def fresh(plan, layer):
    return set(np.flatnonzero(plan.depth > layer).tolist())


TEXT = {0, 1, 12, 18, 19, 20}


@pytest.mark.parametrize("layers", [1, 3])
def test_static_ratio(layers):
    plan = StaticRatio(Fraction("0.3")).plan(layout("approximate", "approximate"), layers)
    for layer in range(layers):
        assert fresh(plan, layer) == {0, 1, 2, 3, 4, 12, 13, 18, 19, 20}
    assert fresh(plan, layers) == {20}  # logits


def test_mpic():
    for policy, expected in (
        (MPIC(2), {0, 1, 2, 3, 12, 13, 14, 18, 19, 20}),
        (MPIC(99), set(range(21))),
        (MPIC(0), TEXT),
    ):
        plan = policy.plan(layout("approximate", "approximate"), 2)
        assert fresh(plan, 0) == fresh(plan, 1) == expected
    exact_first = MPIC(2).plan(layout("exact", "approximate"), 2)
    assert fresh(exact_first, 0) == {0, 1, 12, 13, 14, 18, 19, 20}


def test_epic():
    for ends, expected in (
        ("first", {2, 3, 13, 14}),
        ("last", {10, 11, 16, 17}),
        ("both", {2, 3, 10, 11, 13, 14, 16, 17}),
    ):
        plan = EPIC(2, ends).plan(layout("approximate", "approximate"), 2)
        assert fresh(plan, 0) == fresh(plan, 1) == TEXT | expected
    assert fresh(EPIC(99, "both").plan(layout("exact", "approximate"), 2), 0) == TEXT | set(range(13, 18))


def test_both_ends():
    plan = Ends(Fraction("0.3")).plan(layout("approximate", "approximate"), 2)
    assert fresh(plan, 0) == fresh(plan, 1) == TEXT | {2, 3, 11, 13}  # 3 of 10: two and one; 1 of 5: the first
    for ratio, policy in ((0, StaticRatio(Fraction(0))), (1, Off())):
        states = layout("approximate", "approximate")
        np.testing.assert_array_equal(Ends(Fraction(ratio)).plan(states, 3).depth, policy.plan(states, 3).depth)
    assert parse_policy("ends-0.3") == Ends(Fraction("0.3"))
    assert parse_policy("epic-16") == EPIC(16)
    assert parse_policy("full-two-pass") == TwoPass()
    assert parse_policy("approximate") == parse_policy(APPROXIMATE)
    assert parse_policy("approximate").name == APPROXIMATE  # so reports say what ran


def test_tokens_all_over_an_image():
    assert np.argsort(spread_ranks(2, 5)).tolist() == [7, 0, 3, 6, 8, 1, 4, 5, 2, 9]
    for shape in ((1, 1), (1, 2), (5, 1), (1, 97), (1000, 1)):
        tokens = max(shape)
        order = np.argsort(spread_ranks(*shape))
        assert sorted(order.tolist()) == list(range(tokens))
        for count in range(1, tokens + 1):  # no gap between chosen tokens is four times what it could be
            gaps = np.diff([-1, *np.sort(order[:count]), tokens])
            assert gaps.max() < 4 * max(1, tokens / count)
    for rows, columns in ((5, 7), (16, 16), (20, 30), (32, 32)):
        order = np.argsort(spread_ranks(rows, columns))
        assert sorted(order.tolist()) == list(range(rows * columns))
        cells = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
        for count in (1, 2, 5, 20, rows * columns // 10, rows * columns // 2):
            nearest = np.square(cells[:, None] - cells[order[:count]]).sum(-1).min(1) ** 0.5
            assert nearest.max() < 2 * max(1, (rows * columns / count) ** 0.5)  # no hole is two lattice steps wide
    plan = Spread(Fraction("0.3")).plan(layout("approximate", "approximate"), 2)
    assert fresh(plan, 0) == fresh(plan, 1) == TEXT | {9, 2, 5, 15}  # 7, 0, 3 of 2 x 5; 2 of 1 x 5
    schedule = Schedule((500, 400, 250, 0), "m", "f")
    shrinking = Spread(schedule=schedule, shift=True).plan(layout("approximate", "exact"), 4)
    tokens = [fresh(shrinking, layer) - TEXT for layer in range(4)]
    assert tokens[0] == tokens[1] >= tokens[2] >= tokens[3]
    assert [len(found) for found in tokens] == [8, 8, 5, 0]
    assert shrinking.shift
    assert not plan.shift
    few = layout("approximate", "approximate")
    assert fresh(parse_policy("shift-0.05").plan(few, 2), 0) == TEXT | {9, 15}  # what moves the others
    lowest = Spread(schedule=Schedule((3, 3, 3, 0), "m", "f"), shift=True).plan(few, 4)
    assert [fresh(lowest, layer) - TEXT for layer in range(4)] == [{9, 15}, {9, 15}, {9, 15}, set()]
    assert not parse_policy("shift-0").plan(few, 2).shift
    assert fresh(parse_policy("spread-0.05").plan(few, 2), 0) == fresh(parse_policy("shift-0").plan(few, 2), 0) == TEXT
    assert parse_policy("spread-0.3") == Spread(Fraction("0.3"))
    assert parse_policy("shift-0.3") == Spread(Fraction("0.3"), shift=True)
    assert (parse_policy("shift-0.3").name, Spread(schedule=schedule).name) == ("shift-0.3", "spread-schedule 0.5750")
    for changed in (shrinking.extended(3, 4), shrinking.wanting([3], 4), shrinking.computing(slice(2, 12), 4)):
        assert changed.shift


def test_two_passes():
    """Worked example of the specification, A.2: t t I I I t t."""
    images = [ImageRef("a", (1, 2, 6), 3, lambda: None)]
    make = lambda state: make_layout(np.zeros(7, np.int32), [2], images, 2, [state])  # noqa: E731
    plan = TwoPass().plan(make("approximate"), 2)
    assert fresh(plan, 0) == fresh(plan, 1) == {0, 1, 5, 6}
    sees = {token: {j for j in range(7) if plan.slots[j] <= plan.slots[token]} for token in fresh(plan, 0)}
    assert sees == {0: {0}, 1: {0, 1}, 5: {0, 1, 5}, 6: set(range(7))}
    longer = plan.extended(2, 2)
    assert longer.slots.tolist() == [*plan.slots, 7, 8]
    assert longer.wanting([8], 2).slots.tolist() == longer.slots.tolist()
    assert plan.computing(slice(2, 5), 2).slots.tolist() == list(range(7))
    for state in ("exact", "miss"):  # as "full"
        single = TwoPass().plan(make(state), 2)
        assert single.slots.tolist() == list(range(7))
        np.testing.assert_array_equal(single.depth, StaticRatio(Fraction(0)).plan(make(state), 2).depth)


def test_misses_are_computed_and_exact_images_are_not():
    for policy in (Exact(), StaticRatio(Fraction(1, 2)), MPIC(1)):
        plan = policy.plan(layout("exact", "miss"), 2)
        assert fresh(plan, 0) == TEXT | set(range(13, 18))
    assert fresh(Off().plan(layout("exact", "miss"), 2), 1) == set(range(21))


def test_a_schedule_shrinks():
    schedule = Schedule((500, 300, 200, 0), "m", "f")
    plan = Scheduled(schedule).plan(layout("approximate", "approximate"), 4)
    assert fresh(plan, 0) == fresh(plan, 1)  # the first layer computes what the second one needs
    assert fresh(plan, 1) == TEXT | set(range(2, 8)) | set(range(13, 16))
    assert fresh(plan, 2) == TEXT | set(range(2, 6)) | set(range(13, 15))
    assert fresh(plan, 3) == TEXT
    assert Scheduled(schedule).name == "schedule 0.5000"


@pytest.mark.parametrize(
    "reuse",
    [
        "off", "exact", "full", "full-two-pass", "0.1", "mpic-2", "epic-3", "ends-0.3", "spread-0.02", "shift-0.02",
        "question-0.05", "cacheblend-0.1", "cacheblend-lmcache-0.1", "cacheblend-proto-0.1", "kvshare-0.1",
        "kvshare-attn-0.1",
    ],
)  # fmt: skip
def test_reports_call_policies_as_users_do(reuse):
    assert parse_policy(reuse).name == reuse


def test_counts_are_exact():
    """0.29 of 100 tokens are 29, where floating point says 28; and 0.29 of 3000 are 870."""
    image = ImageRef("a", (1, 2, 6000), 3000, lambda: None)
    one = make_layout(np.zeros(3001, np.int32), [0], [image], 2, ["approximate"])
    for reuse in (0.29, "0.29", Decimal("0.29"), Fraction(29, 100), "2.9e-1"):
        plan = parse_policy(reuse).plan(one, 1)
        assert np.count_nonzero(plan.depth[:3000]) == 870
    schedule = Schedule((145,), "m", "f")
    assert (schedule.count(100, 0), schedule.count(3000, 0), schedule.count(101, 0)) == (29, 870, 29)
    assert Schedule((145,), "m", "f", rounding="ceil").count(101, 0) == 30


def test_the_last_token_is_always_computed():
    image = ImageRef("a", (1, 4, 10), 10, lambda: None)
    ends_in_an_image = make_layout(np.zeros(12, np.int32), [2], [image], 2, ["exact"])
    for policy in (Exact(), StaticRatio(Fraction(0))):
        assert fresh(policy.plan(ends_in_an_image, 3), 2) == {0, 1, 11}


def test_what_reuse_may_be(tmp_path, monkeypatch):
    assert parse_policy("off") == Off()
    assert parse_policy("exact") == Exact()
    assert parse_policy("full") == parse_policy(0) == parse_policy("0.0") == StaticRatio(Fraction(0))
    assert parse_policy("mpic-16") == MPIC(16)
    assert parse_policy(MPIC(3)) == MPIC(3)
    schedule = Schedule((5, 3), "qwen3_vl", "f")
    schedule.save(tmp_path / "s.json")
    for reuse in (schedule, tmp_path / "s.json", str(tmp_path / "s.json")):
        assert parse_policy(reuse) == Scheduled(schedule)
    assert parse_policy(f"shift-{tmp_path / 's.json'}") == Spread(schedule=schedule, shift=True)
    assert parse_policy(f"spread-{tmp_path / 's.json'}") == Spread(schedule=schedule)
    assert parse_policy(f"question-{tmp_path / 's.json'}").schedule == schedule
    assert parse_policy("ends-1e-05") == Ends(Fraction(1, 100_000))
    schedule.save(tmp_path / "shift-own.json")
    monkeypatch.chdir(tmp_path)
    assert parse_policy("shift-own.json") == Scheduled(schedule)
    with pytest.raises(ValueError, match="schedule must be a Schedule or None, got 'x'"):
        Spread(schedule="x")
    with pytest.raises(ValueError, match=r"ratio from 0 to 1, as a Fraction, got 0\.1"):
        Spread(0.1)
    for bad in (
        "",
        "all",
        "1.1",
        "-0.5",
        "nan",
        "inf",
        2,
        True,
        None,
        [],
        MPIC,
        object(),
        str(tmp_path),
        "1e999",
        "0_1",
        "shift-0.1 ",
        "question-",
        "1e-999999999",
    ):
        with pytest.raises(ValueError, match="reuse must be"):
            parse_policy(bad)
    assert parse_policy(np.float32(0.1)) == parse_policy("0.1")
    for missing in ("no.json", tmp_path / "no"):
        with pytest.raises(ValueError, match=r"schedule must be a readable JSON file, got .*no.*No such file"):
            parse_policy(missing)
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="k must be"):
            MPIC(bad)


@pytest.mark.parametrize(
    ("reuse", "message"),
    [
        ("a" * 100_000, "reuse must be .* got 'aaa"),
        ("a" * 100_000 + ".json", "schedule must be a readable JSON file, got 'aaa.*: File name too long"),
        (pathlib.Path("a" * 5000), "schedule must be a readable JSON file, got 'aaa.*: File name too long"),
        ("1" * 100_000 + "x", "reuse must be .* got '111"),
        ("\ud800", r"reuse must be .* got '\\ud800'"),
        ("\ud800.json", r"schedule must be .* got '\\ud800.json': .* surrogates not allowed"),
        ("shift-\ud800.json", r"schedule must be .* got '\\ud800.json': .* surrogates not allowed"),
        (pathlib.Path("a\0b"), r"schedule must be .* got 'a\\x00b': embedded null byte"),
        ("mpic-" + "9" * 5000, "reuse must be mpic-K with a K of at most 30 digits, got 'mpic-999"),
        ("epic-" + "9" * 31, "reuse must be epic-K with a K of at most 30 digits, got 'epic-999"),
        ("0." + "3" * 5000, "reuse must be a ratio from 0 to 1 of at most 30 digits, got 0.333"),
        ("shift-2", "reuse must be shift-R with a ratio R from 0 to 1 of at most 30 digits, got shift-2"),
        (
            "shift-1e" + "9" * 30,
            "reuse must be shift-R with a ratio R from 0 to 1 of at most 30 digits, got shift-1e999",
        ),
        ("1e-" + "9" * 30, "reuse must be a ratio from 0 to 1 of at most 30 digits, got 1e-999"),
        (10**5000, "reuse must be a ratio from 0 to 1 of at most 30 digits, got 1000"),
        (Fraction(10**5000, 3), "reuse must be a ratio from 0 to 1, as a Fraction, got Fraction"),
        (Decimal("sNaN"), "reuse must be a ratio from 0 to 1 of at most 30 digits, got sNaN"),
    ],
    ids=lambda value: repr(value)[:20] if isinstance(value, str) else type(value).__name__,
)
def test_values_beyond_measure_get_short_messages(reuse, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_policy(reuse)
    assert len(str(caught.value)) < 1200


POLICIES = (
    "exact",
    "full",
    "0.3",
    "full-two-pass",
    "mpic-2",
    "epic-3",
    "ends-0.5",
    "spread-0.4",
    "shift-0.4",
    "question-0.5",
)


@pytest.mark.parametrize("reuse", [*POLICIES, "cacheblend-0.5", "kvshare-0.5"])
@pytest.mark.parametrize("states", [("approximate", "approximate"), ("approximate", "exact")])
@pytest.mark.parametrize("dear", [(), (0,), (1,), (0, 1)])
def test_what_is_computed_after_all_need_not_be_planned_again(reuse, states, dear):
    policy = parse_policy(reuse)
    whole = layout(*states)
    got = computing([whole.images[i] for i in dear], whole, *decide(policy, whole, 4), 4)
    again = layout(*("miss" if i in dear else state for i, state in enumerate(states)))
    plan, choice = decide(policy, again, 4)
    assert [span.state for span in got[0].spans] == [span.state for span in again.spans]
    np.testing.assert_array_equal(got[1].depth, plan.depth)
    np.testing.assert_array_equal(got[1].slots, plan.slots)
    assert (got[1].shift, got[2]) == (plan.shift, choice)


def test_a_policy_that_leaves_out_what_it_must_not():
    class Broken:
        name, links, approximates = "broken", True, True

        def __init__(self, depth):
            self.depth = depth

        def plan(self, layout, num_layers):
            return Plan(np.asarray(self.depth))

    one = layout("approximate", "miss")
    good = Exact().plan(one, 3).depth.astype(int)
    make_plan(Broken(good), one, 3)
    for change, message in (
        (good[:-1], "shape"),
        (good + 0.5, "integers"),
        (good + 1, "from 0 to 4"),
        (np.where(np.arange(21) == 20, 3, good), "4 at the last token"),
        (np.where(np.arange(21) == 1, 2, good), "must compute tokens 0 to 1 in every layer"),
        (np.where(np.arange(21) == 15, 0, good), "must compute tokens 13 to 17"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(Broken(change), one, 3)

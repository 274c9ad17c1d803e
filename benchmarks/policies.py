"""All policies side by side: at equal ratios, and at equal shares of rows (`vlcache bench policies`).

A ratio says what goes on behind the layers that a policy computes whole, so policies of one ratio compute different
numbers of rows. The table has both comparisons; every setting is answered once, by the protocol of `bench accuracy`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.files import check_readable, check_writable
from vlcache_jax.progress import Progress, say
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study import accuracy
from vlcache_jax.study.questions import Sample, rows_of_questions, spread
from vlcache_jax.study.report import environment, show, write

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM

RATIOS = (0.02, 0.05, 0.1, 0.3)
SHARES = (0.02, 0.05, 0.1, 0.4)
BY_RATIO = ("", "ends-", "spread-", "shift-")  # a share of the tokens of every image, before them the share
BY_COUNT = ("epic", "mpic")  # so many tokens of every image, whatever its size


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings that are compared with each other.

    Attributes:
      name: what they have in common.
      reference: the setting that the others are compared with, VLCache's static ratio.
      settings: `reuse` of the engine; a schedule is called by the name of its file, also behind "shift-".
    """

    name: str
    reference: str
    settings: tuple[str, ...]


def groups_of(
    ratios: Sequence[float],
    shares: Sequence[float],
    schedules: Sequence[pathlib.Path],
    *,
    image_tokens: float,
    num_layers: int,
) -> list[Group]:
    """The comparisons.

    Args:
      ratios: every policy runs at each of them.
      shares: image rows computed in the mean over layers, of all image rows; policies that cannot compute so few, as
        they compute whole layers first, are left out.
      schedules: files; each is a comparison with every policy at its mean.
      image_tokens: of an image in the mean, for policies that take a number of tokens.
      num_layers: of the model.
    """
    from vlcache_jax.reuse.selection import NAMED

    whole = {name: make(Fraction(0)).check_layer + 1 for name, make in NAMED.items()}  # layers computed first
    whole = {name: layers for name, layers in whole.items() if layers < num_layers}
    groups = [Group("no rows", "full", ("full", "full-two-pass"))]
    for ratio in ratios:
        fixed = _fixed(f"{ratio:g}", ratio * image_tokens)
        groups.append(Group(f"r = {ratio:g}", fixed[0], (*fixed, *(f"{name}-{ratio:g}" for name in whole))))
    targets: list[tuple[str, float, tuple[str, ...]]] = [
        (f"{100 * share:g} % of image rows", share, ()) for share in shares
    ]
    for path in schedules:
        schedule = Schedule.load(path)
        computed = [schedule.count(10_000, max(layer, 1)) / 10_000 for layer in range(num_layers)]
        targets.append((f"rows of {path.stem}", float(np.mean(computed)), (path.name, f"shift-{path.name}")))
    for name, share, scheduled in targets:
        settings = [*scheduled, *_fixed(f"{share:.4g}", share * image_tokens)]
        for policy, layers in whole.items():
            if (ratio := (share * num_layers - layers) / (num_layers - layers)) >= 0:
                settings.append(f"{policy}-{ratio:.4g}")
        groups.append(Group(name, f"{share:.4g}", tuple(settings)))
    return groups


def _fixed(ratio: str, tokens: float) -> list[str]:
    """Policies that compute the same number of rows in every layer, at a ratio and at its tokens of an image."""
    return [f"{name}{ratio}" for name in BY_RATIO] + [f"{name}-{round(tokens)}" for name in BY_COUNT]


def table(
    groups: Sequence[Group], details: Sequence[dict[str, Any]], scores: dict[str, list[list[float]]]
) -> list[dict[str, Any]]:
    """One row for each setting of each group.

    Args:
      groups: the comparisons.
      details: rows of `accuracy.summarize` of one case.
      scores: of the questions by setting, one list for each auxiliary prompt.
    """
    rows = []
    for group in groups:
        for setting in group.settings:
            own = [row for row in details if row["reuse"] == setting]
            worst = min(own, key=lambda row: row["difference"])
            ahead = accuracy.paired(scores[group.reference], scores[setting])
            by_layer = 100 * np.mean([row["image rows by layer"] for row in own], axis=0)
            rows.append(
                {
                    "group": group.name,
                    "reuse": setting,
                    "accuracy": float(np.mean([row["accuracy"] for row in own])),
                    "difference": float(np.mean([row["difference"] for row in own])),
                    "worst": f"{worst['difference']:+.1f} [{worst['low']:+.1f}, {worst['high']:+.1f}] {worst['task']}",
                    "over static": f"{ahead['difference']:+.1f} [{ahead['low']:+.1f}, {ahead['high']:+.1f}]",
                    "logit MSE": f"{np.mean([row['logit MSE'] for row in own]):.2g}",
                    "agreement": float(np.mean([row["agreement"] for row in own])),
                    "image rows %": float(np.mean(by_layer)),
                    "by layer %": " ".join(f"{share:.0f}" for share in by_layer),
                    "ms": 1e3 * float(np.mean([row["seconds"] for row in own])),
                }
            )
    return rows


def measure(
    model: str | None,
    data: Sequence[pathlib.Path],
    *,
    ratios: Sequence[float],
    shares: Sequence[float],
    schedules: Sequence[pathlib.Path] | None,
    protocols: Sequence[accuracy.Protocol],
    questions: int | None,
    split: str,
    max_tokens: int,
    dtype: str,
    work: pathlib.Path | None,
    out: pathlib.Path | None,
) -> None:
    """Runs every comparison under each protocol, prints the tables and writes them.

    Without `schedules`, the shipped model is compared under its own.

    Raises:
      ValueError: a ratio or share is not between 0 and 1, or a schedule is not the model's.
    """
    from vlcache_jax.assets import SCHEDULES, TINY_VQA

    if schedules is None:
        schedules = SCHEDULES if model is None else ()
    for name, values in (("ratio", ratios), ("share", shares)):
        for value in values:
            if not 0 < value < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value}")
    if split not in ("profile", "test"):
        raise ValueError(f"split must be profile or test, got {split!r}")
    check_writable("out", out)
    for path in data:
        check_readable("data", path)
    say("importing JAX")
    from vlcache_jax import LLM, CacheConfig
    from vlcache_jax.reuse.parse import parse_policy

    named = accuracy.name_settings([f"{prefix}{path}" for path in schedules for prefix in ("", "shift-")])
    with Progress("reading questions"):
        samples = load_samples(data, questions=questions, split=split)
    with LLM(model or TINY_VQA, dtype=dtype, cache=CacheConfig(load="link"), enable_prefix_caching=False) as llm:
        for policy in named.values():
            llm._parse_policy(policy)
        image_tokens, num_layers = _sizes(llm, samples)
        groups = groups_of(ratios, shares, schedules, image_tokens=image_tokens, num_layers=num_layers)
        names = dict.fromkeys(setting for group in groups for setting in group.settings)
        settings = {name: named.get(name) or parse_policy(name) for name in names}
        results = accuracy.run(llm, samples, settings, protocols, max_tokens=max_tokens, work=work)
    details, _ = accuracy.summarize(samples, results)
    rows: list[dict[str, Any]] = []
    for case, runs in accuracy.by_case(results).items():
        shown = {"arrangement": case.arrangement, "donors": case.donors}
        scores = {name: [accuracy.by_question(samples, run[name]) for run in runs] for name in runs[0]}
        found = table(groups, [row for row in details if shown.items() <= row.items()], scores)
        rows += [shown | row for row in found]
        show(f"Policies, {case.title}, {len(runs)} auxiliary prompts a question", found)
    head = environment("jax") | {
        "model": str(model or "tiny_vqa, shipped with the package"),
        "data": [path.name for path in data] or f"drawn for the shipped model, split {split}",
        "questions": len(rows_of_questions(samples)),
        "auxiliary prompts": len(protocols) // len(accuracy.by_case(results)),
        "image_tokens": image_tokens,
        "dtype": dtype,
        "details": details,
    }
    if out is not None:
        write("Policies side by side", rows, head, out)


def _sizes(llm: LLM, samples: Sequence[Sample]) -> tuple[float, int]:
    """Tokens of an image, in the mean over a few samples, and the model's layers."""
    from vlcache_jax import SamplingParams

    few = spread(samples, 20)
    prompts = [accuracy.Protocol("image_first").formal(few, i) for i in range(len(few))]
    reports = [output.cache for output in llm.chat(prompts, SamplingParams(max_tokens=1), reuse="off")]
    return float(np.mean([image.tokens for report in reports for image in report.images])), len(reports[0].rows)

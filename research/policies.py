"""The study of reuse: all policies compared, at equal ratios and at equal rows (`python -m research.policies`).

A ratio selects the tokens that continue after the layers that a policy computes fully, so policies of one ratio compute
different numbers of rows. The tables have both comparisons. Without data the questions are drawn for the trained
models: small and large images, one and two in a question, each arrangement, images cached together and separately.
Schedules are profiled for each of these cases on separate questions, and compared with one that was profiled after
other text.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import PLAIN, load_samples
from vlcache_jax.commands import options as opt
from vlcache_jax.commands.bench import Cached
from vlcache_jax.common.files import check_all_readable, check_writable
from vlcache_jax.common.progress import Progress, say, say_errors
from vlcache_jax.reuse.schedule import UNITS, Schedule
from vlcache_jax.study import accuracy, pairs
from vlcache_jax.study.questions import Sample, spread
from vlcache_jax.study.report import WorkLog, environment, show, write
from vlcache_jax.study.search import MAX_LEVEL, find_schedule

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM
    from vlcache_jax.reuse.policies import Policy

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
RATIOS = (0.03, 0.1)
SHARES = (0.6,)
PROFILED = 20  # questions for the profile of each schedule
OWN, CROSS = "schedule", "schedule-of-{}"
FULL = ("full", "full-two-pass")
# Policies with a fraction of the tokens of every image, which follows the prefix.
BY_RATIO = ("", "ends-", "spread-", "shift-")
_NUMBER = re.compile(r"\d*\.?\d+")
BY_COUNT = ("epic", "mpic")  # policies with a number of tokens of every image, whatever its size


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Settings that are compared with each other.

    Attributes:
      name: Common property of the settings.
      reference: Setting that the others are compared with, VLCache's static ratio.
      settings: Values of `reuse` of the engine; a schedule has a name, also after "shift-".
    """

    name: str
    reference: str
    settings: tuple[str, ...]


def groups_of(
    ratios: Sequence[float],
    shares: Sequence[float],
    schedules: Mapping[str, Schedule],
    *,
    asked: Sequence[str] = (),
    image_tokens: float,
    num_layers: int,
) -> list[Comparison]:
    """Return the comparisons.

    Args:
      asked: Settings to compare with the first of them, instead of the default ones.
      ratios: Every policy runs at each of them.
      shares: Fractions of image rows computed, as the mean over layers. Policies whose full first layers exceed a
        fraction are left out.
      schedules: Schedules by name; each is compared with a static ratio, spread and shifted tokens at its mean.
      image_tokens: Mean tokens of an image, for policies that take a number of tokens.
      num_layers: Layers of the model.
    """
    from vlcache_jax.reuse.selection import NAMED

    whole = {name: make(Fraction(0)).check_layer + 1 for name, make in NAMED.items()}  # layers computed first
    whole = {name: layers for name, layers in whole.items() if layers < num_layers}
    groups = [Comparison("asked for", asked[0], tuple(asked)) if asked else Comparison("no rows", "full", FULL)]
    for ratio in ratios:
        fixed = _fixed(f"{ratio:g}", ratio * image_tokens)
        groups.append(Comparison(f"r = {ratio:g}", fixed[0], (*fixed, *(f"{name}-{ratio:g}" for name in whole))))
    for share in shares:
        settings = _fixed(f"{share:.4g}", share * image_tokens)
        for policy, layers in whole.items():
            if (ratio := (share * num_layers - layers) / (num_layers - layers)) >= 0:
                settings.append(f"{policy}-{ratio:.4g}")
        groups.append(Comparison(f"{100 * share:g} % of image rows", f"{share:.4g}", tuple(settings)))
    for name, schedule in schedules.items():
        computed = [schedule.count(10_000, max(layer, 1)) / 10_000 for layer in range(num_layers)]
        static = f"{float(np.mean(computed)):.4g}"
        settings = [name, f"shift-{name}", static, f"spread-{static}", f"shift-{static}"]
        groups.append(Comparison(f"rows of {name}", static, tuple(settings)))
    return groups


def _fixed(ratio: str, tokens: float) -> list[str]:
    """Return policies that compute the same number of rows in every layer, at a ratio and at its tokens of an image."""
    return [f"{name}{ratio}" for name in BY_RATIO] + [f"{name}-{round(tokens)}" for name in BY_COUNT]


def policies_of(
    groups: Sequence[Comparison], schedules: Mapping[str, Schedule], asked: Mapping[str, Policy]
) -> dict[str, Policy]:
    """Return the policy of each setting, once."""
    from vlcache_jax.reuse.policies import Scheduled, Spread
    from vlcache_jax.reuse.selection import parse_policy

    policies: dict[str, Policy] = {}
    for name in (setting for group in groups for setting in group.settings):
        if name in asked:
            policies[name] = asked[name]
        elif name in schedules:
            policies[name] = Scheduled(schedules[name])
        elif (moved := name.removeprefix("shift-")) in schedules:
            policies[name] = Spread(schedule=schedules[moved], shift=True)
        else:
            policies[name] = parse_policy(name)
    return policies


def table(groups: Sequence[Comparison], case: pairs.PairCase) -> list[dict[str, Any]]:
    """Return one row for the cold run, and one for each setting of each group."""
    settings = [(Comparison("cold", accuracy.COLD, ()), accuracy.COLD)]
    settings += [(group, setting) for group in groups for setting in group.settings]
    return [_row(group, case, setting) for group, setting in settings]


def _row(group: Comparison, case: pairs.PairCase, setting: str) -> dict[str, Any]:
    details = pairs.details_of(case, setting)
    ahead = pairs.mean_of(case.compare(setting, group.reference))
    by_layer = 100 * np.mean([row["image rows by layer"] for row in details], axis=0)
    return {
        **case.shown,
        "group": group.name,
        "reuse": setting,
        **{pairs.column(sample.task): "-" for sample in case.samples},  # tasks without such questions
        **pairs.total(details),
        **{f"over static {name}": value for name, value in ahead.items()},
        "by layer %": " ".join(f"{share:.0f}" for share in by_layer),
    }


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions of one table.

    Attributes:
      size: Size of the images, or "as they are" for files.
      asked: The questions.
      profiled: Similar questions, for schedules; empty for files.
    """

    size: str
    asked: list[Sample]
    profiled: list[Sample]


def questions_of(
    data: Sequence[pathlib.Path], sizes: Sequence[str], *, questions: int | None, profiled: int, split: str
) -> list[Questions]:
    """Return the questions of files; without files, those drawn for the trained models, of one image and of two.

    Args:
      data: Files of VLMEvalKit.
      sizes: Sizes of drawn images.
      questions: Maximum questions of each task and number of images, or of each file.
      profiled: Questions that schedules are profiled on.
      split: Split of drawn questions.
    """
    if data:
        return [Questions("as they are", load_samples(data, questions=questions), [])]

    def drawn(size: str, split: str, count: int | None) -> list[Sample]:
        both = (load_samples([], questions=count, split=split, images=images, size=size) for images in (1, 2))
        return [sample for samples in both for sample in samples]

    return [
        Questions(size, drawn(size, split, questions), drawn(size, "schedules", profiled) if profiled else [])
        for size in sizes
    ]


def find_schedules(
    llm: LLM,
    samples: Sequence[Sample],
    protocol: accuracy.Protocol,
    mean: str,
    *,
    count: int,
    work: pathlib.Path | None,
) -> dict[str, Schedule]:
    """Return a schedule profiled for a protocol, and one profiled after other text or, if that is it, another
    question.
    """
    from vlcache_jax.study.sensitivity import cases_of, profile

    found = {}
    other = "question_first" if protocol.arrangement == "text_first" else "text_first"
    for name, arrangement in ((OWN, protocol.arrangement), (CROSS.format(other), other)):
        kind = dataclasses.replace(protocol, arrangement=arrangement, auxiliary="neutral", seed=0)
        several = [sample for sample in samples if len(sample.images) > 1 or protocol.donors == "together"]
        cases = cases_of(llm, spread(several, count), kind, max_tokens=32)
        with Progress(f"{name}, questions", len(cases)) as bar:
            scores = profile(llm, cases, work=work, progress=bar.reach)
        found[name] = find_schedule(scores, mean)
    return found


def _compare(
    llm: LLM,
    found: Questions,
    groups: Sequence[Comparison],
    policies: dict[str, Policy],
    protocols: Sequence[accuracy.Protocol],
    *,
    max_tokens: int,
    work: pathlib.Path | None,
) -> list[dict[str, Any]]:
    """Run the comparisons of some questions under protocols of one case, print their tables and return the rows."""
    rows: list[dict[str, Any]] = []
    results = accuracy.run(llm, found.asked, policies, protocols, max_tokens=max_tokens, work=work)
    for part in pairs.cases_of(found.asked, results):
        new = [{"size": found.size} | row for row in table(groups, part)]
        show(f"{found.size} images, {part.title}", [pairs.printed(row, ("size", *part.shown)) for row in new])
        rows += new
    return rows


def _check(
    data: Sequence[pathlib.Path],
    *,
    ratios: Sequence[float],
    shares: Sequence[float],
    mean: str,
    profiled: int,
    split: str,
) -> None:
    for name, values in (("ratio", ratios), ("share", shares)):
        for value in values:
            if not 0 < value < 1:
                raise ValueError(f"{name} must be above 0 and below 1, got {value}")
    if split not in ("profile", "test"):
        raise ValueError(f"split must be profile or test, got {split!r}")
    if profiled and not (_NUMBER.fullmatch(mean) and 0 < Fraction(mean) <= Fraction(MAX_LEVEL, UNITS)):
        raise ValueError(f"mean must be a number above 0, at most {MAX_LEVEL / UNITS:g}, got {mean!r}")
    if data and profiled:
        raise ValueError(
            f"profiled must be 0 with data, got {profiled}: pass a schedule of other questions by schedule"
        )
    check_all_readable("data", data)


def _sizes(llm: LLM, samples: Sequence[Sample]) -> tuple[float, int]:
    """Return the mean tokens of an image over a few samples, and the model's layers."""
    from vlcache_jax import SamplingParams

    few = spread(samples, 20)
    prompts = [accuracy.Protocol("image_first").formal(few, i) for i in range(len(few))]
    reports = [output.cache for output in llm.chat(prompts, SamplingParams(max_tokens=1), reuse="off")]
    return float(np.mean([image.tokens for report in reports for image in report.images])), len(reports[0].rows)


_Ratios = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>",
        help="Ratio at which every policy runs; may be repeated.",
        show_default="0.03, 0.1; none with --reuse",
    ),
]
_Shares = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>",
        help="Fraction of image rows that every policy computes, over all layers; may be repeated.",
        show_default="0.6; none with --reuse",
    ),
]


@app.command()
def main(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>",
                     help="Setting to compare with cold and with the first of them, instead of all policies; may be "
                     "repeated.", show_default=False),
    ] = None,
    ratio: _Ratios = None,
    share: _Shares = None,
    schedule: Annotated[
        list[pathlib.Path] | None,
        typer.Option(metavar="<path>",
                     help="Schedule file, compared with others at its rows; may be repeated.", show_default=False),
    ] = None,
    mean: Annotated[str, typer.Option(help="Mean ratio of the profiled schedules.")] = "0.025",
    profiled: Annotated[
        int | None,
        typer.Option(min=0, help="Drawn questions to profile a schedule, for each table; 0: no schedules.",
                     show_default="20; none with --data or --reuse"),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>",
                     help="Size of drawn images: small (64 to 144 tokens), large (400), or tinted; may be repeated.",
                     show_default="small and large"),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Text before the images: new-text or new-question; may be repeated.",
                     show_default="both"),
    ] = None,
    cached: Cached = None,
    seeds: opt.Seeds = 1,
    questions: opt.Questions = None,
    split: Annotated[str, typer.Option(help="Split of drawn questions: choose on profile, report on test.")] = "test",
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    work: opt.Work = None,
    out: opt.Out = None,
) -> None:  # fmt: skip
    """Compare all policies, at equal ratios and at equal fractions of image rows.

    Without data the questions are drawn for the trained models, about one image and about two, small and large;
    schedules are profiled for each table. The tables have the accuracy of each task, the mean difference to the cold
    run and the worst task with 95 % intervals, the possible loss of a task by them, the difference to a static ratio of
    the same rows, the error of the logits, the agreement of the most likely token, the image rows computed, the bytes
    read, and the time.

    Example: python -m research.policies --questions 100 --work study.work --out study.json
    """
    with say_errors():
        # Wrong arguments and files are reported before JAX is imported and a model loaded.
        chosen = opt.one_model(model, same_model)
        settings, files = reuse or [], data or []
        ratios = ratio or (() if settings else RATIOS)
        shares = share or (() if settings else SHARES)
        count = (0 if files or settings else PROFILED) if profiled is None else profiled
        orders = [accuracy.arrangement_of(one, new=True) for one in context or tuple(accuracy.CONTEXTS)[1:]]
        donors = [accuracy.donors_of(one) for one in cached or ()]
        protocols = accuracy.protocols_of(orders, donors, seeds)
        _check(files, ratios=ratios, shares=shares, mean=mean, profiled=count, split=split)
        check_writable("out", out)
        WorkLog(work, "")  # refuses another kind of file before the work
        say("importing JAX")
        from vlcache_jax import LLM, CacheConfig

        asked = accuracy.name_settings(settings)
        given = {path.name: Schedule.load(path) for path in schedule or []}
        with Progress("reading questions"):
            sizes = tuple(dict.fromkeys(size or PLAIN))
            sets = questions_of(files, sizes, questions=questions, profiled=count, split=split)
        cases = {one.case: [other for other in protocols if other.case == one.case] for one in protocols}
        rows: list[dict[str, Any]] = []
        levels: list[dict[str, Any]] = []
        with LLM(chosen or TINY_VQA, dtype=dtype, cache=CacheConfig(load="kv"), enable_prefix_caching=False) as llm:
            # Every setting must suit the model.
            for loaded in given.values():
                llm.service.policy_of(loaded)
            for policy in asked.values():
                llm.service.policy_of(policy)
            for found in sets:
                image_tokens, num_layers = _sizes(llm, found.asked)
                for case in accuracy.possible(list(cases), found.asked):
                    # Schedules are found for each case, then all is compared within the groups.
                    own = found.profiled
                    made = find_schedules(llm, own, case, mean, count=count, work=work) if own else {}
                    shown = {"size": found.size, "arrangement": case.arrangement, "donors": case.donors}
                    levels += [shown | {"schedule": name, "levels": list(one.levels)} for name, one in made.items()]
                    named = given | made
                    groups = groups_of(
                        ratios, shares, named, asked=list(asked), image_tokens=image_tokens, num_layers=num_layers
                    )
                    policies = policies_of(groups, named, asked)
                    rows += _compare(llm, found, groups, policies, cases[case], max_tokens=max_tokens, work=work)
        if out is not None:
            head = environment("jax") | {
                "model": str(chosen or "tiny_vqa, shipped with the package"),
                "data": [path.name for path in files] or f"drawn for the trained models, split {split}",
                "auxiliary prompts": len(protocols) // len(cases),
                "dtype": dtype,
                "schedules": levels,
            }
            write("Policies side by side", rows, head, out)


if __name__ == "__main__":
    app()

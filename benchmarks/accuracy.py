"""Accuracy under reuse: `vlcache bench accuracy`.

    vlcache bench accuracy                                  # the shipped model, on splits drawn for it
    vlcache bench accuracy Qwen/Qwen3-VL-8B-Instruct --data MMBench_DEV_EN.tsv --data DocVQA_VAL.tsv

The protocol stands in `vlcache_jax.study.accuracy`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from vlcache_jax.assets import SCHEDULES, TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.common.files import PICTURES, check_all_readable, check_writable
from vlcache_jax.common.progress import Progress, say
from vlcache_jax.study import pairs
from vlcache_jax.study.accuracy import COLD, Protocol, name_settings, possible, run
from vlcache_jax.study.report import environment, show, write
from vlcache_jax.study.worklog import WorkLog

SETTINGS = ("full", "0.03", "0.1", "approximate", "shift-0.1")


def measure(
    model: str | None,
    data: Sequence[pathlib.Path],
    *,
    settings: Sequence[str] | None,
    protocols: Sequence[Protocol],
    questions: int | None,
    max_tokens: int,
    dtype: str,
    work: pathlib.Path | None,
    out: pathlib.Path | None,
    picture: pathlib.Path | None,
) -> None:
    """Evaluates a model, prints the tables and writes them.

    Args:
      model: checkpoint; None is the shipped one.
      data: files of VLMEvalKit; none are the splits drawn for the shipped model.
      settings: `reuse` of the engine; None is `SETTINGS`, with the schedules that ship for the shipped model.
      questions: of each file at most.
      work: file of finished parts.
      out, picture: JSON and picture to write.
    """
    if settings is None:
        settings = [*SETTINGS, *(map(str, SCHEDULES) if model is None else ())]
    check_writable("out", out)
    check_writable("picture", picture, PICTURES)
    check_all_readable("data", data)
    WorkLog(work, "")  # refuses another kind of file before the work
    say("importing JAX")
    from vlcache_jax import LLM, CacheConfig

    named = name_settings(settings)
    with Progress("reading questions"):
        samples = load_samples(data, questions=questions)
    with LLM(model or TINY_VQA, dtype=dtype, cache=CacheConfig(load="link"), enable_prefix_caching=False) as llm:
        results = run(llm, samples, named, possible(protocols, samples), max_tokens=max_tokens, work=work)
    # Tables of what was right, and of differences from the cold run.
    cases = pairs.cases_of(samples, results)
    details, totals = pairs.summarize(cases)
    for case in cases:
        rows = [row for row in totals if case.shown.items() <= row.items()]
        show(
            f"Accuracy, {case.title} ({case.protocol.auxiliary} auxiliary query)",
            [pairs.printed(row, case.shown) for row in rows],
        )
    names = ("arrangement", "donors", "images", "reuse", "task", "questions")
    show(
        "Against cold: points, 95 % interval of paired answers, McNemar's p",
        [
            {name: row[name] for name in names} | {"difference": pairs.interval(row), "p": f"{row['p']:.1g}"}
            for row in details
            if row["reuse"] != COLD
        ],
    )
    head = environment("jax") | {
        "model": str(model or "tiny_vqa, shipped with the package"),
        "data": [path.name for path in data] or "drawn for the shipped model",
        "max_tokens": max_tokens,
        "dtype": dtype,
        "totals": totals,
    }
    if out is not None:
        write("Accuracy under reuse", details, head, out)
    if picture is not None:
        pairs.draw(details, picture)
        print(f"written to {picture}")

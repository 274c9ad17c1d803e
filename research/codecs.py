"""Effect of codecs of stored keys and values on the answers of the shipped model.

Every question is answered under the same policies from cache entries of the model's dtype and from coded ones, which
the same donors filled after other text, as in `vlcache bench accuracy`. The tokens of the cold answer are forced, so
that next-token distributions can be compared position by position.

    python -m research.codecs --out benchmarks/results/codecs_cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax import LLM, CacheConfig
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.benchmarks.ttft import check_coded
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.models.registry import load_config
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.study.accuracy import CONTEXTS, Protocol, answer, answer_cold, batches, fill, name_settings
from vlcache_jax.study.questions import Sample
from vlcache_jax.study.report import environment, show, write

AUTO = "auto"
POLICIES = ("full", "0.1", "shift-0.03")
QUESTIONS = 50  # questions of a task; they take three minutes on two cores
MAX_TOKENS = 32
MAX_KL, LEAST_AGREEMENT = 1e-3, 99.9  # in nats and percent; limits for int8


@dataclasses.dataclass(frozen=True)
class CodecComparison:
    """A question answered from coded cache entries.

    Attributes:
      task: Task of the question.
      kl: KL divergence of each token, in nats, from the answer with cache entries of the model's dtype `[n]`.
      cold_kl: KL divergence from the cold run `[n]`.
      agrees: True if the most likely token is the one with cache entries of the model's dtype `[n]`.
      score: Score of the answer, from 0 to 1.
    """

    task: str
    kl: npt.NDArray[np.float64]
    cold_kl: npt.NDArray[np.float64]
    agrees: npt.NDArray[np.bool_]
    score: float


def divergence(reference: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the KL divergence, in nats, of the distributions of logits `[n, V]` from those of a reference `[n]`.

    Raises:
      ValueError: Logits are empty, not finite or constant.
    """
    p, q = check_logits(reference), check_logits(other)
    # A divergence is not negative, but rounding may make it so.
    return np.maximum(0, (np.exp(p) * (p - q)).sum(-1))


def check_logits(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return logarithms of the probabilities `[n, V]`.

    Raises:
      ValueError: Logits are empty, not finite or constant.
    """
    if not logits.size or not np.isfinite(logits).all() or (np.ptp(logits, -1) == 0).any():
        raise ValueError(f"logits must be finite and differ from each other, got {logits}")
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def compare(
    samples: Sequence[Sample], protocol: Protocol, *, dtype: str, batch: int = 50
) -> tuple[dict[tuple[str, str], list[CodecComparison]], dict[str, int]]:
    """Answer all samples without reuse, and with every policy and codec.

    Returns:
      For each policy and codec one comparison per sample, in no order, and for each codec the bytes of a token's KV.

    Raises:
      ValueError: An output is empty, not finite or constant, or an image was not linked from a cache entry as expected.
    """
    policies, codecs = name_settings(POLICIES), (AUTO, *CODECS)
    found: dict[tuple[str, str], list[CodecComparison]] = {(name, codec): [] for name in policies for codec in codecs}
    sizes: dict[str, int] = {}
    with contextlib.ExitStack() as stack, Progress("questions", len(samples)) as bar:
        # An engine for each codec; all answer the same questions, batch by batch, from a cache filled alike.
        engines = {
            codec: stack.enter_context(
                LLM(
                    TINY_VQA,
                    dtype=dtype,
                    cache=CacheConfig(codec=codec, load="kv"),
                    enable_prefix_caching=False,
                )
            )
            for codec in codecs
        }
        for chosen in batches(samples, batch):
            cold = answer_cold(engines[AUTO], samples, protocol, chosen, max_tokens=MAX_TOKENS)
            formal = [protocol.formal(samples, i) for i in chosen]
            references: dict[str, list[Any]] = {}
            for codec, llm in engines.items():
                fill(llm, samples, protocol, chosen)
                for name, policy in policies.items():
                    scores, texts, _ = answer(llm, formal, cold, policy, max_tokens=MAX_TOKENS)
                    sizes[codec] = check_coded(llm, codec, scores)
                    logits = [score.logits for score in scores]
                    reference = references.setdefault(name, logits)  # that of `AUTO`, which comes first
                    found[name, codec] += [
                        CodecComparison(
                            task=samples[i].task,
                            kl=divergence(base, own),
                            cold_kl=divergence(true, own),
                            agrees=own.argmax(-1) == base.argmax(-1),
                            score=samples[i].score(text),
                        )
                        for i, base, true, own, text in zip(chosen, reference, cold.logits, logits, texts, strict=True)
                    ]
            bar.update(len(chosen))
    # Codes are never exact, so equal logits would mean that no coded KV was linked.
    for (name, codec), rows in found.items():
        if codec != AUTO and not any(row.kl.any() for row in rows):
            raise ValueError(f"codec {codec} must change the logits under {name}, but they are equal")
    return found, sizes


def tabulate(found: dict[tuple[str, str], list[CodecComparison]]) -> list[dict[str, Any]]:
    """Return a row for each policy, codec and task, and one for all tasks, with equal weights of tokens and
    questions.
    """
    rows = []
    for (name, codec), compared in found.items():
        for task in (*dict.fromkeys(one.task for one in compared), "all"):
            own = [one for one in compared if task in (one.task, "all")]
            kl, cold, agrees = (np.concatenate([getattr(one, x) for one in own]) for x in ("kl", "cold_kl", "agrees"))
            rows.append(
                {
                    "reuse": name,
                    "codec": codec,
                    "task": task,
                    "questions": len(own),
                    "tokens": len(kl),
                    "mean KL": float(kl.mean()),
                    "largest KL": float(kl.max()),
                    "agreement %": 100 * float(agrees.mean()),
                    "right %": 100 * float(np.mean([one.score for one in own])),
                    "mean KL to cold": float(cold.mean()),
                }
            )
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each policy and codec the mean over all tasks, the worst task by mean KL, and whether limits are
    met.
    """
    coded = [row for row in rows if row["codec"] != AUTO]
    return [
        {
            "reuse": row["reuse"],
            "codec": row["codec"],
            "mean KL": row["mean KL"],
            "agreement %": row["agreement %"],
            "worst task": max(
                (one for one in coded if (one["reuse"], one["codec"]) == (row["reuse"], row["codec"])),
                key=lambda one: one["mean KL"],
            )["task"],
            "within": row["mean KL"] <= MAX_KL and row["agreement %"] >= LEAST_AGREEMENT,
        }
        for row in coded
        if row["task"] == "all"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="questions of each task")
    parser.add_argument("--context", choices=[*CONTEXTS][1:], default="new-text")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args()
    check_writable("out", args.out)
    samples = load_samples([], questions=args.questions)
    found, sizes = compare(samples, Protocol(CONTEXTS[args.context]), dtype=args.dtype)
    rows = tabulate(found)
    show(
        f"Codecs against records of {args.dtype} under the same policy",
        [{name: f"{value:.1e}" if "KL" in name else value for name, value in row.items()} for row in rows],
    )
    plain = KVShape.of(load_config(TINY_VQA), "bfloat16").slot_bytes
    stored = [
        {"codec": codec, "bytes a token": size, "times less than bfloat16": plain / size}
        for codec, size in sizes.items()
    ]
    show("Records of K, V", stored)
    totals = summarize(rows)
    show(
        f"Over all tasks; within: mean KL at most {MAX_KL} and agreement at least {LEAST_AGREEMENT} %",
        [{**row, "mean KL": f"{row['mean KL']:.1e}"} for row in totals],
    )
    if args.out is not None:
        head = environment("jax") | {
            "model": "tiny_vqa, shipped with the package",
            "dtype": args.dtype,
            "arrangement": CONTEXTS[args.context],
            "max_tokens": MAX_TOKENS,
            "bfloat16 bytes a token": plain,
            "records": stored,
            "totals": totals,
        }
        write("Codecs against records of the model's dtype", rows, head, args.out)


if __name__ == "__main__":
    main()

"""Effect of keeping the length of shifted keys: `shift` with and without, on the same questions about two images.

    python -m research.key_lengths MODEL --questions 100 --out benchmarks/results/key_lengths.json

The model is opened twice, one time after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.benchmarks.tiny_vqa.splits import SIZES, load_samples
from vlcache_jax.common.files import check_writable
from vlcache_jax.reuse import shift
from vlcache_jax.study import accuracy, pairs
from vlcache_jax.study.questions import Sample
from vlcache_jax.study.report import environment, publish

SETTINGS = ("shift-0.03", "shift-0.1")
CASES = tuple(
    accuracy.Protocol(arrangement, donors=donors)
    for arrangement in accuracy.ARRANGEMENTS[1:]
    for donors in ("together", "apart")
)


@contextlib.contextmanager
def free_lengths() -> Iterator[None]:
    """Open engines within that do not rescale shifted keys."""
    kept = shift.length_kept
    shift.length_kept = lambda before, after, weight: jnp.ones((), jnp.float32)
    try:
        yield
    finally:
        shift.length_kept = kept
        jax.clear_caches()  # of programs that were traced within


def answer(
    model: str, samples: Sequence[Sample], protocols: Sequence[accuracy.Protocol], dtype: str
) -> dict[accuracy.Protocol, dict[str, list[accuracy.AccuracyResult]]]:
    """Answer with an engine that is opened for it."""
    from vlcache_jax import LLM, CacheConfig

    with LLM(model, dtype=dtype, cache=CacheConfig(load="kv"), enable_prefix_caching=False) as llm:
        return accuracy.run(llm, samples, accuracy.name_settings(SETTINGS), protocols)


def compare(
    model: str, samples: Sequence[Sample], protocols: Sequence[accuracy.Protocol] = CASES, dtype: str = "auto"
) -> list[dict[str, Any]]:
    """Return a row for each case and setting: the loss with lengths kept and left free, and the difference of the
    two.
    """
    kept = answer(model, samples, protocols, dtype)
    with free_lengths():
        free = answer(model, samples, protocols, dtype)
    results = {
        protocol: own | {f"{name} free": free[protocol][name] for name in SETTINGS} for protocol, own in kept.items()
    }
    rows = []
    for case in pairs.cases_of(samples, results):
        for name in SETTINGS:
            own, other = (pairs.total(pairs.details_of(case, setting)) for setting in (name, f"{name} free"))
            gain = pairs.mean_of(case.compare(name, f"{name} free"))
            rows.append(
                case.shown
                | {"reuse": name, "questions": own["questions"], "cold": own["mean"] - own["difference"]}
                | {f"kept {end}": own[end] for end in ("difference", "low", "high")}
                | {f"free {end}": other[end] for end in ("difference", "low", "high")}
                | {f"gain {end}": value for end, value in gain.items()}
                | {"kept MSE": own["logit MSE"], "free MSE": other["logit MSE"]}
            )
    return rows


def main() -> None:
    from vlcache_jax.assets import TINY_VQA

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY_VQA), help="checkpoint; by default the shipped model")
    parser.add_argument("--questions", type=int, default=100, help="questions of each task")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="size of the images")
    parser.add_argument("--split", choices=("profile", "test"), default="profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args()
    check_writable("out", args.out)
    samples = load_samples([], questions=args.questions, split=args.split, images=2, size=args.size)
    head = environment("jax") | {"model": args.model, "size": args.size, "split": args.split, "dtype": args.dtype}
    publish("Moved keys: lengths kept and left free", compare(args.model, samples, dtype=args.dtype), head, args.out)


if __name__ == "__main__":
    main()

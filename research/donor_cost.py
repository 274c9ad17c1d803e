"""Cost of neutral donors: time to the first token of an image's first request and of later ones, and bytes of entries.

    uv run --group test python -m research.donor_cost --out benchmarks/results/donor_cost_cpu.json

The model has 12 layers of width 768 and random weights. One engine links images from any context, the other one from
neutral contexts only, so it computes each new image by itself before the request. Each round sends new images to both,
in turn, and then the same images after another text. The table shows medians. Videos have their own rows: all chunks of
a video are computed in one prompt.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from research.dialogue import first_token
from vlcache_jax import LLM, CacheConfig
from vlcache_jax.benchmarks.random_models import drawn_weights, make_random_model
from vlcache_jax.common.files import check_writable
from vlcache_jax.study.report import environment, show, write

SIDE = 1024  # pixels: an image has 1024 tokens
FRAME, FRAMES = 512, 8  # pixels and frames of a video: four chunks of 256 tokens
LONGEST = 8192  # tokens of a prompt
RULES = ("any", "neutral")
TEXTS = {"first request": "This is page 3 of the book. ", "next request": "Yesterday I saw a blue ring. "}


def shown(rng: np.random.Generator, kind: str, count: int) -> list[dict[str, Any]]:
    """Return parts of a message with new images, or a new video."""
    if kind == "video":
        frames = rng.integers(0, 256, (FRAMES, FRAME, FRAME, 3), np.uint8)
        size = {"resized_height": FRAME, "resized_width": FRAME}
        return [{"type": "video", "video": frames, "video_metadata": {"fps": 2.0}, **size}]
    images = rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
    return [{"type": "image", "image": image} for image in images]


def asked(parts: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a question about parts of a message after a text."""
    content = [{"type": "text", "text": text}, *parts, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": content}]


def measure(engines: dict[str, LLM], kind: str, count: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row of each request.

    Raises:
      ValueError: an image is not linked from the kind of context that the rule asks for.
    """
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):  # the first round compiles
        parts = shown(rng, kind, count)
        for name, text in TEXTS.items():
            for rule, llm in [*engines.items()][:: 1 if number % 2 else -1]:
                took, output = first_token(llm, asked(parts, text))
                llm.cache.flush()
                linked = {"neutral": "neutral", "any": None if name == "first request" else "own"}[rule]
                if (donors := {image.donor for image in output.cache.images}) != {linked}:
                    raise ValueError(f"donors={rule!r} must link {linked} KV in the {name}, got {donors}")
                if number:
                    seconds[name, rule].append(took)
        bytes_of = {rule: llm.cache.stats().bytes for rule, llm in engines.items()}
        for llm in engines.values():
            llm.reset_mm_cache()
    rows = []
    for name in TEXTS:
        row: dict[str, Any] = {"images": "a video of 4 chunks" if kind == "video" else count, "request": name}
        row |= {f"{rule} [ms]": round(1e3 * statistics.median(seconds[name, rule])) for rule in RULES}
        rows.append(row | {f"{rule} [MiB]": round(bytes_of[rule] / 2**20, 1) for rule in RULES})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--out", type=pathlib.Path, help="file of the results, JSON")
    given = parser.parse_args(arguments)
    check_writable("--out", given.out)
    with ExitStack() as stack:
        root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlcache-bench-")))
        stack.enter_context(drawn_weights())
        model, _ = make_random_model(root / "model")
        options: dict[str, Any] = {"reuse": "approximate", "enable_prefix_caching": False, "use_tqdm": False}
        options |= {"max_model_len": LONGEST, "kv_cache_bytes": "2GiB", "max_num_seqs": 4}
        engines = {rule: stack.enter_context(LLM(model, cache=CacheConfig(donors=rule), **options)) for rule in RULES}
        cases = (("image", 1), ("image", 4), ("video", 1))
        rows = [row for kind, count in cases for row in measure(engines, kind, count, given.rounds)]
    show(f"Images of {SIDE} x {SIDE} and a video, by `donors`", rows)
    if given.out is not None:
        head = {**environment("jax", "jaxlib"), "rounds": given.rounds, "side": SIDE}
        write("Cost of neutral donors", rows, head, given.out)


if __name__ == "__main__":
    main()

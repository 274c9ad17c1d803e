"""Host time of a cache hit, from the arrival of a request whose images are all cached to its first launch.

    uv run --group test python -m research.launched --out benchmarks/results/launched_cpu.json

Twenty photo-like JPEGs of 1024 x 1024, about 20 thousand tokens, arrive in fresh copies of their bytes, or as PIL
images. For comparison it measures hashing the same bytes, and the same pixels, on all threads, which is the minimum,
and the image processor of transformers. The model is narrow, because it does not matter here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
from blake3 import blake3
from PIL import Image

from vlcache_jax.calls.groups import Call
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.engine.engine import Engine
from vlcache_jax.engine.prefilling import Prefiller
from vlcache_jax.engine.uploads import Upload
from vlcache_jax.preparation.identification import Arrivals, Identifier
from vlcache_jax.preparation.planner import Planner
from vlcache_jax.study.report import environment, show, write

SIDE = 1024
TEXT = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 32768}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "deepstack_visual_indexes": [0, 1]}
PARTS = (
    ("render the prompt", Call, "prompt"),
    ("hash, look up", Identifier, "open"),
    ("number the tokens", Arrivals, "_finish"),
    ("plan", Planner, "plan"),
    ("give pages", Engine, "_admit"),
    ("find what is linked", Prefiller, "begin"),
    ("make places, launch all links", Upload, "advance"),
)


def photo(seed: int) -> bytes:
    """Return a JPEG of about 250 KB: smooth, with the noise of a camera."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)).resize(
        (SIDE, SIDE), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(smooth).astype(np.int16) + rng.integers(-12, 13, (SIDE, SIDE, 3), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=76)
    return file.getvalue()


@contextlib.contextmanager
def timed(took: dict[str, list[float]]) -> Iterator[None]:
    """Record the milliseconds of each of `PARTS` within."""
    with contextlib.ExitStack() as stack:
        for name, owner, method in PARTS:
            stack.enter_context(mock.patch.object(owner, method, _timed(getattr(owner, method), took[name])))
        yield


def _timed(method: Callable[..., Any], took: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **options)
        finally:
            took.append(1e3 * (time.perf_counter() - start))

    return run


def measure(count: int, repeats: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the table, and how many programs a hit launches.

    Raises:
      ValueError: An image was not found, or an answer is empty.
    """
    from transformers import AutoImageProcessor

    from vlcache_jax import LLM, CacheConfig, SamplingParams
    from vlcache_jax.testing import make_checkpoint

    one = SamplingParams(max_tokens=1, temperature=0)
    files = [photo(seed) for seed in range(count)]
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    fresh: dict[str, Callable[[], list[Any]]] = {
        "bytes": lambda: [bytes(bytearray(file)) for file in files],
        "PIL images": lambda: [picture.copy() for picture in pictures],
    }
    # Milliseconds: of full calls, of their parts, and of the minimum of a hit.
    launched: dict[str, list[float]] = {kind: [] for kind in fresh}
    parts: dict[str, list[float]] = defaultdict(list)
    hashing: dict[str, list[float]] = {kind: [] for kind in fresh}
    processing = []
    threads = ThreadPoolExecutor(os.cpu_count())
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as directory:
        make_checkpoint(directory, "qwen3_vl", text=TEXT, vision=VISION)
        limits = {"max_pixels": SIDE * SIDE}
        processor = AutoImageProcessor.from_pretrained(directory, use_fast=True)
        with LLM(
            directory, dtype="float32", max_model_len=(count + 1) * SIDE, mm_processor_kwargs=limits,
            cache=CacheConfig(load="kv"), enable_prefix_caching=False, use_tqdm=False,
        ) as llm:  # fmt: skip

            def ask(images: list[Any]) -> Any:
                content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "What?"}]
                [output] = llm.chat([{"role": "user", "content": content}], one, use_tqdm=False)
                if not output.outputs[0].token_ids:
                    raise ValueError(f"an answer must have a token, got {output}")
                return output

            with Progress("measuring", 2 + 2 * repeats) as bar:
                ask(fresh["bytes"]())
                llm.cache.flush()
                bar.update()
                # Programs of a hit are compiled, and have run once, before anything is timed.
                llm.service.ahead.wait()
                llm.service.ahead.stop()
                for kind in fresh:
                    ask(fresh[kind]())
                bar.update()
                # Programs of a hit, and then the seconds of each kind, interleaved.
                before = llm.stats().launches
                ask(fresh["bytes"]())
                launches = llm.stats().launches - before
                for _ in range(repeats):
                    for kind, make in fresh.items():
                        images = make()
                        with timed(parts) if kind == "bytes" else contextlib.nullcontext():
                            output = ask(images)
                        if [image.match for image in output.cache.images] != ["exact"] * count:
                            raise ValueError(f"all images must be cached, got {output.cache.images}")
                        launched[kind].append(1e3 * output.metrics.launched)
                        bar.update()
                    for kind, copies in (
                        ("bytes", fresh["bytes"]()),
                        ("PIL images", [picture.tobytes() for picture in pictures]),
                    ):
                        start = time.perf_counter()
                        list(threads.map(lambda copy: blake3(copy).digest(), copies))
                        hashing[kind].append(1e3 * (time.perf_counter() - start))
                # The savings of a hit: decoding and the image processor of transformers.
                for _ in range(3):
                    start = time.perf_counter()
                    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
                    processor(images=images, return_tensors="np")
                    processing.append(1e3 * (time.perf_counter() - start))
    rows = [_row(f"launched, from {kind}", took) for kind, took in launched.items()]
    rows += [
        _row("BLAKE3 of the bytes, all threads", hashing["bytes"]),
        _row("BLAKE3 of the pixels, all threads", hashing["PIL images"]),
        _row("image processor of transformers", processing),
    ]
    return rows + [_row(f"part: {name}", parts[name]) for name, _, _ in PARTS], launches


def _row(name: str, took: list[float]) -> dict[str, Any]:
    return {"what": name, "ms": statistics.median(took), "least ms": min(took), "most ms": max(took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20, help="images of the request")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    check_writable("out", arguments.out)
    rows, launches = measure(arguments.images, arguments.repeats)
    layers = TEXT["num_hidden_layers"]
    show(f"A hit of {arguments.images} images, {launches} launches in {layers} layers: the host until the first", rows)
    if arguments.out is not None:
        head = environment("jax") | {"images": arguments.images, "launches": launches, "layers": layers}
        write("The host until the first launch of a hit", rows, head, arguments.out)


if __name__ == "__main__":
    main()

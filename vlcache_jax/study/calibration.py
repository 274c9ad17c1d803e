"""Calibration: rates of this machine, by which an engine decides whether to load or to compute an image.

Images of noise of two sizes are alternately computed without reuse and linked. The fastest run of each size counts,
because other load can only add time. A rate is a slope: the difference in time divided by the difference in size. The
constant time of a prompt is therefore not part of it.
"""

from __future__ import annotations

import io
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from PIL import Image as Pictures

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.common.progress import Progress
from vlcache_jax.device.checkpoint import links_images
from vlcache_jax.pallas_kernels.split import FIRST
from vlcache_jax.preparation.planner import Identity, Image, Rates
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.study.model_support import read_config

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM
    from vlcache_jax.outputs import RequestOutput

GRIDS = ((22, 23), (30, 34))
"""Rows and columns of tokens of the two images. Their prompts nearly fill buckets: 512 or 544 and 1024 tokens, 2048 and
4096 patches."""

MOVED = (4 << 20, 16 << 20)  # bytes of copies that are timed without the engine
ATTEMPTS = 5

Seconds = Mapping[str, Mapping[int, Sequence[float]]]  # seconds of each run, by rate and by number of units


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Attributes:
      identity: model, data type, codec and device that the rates are valid for.
      rates: the measured rates.
      image: sizes of the larger image and of its cache entries.
    """

    identity: Identity
    rates: Rates
    image: Image


def calibrate(
    model: str,
    *,
    dtype: str = "auto",
    codec: str = "auto",
    tensor_parallel_size: int = 1,
    grids: tuple[tuple[int, int], tuple[int, int]] = GRIDS,
    repeats: int = 7,
) -> Calibration:
    """Open a model and measure its rates. Writes no file.

    Args:
      model, dtype, tensor_parallel_size: see `EngineConfig`.
      codec: see `CacheConfig`.
      grids: rows and columns of tokens of a small and of a large image.
      repeats: timed runs of each image, without reuse and linked, after two warm-up runs.

    Raises:
      ValueError: an argument is invalid, or a rate is not positive in each of `ATTEMPTS` attempts.
    """
    from vlcache_jax.llm import LLM

    cache = CacheConfig(codec=codec, load="kv")
    config = read_config(model)
    vision, links = config.vision, links_images(config)
    pixels = [math.prod(grid) * (vision.patch_size * vision.merge_size) ** 2 for grid in grids]
    with LLM(
        model,
        dtype=dtype,
        cache=cache,
        tensor_parallel_size=tensor_parallel_size,
        enable_prefix_caching=not links,  # states after images are loaded into slots of snapshots
        state_snapshots=None if links else 2,
        max_model_len=math.prod(grids[1]) + 64,
        max_num_seqs=1,
        mm_processor_kwargs={"min_pixels": pixels[0], "max_pixels": pixels[1]},
    ) as llm:
        llm.service.ahead.stop()  # its compilation would run during the measurement
        for _ in range(ATTEMPTS):
            seconds, image = _measure(llm, grids, repeats)
            slopes = {name: _slope(of) for name, of in seconds.items()}
            wrong = {name: slope for name, slope in slopes.items() if not 0 < slope < math.inf}
            if not wrong:
                break
        else:
            raise ValueError(
                f"rates must be positive, got {wrong} seconds in the last of {ATTEMPTS} attempts. Stop other programs "
                "on this machine and try again"
            )
        transfer, hit = slopes.pop("transfer", 0.0), slopes.pop("hit")
        assert image.kv_bytes is not None
        states = llm.service.device.runner.shapes.kv.state_bytes  # for an image of any size
        link = max(0.0, hit - transfer * (image.kv_bytes - states) / image.tokens)
        return Calibration(llm.service.device.identity, Rates({"host": transfer}, link=link, **slopes), image)


def _measure(llm: LLM, grids: Sequence[tuple[int, int]], repeats: int) -> tuple[Seconds, Image]:
    """Return (seconds by rate and number of units, the larger image). Hits have one rate for transfer and link."""
    vision = llm.service.device.runner.config.vision
    mode = "full" if links_images(llm.service.device.runner.config) else "exact"
    cell = vision.patch_size * vision.merge_size
    prompts = [
        {
            "prompt": "<|vision_start|><|image_pad|><|vision_end|>?",
            "multi_modal_data": {"image": _noise(rows, columns, cell)},
        }
        for rows, columns in grids
    ]
    seconds: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    hit = None
    with Progress("measuring", (2 + repeats) * len(grids)) as bar:
        for prompt in prompts:
            _run(llm, prompt, "exact")  # fills the cache
        for repeat in range(2 + repeats):  # the first ones compile
            for prompt, grid in zip(prompts, grids, strict=True):
                cold, hit = _run(llm, prompt, "off"), _run(llm, prompt, mode)
                bar.update()
                tokens = math.prod(grid)
                [found] = hit.cache.images
                if (found.kv, found.tokens, found.recomputed[-1]) != ("host", tokens, 0):
                    raise ValueError(
                        f"an image of {tokens} tokens must be loaded into the KV cache without recomputation, "
                        f"got {found}"
                    )
                if repeat < 2:
                    continue
                patches, metrics = tokens * vision.merge_size**2, cold.metrics
                seconds["decode"][patches].append(metrics.decode_image + metrics.preprocess)
                seconds["encode"][patches].append(metrics.encode)
                seconds["row"][tokens].append(metrics.prefill)
                # The whole time of a hit: its parts are too short for the engine's own clock.
                seconds["hit"][tokens].append(hit.metrics.ttft - hit.metrics.identified)
    assert hit is not None
    text, dtype = llm.service.device.runner.config.text, np.dtype(llm.service.device.runner.dtype)
    shape = 1 + vision.num_deepstack, -1, text.hidden_size
    devices = llm.service.device.runner.devices
    whole = _timed(lambda data: devices.put(_stage(data)), shape, dtype, repeats)
    measured: dict[str, Mapping[int, Sequence[float]]] = {**seconds, "stage": whole}
    if not llm.service.device.runner.is_host:  # on a CPU, cache entries are read in place
        # Timed here: the engine's own time starts after the copy has been enqueued.
        measured["transfer"] = _timed(lambda data: devices.put(data, FIRST), (-1,), np.dtype(np.uint8), repeats)
    [found] = hit.cache.images
    encoder = shape[0] * shape[2] * dtype.itemsize * found.tokens
    return measured, Image(found.tokens, found.tokens * vision.merge_size**2, found.bytes_moved, encoder)


def _run(llm: LLM, prompt: dict[str, Any], reuse: str) -> RequestOutput:
    llm.cache.flush()
    llm.reset_prefix_cache()
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), reuse=reuse, use_tqdm=False)
    return output


def _noise(rows: int, columns: int, cell: int) -> bytes:
    """Return a JPEG file of color noise with a grain of `cell` / 4. `cell` is the side of a token in pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (4 * rows, 4 * columns, 3), np.uint8)
    file = io.BytesIO()
    size = columns * cell, rows * cell
    Pictures.fromarray(noise).resize(size, Pictures.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    return file.getvalue()


def _stage(data: np.ndarray) -> np.ndarray:
    """Return a copy of encoder output, as the host makes it before it sends the output to the device."""
    return data[:, np.arange(data.shape[1])]


def _timed(
    put: Callable[[np.ndarray], jax.Array], shape: tuple[int, ...], dtype: np.dtype, repeats: int
) -> dict[int, list[float]]:
    """Return the seconds of each copy of `MOVED` bytes from host memory to the device, by bytes.

    Args:
      put: starts the copy of an array and returns the device array.
      shape: shape of the array; the size of an axis of -1 follows from the bytes.
      dtype: data type of the array.
      repeats: number of timed copies of each size, after two warm-up copies.
    """
    unit = -math.prod(shape) * dtype.itemsize
    arrays = [np.ones([size // unit if n < 0 else n for n in shape], dtype) for size in MOVED]
    seconds: dict[int, list[float]] = {array.nbytes: [] for array in arrays}
    for repeat in range(2 + repeats):
        for array in arrays:
            start = time.perf_counter()
            jax.block_until_ready(put(array))
            if repeat >= 2:
                seconds[array.nbytes].append(time.perf_counter() - start)
    return seconds


def _slope(seconds: Mapping[int, Sequence[float]]) -> float:
    """Return the seconds that one more unit takes, from the fastest runs of two sizes."""
    (small, short), (large, long) = sorted(seconds.items())
    return (min(long) - min(short)) / (large - small)

"""The rates by which an engine decides whether to link an image or to compute it, measured on this machine.

Pictures of noise of two sizes are computed cold and then linked, in turn. Of the runs of a size the fastest counts, as
whatever else happens on a machine only adds to it. A rate is a slope: the difference in time over the difference in
size, so that what every prompt takes is not in it.
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
from vlcache_jax.convert.source import locate
from vlcache_jax.models.registry import load_config
from vlcache_jax.pallas_kernels.split import FIRST
from vlcache_jax.preparation.planner import Identity, Image, Rates
from vlcache_jax.sampling import SamplingParams

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM
    from vlcache_jax.outputs import RequestOutput

GRIDS = ((22, 23), (30, 34))
"""Rows and columns of tokens of the two pictures. Prompts with them nearly fill rungs of the ladders: 512 or 544 and
1024 rows, 2048 and 4096 patches."""

MOVED = (4 << 20, 16 << 20)  # bytes, for what is measured without the engine
ATTEMPTS = 5

Seconds = Mapping[str, Mapping[int, Sequence[float]]]  # by rate and by how many units were done


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
      identity: what the rates hold for.
      rates: these.
      image: the larger picture, and what is kept of it.
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
    """Opens a model and measures; writes nothing.

    Args:
      model, dtype, tensor_parallel_size: see `EngineConfig`.
      codec: see `CacheConfig`.
      grids: rows and columns of tokens of a small picture and of a large one.
      repeats: runs of each picture and kind, after two that warm up.

    Raises:
      ValueError: an argument is wrong; or a rate is not positive, however often it is measured.
    """
    from vlcache_jax.llm import LLM

    cache = CacheConfig(codec=codec, load="link")
    vision = load_config(locate(model, weights=False).directory).vision
    pixels = [math.prod(grid) * (vision.patch_size * vision.merge_size) ** 2 for grid in grids]
    with LLM(
        model,
        dtype=dtype,
        cache=cache,
        tensor_parallel_size=tensor_parallel_size,
        enable_prefix_caching=False,
        max_model_len=math.prod(grids[1]) + 64,
        max_num_seqs=1,
        mm_processor_kwargs={"min_pixels": pixels[0], "max_pixels": pixels[1]},
    ) as llm:
        llm.service.ahead.stop()  # what it compiles would run beside what is measured
        for _ in range(ATTEMPTS):
            seconds, image = _measure(llm, grids, repeats)
            slopes = {name: _slope(of) for name, of in seconds.items()}
            wrong = {name: slope for name, slope in slopes.items() if not 0 < slope < math.inf}
            if not wrong:
                break
        else:
            raise ValueError(
                f"rates must be positive, got {wrong} seconds in the last of {ATTEMPTS} attempts: see that nothing "
                "else runs on this machine"
            )
        transfer, hit = slopes.pop("transfer", 0.0), slopes.pop("hit")
        assert image.kv_bytes is not None
        link = max(0.0, hit - transfer * image.kv_bytes / image.tokens)
        return Calibration(llm.service.device.identity, Rates({"host": transfer}, link=link, **slopes), image)


def _measure(llm: LLM, grids: Sequence[tuple[int, int]], repeats: int) -> tuple[Seconds, Image]:
    """Seconds of each rate, those of hits as a whole, and the larger picture."""
    vision = llm.service.device.runner.config.vision
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
            _run(llm, prompt, "exact")  # is kept
        for repeat in range(2 + repeats):  # the first ones compile
            for prompt, grid in zip(prompts, grids, strict=True):
                cold, hit = _run(llm, prompt, "off"), _run(llm, prompt, "full")
                bar.update()
                tokens = math.prod(grid)
                [found] = hit.cache.images
                if (found.kv, found.tokens, found.recomputed[-1]) != ("host", tokens, 0):
                    raise ValueError(f"an image of {tokens} tokens must be linked as a whole, got {found}")
                if repeat < 2:
                    continue
                patches, metrics = tokens * vision.merge_size**2, cold.metrics
                seconds["decode"][patches].append(metrics.decode_image + metrics.preprocess)
                seconds["encode"][patches].append(metrics.encode)
                seconds["row"][tokens].append(metrics.prefill)
                # As a whole: steps this short begin and end before the clock that times them looks.
                seconds["hit"][tokens].append(hit.metrics.ttft - hit.metrics.identified)
    assert hit is not None
    text, dtype = llm.service.device.runner.config.text, np.dtype(llm.service.device.runner.dtype)
    shape = 1 + vision.num_deepstack, -1, text.hidden_size
    devices = llm.service.device.runner.devices
    whole = _timed(lambda data: devices.put(_stage(data)), shape, dtype, repeats)
    measured: dict[str, Mapping[int, Sequence[float]]] = {**seconds, "stage": whole}
    if not llm.service.device.runner.is_host:  # else records are read where they lie
        # By the clock: the engine's own figure begins only when the copy has been handed over.
        measured["transfer"] = _timed(lambda data: devices.put(data, FIRST), (-1,), np.dtype(np.uint8), repeats)
    [found] = hit.cache.images
    encoder = shape[0] * shape[2] * dtype.itemsize * found.tokens
    return measured, Image(found.tokens, found.tokens * vision.merge_size**2, found.bytes_moved, encoder)


def _run(llm: LLM, prompt: dict[str, Any], reuse: str) -> RequestOutput:
    llm.cache.flush()
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), reuse=reuse, use_tqdm=False)
    return output


def _noise(rows: int, columns: int, cell: int) -> bytes:
    """A JPEG file of coloured noise, a quarter of a cell fine; `cell` is the side of the pixels that become a token."""
    noise = np.random.default_rng(0).integers(0, 256, (4 * rows, 4 * columns, 3), np.uint8)
    file = io.BytesIO()
    size = columns * cell, rows * cell
    Pictures.fromarray(noise).resize(size, Pictures.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    return file.getvalue()


def _stage(data: np.ndarray) -> np.ndarray:
    """What the host does with stored encoder rows before they go to the device."""
    return data[:, np.arange(data.shape[1])]


def _timed(
    put: Callable[[np.ndarray], jax.Array], shape: tuple[int, ...], dtype: np.dtype, repeats: int
) -> dict[int, list[float]]:
    """Seconds until what is put on the device, of host memory, is there, by bytes.

    Args:
      shape: of the memory; -1 is as large as the bytes ask for.
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
    """More seconds a unit, from the fastest runs of two sizes."""
    (small, short), (large, long) = sorted(seconds.items())
    return (min(long) - min(short)) / (large - small)

"""Cost of a cache hit for Qwen3-VL-8B on an H200, counted.

The prompt has 20 cached images of 1024 tokens, 20 text tokens before and 6 after. A falling schedule of mean 0.025
selects the computed tokens. Bytes and operations are those of the model's shapes, seconds their lower bounds at the
rates of an H200 (`floor`), so nothing here was measured on a GPU. Launches are the programs that the engine submits to
its device. A narrow model with the same number of layers makes them here, with the same prompt, the same rows and a
GPU's bucket sizes.

    python -m research.hits --out benchmarks/results/hits_h200_counted.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from vlcache_jax.benchmarks.floor import BEFORE, H200, IMAGE, IMAGES, MODELS, floor
from vlcache_jax.benchmarks.known_images import KnownImages
from vlcache_jax.benchmarks.ttft import check_found, falling_schedule, make_cache
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.models import ModelConfig
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.reuse.policies import Plan
from vlcache_jax.study.report import environment, publish
from vlcache_jax.testing import make_checkpoint

MODEL = "Qwen3-VL-8B"
PLACES: dict[str, int | str] = {"host": 0, "device": "1GB"}  # device memory for copies
TITLE = f"A hit of {MODEL} on an H200, counted, nothing of it measured on a GPU"
# The narrow model, with as many layers and DeepStack features as the real one.
TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 32768,
}  # fmt: skip
VISION = {
    "depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "deepstack_visual_indexes": [0, 1, 2],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Hit:
    """A hit of the narrow model.

    Attributes:
      place, codec: Tier and codec of the stored KV.
      launches: Programs submitted to the device.
      moved: Tokens whose KV was transferred to the device, and tokens whose encoder rows were.
      plan: The computed tokens.
    """

    place: str
    codec: str
    launches: int
    moved: tuple[int, int]
    plan: Plan


def count_hit(directory: pathlib.Path, place: str, codec: str, *, images: int = IMAGES, tokens: int = IMAGE) -> Hit:
    """Run a hit of the model in `directory` and count.

    Raises:
      ValueError: An image was not found as expected, or the moved bytes differ from `moved_bytes`.
    """
    from vlcache_jax import LLM, BucketSizes, SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    length = BEFORE + images * (tokens + 2) + 16
    with LLM(
        directory, dtype="float32", buckets=BucketSizes(), max_model_len=length, enable_prefix_caching=False,
        cache=make_cache(codec, "16GiB", device_bytes=PLACES[place]), use_tqdm=False,
    ) as llm:  # fmt: skip
        llm.service.ahead.stop()
        config = llm.service.checkpoint.config
        known = KnownImages(config, llm.get_tokenizer(), images=images, tokens=tokens, text_before=BEFORE)
        falling = falling_schedule(config.model_type, config.text.num_layers)
        llm.cache.precompute(known.files, mm_processor_kwargs=known.limits)
        llm.cache.flush()
        before = llm.stats().launches
        [output] = llm.generate(known.draw(), one, reuse=falling, use_tqdm=False)
        launches = llm.stats().launches - before
    check_found("the hit", place, output)
    report = output.cache
    # Entries in device memory are not transferred.
    linked = sum(image.tokens for image in report.images if image.kv == "host")
    staged = sum(image.recomputed[0] for image in report.images if image.encoder == "host")
    hit = Hit(place, codec, launches, (linked, staged), known.plan(report))
    reported, counted = sum(image.bytes_moved for image in report.images), moved_bytes(config, hit, "float32")
    if reported != counted:
        raise ValueError(f"counted bytes must equal those that the engine moved, {reported}, got {counted}")
    return hit


def moved_bytes(config: ModelConfig, hit: Hit, dtype: str = "bfloat16") -> int:
    """Return the bytes of cache entries that a hit moves to the device: KV of all layers, and encoder rows of computed
    tokens.
    """
    (linked, staged), kv = hit.moved, KVShape.of(config, dtype, CODECS.get(hit.codec))
    rows = (1 + config.vision.num_deepstack) * config.text.hidden_size * kv.dtype.itemsize
    return linked * kv.stored_bytes + staged * rows


def make_row(config: ModelConfig, hit: Hit) -> dict[str, Any]:
    """Return the table's row of the same hit for a model as wide as `config`, in bfloat16, on an H200."""
    loaded, kv = moved_bytes(config, hit), KVShape.of(config, "bfloat16", CODECS.get(hit.codec))
    least = floor(config, hit.plan, H200, loaded=loaded, kept=kv.stored_bytes // kv.layers)
    return {
        "K, V in": hit.place,
        "codec": hit.codec,
        "MB on the bus": loaded / 1e6,
        "bus ms": 1e3 * least.parts["load"],
        "arithmetic ms": 1e3 * (least.seconds - least.parts["load"]),
        "floor ms": 1e3 * least.seconds,
        "launches": hit.launches,
    }


def measure(config: ModelConfig, codecs: Sequence[str] = ("auto", *CODECS), **prompt: int) -> list[dict[str, Any]]:
    """Return the rows of the table: every tier and codec.

    Args:
      config: Configuration of the model.
      prompt: `images` and `tokens` of each, see `count_hit`.
    """
    vision = {**VISION, "deepstack_visual_indexes": list(range(config.vision.num_deepstack))}
    rows = []
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as folder:
        text = {**TEXT, "num_hidden_layers": config.text.num_layers}
        directory = make_checkpoint(folder, config.model_type, text=text, vision=vision)
        with Progress("counting", len(PLACES) * len(codecs)) as bar:
            for place, codec in itertools.product(PLACES, codecs):
                rows.append(make_row(config, count_hit(directory, place, codec, **prompt)))
                bar.update()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    check_writable("out", arguments.out)
    config = MODELS[MODEL]
    rows = measure(config)
    levels = falling_schedule(config.model_type, config.text.num_layers)
    head = environment("jax") | {
        "images": IMAGES,
        "tokens of each": IMAGE,
        "schedule": f"levels {list(dict.fromkeys(levels.levels))} of 500, mean {levels.mean_text}",
        "dtype": "bfloat16",
        "launches": f"of a narrow model of {config.text.num_layers} layers",
        "rates": dataclasses.asdict(H200),
    }
    publish(TITLE, rows, head, arguments.out)


if __name__ == "__main__":
    main()

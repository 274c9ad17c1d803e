"""Times to the first token of prompts with images, compared with transformers."""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from vlcache_jax import LLM, SamplingParams
from vlcache_jax.benchmarks import ttft as time_to_first
from vlcache_jax.benchmarks.gpu.engines import checkpoint, in_process, settings
from vlcache_jax.benchmarks.gpu.plan import KERNELS, MODEL, GpuCase, GpuPlan, Row
from vlcache_jax.benchmarks.gpu.tracing import traced
from vlcache_jax.benchmarks.known_images import KnownImages
from vlcache_jax.benchmarks.random_models import drawn_weights
from vlcache_jax.benchmarks.settings import TtftSetup
from vlcache_jax.testing import make_checkpoint

SIZES = ((1, 4096), (5, 4096), (1, 1024))  # of prompts: images, tokens of each


def ttft(plan: GpuPlan) -> Iterator[GpuCase]:
    sizes = ((1, 16),) if plan.rehearse else SIZES
    for count, tokens in sizes:
        yield GpuCase(f"{count} x {tokens} image tokens", functools.partial(_ttft, plan, count, tokens), KERNELS)
    yield GpuCase(
        f"{sizes[0][1]} image tokens, traced", functools.partial(_traced_first_tokens, plan, sizes[0][1]), KERNELS
    )
    for count, tokens in sizes:
        library = functools.partial(in_process, _transformers_ttft, plan, count, tokens)
        yield GpuCase(f"{count} x {tokens} image tokens, transformers", library)


def _ttft(plan: GpuPlan, count: int, tokens: int) -> Row:
    options = settings(plan)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        out = plan.out / f"ttft_{count}x{tokens}.json"
        setup = TtftSetup(
            model=str(make_checkpoint(directory, "qwen3_vl")) if plan.rehearse else None,
            random_weights=None if plan.rehearse else MODEL,
            layers=plan.layers,
            dtype=options.pop("dtype"),
            images=count,
            tokens=tokens,
            ratios=(),
            repeats=1 if plan.rehearse else 3,
            max_model_len=None if plan.rehearse else 20992,  # the same programs for all sizes
            host_bytes="40GiB",
        )
        time_to_first.measure(setup, out=out, **options)
    rows = json.loads(out.read_text())["rows"]
    measured = {row["configuration"] + " ms": row["TTFT ms"] for row in rows}
    floors = {row["configuration"] + " floor ms": row["floor ms"] for row in rows}
    return measured | floors | {"seconds": time.monotonic() - start}


def _traced_first_tokens(plan: GpuPlan, tokens: int) -> Row:
    """Trace an image that is computed, one that is computed and stored, and one that is cached."""
    options = settings(plan)
    row: Row = {}
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory, drawn_weights():
        checkpoint(plan, directory)
        cache = time_to_first.make_cache("auto", "40GiB")
        with LLM(directory, max_model_len=tokens + 64, enable_prefix_caching=False, cache=cache, **options) as llm:
            config = llm.service.checkpoint.config
            known = KnownImages(config, llm.get_tokenizer(), images=1, tokens=tokens, text_before=20)
            found = time_to_first.falling_schedule(config.model_type, config.text.num_layers)

            def ask(reuse: Any) -> None:
                llm.generate(known.draw(), one, use_tqdm=False, reuse=reuse)
                llm.cache.flush()

            for name, reuse in (("computed", "off"), ("stored", "exact"), ("found", found)):
                for _ in range(2):  # the first one compiles
                    ask(reuse)
                part = traced(plan, f"first_token_{name}", functools.partial(ask, reuse))
                row |= {f"{name}, {what}": part[what] for what in ("busy ms", "span ms", "events")}
    return row


def _transformers_ttft(plan: GpuPlan, count: int, tokens: int) -> Row:
    """Measure transformers from pixels on the device to the logits of the first token, without its preprocessing."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    device = "cpu" if plan.rehearse else "cuda"
    with tempfile.TemporaryDirectory() as directory:
        checkpoint(plan, directory)
        config = AutoConfig.from_pretrained(directory)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    rows = int(tokens**0.5)
    while tokens % rows:
        rows -= 1
    grid = torch.tensor([[1, 2 * rows, 2 * tokens // rows]] * count, device=device)
    vision = config.vision_config
    pixels = torch.randn(
        count * 4 * tokens, 3 * vision.temporal_patch_size * vision.patch_size**2, dtype=torch.bfloat16, device=device
    )
    one = [config.vision_start_token_id] + [config.image_token_id] * tokens + [config.vision_end_token_id]
    ids = torch.tensor([[5] * 20 + one * count + [7] * 6], device=device)
    marks = (ids == config.image_token_id).int()
    measured = []
    with torch.inference_mode():
        for _ in range(2 if plan.rehearse else 4):
            start = time.perf_counter()
            logits = model(
                input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=marks, logits_to_keep=1
            ).logits
            if not torch.isfinite(logits).all():  # waits for the device, too
                raise ValueError("transformers' logits must be finite")
            measured.append(time.perf_counter() - start)
    return {"transformers ms": 1e3 * statistics.median(measured[1:])}

"""Time to first token: cold, with the encoder's output cached, and with K, V linked (`vlcache bench ttft`).

Every prompt has new text before its images, so nothing is an exact hit: this is the case that other engines compute
whole. The configurations take turns; the table has medians.

    vlcache bench ttft --out benchmarks/results/ttft_cpu.json
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from vlcache_jax.benchmarks.floor import H200, Floor, floor
from vlcache_jax.benchmarks.prefill import ALLOCATOR, TEXT, VISION
from vlcache_jax.files import check_writable
from vlcache_jax.progress import Progress
from vlcache_jax.reuse.policies import spread_ranks
from vlcache_jax.study.report import environment, show, write

STEPS = ("lookup", "decode_image", "preprocess", "encode", "transfer", "link", "prefill", "first_token")
TEXT_AFTER = 6
LEVELS = (60, 30, 15, 8, 4, 2)  # of the falling schedule, in 1/500; spread over the layers its mean is about 0.04


def make_images(count: int, tokens: int, cell: int) -> list[bytes]:
    """PNG files of coloured noise; `cell` is the side of the pixels that become one token."""
    rng = np.random.default_rng(0)
    rows, columns = _grid(tokens)
    images = []
    for _ in range(count):
        noise = rng.integers(0, 256, (rows * 2, columns * 2, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise.repeat(cell // 2, axis=0).repeat(cell // 2, axis=1)).save(file, "PNG")
        images.append(file.getvalue())
    return images


def _grid(tokens: int) -> tuple[int, int]:
    """Rows and columns of the images, as nearly square as may be."""
    rows = int(np.sqrt(tokens))
    while tokens % rows:
        rows -= 1
    return rows, tokens // rows


@contextlib.contextmanager
def drawn_weights() -> Iterator[None]:
    """Within, models need no weights: they are drawn on the device, as writing the files would take minutes."""
    from vlcache_jax import base
    from vlcache_jax.convert.plan import as_dtype
    from vlcache_jax.engine.checkpoint import Checkpoint
    from vlcache_jax.models.params import parameters
    from vlcache_jax.models.registry import load_config

    class Drawn(Checkpoint):
        source_digest = fingerprint = "drawn"

        def load(self, device: Any = None, loaded: Callable[[], object] = lambda: None) -> dict[str, Any]:
            import jax

            draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
            tree: dict[Any, Any] = {}
            for i, parameter in enumerate(parameters(self.config)):
                *folders, leaf = parameter.path
                branch = tree
                for folder in folders:
                    branch = branch.setdefault(folder, {})
                # Layers keep the size of what passes through them.
                scale = parameter.shape[0] ** -0.5 if len(parameter.shape) > 1 else 1.0
                branch[leaf] = draw(jax.random.key(i), parameter.shape, self.dtype) * np.asarray(scale, self.dtype)
                loaded()
            return tree

    def open_drawn(
        directory: str | pathlib.Path, *, dtype: Any = None, revision: str | None = None, verify_weights: bool = False
    ) -> Checkpoint:
        return Drawn(pathlib.Path(directory), load_config(pathlib.Path(directory)), as_dtype(dtype), revision)

    with mock.patch.object(base, "open_checkpoint", open_drawn):
        yield


def run(model: str | None, **settings: Any) -> None:
    """Runs `measure` in a process of its own, whose allocator keeps its pages."""
    os.environ.update(ALLOCATOR)  # read when a process starts
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(measure, model, **settings).result()


def measure(
    model: str | None,
    *,
    dtype: str,
    num_images: int,
    tokens: int,
    text_before: int,
    repeats: int,
    schedule: str | None,
    out: pathlib.Path | None,
    picture: pathlib.Path | None = None,
    random_weights: bool = False,
    **settings: Any,
) -> None:
    """Measures and prints.

    Args:
      model: checkpoint; None is one of 12 layers x 768 with random weights.
      num_images, tokens: images of a prompt, and tokens of each.
      text_before: tokens before the images, new in each prompt.
      repeats: of each configuration, after one that warms up.
      schedule: path of a schedule file; None is a falling one.
      out: JSON file to write.
      picture: of the steps, to draw.
      random_weights: the model has none, and gets random ones.
      settings: of the engine.
    """
    from vlcache_jax import LLM, SamplingParams, Schedule

    check_writable("out", out)
    weights = drawn_weights() if random_weights else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as directory, weights:
        if model is None:
            from vlcache_jax.testing import make_checkpoint

            model = directory
            with Progress("drawing weights"):
                make_checkpoint(directory, "qwen3_vl", text=TEXT, vision=VISION, tie_word_embeddings=True)
        slots = num_images * (tokens + 2) + text_before + TEXT_AFTER + 8
        with LLM(model, dtype=dtype, max_model_len=slots, enable_prefix_caching=False, **settings) as llm:
            config = llm._checkpoint.config
            layers = config.text.num_layers
            cell = config.vision.patch_size * config.vision.merge_size
            pictures = make_images(num_images, tokens, cell)
            if schedule is None:
                levels = tuple(LEVELS[layer * len(LEVELS) // layers] for layer in range(layers))
                falling = Schedule(levels, config.model_type, "", allow_other_model=True)
            else:
                falling = Schedule.load(schedule)
            configurations: dict[str, Any] = {
                "cold": "off",
                "encoder cached": "exact",
                "r = 0": "full",
                "r = 0.1": "0.1",
                f"schedule, mean {falling.mean_text}": falling,
                "shift, r = 0.02": "shift-0.02",
            }
            rng = np.random.default_rng(1)
            limits = {"max_pixels": 2 * tokens * cell**2}

            def prompt() -> dict[str, Any]:
                before, after = (
                    bytes(rng.integers(97, 123, count, dtype=np.uint8)).decode() for count in (text_before, TEXT_AFTER)
                )
                text = before + "<|vision_start|><|image_pad|><|vision_end|>" * num_images + after
                return {"prompt": text, "multi_modal_data": {"image": pictures}, "mm_processor_kwargs": limits}

            one = SamplingParams(max_tokens=1, temperature=0)
            # The first runs compile what they call for, which is far less than `warmup` does for any request.
            llm._ahead.stop()
            [donor] = llm.generate(prompt(), one, use_tqdm=False)
            if [image.tokens for image in donor.cache.images] != [tokens] * num_images:
                raise ValueError(f"images must have {tokens} tokens, got {donor.cache.images}")
            _check_exact(llm, prompt(), dtype)

            outputs: dict[str, list[Any]] = {name: [] for name in configurations}
            with Progress("measuring", (repeats + 1) * len(configurations)) as bar:
                for repeat in range(repeats + 1):  # the first round warms up
                    for name, reuse in configurations.items():
                        llm.cache.flush()
                        [output] = llm.generate(prompt(), one, reuse=reuse, use_tqdm=False)
                        _check(name, output)
                        if repeat:
                            outputs[name].append(output)
                        bar.update()

            [device] = llm._runner._normalization.devices()
            on_gpu = device.platform == "gpu"  # whose rates are taken to be those of an H200
            rows: list[dict[str, Any]] = []
            baseline: dict[str, float] = {}
            for name, runs in outputs.items():
                report, length = runs[0].cache, len(runs[0].prompt_token_ids)
                ttft = statistics.median(run.metrics.ttft for run in runs)
                baseline[name] = ttft
                ranks = spread_ranks(*_grid(tokens)) if "shift" in name else np.arange(tokens)
                least = _floor(config, report, length, ranks, np.dtype(llm._runner.dtype).itemsize)
                row: dict[str, Any] = {"configuration": name}
                for step in STEPS:
                    row[f"{step} ms"] = 1000 * statistics.median(getattr(run.metrics, step) for run in runs)
                row["TTFT ms"] = 1000 * ttft
                row["spread ms"] = 1000 * (max(r.metrics.ttft for r in runs) - min(r.metrics.ttft for r in runs))
                row["tokens reused"] = length - report.rows[-1]
                row["rows a layer"] = sum(report.rows) / len(report.rows)
                row["over cold"] = baseline["cold"] / ttft
                row["over encoder cached"] = baseline.get("encoder cached", ttft) / ttft
                if on_gpu:
                    row["floor ms"] = 1000 * least.seconds
                row["GFLOP"] = least.operations / 1e9
                row["GFLOP/s of cold"] = (least.operations / ttft) / rows[0]["rate"] if rows else 1.0
                row["rate"] = least.operations / ttft
                rows.append(row)
            head = environment("jax") | {
                "device": str({device}),
                "dtype": str(llm._runner.dtype),
                "layers": layers,
                "prompt": f"{text_before} text tokens, {num_images} images of {tokens}, {TEXT_AFTER} text tokens",
                "repeats": repeats,
            }
            _publish(rows, head, out, picture)


def draw(rows: list[dict[str, Any]], head: dict[str, Any], picture: pathlib.Path) -> None:
    """Draws the steps of each configuration as a bar, from the rows of the table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(rows) + 1.3), layout="constrained")
    names = [row["configuration"] for row in rows]
    shown = [step for step in STEPS if any(row[f"{step} ms"] > 0.01 * row["TTFT ms"] for row in rows)]
    begin = np.zeros(len(rows))
    for step in shown:
        seconds = np.array([row[f"{step} ms"] / 1000 for row in rows])
        axes.barh(names, seconds, left=begin, label=step.replace("_", " "))
        begin += seconds
    rest = np.array([row["TTFT ms"] / 1000 for row in rows]) - begin
    axes.barh(names, np.maximum(rest, 0), left=begin, label="rest", color="lightgray")
    for row in rows:
        text = f" {row['TTFT ms'] / 1000:.2f} s, {row['over cold']:.0f} x"
        axes.text(row["TTFT ms"] / 1000, row["configuration"], text, va="center")
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * max(row["TTFT ms"] for row in rows) / 1000)
    axes.set_xlabel("seconds to the first token")
    axes.set_title(f"{head['prompt']}; {head['dtype']}, {head['layers']} layers", fontsize="medium")
    axes.legend(ncols=2, fontsize="small", loc="lower right")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _publish(
    rows: list[dict[str, Any]], head: dict[str, Any], out: pathlib.Path | None, picture: pathlib.Path | None
) -> None:
    steps = tuple(f"{step} ms" for step in STEPS)
    whole = [{key: value for key, value in row.items() if key not in (*steps, "rate")} for row in rows]
    show(f"Time to first token, {head['dtype']}: {head['prompt']}", whole)
    show("Its steps, ms", [{key.removesuffix(" ms"): row[key] for key in ("configuration", *steps)} for row in rows])
    if out is not None:
        write("Time to first token", rows, head, out)
    if picture is not None:
        draw(rows, head, picture)
        print(f"written to {picture}")


def _check_exact(llm: Any, prompt: dict[str, Any], dtype: str) -> None:
    """A repeat must have the logits of a cold run before anything is timed."""
    from vlcache_jax import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0)
    llm.generate(prompt, one, use_tqdm=False)
    [output] = llm.generate(prompt, one, use_tqdm=False, verify=True)
    if output.num_cached_tokens == 0 or not output.cache.exact:
        raise ValueError(f"a repeat must hit exactly, got {output.cache}")
    if not output.verification.max_logit_difference < (1e-3 if dtype == "float32" else 0.5):
        raise ValueError(f"a repeat must have the logits of a cold run, got {output.verification}")


def _check(name: str, output: Any) -> None:
    found = {(image.encoder != "computed", image.match) for image in output.cache.images}
    expected = {"cold": (False, "miss"), "encoder cached": (True, "miss")}.get(name, (True, "approximate"))
    if found != {expected} or len(output.outputs[0].token_ids) != 1:
        raise ValueError(f"{name} must find its images as {expected}, got {found}")


def _floor(config: Any, report: Any, length: int, ranks: np.ndarray, itemsize: int) -> Floor:
    """Of a run, by its report: the rows of an image are the first by `ranks`, and text is computed whole."""
    from vlcache_jax.reuse.plan import Plan

    layers = config.text.num_layers
    depth = np.full(length, layers, np.int16)
    first = length - TEXT_AFTER - 1
    for image in reversed(report.images):
        start = first - image.tokens
        fresh = np.asarray(image.recomputed)
        depth[start:first] = (ranks[:, None] < fresh).sum(1)
        first = start - 2  # vision end, vision start
    depth[-1] = layers + 1
    plan = Plan(depth)
    if plan.rows(layers) != report.rows:
        raise ValueError(f"rows counted must be those of the report, {report.rows}, got {plan.rows(layers)}")
    merge = config.vision.merge_size
    shapes = [_grid(image.tokens) for image in report.images if image.encoder == "computed"]
    grids = [(1, rows * merge, columns * merge) for rows, columns in shapes]
    loaded = sum(image.bytes_moved for image in report.images)
    return floor(config, plan, H200, encoded=grids, loaded=loaded, itemsize=itemsize)

"""One command for a day with a GPU: checks the kernels on the chip, then measures, the most valuable first.

    python -m benchmarks.gpu --out results --minutes 9

It runs from the repository on jax 0.11.2, transformers and torch, with nothing installed. Cases that are done stand in
`gpu.json` in the folder `--out`; run again, it goes on with the next one, those that were tried before last, and after
the last minute it begins no case. What could not be measured is in the table with its reason. A folder belongs to one
chip, one version of jax and one state of the kernels. Copy `tuned.json` to `pallas_kernels/attention/`, where the
kernel reads it; a jax that cannot split registers where this one could, or the reverse, passes it over. `--rehearse`
goes through all cases on a CPU, in small, with interpreted kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.benchmarks.rates import seconds
from vlcache_jax.pallas_kernels import Work, attention, dispatch, link, paged_attention
from vlcache_jax.pallas_kernels.checks import CHECKS, Check
from vlcache_jax.pallas_kernels.shapes import ATTENTION, LINK, AttentionShape, LinkShape
from vlcache_jax.study import report

Row = dict[str, Any]
Case = tuple[str, Callable[[], Row]]  # a name, and what measures it
SECTIONS = ("check", "ceiling", "speed", "tune", "ttft", "decode")
SHAPES = ATTENTION["Qwen3-VL-8B"] + tuple(s for s in ATTENTION["Qwen2.5-VL-7B"] if s.H != 28)
JAXS = "jax.experimental.pallas.ops.gpu.attention_mgpu"
REHEARSED = ("stage 512 of 20480", "decode 64 over one prefix of 16384")
L2_CACHE = 50 * 2**20  # bytes of an H100's or H200's
TOLERANCE = 0.04  # of the root mean square of a row's results: weights and results are rounded to bfloat16
SHAPE = "qwen3-vl-8b"  # of the model, with random weights


@dataclasses.dataclass
class Plan:
    """What is run, and how."""

    rehearse: bool
    out: pathlib.Path

    @property
    def repeats(self) -> int:
        return 1 if self.rehearse else 5

    @property
    def implementation(self) -> str:
        return "mosaic_gpu_interpreted" if self.rehearse else "mosaic_gpu"

    def shapes(self) -> tuple[AttentionShape, ...]:
        return tuple(s.in_small() for s in SHAPES if s.name in REHEARSED) if self.rehearse else SHAPES

    def links(self) -> tuple[LinkShape, ...]:
        return (LinkShape(16, 40, 8, 128),) if self.rehearse else LINK["Qwen3-VL-8B"]


# Timing.


def times_for(operations: int, traffic: int) -> int:
    """Runs that take about 50 ms on an H200."""
    return max(1, min(1000, int(0.05 / max(operations / 5e14, traffic / 3e12, 5e-6))))


# (a) Kernels against the reference, on the chip.


def check(plan: Plan) -> Iterator[Case]:
    for shape in plan.shapes():
        yield f"attention, {shape.name}, D {shape.D}", functools.partial(_check_attention, plan, shape)
    for case in plan.links():
        yield f"link {case.T} tokens", functools.partial(_check_link, plan, case)
    for kernel, corners in CHECKS.items():
        for corner in corners[-1:] if plan.rehearse else corners:
            yield f"{kernel}, corner: {corner.name}", functools.partial(_check_corner, plan, corner)


def _check_attention(plan: Plan, shape: AttentionShape) -> Row:
    plain = shape.arrays()
    args: tuple[Any, ...] = (*shape.paged_arrays(), shape.work(plan.implementation)) if shape.has_pages else plain
    run = jax.jit(functools.partial(_contract(shape), implementation=plan.implementation))
    out = run(*args)
    error = _error(shape, plain, out)
    again = bool((out == run(*args)).all())
    if not (error < TOLERANCE and again):
        raise ValueError(f"{shape.name}: error {error}, must be below {TOLERANCE}; bit-equal when repeated: {again}")
    return {"error": error, "bit-equal": again}


def _contract(shape: AttentionShape) -> Callable[..., jax.Array]:
    return paged_attention if shape.has_pages else attention


def _error(shape: AttentionShape, args: tuple[jax.Array, ...], out: jax.Array) -> float:
    """Largest difference from float32 of rows spread over the case, by the root mean square of the row."""
    q, k, v, start, end = args
    rows = np.unique(np.linspace(0, shape.N - 1, min(shape.N, 48)).astype(int))
    group = shape.H // shape.K

    @jax.jit
    def exact(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
        scores = product("kgd,skd->kgs", q.reshape(shape.K, group, -1).astype(jnp.float32), k.astype(jnp.float32))
        slot = jnp.arange(len(k))
        scores = jnp.where((slot >= start) & (slot < end), scores * shape.D**-0.5, -jnp.inf)
        weights = jnp.where(start < end, jax.nn.softmax(scores, -1), 0)
        return product("kgs,skd->kgd", weights, v.astype(jnp.float32)).reshape(shape.H, -1)

    def error(n: int) -> float:
        want = exact(q[n], k, v, start[n], end[n])
        scale = jnp.sqrt(jnp.mean(want**2))  # of an empty row 0, which its result must equal
        return float(jnp.nan_to_num(jnp.abs(want - out[n].astype(jnp.float32)) / scale, nan=0.0, posinf=jnp.inf).max())

    if not bool(jnp.isfinite(out).all()):
        return float("inf")
    return max(map(error, rows.tolist()))


def _link_arrays(case: LinkShape) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    specs = case.specs()
    k, v, data = (
        jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys, jax.tree.leaves(specs[:3]), strict=False)
    )
    slot = jnp.arange(case.T, dtype=jnp.int32) + (case.S - case.T) // 2
    angle = jax.random.uniform(keys[3], specs[4].shape) * 6
    return k, v, [[data]], slot, jnp.cos(angle).astype(specs[4].dtype), jnp.sin(angle).astype(specs[4].dtype)


def _check_link(plan: Plan, case: LinkShape) -> Row:
    args = _link_arrays(case)
    got = jax.jit(functools.partial(link, implementation=plan.implementation))(*args)
    wide = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), args)
    want = jax.jit(functools.partial(link, implementation="xla"))(*wide)
    equal = all(bool((g == w.astype(g.dtype)).all()) for g, w in zip(got, want, strict=True))
    if not equal:
        raise ValueError(f"linked keys and values of {case} must be those of float32, rounded")
    return {"error": 0.0, "bit-equal": equal}


def _check_corner(plan: Plan, corner: Check) -> Row:
    return {"error": corner.error(plan.implementation), "bit-equal": True}  # or it raises


# (b) Kernels against the chip's ceilings and other libraries.


def ceiling(plan: Plan) -> Iterator[Case]:
    yield "matrix product", functools.partial(_matrix_rate, plan)
    yield "copy", functools.partial(_copy_rate, plan)


def _matrix_rate(plan: Plan) -> Row:
    size = 256 if plan.rehearse else 8192
    x, w = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    took = seconds(lambda x, w: (x @ w) * size**-0.5, x, w, times=20, repeats=plan.repeats)
    return {"ms": 1e3 * took, "TFLOP/s": 2 * size**3 / took / 1e12}


def _copy_rate(plan: Plan) -> Row:
    x = jnp.zeros(2**20 if plan.rehearse else 2**30, jnp.bfloat16)
    took = seconds(lambda x: x + 1, x, times=20, repeats=plan.repeats)
    return {"ms": 1e3 * took, "TB/s": 2 * x.nbytes / took / 1e12}


def speed(plan: Plan) -> Iterator[Case]:
    for shape in plan.shapes():
        name = f"attention, {shape.name}, D {shape.D}"
        yield name, functools.partial(_time_attention, plan, shape, plan.implementation)
        if shape.has_pages and shape.paged().shared:
            time_apart = functools.partial(_time_attention, plan, shape, plan.implementation, shared=False)
            yield f"{name}, each request apart", time_apart
        if not plan.rehearse:
            yield f"{name}, XLA", functools.partial(_time_attention, plan, shape, "xla")
    for case in plan.links()[-1:]:  # the largest: smaller ones stay in the L2 cache
        for implementation in (plan.implementation, "xla"):
            name = f"link {case.T} tokens{', XLA' * (implementation == 'xla')}"
            yield name, functools.partial(_time_link, plan, case, implementation)
    for n in (64,) if plan.rehearse else (4096, 20480):
        heads = n, 32, 8, 128
        yield f"causal {n}", functools.partial(_time_causal, plan, heads, plan.implementation)
        if not plan.rehearse:
            yield f"causal {n}, cuDNN", functools.partial(_time_causal, plan, heads, "cudnn")
            yield f"causal {n}, {JAXS}, float16", functools.partial(_time_causal, plan, heads, JAXS)
        yield f"causal {n}, torch", functools.partial(_time_torch, plan, heads)


def _rates(took: float, operations: int, traffic: int) -> Row:
    return {"ms": 1e3 * took, "TFLOP/s": operations / took / 1e12, "TB/s": traffic / took / 1e12}


def _time_attention(
    plan: Plan, shape: AttentionShape, implementation: str, config: Any = None, *, shared: bool = True
) -> Row:
    options: dict[str, Any] = {"implementation": implementation}
    step = _contract(shape)
    if config is not None:
        from vlcache_jax.pallas_kernels.attention import mosaic_gpu

        step = mosaic_gpu.paged_attention if shape.has_pages else mosaic_gpu.attention
        interpret = dispatch.interpreter(dispatch.Choice("attention", shape.name, implementation, "measured"))
        options = {"scale": shape.D**-0.5, "config": config, "interpret": interpret}
    step = functools.partial(step, **options)
    times = 1 if plan.rehearse else times_for(shape.operations(), shape.bytes())
    if not shape.has_pages:
        q, k, v, start, end = shape.arrays()

        def plain_turn(carry: Any, k: jax.Array, v: jax.Array) -> Any:
            q, start, end = carry
            return step(q, k, v, start, end), start, end

        took = seconds(plain_turn, (q, start, end), k, v, times=times, repeats=plan.repeats)
        return _rates(took, shape.operations(), shape.bytes())

    # Every turn reads other pages, so that none finds its own in the cache.
    q, k, v = shape.paged_arrays()
    pages, copies = shape.paged().pages, 2 if plan.rehearse else 1 + 3 * L2_CACHE // (k.nbytes + v.nbytes)
    work = shape.work(implementation, shared=shared, **({"tile": config.tile, "small": config.tile} if config else {}))
    place, _ = work.config.places["tables"]
    lists = np.tile(work.buffer, (copies, 1))
    lists[:, place] += pages * np.arange(copies, dtype=np.int32)[:, None]

    def turn(carry: Any, k: jax.Array, v: jax.Array) -> Any:
        q, count, lists = carry
        return step(q, k, v, Work(lists[count % copies], work.config)), count + 1, lists

    k, v = (jnp.tile(x, (copies, 1, 1)) for x in (k, v))
    took = seconds(turn, (q, jnp.int32(0), jnp.asarray(lists)), k, v, times=times, repeats=plan.repeats)
    return _rates(took, shape.operations(), shape.bytes())


def _time_link(plan: Plan, case: LinkShape, implementation: str) -> Row:
    k_pool, v_pool, *rest = _link_arrays(case)
    write = functools.partial(link, implementation=implementation)
    times = 1 if plan.rehearse else 200
    took = seconds(
        lambda pools, *rest: write(*pools, *rest), (k_pool, v_pool), *rest, times=times, repeats=plan.repeats
    )
    return _rates(took, 0, case.bytes())


def _causal_cost(shape: tuple[int, int, int, int]) -> tuple[int, int]:
    n, heads, kv_heads, width = shape
    return 2 * n * (n + 1) * heads * width, 2 * 2 * n * (heads + kv_heads) * width


def _time_causal(plan: Plan, shape: tuple[int, int, int, int], implementation: str) -> Row:
    n, heads, kv_heads, width = shape
    q, k, v = (
        jax.random.normal(jax.random.key(i), (n, h, width), jnp.bfloat16)
        for i, h in enumerate((heads, kv_heads, kv_heads))
    )
    if implementation == "cudnn":

        def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True, implementation="cudnn")[0]

        args: tuple[jax.Array, ...] = (q, k, v)
    elif implementation == JAXS:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)

        def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention_mgpu.attention(q, k, v, config)

        args = tuple(x[None].astype(jnp.float16) for x in (q, k, v))  # in jax 0.11.2 it does float16 alone
    else:
        step = functools.partial(attention, implementation=implementation)
        args = q, k, v, jnp.zeros(n, jnp.int32), jnp.arange(n, dtype=jnp.int32) + 1
    operations, traffic = _causal_cost(shape)
    took = seconds(step, *args, times=1 if plan.rehearse else times_for(operations, traffic), repeats=plan.repeats)
    return _rates(took, operations, traffic)


def _time_torch(plan: Plan, shape: tuple[int, int, int, int]) -> Row:
    import torch

    n, heads, kv_heads, width = shape
    device = "cpu" if plan.rehearse else "cuda"
    q, k, v = (torch.randn(1, h, n, width, dtype=torch.bfloat16, device=device) for h in (heads, kv_heads, kv_heads))

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    operations, traffic = _causal_cost(shape)
    times = 1 if plan.rehearse else times_for(operations, traffic)
    run()
    measured = []
    for _ in range(plan.repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        synchronize()
        measured.append((time.perf_counter() - start) / times)
    return _rates(statistics.median(measured), operations, traffic)


# (c) Tiles, blocks, stages, turns.


def tune(plan: Plan) -> Iterator[Case]:
    """Shapes that the kernel's sizes cannot tell apart share one way to cut."""
    for key, same in itertools.groupby(sorted(plan.shapes(), key=_static), key=_static):
        n, heads, kv_heads, width, decode = key
        name = f"N {n}, {heads}/{kv_heads} heads of {width}{', decoding' * decode}"
        yield name, functools.partial(_tune, plan, list(same))


def _static(shape: AttentionShape) -> tuple[int, int, int, int, bool]:
    return shape.N, shape.H, shape.K, shape.D, shape.is_decode


def _tune(plan: Plan, shapes: list[AttentionShape]) -> Row:
    from vlcache_jax.pallas_kernels.attention import mosaic_gpu

    n, heads, kv_heads, width, decode = _static(shapes[0])
    usual = mosaic_gpu.default_config(n, heads, kv_heads, width, decode=decode)
    took: dict[Any, float] = {}

    def total_ms(config: Any) -> float:
        if config not in took:
            took[config] = sum(_time_attention(plan, shape, plan.implementation, config)["ms"] for shape in shapes)
        return took[config]

    total_ms(usual)
    blocks = [{"block": 128, "stages": 2}, {"block": 128, "stages": 3}, {"block": 64, "stages": 4}]
    # One setting after the other, each from the best so far.
    for changes in (
        [] if plan.rehearse else [{"tile": 24 - usual.tile} | block for block in blocks],
        blocks[:1] if plan.rehearse else blocks,
        [] if plan.rehearse else [{"take_turns": False}],
    ):
        best = min(took, key=total_ms)
        for change in changes:
            try:
                total_ms(dataclasses.replace(best, **change))
            except Exception as error:  # too much shared memory, say: that way of cutting is out, and the log tells
                print(f"{shapes[0].name}: {change}: {str(error).splitlines()[0][:160]}")
    best = min(took, key=total_ms)
    return {
        "N": n, "H": heads, "K": kv_heads, "D": width, "decode": decode,
        "splits registers": mosaic_gpu.SPLITS_REGISTERS,
        "config": dataclasses.asdict(best), "ms": took[best], "default ms": took[usual],
    }  # fmt: skip


# (d) Time to first token, and (e) decoding, with random weights.


def ttft(plan: Plan) -> Iterator[Case]:
    images = ((1, 16),) if plan.rehearse else ((1, 1024), (1, 4096), (5, 4096))
    for count, tokens in images:
        name = f"{count} x {tokens} image tokens"
        yield name, functools.partial(_ttft, plan, count, tokens)
        yield f"{name}, transformers", functools.partial(_in_process, _transformers_ttft, plan, count, tokens)


def _checkpoint(plan: Plan, directory: str) -> None:
    """Configuration, tokenizer and processor; weights are drawn on the device."""
    from vlcache_jax.benchmarks.random_models import make_random_model
    from vlcache_jax.testing import make_checkpoint

    if plan.rehearse:
        make_checkpoint(directory, "qwen3_vl", weights=False)
    else:
        make_random_model(directory, SHAPE)


def _settings(plan: Plan) -> Row:
    from vlcache_jax import Ladder

    if plan.rehearse:
        return {"ladder": Ladder(rows=(64,), patches=(64,), sequences=(1, 2)), "max_rows": 64, "dtype": "float32"}
    ladder = Ladder(rows=(64, 512, 2048, 8192), patches=(4096, 16384), sequences=(1, 8, 64))
    return {
        "ladder": ladder,
        "dtype": "bfloat16",
        "kv_cache_bytes": 24 * 2**30,  # which leaves room for the library's model
        "implementation": plan.implementation,  # not XLA in its place, whatever a first contact has found
    }


def _ttft(plan: Plan, count: int, tokens: int) -> Row:
    from vlcache_jax.benchmarks import ttft
    from vlcache_jax.testing import make_checkpoint

    settings = _settings(plan)
    with tempfile.TemporaryDirectory() as directory:
        out = plan.out / f"ttft_{count}x{tokens}.json"
        setup = ttft.Setup(
            model=str(make_checkpoint(directory, "qwen3_vl")) if plan.rehearse else None,
            random_weights=None if plan.rehearse else SHAPE,
            dtype=settings.pop("dtype"),
            sizes=((count, tokens),),
            repeats=1 if plan.rehearse else 3,
            host_bytes="40GiB",
        )
        ttft.measure(setup, out=out, **settings)
    rows = json.loads(out.read_text())["rows"]
    measured = {row["configuration"] + " ms": row["TTFT ms"] for row in rows}
    return measured | {row["configuration"] + " floor ms": row["floor ms"] for row in rows}


def _in_process(function: Callable[..., Row], *args: Any) -> Row:
    """In a process of its own, which gives its memory back."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def _transformers_ttft(plan: Plan, count: int, tokens: int) -> Row:
    """From pixels on the device to the logits of the first token; the library's preprocessing is not counted."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    device = "cpu" if plan.rehearse else "cuda"
    with tempfile.TemporaryDirectory() as directory:
        _checkpoint(plan, directory)
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
                raise ValueError("the library's logits must be finite")
            measured.append(time.perf_counter() - start)
    return {"transformers ms": 1e3 * statistics.median(measured[1:])}


def decode(plan: Plan) -> Iterator[Case]:
    for sequences in (1, 2) if plan.rehearse else (1, 8, 64):
        yield f"{sequences} sequences", functools.partial(_decode, plan, sequences)


def _decode(plan: Plan, sequences: int) -> Row:
    from vlcache_jax import LLM, SamplingParams
    from vlcache_jax.benchmarks.random_models import drawn_weights

    length, answer = (20, 3) if plan.rehearse else (2048, 65)
    rng = np.random.default_rng(0)
    prompts = [bytes(rng.integers(97, 123, length, dtype=np.uint8)).decode() for _ in range(sequences)]
    with tempfile.TemporaryDirectory() as directory, drawn_weights():
        _checkpoint(plan, directory)
        with LLM(directory, max_model_len=length + answer + 8, reuse="off", **_settings(plan)) as llm:
            params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
            for _ in range(2):  # the first one compiles
                outputs = llm.generate(prompts, params, use_tqdm=False)
    if [len(output.outputs[0].token_ids) for output in outputs] != [answer] * sequences:
        raise ValueError(f"every sequence must get {answer} tokens")
    step = max(output.metrics.decode for output in outputs) / (answer - 1)
    return {"step ms": 1e3 * step, "tokens/s": sequences / step}


# The run.


def device_head() -> Row:
    """Chip, driver and versions."""
    head = report.environment("jax", "jaxlib", "flax", "torch", "transformers")
    device = jax.devices()[0]
    driver = ""
    if device.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return head | {"chip": device.device_kind, "driver": driver}


def identity(plan: Plan) -> Row:
    """What results of one folder have in common."""
    kernels = pathlib.Path(dispatch.__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(kernels.rglob("*.py")))
    return {
        "rehearsed": plan.rehearse,
        "chip": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "kernels": hashlib.sha256(sources).hexdigest()[:16],
    }


def run(plan: Plan, minutes: float, only: tuple[str, ...] = SECTIONS) -> list[Row]:
    """Runs the cases that are not done yet; returns a row for every case.

    Raises:
      ValueError: the folder has results of another chip, jax or state of the kernels.
    """
    # What a run before this one has measured is not measured again.
    deadline = time.monotonic() + 60 * minutes
    file = plan.out / "gpu.json"
    plan.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, Row] = {}
    tried: dict[str, int] = {}
    if file.exists():
        before = json.loads(file.read_text())
        if before["identity"] != identity(plan):
            raise ValueError(f"out must have no results of {before['identity']}; {identity(plan)} needs another folder")
        done, tried = before["cases"], before["tried"]

    def save() -> None:
        content = {"head": device_head(), "identity": identity(plan), "tried": tried, "cases": done}
        file.write_text(json.dumps(content, indent=1) + "\n")

    # Those that were tried least come first. Speeds of a wrong kernel are worth nothing.
    cases = [(section, f"{section}: {name}", case) for section in only for name, case in globals()[section](plan)]
    results: dict[str, str] = {}
    broken = False
    for section, key, case in sorted(cases, key=lambda case: tried.get(case[1], 0)):
        if key in done:
            continue
        if time.monotonic() > deadline:
            results[key] = "not measured: out of time"
        elif broken and section != "check":
            results[key] = "not measured: a kernel is wrong"
        else:
            tried[key] = tried.get(key, 0) + 1
            save()  # a case that is killed is not the first one next time
            try:
                done[key] = case()
            except Exception as error:  # the other cases are worth having
                broken |= section == "check"
                results[key] = f"failed: {type(error).__name__}: {str(error)[:300]}"
                print(key, results[key], flush=True)
                continue
            save()
            print(key, done[key], flush=True)
    entries = [case for key, case in done.items() if key.startswith("tune: ")]
    if entries:
        report.write("Fastest ways to cut attention", entries, device_head(), plan.out / "tuned.json")

    def shown(key: str) -> str:
        if key in results:
            return results[key]
        return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in done[key].items())

    return [{"case": key, "result": shown(key)} for _, key, _ in cases]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no case later than this")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in small")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch measures on the same chip
    if not arguments.rehearse:
        dispatch.check_device("mosaic_gpu", jax.devices()[0])
    rows = run(Plan(arguments.rehearse, arguments.out), arguments.minutes, tuple(arguments.only))
    report.show(f"{device_head()['chip']}, jax {jax.__version__}", rows)
    if any(row["result"].startswith("failed") for row in rows):
        raise SystemExit(1)

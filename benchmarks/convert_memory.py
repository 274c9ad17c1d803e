"""Memory and rate of a conversion, and of loading its result: `python -m vlcache_jax.benchmarks.convert_memory`.

Makes a synthetic checkpoint of random bits in uneven shards, converts it, compares the result with the source byte by
byte, and loads both kinds of directory; each step runs in a process of its own. Memory is anonymous memory (`RssAnon`)
over that of the process after its imports, sampled every two milliseconds; pages of mapped files do not count, since
the system drops them when it needs room.
"""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import numpy as np
import typer

# Four layers and two embeddings of half a gigabyte: 2.1 GB in bfloat16.
TEXT = {
    "vocab_size": 60_000,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# Three layers of 128 experts, 0.6 GB each: 2.0 GB, of which most is in six tensors.
EXPERTS = TEXT | {
    "vocab_size": 20_000,
    "hidden_size": 2048,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
}
SHARES = (0.05, 0.31, 0.18, 0.46)  # of the bytes, by shard


def make_source(
    directory: pathlib.Path, text: dict[str, Any], seed: int = 0, family: str = "qwen3_vl"
) -> tuple[int, int]:
    """Writes a checkpoint without ever holding it; returns its bytes, and those of the largest tensor."""
    from vlcache_jax.models.params import parameters, published_name
    from vlcache_jax.models.registry import load_config
    from vlcache_jax.testing import make_checkpoint

    make_checkpoint(directory, family, dtype="bfloat16")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= text
    config["text_config"]["rope_parameters"]["mrope_section"] = _sections(text["head_dim"])
    config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    (directory / "config.json").write_text(json.dumps(config))

    model = load_config(directory)
    sizes = {published_name(model, p.tensor): p.tensor_shape for p in parameters(model)}
    total = 2 * sum(math.prod(shape) for shape in sizes.values())
    ends = np.cumsum(SHARES) * total
    shards: list[list[str]] = [[] for _ in SHARES]
    done = 0
    for name, shape in sizes.items():
        shards[int(np.searchsorted(ends[:-1], done))].append(name)
        done += 2 * math.prod(shape)

    rng = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_random(directory / file, {name: sizes[name] for name in names}, rng)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total, 2 * max(math.prod(shape) for shape in sizes.values())


def _sections(head_dim: int) -> list[int]:
    side = head_dim // 2 * 5 // 16
    return [head_dim // 2 - 2 * side, side, side]


def _write_random(path: pathlib.Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, 64 << 20):
            bits = np.frombuffer(rng.bytes(min(64 << 20, end - begin)), "<u2")
            file.write((bits & 0xBFFF).tobytes())  # one bit of the exponent is 0, so that every value is finite


def measure(step: str, source: pathlib.Path, destination: pathlib.Path) -> dict[str, Any]:
    """Runs one step in this process."""
    import jax
    import transformers

    import vlcache_jax.convert.store
    from vlcache_jax.convert import convert, verify_weights
    from vlcache_jax.convert.memory import PeakMemory
    from vlcache_jax.engine.checkpoint import open_checkpoint

    jax.devices(), transformers.AutoConfig, vlcache_jax.convert.store  # everything lazy is now imported
    steps = {
        "convert": lambda: convert(source, destination),
        "verify": lambda: verify_weights(source, destination),
        "load converted": lambda: open_checkpoint(destination).load(),
        "load hub": lambda: open_checkpoint(source).load(),
        "fingerprint hub": lambda: open_checkpoint(source).fingerprint,
    }
    with PeakMemory(interval=0.002) as memory:
        begin = time.perf_counter()
        result = steps[step]()
        seconds = time.perf_counter() - begin
    del result
    if memory.base is None or memory.peak is None:
        raise RuntimeError("this system does not tell a process's anonymous memory")
    return {
        "step": step,
        "seconds": seconds,
        "base_bytes": memory.base,
        "peak_over_base_bytes": memory.peak - memory.base,
    }


def run(
    directory: Annotated[
        pathlib.Path | None, typer.Option(help="Where to work; by default a temporary folder.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Decoder layers of 0.28 GB each, of 0.6 GB with experts; 4 or 3 by default.")
    ] = None,
    vocab: Annotated[int | None, typer.Option(help="Rows of the two embeddings, of 8 or 4 KB each.")] = None,
    experts: Annotated[bool, typer.Option("--experts", help="A mixture of experts.")] = False,
    output: Annotated[pathlib.Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Measure memory and rate of a conversion, and of loading what it makes.

    Example: python -m vlcache_jax.benchmarks.convert_memory --output convert.json
    """
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        source, destination = pathlib.Path(folder, "source"), pathlib.Path(folder, "converted")
        text, family = (EXPERTS, "qwen3_vl_moe") if experts else (TEXT, "qwen3_vl")
        given = {"num_hidden_layers": layers, "vocab_size": vocab}
        text = text | {key: value for key, value in given.items() if value is not None}
        total, largest = make_source(source, text, family=family)
        typer.echo(f"checkpoint of {total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB")
        typer.echo(f"{'step':16} {'seconds':>8} {'GB/s':>6} {'base MB':>8} {'peak over base MB':>18}")
        rows = []
        for step in ("convert", "verify", "load converted", "load hub", "fingerprint hub"):
            command = [sys.executable, "-m", __spec__.name, "--step", step, str(source), str(destination)]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            rate = total / row["seconds"] / 1e9
            rows.append(row | {"gigabytes_per_second": rate})
            base, peak = row["base_bytes"] / 1e6, row["peak_over_base_bytes"] / 1e6
            typer.echo(f"{step:16} {row['seconds']:8.1f} {rate:6.2f} {base:8.0f} {peak:18.0f}")
        allowed = 2 * largest + 300_000_000
        peak = rows[0]["peak_over_base_bytes"]
        typer.echo(f"allowed in the conversion: {allowed / 1e6:.0f} MB over base; used {peak / 1e6:.0f} MB")
        if output:
            figures = {"total_bytes": total, "largest_tensor_bytes": largest, "allowed_bytes": allowed, "steps": rows}
            output.write_text(json.dumps(figures, indent=1) + "\n")
        if peak > allowed or rows[0]["gigabytes_per_second"] < 0.1:
            raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        print(json.dumps(measure(sys.argv[2], pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4]))))
    else:
        typer.run(run)

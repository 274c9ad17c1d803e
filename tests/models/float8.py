"""Checkpoints in 8 bits, and what they stand for."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import ml_dtypes
import numpy as np

from vlcache_jax.models.layers import JOINED
from vlcache_jax.models.registry import FAMILIES
from vlcache_jax.testing import make_checkpoint

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = 32
# Blocks fall neither on heads nor on the ends of matrices.
TEXT = {"hidden_size": 80, "intermediate_size": 100, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
# The last layer has linear attention, too.
HYBRID = {"layer_types": None, "full_attention_interval": 2}
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": FLOAT8}


def make(directory: pathlib.Path, kind: str = "qwen3_vl", quantization: Any = "fp8", **options: Any) -> pathlib.Path:
    """A checkpoint in 8 bits."""
    text = TEXT | (EXPERTS if kind.endswith("moe") else {}) | (HYBRID if kind.startswith("qwen3_5") else {})
    given = {"text": text, "seed": 21, "block": BLOCK} | options
    return make_checkpoint(directory, kind, quantization=quantization, **given)


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = (begin + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(raw[first:last], np.uint8)
        found[name] = flat.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def write(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def exact(matrix: np.ndarray, factors: np.ndarray, block: int = BLOCK) -> np.ndarray:
    """A matrix [out, in] in 8 bits in float64, value by value as the published layouts say."""
    out, inputs = matrix.shape
    own = np.zeros(matrix.shape)
    for i in range(out):
        for j in range(inputs):
            factor = factors[i, 0] if factors.shape == (out, 1) else factors[i // block, j // block]
            own[i, j] = float(matrix[i, j]) * float(factor)
    return own


def twin(source: pathlib.Path, destination: pathlib.Path) -> pathlib.Path:
    """The same model without 8 bits: its matrices are what they stand for, which float32 holds exactly."""
    shutil.copytree(source, destination)
    config = json.loads((destination / "config.json").read_text())
    del config["quantization_config"]
    (destination / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    tensors = read(destination / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dtype == FLOAT8]:
        [suffix] = [own for own in ("_scale_inv", "_scale") if name + own in tensors]
        stands_for = exact(tensors[name], tensors.pop(name + suffix))
        tensors[name] = stands_for.astype(np.float32)
        assert (tensors[name] == stands_for).all()
    stacked(tensors, by_output=FAMILIES[config["model_type"]].published.experts_by_output)
    write(destination / "model.safetensors", {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    return destination


def stacked(tensors: dict[str, np.ndarray], *, by_output: bool = False) -> None:
    """Puts matrices of experts that are stored one by one together, in place, as they are published without 8 bits.

    `by_output`: as [E, out, in].
    """
    for first in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        folder = first.removesuffix(".0.gate_proj.weight")
        count = sum(name.startswith(f"{folder}.") and name.endswith(".gate_proj.weight") for name in tensors)
        gate, up, down = (
            np.stack([tensors.pop(f"{folder}.{i}.{kind}_proj.weight") for i in range(count)])
            for kind in ("gate", "up", "down")
        )
        for name, stack in (("gate_up_proj", np.concatenate([gate, up], axis=1)), ("down_proj", down)):
            # The library tells published stacks from its own by their shapes, and would not turn a square one.
            assert stack.shape[1] != stack.shape[2]
            tensors[f"{folder}.{name}"] = stack if by_output else stack.swapaxes(1, 2)


def stands_for(product: dict[str, Any], name: str) -> np.ndarray:
    """The matrix of a product as the model without 8 bits has it, in float64, whatever its layers are stored as."""
    if "kernel" in product:
        return np.asarray(product["kernel"]).astype(np.float64)
    if "weight" not in product:
        return np.concatenate([stands_for(product[own], own) for own in JOINED[name]], -2)
    matrix, factors = (np.asarray(product[own]).astype(np.float64) for own in ("weight", "weight_scale"))
    return np.moveaxis(matrix * np.repeat(factors, matrix.shape[-1] // factors.shape[-1], axis=-1), -1, 0)


def names_in_8_bits(tree: dict[str, Any]) -> list[str]:
    """The names of all products of a tree that stay in 8 bits, or of the layers of a product that differ."""
    return [
        own
        for name, node in tree.items()
        if isinstance(node, dict)
        for own in ([name] if "weight_scale" in node else names_in_8_bits(node))
    ]


def left_out(source: pathlib.Path, destination: pathlib.Path, modules: list[str], listed: Any = None) -> pathlib.Path:
    """The same checkpoint with some modules' matrices in bfloat16, which its list names, or as `listed` has it."""
    shutil.copytree(source, destination)
    tensors = read(destination / "model.safetensors")
    for module in modules:
        name = f"{module}.weight"
        [suffix] = [own for own in ("_scale_inv", "_scale") if name + own in tensors]
        tensors[name] = exact(tensors[name], tensors.pop(name + suffix)).astype(ml_dtypes.bfloat16)
    write(destination / "model.safetensors", tensors)
    config = json.loads((destination / "config.json").read_text())
    quantization = config["quantization_config"]
    key = "modules_to_not_convert" if quantization["quant_method"] == "fp8" else "ignore"
    quantization[key] += modules if listed is None else listed
    (destination / "config.json").write_text(json.dumps(config))
    return destination

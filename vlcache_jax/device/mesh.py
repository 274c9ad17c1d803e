"""Tensor parallelism: placement of weights, the KV pool and cache entries on several devices.

The compiler partitions programs by the placement of their arguments (GSPMD), and kernels partition themselves
(`pallas_kernels.split`). Each device has its own KV heads with their queries, columns of gate and up with the rows of
down, experts, and a part of the vocabulary. Hidden states, the vision tower and inputs from the host are replicated. If
there are fewer KV heads than devices, each head is replicated, with a part of its queries. Layers with states are
divided by the heads of these. `check_exchange` checks that devices reach each other before a program waits for them.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.params import FP8_LEAVES, Parameter, Path, is_apart
from vlcache_jax.pallas_kernels import split
from vlcache_jax.pallas_kernels.split import AXIS, FIRST, FOURTH, SECOND, THIRD, WHOLE, spread

LIMIT = 120.0  # seconds, including the setup of NCCL's channels


def check_exchange(devices: Devices, values: int = 2**18, limit: float = LIMIT) -> float:
    """Compute a sum over all devices, as each layer does, and check it.

    Args:
      values: number of float32 values on each device.
      limit: time limit in seconds.

    Returns:
      Seconds of the sum after setup, the minimum of five runs.

    Raises:
      RuntimeError: the sum fails, is wrong, or does not end within `limit`.
    """
    found: list[float | BaseException] = []

    def measure() -> None:
        try:
            found.append(_measure(devices, values))
        except Exception as error:  # the waiting thread reports it
            found.append(error)

    thread = threading.Thread(target=measure, name="vlcache-exchange", daemon=True)
    thread.start()
    thread.join(limit)
    if found and isinstance(found[0], float):
        return found[0]
    what = f"did not end within {limit:g} s" if not found else f"failed: {found[0]}"
    raise RuntimeError(
        f"{devices.count} devices like {devices.all[0]} must be able to reach each other, but an all-reduce "
        f"over them {what}. "
        "Set NCCL_DEBUG=INFO to log the steps of NCCL. NCCL_P2P_DISABLE=1 avoids the links between devices. "
        "NCCL_SHM_DISABLE=1 avoids shared memory (in a container: --shm-size=1g). "
        "tensor_parallel_size=1 uses one device"
    )


def _measure(devices: Devices, values: int) -> float:
    count = devices.count
    with split.over(devices.mesh):
        add = jax.jit(split.spread(lambda own: jax.lax.psum(own[0], AXIS), (FIRST,), WHOLE))
        own = devices.put(np.arange(count, dtype=np.float32)[:, None] + np.zeros((1, values), np.float32), FIRST)
        made = add(own)
    wrong = jnp.abs(made - count * (count - 1) / 2).max()
    if float(wrong) != 0:
        raise ValueError(f"its result is wrong by {float(wrong)}")
    min_seconds = math.inf
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(add(own))
        min_seconds = min(min_seconds, time.perf_counter() - start)
    return min_seconds


MAX_DEVICES = 8  # devices of a machine; replicas use more


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of an engine, all of one kind.

    Attributes:
      mesh: mesh of the devices, or None for a single device.
      copies: number of copies of each KV head.
    """

    mesh: Mesh | None
    copies: int = 1

    @property
    def all(self) -> list[Any]:
        """List of the engine's devices."""
        return jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    @classmethod
    def of(cls, devices: list[Any], config: ModelConfig) -> Devices:
        """Return the devices with the mesh and head copies that a model needs.

        Raises:
          ValueError: the model cannot be spread over so many devices, see `check_sizes`.
        """
        check_sizes(config.text, len(devices))
        return cls.over(devices, copies_of(config.text, len(devices))) if len(devices) > 1 else cls(None)

    @classmethod
    def over(cls, devices: list[Any], copies: int = 1) -> Devices:
        """Return a mesh of several devices of one kind."""
        return cls(Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,)), copies)

    @property
    def count(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def sharding(self, spec: PartitionSpec = WHOLE) -> NamedSharding | None:
        """Return the sharding for `spec`, or None for a single device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """Return the shardings for a tree of specs."""
        return jax.tree.map(self.sharding, specs, is_leaf=lambda one: isinstance(one, PartitionSpec))

    def placed(self, tree: Any) -> Any:
        """Return abstract arrays in which those without a sharding are replicated."""
        return jax.tree.map(lambda one: one if one.sharding else self.abstract(one), tree) if self.mesh else tree

    def by_token(self, tokens: int) -> PartitionSpec:
        """Return the placement of stored KV [G, 2, tokens, K, ...] that comes from the host.

        If `tokens` is a multiple of the number of devices, each device receives an equal part of the tokens, so that
        all buses carry data. Otherwise KV is replicated.
        """
        return WHOLE if tokens % self.count else THIRD

    def by_head(self, buffers: Any) -> Any:
        """Reshard stored KV from `by_token` so that each device has its heads of all tokens. Called while tracing."""
        if self.mesh is None:
            return buffers

        def resharded(buffer: jax.Array) -> jax.Array:
            spec = self.by_token(buffer.shape[2])

            def own(part: jax.Array) -> jax.Array:
                copied = jnp.repeat(part, self.copies, axis=3)
                if spec != WHOLE:
                    return jax.lax.all_to_all(copied, AXIS, 3, 2, tiled=True)
                size = copied.shape[3] // self.count
                return jax.lax.dynamic_slice_in_dim(copied, jax.lax.axis_index(AXIS) * size, size, 3)

            return spread(own, (spec,), FOURTH)(buffer)

        return jax.tree.map(resharded, buffers)

    def share_out(self, sizes: Sequence[int]) -> list[list[int]]:
        """Distribute items over devices: the largest first, each to the device with the smallest load.

        Returns:
          Indices into `sizes`, by device.
        """
        shares: list[list[int]] = [[] for _ in range(self.count)]
        loads = [0] * self.count
        for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            device = loads.index(min(loads))
            shares[device].append(number)
            loads[device] += sizes[number]
        return shares

    def shares(self, size: int, sizes: Sequence[int]) -> list[int]:
        """Return the buckets, at most two, that each device may use for its part of `size`.

        The first is the smallest bucket that holds an equal part. If a device's part exceeds the second, each device
        computes all of `size`.
        """
        if self.mesh is None:
            return []
        return [bucket for bucket in sizes if bucket < size and size <= self.count * bucket][:2]

    def put(self, arrays: Any, spec: PartitionSpec = WHOLE) -> Any:
        """Put host arrays on the devices, replicated by default."""
        return jax.device_put(arrays, self.sharding(spec))

    def place(self, parameter: Parameter, array: np.ndarray) -> jax.Array:
        """Put a parameter on the devices, sharded by `spec_of`. Returns before the transfer ends."""
        if self.copies > 1 and "qkv_proj" in parameter.path:
            copy = copied_rows if parameter.path[-1] in FP8_LEAVES else copied
            array = copy(array, self.copies, {"q_proj": 0, "k_proj": 1, "v_proj": 1}.get(str(parameter.path[-2]), 2))
        if (times := repeats(parameter.path, parameter.shape, self.count)) > 1:
            array = np.repeat(array, times, axis=-1)
        return jax.device_put(array, self.sharding(spec_of(parameter.path)))

    def abstract(self, array: Any, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
        """Return an abstract array with the sharding of `spec`."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.sharding(spec))


ONE = Devices(None)


def find_devices(count: int) -> list[Any]:
    """Return the first `count` devices.

    Raises:
      ValueError: there are fewer devices, or they are of different kinds.
    """
    found = jax.devices()
    if count > len(found):
        raise ValueError(
            f"tensor_parallel_size must be at most {len(found)}, the number of devices visible to JAX, got {count}"
        )
    if len(kinds := {device.device_kind for device in found[:count]}) > 1:
        raise ValueError(
            f"tensor_parallel_size must select devices of the same kind, got {count} of the kinds "
            f"{', '.join(sorted(kinds))}; select them with CUDA_VISIBLE_DEVICES"
        )
    return found[:count]


_BACK = ("o_proj", "down_proj", "out_proj")  # products whose inputs are divided
_BY_KEY_HEAD = ("in_proj_qk", "in_proj_vz", "in_proj_ba")


def spec_of(path: Path) -> PartitionSpec:
    """Return the placement of a parameter on several devices."""
    *_, module, leaf = map(str, path)
    if path[0] == "visual":
        return WHOLE
    if is_apart(path):
        module = str(path[-3])  # its layers are divided as the product is
    if module == "experts":
        return FIRST  # by expert
    if leaf in FP8_LEAVES and module in ("gate_up_proj", *_BACK):
        return SECOND
    if module in ("qkv_proj", *_BY_KEY_HEAD):
        return SECOND if leaf == "kernel" else FIRST
    if leaf in ("taps", "A_log", "dt_bias"):
        return FIRST
    if module == "gate_up_proj":
        return PartitionSpec(None, None, AXIS)
    if leaf == "embedding" or (module in _BACK and leaf == "kernel"):
        return FIRST  # by rows of the vocabulary, or by the rows that belong to a device's heads and columns
    return WHOLE


def repeats(path: Path, shape: tuple[int, ...], count: int) -> int:
    """Return how often each scale of FP8 weights is repeated, so that `count` devices can split its input groups."""
    if path[-1] != FP8_LEAVES[1] or spec_of(path) != SECOND or len(shape) > 2:
        return 1
    return count // math.gcd(shape[-1], count)


def copies_of(text: TextConfig, count: int) -> int:
    """Return the number of copies of each KV head on `count` devices."""
    return max(1, count // text.num_kv_heads)


def widened(config: ModelConfig, count: int) -> ModelConfig:
    """Return the model as `count` devices compute it, with all copies of KV heads."""
    heads = config.text.num_kv_heads * copies_of(config.text, count)
    return dataclasses.replace(config, text=dataclasses.replace(config.text, num_kv_heads=heads))


def part_of(config: ModelConfig, count: int) -> ModelConfig:
    """Return the part of the model that each of `count` devices computes, as a model configuration."""
    computed = widened(config, count)
    text, experts = computed.text, computed.text.experts
    if experts is not None:
        experts = dataclasses.replace(experts, count=experts.count // count, shared_size=experts.shared_size // count)
    linear = text.linear_attention
    if linear is not None:
        linear = dataclasses.replace(
            linear, key_heads=linear.key_heads // count, value_heads=linear.value_heads // count
        )
    text = dataclasses.replace(
        text, num_heads=text.num_heads // count, num_kv_heads=text.num_kv_heads // count,
        intermediate_size=text.intermediate_size // count, vocab_size=text.vocab_size // count, experts=experts,
        linear_attention=linear, layer_kinds=tuple(kind.part(count) for kind in text.layer_kinds),
    )  # fmt: skip
    return dataclasses.replace(computed, text=text)


def copied(array: np.ndarray, copies: int, shared: int = 2) -> np.ndarray:
    """Return stored q|k|v [..., K, G + 2, D] with copies of each KV head: [..., K * copies, G / copies + 2, D].

    Each copy has an equal part of the head's queries.

    Args:
      shared: number of last entries that all copies have: 2 for q|k|v, 0 for q alone, 1 for k or v alone.
    """
    *lead, heads, rows, width = array.shape
    own = rows - shared
    q = array[..., :own, :].reshape(*lead, heads, copies, own // copies, width)
    kv = np.broadcast_to(array[..., None, own:, :], (*lead, heads, copies, shared, width))
    return np.concatenate([q, kv], axis=-2).reshape(*lead, heads * copies, -1, width)


def copied_rows(array: np.ndarray, copies: int, shared: int = 2) -> np.ndarray:
    """Return an FP8 matrix or its scales [K, G + 2, D, ...] with copies of each KV head, as `copied` does."""
    heads, rows, *rest = array.shape
    made = copied(array.reshape(heads, rows, -1), copies, shared)
    return made.reshape(*made.shape[:2], *rest)


def check_sizes(text: TextConfig, count: int, name: str = "tensor_parallel_size") -> None:
    """Check that a model can be spread over `count` devices.

    Args:
      name: name of the argument in the error.

    Raises:
      ValueError: it cannot. The message lists the valid numbers of devices.
    """
    if wrong := list(_uneven(text, count)):
        raise ValueError(
            f"{name} must be one of {', '.join(map(str, fitting(text)))} for this model, got {count}: "
            f"{' and '.join(wrong)} cannot be divided evenly"
        )


def fitting(text: TextConfig) -> list[int]:
    """Return the numbers of devices over which a model can be spread."""
    return [count for count in range(1, MAX_DEVICES + 1) if not list(_uneven(text, count))]


def _uneven(text: TextConfig, count: int) -> Iterator[str]:
    shared = {"query heads": text.num_heads, "rows of the vocabulary": text.vocab_size}
    kinds = {text.experts_of(layer) for layer in range(text.num_layers)}
    if None in kinds:
        shared["columns of the MLP"] = text.intermediate_size
    if text.experts is not None:
        shared["experts"] = text.experts.count
        shared["columns of the shared expert"] = text.experts.shared_size
    if states := {array.shape[0] for kind in text.layer_kinds for array in kind.states}:
        shared["heads of states"] = math.gcd(*states)
    yield from (f"{size} {name}" for name, size in shared.items() if size % count)
    if text.num_kv_heads % count and count % text.num_kv_heads:
        yield f"{text.num_kv_heads} KV heads"

"""Several devices as one: how weights, the KV pool and records are placed on them.

The compiler partitions programs by the placement of their arguments (GSPMD), and kernels partition themselves
(`pallas_kernels.split`). Each device has its own KV heads with their queries, columns of gate and up with the rows of
down, experts, and a part of the vocabulary. Hidden states, the vision tower and inputs from the host are replicated. If
there are fewer KV heads than devices, each head is replicated, with a part of its queries. `check_exchange` finds out
whether devices reach each other before anything waits for it.
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
from vlcache_jax.models.params import IN_8_BITS, Parameter, Path
from vlcache_jax.pallas_kernels import split
from vlcache_jax.pallas_kernels.split import AXIS, FIRST, FOURTH, SECOND, THIRD, WHOLE, spread

LIMIT = 120.0  # seconds, with making NCCL's channels


def check_exchange(devices: Devices, values: int = 2**18, limit: float = LIMIT) -> float:
    """Adds something up over all devices, as each layer does.

    Args:
      values: float32 numbers that each device has.
      limit: seconds that it may take.

    Returns:
      Seconds that it takes, once all is set up: the least of five.

    Raises:
      RuntimeError: it fails, gives something wrong, or does not end.
    """
    found: list[float | BaseException] = []

    def measure() -> None:
        try:
            found.append(_measure(devices, values))
        except Exception as error:  # told by the thread that waits
            found.append(error)

    thread = threading.Thread(target=measure, name="vlcache-exchange", daemon=True)
    thread.start()
    thread.join(limit)
    if found and isinstance(found[0], float):
        return found[0]
    what = f"did not end within {limit:g} s" if not found else f"failed: {found[0]}"
    raise RuntimeError(
        f"{devices.count} devices like {devices.all[0]} must reach each other, but adding up over them {what}. "
        "NCCL_DEBUG=INFO says what NCCL does; NCCL_P2P_DISABLE=1 goes round the links between them, NCCL_SHM_DISABLE=1 "
        "round shared memory (in a container: --shm-size=1g); with tensor_parallel_size=1 one device is used"
    )


def _measure(devices: Devices, values: int) -> float:
    count = devices.count
    with split.over(devices.mesh):
        add = jax.jit(split.spread(lambda own: jax.lax.psum(own[0], AXIS), (FIRST,), WHOLE))
        own = devices.put(np.arange(count, dtype=np.float32)[:, None] + np.zeros((1, values), np.float32), FIRST)
        made = add(own)
    wrong = jnp.abs(made - count * (count - 1) / 2).max()
    if float(wrong) != 0:
        raise ValueError(f"a sum is wrong by {float(wrong)}")
    least = math.inf
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(add(own))
        least = min(least, time.perf_counter() - start)
    return least


MOST = 8  # devices of a machine: beyond these come replicas


@dataclasses.dataclass(frozen=True)
class Devices:
    """Those of an engine, of one kind.

    Attributes:
      mesh: of them; None: there is one.
      copies: of each KV head.
    """

    mesh: Mesh | None
    copies: int = 1

    @property
    def all(self) -> list[Any]:
        """Each of them."""
        return jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    @classmethod
    def of(cls, devices: list[Any], config: ModelConfig) -> Devices:
        """Devices on which a model's heads are spread.

        Raises:
          ValueError: see `check_sizes`.
        """
        check_sizes(config.text, len(devices))
        return cls.over(devices, copies_of(config.text, len(devices))) if len(devices) > 1 else cls(None)

    @classmethod
    def over(cls, devices: list[Any], copies: int = 1) -> Devices:
        """Several of one kind."""
        return cls(Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,)), copies)

    @property
    def count(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def sharding(self, spec: PartitionSpec = WHOLE) -> NamedSharding | None:
        """How an array lies; None: on the one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """The same of a tree of them."""
        return jax.tree.map(self.sharding, specs, is_leaf=lambda one: isinstance(one, PartitionSpec))

    def placed(self, tree: Any) -> Any:
        """Abstract arrays of which those that lie nowhere yet are whole on each device."""
        return jax.tree.map(lambda one: one if one.sharding else self.abstract(one), tree) if self.mesh else tree

    def by_token(self, tokens: int) -> PartitionSpec:
        """How records [G, 2, tokens, K, ...] come from the host: each bus carries its share, where there is one."""
        return WHOLE if tokens % self.count else THIRD

    def by_head(self, planes: Any) -> Any:
        """While tracing: records as they come from the host, where each device has its heads of all tokens."""
        if self.mesh is None:
            return planes

        def turned(plane: jax.Array) -> jax.Array:
            lies = self.by_token(plane.shape[2])

            def own(part: jax.Array) -> jax.Array:
                copied = jnp.repeat(part, self.copies, axis=3)
                if lies != WHOLE:
                    return jax.lax.all_to_all(copied, AXIS, 3, 2, tiled=True)
                size = copied.shape[3] // self.count
                return jax.lax.dynamic_slice_in_dim(copied, jax.lax.axis_index(AXIS) * size, size, 3)

            return spread(own, (lies,), FOURTH)(plane)

        return jax.tree.map(turned, planes)

    def share_out(self, sizes: Sequence[int]) -> list[list[int]]:
        """Which of several things each device takes: the largest first, each to whoever has least."""
        shares: list[list[int]] = [[] for _ in range(self.count)]
        loads = [0] * self.count
        for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            least = loads.index(min(loads))
            shares[least].append(number)
            loads[least] += sizes[number]
        return shares

    def shares(self, size: int, rungs: Sequence[int]) -> list[int]:
        """The rungs that each device may take where all take `size` together: a fair share, or half more of it. Where
        one would have more, all do the whole."""
        if self.mesh is None:
            return []
        return [rung for rung in rungs if rung < size and size <= self.count * rung][:2]

    def put(self, arrays: Any, spec: PartitionSpec = WHOLE) -> Any:
        """Arrays of the host on the devices: by default the same on each."""
        return jax.device_put(arrays, self.sharding(spec))

    def place(self, parameter: Parameter, array: np.ndarray) -> jax.Array:
        """A parameter as each device needs its part of it. Returns before it is there."""
        if self.copies > 1 and "qkv_proj" in parameter.path:
            array = copied_rows(array, self.copies) if parameter.path[-1] in IN_8_BITS else copied(array, self.copies)
        if (times := repeats(parameter.path, parameter.shape, self.count)) > 1:
            array = np.repeat(array, times, axis=-1)
        return jax.device_put(array, self.sharding(spec_of(parameter.path)))

    def abstract(self, array: Any, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
        """An abstract array that lies so."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.sharding(spec))


ONE = Devices(None)


def find_devices(count: int) -> list[Any]:
    """The first `count` devices.

    Raises:
      ValueError: there are fewer, or they are of several kinds.
    """
    found = jax.devices()
    if count > len(found):
        raise ValueError(f"tensor_parallel_size must be at most {len(found)}, the devices that jax sees, got {count}")
    if len(kinds := {device.device_kind for device in found[:count]}) > 1:
        raise ValueError(f"tensor_parallel_size must be for devices of one kind, got {count} of {sorted(kinds)}")
    return found[:count]


def spec_of(path: Path) -> PartitionSpec:
    """How a parameter lies on several devices."""
    *_, module, leaf = map(str, path)
    if path[0] == "visual":
        return WHOLE
    if module == "experts":
        return FIRST  # by number
    if leaf in IN_8_BITS and module in ("gate_up_proj", "o_proj", "down_proj"):
        return SECOND
    if module == "qkv_proj":
        return SECOND if leaf == "kernel" else FIRST
    if module == "gate_up_proj":
        return PartitionSpec(None, None, AXIS)
    if leaf == "embedding" or (module in ("o_proj", "down_proj") and leaf == "kernel"):
        return FIRST  # by rows: of the vocabulary, or those that meet a device's heads and columns
    return WHOLE


def repeats(path: Path, shape: tuple[int, ...], count: int) -> int:
    """How often each factor of weights in 8 bits stands, so that so many devices can share out groups of inputs, of
    which each device may have a part."""
    if path[-1] != IN_8_BITS[1] or spec_of(path) != SECOND or len(shape) > 2:
        return 1
    return count // math.gcd(shape[-1], count)


def copies_of(text: TextConfig, count: int) -> int:
    """How many of each KV head so many devices have."""
    return max(1, count // text.num_kv_heads)


def widened(config: ModelConfig, count: int) -> ModelConfig:
    """The model as so many devices compute it: with all copies of KV heads."""
    heads = config.text.num_kv_heads * copies_of(config.text, count)
    return dataclasses.replace(config, text=dataclasses.replace(config.text, num_kv_heads=heads))


def part_of(config: ModelConfig, count: int) -> ModelConfig:
    """What each of so many devices computes, as a model."""
    computed = widened(config, count)
    text, experts = computed.text, computed.text.experts
    if experts is not None:
        experts = dataclasses.replace(experts, count=experts.count // count)
    text = dataclasses.replace(
        text, num_heads=text.num_heads // count, num_kv_heads=text.num_kv_heads // count,
        intermediate_size=text.intermediate_size // count, vocab_size=text.vocab_size // count, experts=experts,
    )  # fmt: skip
    return dataclasses.replace(computed, text=text)


def copied(array: np.ndarray, copies: int) -> np.ndarray:
    """The stored q|k|v [..., K, G + 2, D] with copies of each KV head, of which each has its share of the queries:
    [..., K * copies, G / copies + 2, D]."""
    *lead, heads, rows, width = array.shape
    q = array[..., :-2, :].reshape(*lead, heads, copies, (rows - 2) // copies, width)
    kv = np.broadcast_to(array[..., None, -2:, :], (*lead, heads, copies, 2, width))
    return np.concatenate([q, kv], axis=-2).reshape(*lead, heads * copies, -1, width)


def copied_rows(array: np.ndarray, copies: int) -> np.ndarray:
    """The same of a matrix in 8 bits, or its factors, [K, G + 2, D, ...]."""
    heads, rows, *rest = array.shape
    made = copied(array.reshape(heads, rows, -1), copies)
    return made.reshape(*made.shape[:2], *rest)


def check_sizes(text: TextConfig, count: int, name: str = "tensor_parallel_size") -> None:
    """Sees that a model can be spread over so many devices; `name`: of the argument.

    Raises:
      ValueError: it cannot; the message names the numbers of devices that can.
    """
    if wrong := list(_uneven(text, count)):
        raise ValueError(
            f"{name} must be one of {', '.join(map(str, fitting(text)))} for this model, got {count}: "
            f"{' and '.join(wrong)} cannot be spread evenly"
        )


def fitting(text: TextConfig) -> list[int]:
    """Numbers of devices over which a model can be spread."""
    return [count for count in range(1, MOST + 1) if not list(_uneven(text, count))]


def _uneven(text: TextConfig, count: int) -> Iterator[str]:
    shared = {"query heads": text.num_heads, "rows of the vocabulary": text.vocab_size}
    kinds = {text.experts_of(layer) for layer in range(text.num_layers)}
    if None in kinds:
        shared["columns of the MLP"] = text.intermediate_size
    if text.experts is not None:
        shared["experts"] = text.experts.count
    yield from (f"{size} {name}" for name, size in shared.items() if size % count)
    if text.num_kv_heads % count and count % text.num_kv_heads:
        yield f"{text.num_kv_heads} KV heads"

"""Lower bound (roofline) of a run: operations and bytes of its operators, and seconds at the rates of a device.

An operator takes the longer of operations / matrix rate and bytes / bandwidth; operators run one after the other. They
count as follows:

- A linear moves its weights and its rows in and out. An MLP is one operator, and so are the experts that rows pass;
  other experts count nothing.
- Attention moves the KV of the slots that its rows see, once, and queries and results.
- Linear attention moves queries, keys, values and results of its rows, and its state once.
- Linking moves the KV of the tokens that are not computed, in and out. Under `shift`, which is separate from linking,
  they go in and out once more in every layer except the first.
- Linking in a layer with linear attention moves the map S -> A S + B of each image in, and the state in and out, and
  multiplies A by the state. An image is a run of tokens that no layer computes.
- The rest counts nothing: norms, rotations, embeddings of tokens and of patches, sampling, launches.

    python -m vlcache_jax.benchmarks.floor

This command prints the reference cases: images of 1024 tokens, 20 480 in all, between 20 and 6 text tokens. For models
with linear attention these include the transfer of the cache entries from host memory.
`measure_rates` measures the rates of this device: matrix products, copies, and transfers from host memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.programs.base import LINK_GROUPS, LINKED
from vlcache_jax.inputs.processor import Grid
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.params import parameters
from vlcache_jax.models.registry import FAMILIES, published_config
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.reuse.edges import Edges
from vlcache_jax.reuse.policies import Ends, Plan, StaticRatio
from vlcache_jax.study import report

PARTS = ("encoder", "linear", "attention", "head", "link", "move")
# Reference cases: tokens of an image, images, text tokens before and after, and the levels (in 1/500) of the falling
# schedule, each in a sixth of the layers. Its mean is 0.025 if six divides the layers.
IMAGE, IMAGES, BEFORE, AFTER = 1024, 20, 20, 6
FALLING = (40, 20, 10, 5, 0, 0)
COPIED = 2**28  # bytes that are copied to measure the bandwidth; more than caches hold
# Models whose lower bounds, programs and hits are counted.
MODELS: dict[str, ModelConfig] = {
    name: published_config(name) for name in ("Qwen3-VL-8B", "Qwen3-VL-32B", "Qwen2.5-VL-7B")
}
# Models with linear attention whose lower bounds are counted.
HYBRIDS: dict[str, ModelConfig] = {name: published_config(name) for name in ("Qwen3.5-9B", "Qwen3.5-35B-A3B")}


@dataclasses.dataclass(frozen=True)
class DeviceRates:
    """Rates of a device; the defaults were measured on an H200.

    Attributes:
      matrix: Operations per second of matrix products in bfloat16.
      memory: Bytes per second, read or written.
      host: Bytes per second from host memory.
    """

    matrix: float = 790e12
    memory: float = 4.3e12
    host: float = 50e9


H200 = DeviceRates()


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator of a run: its part, multiply-adds times two, and bytes in device memory."""

    part: str
    operations: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Floor:
    """Lower bound of a run.

    Attributes:
      parts: Seconds of encoder, linears, attention, output head, linking, moving, and loading from the host.
      operations: Operations of all parts.
    """

    parts: dict[str, float]
    operations: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def floor(
    config: ModelConfig,
    plan: Plan,
    rates: DeviceRates = H200,
    *,
    encoded: Sequence[Grid] = (),
    loaded: int = 0,
    itemsize: int = 2,
    kept: int | None = None,
    mapped: int | None = None,
) -> Floor:
    """Return the lower bound of one prompt.

    Args:
      plan: The computed tokens; in every layer the KV of the other tokens is linked.
      encoded: Grids, in patches, of the images that pass the encoder.
      loaded: Bytes of cache entries that come from host memory.
      itemsize: Bytes of a value.
      kept: Bytes of a token's KV in one layer of a cache entry; None: uncoded values.
      mapped: Bytes of an image's map in one layer with linear attention of a cache entry; None: uncoded values.
    """
    operators = [*encoder(config, encoded, itemsize), *prefill(config, plan, itemsize, kept, mapped)]
    parts = dict.fromkeys(PARTS, 0.0)
    for operator in operators:
        parts[operator.part] += max(operator.operations / rates.matrix, operator.bytes / rates.memory)
    return Floor(parts | {"load": loaded / rates.host}, sum(operator.operations for operator in operators))


def pairs(plan: Plan, text: TextConfig) -> tuple[int, ...]:
    """Return the pairs of a query and a key that it sees, for each layer.

    Rows that end in a layer have no query there. Layers with linear attention have no pairs.
    """
    return tuple(
        int(_seen(plan, layer).sum(dtype=np.int64)) if text.kind_of(layer).keeps_kv else 0
        for layer in range(text.num_layers)
    )


def _seen(plan: Plan, layer: int) -> npt.NDArray[np.int64]:
    """Return how many slots each row that continues after a layer sees, up to its own: [rows], ascending."""
    return np.sort(plan.slots[plan.depth > layer + 1]).astype(np.int64) + 1


def prefill(
    config: ModelConfig, plan: Plan, itemsize: int = 2, kept: int | None = None, mapped: int | None = None
) -> Iterator[Operator]:
    """Yield the operators of the decoder on one prompt; see `floor`.

    A layer projects K and V of its rows; everything else it computes for the rows of the next layer only.
    """
    text = config.text
    width, q = text.hidden_size, text.num_heads * text.head_dim
    kv = 2 * text.num_kv_heads * text.head_dim
    linear = functools.partial(_linear, itemsize=itemsize)
    depth = plan.depth
    gated_q = 2 * q if text.output_gate else q
    for layer in range(text.num_layers):
        rows, seen = int((depth > layer).sum()), _seen(plan, layer)
        if not text.kind_of(layer).keeps_kv:
            yield from _linear_attention(text, rows, itemsize)
            yield from _linked_states(text, plan, itemsize, mapped)
            yield from _mlp(text, layer, len(seen), itemsize)
            continue
        yield linear("linear", rows, width, kv, width * kv)
        yield linear("linear", len(seen), width, gated_q, width * gated_q)
        yield _attention("attention", seen, text.num_heads, text.num_kv_heads, text.head_dim, itemsize)
        yield linear("linear", len(seen), q, width, q * width)
        yield from _mlp(text, layer, len(seen), itemsize)
        yield Operator("link", 0, ((itemsize * kv if kept is None else kept) + itemsize * kv) * (len(depth) - rows))
        if plan.shift and layer:
            yield Operator("move", 0, 2 * itemsize * kv * (len(depth) - rows))
    wanted = int((depth > text.num_layers).sum())
    yield linear("head", wanted, width, text.vocab_size, width * text.vocab_size)


def decode(config: ModelConfig, rows: int, contexts: int, itemsize: int = 2) -> Iterator[Operator]:
    """Yield the operators of one decode step. Layers are alike except for their MLPs, so an operator represents all of
    them.

    Args:
      rows: Sequences that get a token.
      contexts: Slots that they see in total, without shared ones.
    """
    text = config.text
    width, q = text.hidden_size, text.num_heads * text.head_dim
    kv = 2 * text.num_kv_heads * text.head_dim
    values = 2 * text.head_dim * (rows * text.num_heads + contexts * text.num_kv_heads)
    layer = [
        _linear("linear", rows, width, kv, width * kv, itemsize=itemsize),
        _linear("linear", rows, width, q, width * q, itemsize=itemsize),
        Operator("attention", 4 * q * contexts, itemsize * values),
        _linear("linear", rows, q, width, q * width, itemsize=itemsize),
    ]
    for one in layer:
        yield Operator(one.part, text.num_layers * one.operations, text.num_layers * one.bytes)
    for i in range(text.num_layers):
        yield from _mlp(text, i, rows, itemsize)
    yield _linear("head", rows, width, text.vocab_size, width * text.vocab_size, itemsize=itemsize)


def encoder(config: ModelConfig, grids: Sequence[Grid], itemsize: int = 2) -> Iterator[Operator]:
    """Yield the operators of the vision tower on images that pass it together."""
    if not grids:
        return
    vision = config.vision
    patches, width, group = sum(math.prod(grid) for grid in grids), vision.hidden_size, vision.merge_size**2
    tables = FAMILIES[config.model_type].encoder_tables(vision, grids, patches)
    full = getattr(vision, "full_blocks", None)  # if present, the other blocks attend in windows
    linear = functools.partial(_linear, "encoder", itemsize=itemsize)
    mlp = _weights(config, "visual", "blocks", 0, "mlp")
    for block in range(vision.depth):
        sight = "" if full is None else "image_" if block in full else "window_"
        seen = tables[f"{sight}end"] - tables[f"{sight}start"]
        yield linear(patches, width, 3 * width, 3 * width * width)
        yield _attention("encoder", seen, vision.num_heads, vision.num_heads, vision.head_dim, itemsize, slots=patches)
        yield linear(patches, width, width, width * width)
        yield linear(patches, width, width, mlp)
    for _ in range(1 + vision.num_deepstack):
        merger = _weights(config, "visual", "merger")
        yield linear(patches // group, width * group, vision.out_hidden_size, merger)


def _linear_attention(text: TextConfig, rows: int, itemsize: int) -> Iterator[Operator]:
    """Yield the operators of a layer with linear attention.

    Each row reads, updates and multiplies the state, and the state is written once in float32.
    """
    sizes = text.linear_attention
    assert sizes is not None
    keys, values = sizes.key_heads * sizes.key_width, sizes.value_heads * sizes.value_width
    state = sizes.key_width * values
    projected = 2 * (keys + values + sizes.value_heads)  # queries, keys, values, gates, decay and step of each head
    yield _linear("linear", rows, text.hidden_size, projected, text.hidden_size * projected, itemsize=itemsize)
    yield Operator("attention", 6 * state * rows, 4 * state + itemsize * 2 * (keys + values) * rows)
    yield _linear("linear", rows, values, text.hidden_size, values * text.hidden_size, itemsize=itemsize)


def _linked_states(text: TextConfig, plan: Plan, itemsize: int, mapped: int | None) -> Iterator[Operator]:
    """Yield the operator that links each image in a layer with linear attention; see `prefill`."""
    sizes = text.linear_attention
    assert sizes is not None
    channels = 2 * sizes.key_heads * sizes.key_width + sizes.value_heads * sizes.value_width
    state = sizes.value_heads * sizes.key_width * sizes.value_width
    if mapped is None:
        factor = sizes.value_heads * sizes.key_width**2
        mapped = itemsize * (state + factor) + 4 * (sizes.taps - 1) * channels  # B, A and inputs of the convolution
    is_linked = np.concatenate([[False], plan.depth == 0])
    for _ in range(int((is_linked[1:] & ~is_linked[:-1]).sum())):
        yield Operator("link", 2 * sizes.key_width * state, mapped + 2 * 4 * state)


def _mlp(text: TextConfig, layer: int, rows: int, itemsize: int) -> Iterator[Operator]:
    """Yield the operators of a layer's MLP, or of its router and the experts that rows pass."""
    width, experts = text.hidden_size, text.experts_of(layer)
    if experts is None:
        yield _linear("linear", rows, width, width, 3 * width * text.intermediate_size, itemsize=itemsize)
        return
    yield _linear("linear", rows, width, experts.count, width * experts.count, itemsize=itemsize)
    if experts.shared_size:
        yield _linear("linear", rows, width, width, 3 * width * experts.shared_size, itemsize=itemsize)
    weights = 3 * width * experts.intermediate_size
    # Expected number of distinct experts if all are equally likely.
    read = experts.count * (1 - (1 - experts.chosen / experts.count) ** rows)
    moved = itemsize * (round(read * weights) + 2 * rows * width)
    yield Operator("linear", 2 * rows * experts.chosen * weights, moved)


def _weights(config: ModelConfig, *path: str | int) -> int:
    """Return the number of weights in the linears below a path of the parameters."""
    return sum(
        math.prod(parameter.shape)
        for parameter in parameters(config)
        if parameter.is_kernel and parameter.path[: len(path)] == path
    )


def _linear(part: str, rows: int, wide_in: int, wide_out: int, weights: int, *, itemsize: int) -> Operator:
    values = weights + rows * (wide_in + wide_out) if rows else 0
    return Operator(part, 2 * rows * weights, itemsize * values)


def _attention(
    part: str, seen: np.ndarray, heads: int, kv_heads: int, width: int, itemsize: int, slots: int | None = None
) -> Operator:
    """Return the operator of attention.

    `seen` holds how many slots each row sees. `slots` is how many slots some row sees, by default the maximum of
    `seen`.
    """
    slots = int(seen.max(initial=0)) if slots is None else slots
    values = 2 * width * (len(seen) * heads + slots * kv_heads)
    return Operator(part, 4 * heads * width * int(seen.sum(dtype=np.int64)), itemsize * values)


def reference(config: ModelConfig, devices: int = 1) -> dict[str, Floor]:
    """Return the reference cases of a model on an H200 with KV in its memory; several devices divide the images to
    encode.

    The model has KV in each layer. For others see `reference_with_states`.
    """
    layers = config.text.num_layers

    def plan(levels: Sequence[int], shift: bool = False) -> Plan:
        fresh = np.array(levels) * IMAGE // 500
        depth = np.full(BEFORE + IMAGES * IMAGE + AFTER, layers, np.int16)
        depth[BEFORE:-AFTER] = np.tile((np.arange(IMAGE)[:, None] < fresh).sum(1), IMAGES)
        depth[-1] = layers + 1
        return Plan(depth, shift=shift)

    side = int(np.sqrt(IMAGE)) * config.vision.merge_size
    whole = plan([500] * layers)
    return {
        "cold": floor(config, whole, encoded=[(1, side, side)] * -(-IMAGES // devices)),
        "encoder cached": floor(config, whole),
        "r = 0.1": floor(config, plan([50] * layers)),
        "falling to 0": floor(config, plan([FALLING[layer * len(FALLING) // layers] for layer in range(layers)])),
        "r = 0": floor(config, plan([0] * layers)),
        "shift, r = 0.03": floor(config, plan([15] * layers, shift=True)),
    }


def reference_with_states(config: ModelConfig) -> dict[str, Floor]:
    """Return the reference cases of a model with linear attention on an H200 whose cache entries are in host memory.

    A policy computes the ends of an image, see `Edges`. Encoder output is transferred for the tokens that are computed.
    """
    layers, sizes, dtype = config.text.num_layers, config.text.linear_attention, np.dtype(jnp.bfloat16)
    assert sizes is not None
    token = config.vision.out_hidden_size * dtype.itemsize  # of encoder output
    side = int(np.sqrt(IMAGE)) * config.vision.merge_size
    depth = np.full(BEFORE + IMAGES * IMAGE + AFTER, layers, np.int16)
    depth[-1] = layers + 1
    cases = {
        "cold": floor(config, Plan(depth), encoded=[(1, side, side)] * IMAGES),
        "encoder cached": floor(config, Plan(depth), loaded=IMAGES * IMAGE * token),
    }
    policies: dict[str, StaticRatio | Ends] = {
        "r = 0": StaticRatio(Fraction(0)),
        **{f"shift-ends, r = {ratio}": Ends(Fraction(ratio), shift=True) for ratio in ("0.1", "0.2")},
    }
    for (name, policy), codec in itertools.product(policies.items(), (None, "int8")):
        edges = Edges(policy, sizes.taps - 1)
        first, last = edges.counts(IMAGE)
        linked = depth.copy()
        linked[BEFORE:-AFTER].reshape(IMAGES, IMAGE)[:, first : IMAGE - last] = 0
        kv = KVShape.of(config, dtype, None if codec is None else CODECS[codec], edges.computed)
        cases[name if codec is None else f"{name}, {codec}"] = floor(
            config,
            Plan(linked, shift=policy.shift),
            loaded=IMAGES * (IMAGE * kv.stored_bytes + kv.map_bytes + (first + last) * token),
            kept=kv.stored_bytes // kv.layers,
            mapped=kv.map_bytes // (layers - kv.layers),
        )
    return cases


def seconds(
    step: Callable[..., Any],
    carry: Any,
    *rest: Any,
    times: int,
    repeats: int,
    choose: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Return the seconds of `carry = step(carry, *rest)`, by default the median; each device call runs it `times`
    times.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry: Any, *rest: Any) -> Any:
        # The barrier makes every iteration look different, so nothing is moved out of the loop.
        return jax.lax.fori_loop(0, times, lambda _, carry: jax.lax.optimization_barrier(step(carry, *rest)), carry)

    carry = jax.block_until_ready(run(carry, *rest))
    measured = []
    for _ in range(repeats):
        start = time.perf_counter()
        carry = jax.block_until_ready(run(carry, *rest))
        measured.append((time.perf_counter() - start) / times)
    return choose(measured)


def measure_rates(dtype: Any, *, size: int | None = None, copied: int = COPIED, repeats: int = 5) -> DeviceRates:
    """Measure the rates of jax's first device, each the best of `repeats`, because a lower bound must not be beaten.

    Args:
      dtype: Data type of the matrices.
      size: Their rows and columns; None is 8192 on a GPU and 2048 on a CPU.
      copied: Bytes that are read, and as many that are written.

    Returns:
      The rates. On a CPU `host` is infinite: cache entries are read in place, and nothing is loaded.
    """
    is_host = jax.devices()[0].platform == "cpu"
    size = size or (2048 if is_host else 8192)
    times = 1 if is_host else 20
    # As in the models: float32 is float32 even if a GPU would round it first.
    product = functools.partial(jnp.matmul, precision="highest" if np.dtype(dtype) == np.float32 else None)
    x, w = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    took = seconds(lambda x, w: product(x, w) * size**-0.5, x, w, times=times, repeats=repeats, choose=min)
    words = jnp.zeros(copied // 4, jnp.float32)
    copying = seconds(lambda words: words + 1, words, times=times, repeats=repeats, choose=min)
    # Engines transfer cache entries in this many independent parts; in one part, one core would copy all of it.
    parts = (1, LINK_GROUPS, LINKED[0] * LINK_GROUPS) * repeats
    host = math.inf if is_host else copied / min(_put_seconds(copied, count) for count in parts)
    return DeviceRates(matrix=2 * size**3 / took, memory=2 * copied / copying, host=host)


def _put_seconds(size: int, parts: int) -> float:
    """Return the seconds until bytes in `parts` parts are on the device; each part is some layers of a cache entry."""
    sources = np.ones((parts, size // parts), np.uint8)
    start = time.perf_counter()
    jax.block_until_ready([jax.device_put([source], may_alias=True) for source in sources])
    return time.perf_counter() - start


def best(measured: Sequence[DeviceRates]) -> DeviceRates:
    """Return the highest of each rate, because a shared device is never faster than possible."""
    names = (field.name for field in dataclasses.fields(DeviceRates))
    return DeviceRates(**{name: max(getattr(rates, name) for rates in measured) for name in names})


def rates_as_json(rates: DeviceRates) -> dict[str, float | str]:
    """Return the rates for the head of a result; an infinite rate becomes a word, because JSON has no such number."""
    known = dataclasses.asdict(rates).items()
    return {name: value if math.isfinite(value) else "read where it lies" for name, value in known}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    rows = [
        {"model": model, "case": name, "ms": 1e3 * found.seconds}
        | {f"{part} ms": 1e3 * seconds for part, seconds in found.parts.items()}
        | {"TFLOP": found.operations / 1e12}
        for model, config in (MODELS | HYBRIDS).items()
        for name, found in (reference_with_states if config.text.has_states else reference)(config).items()
    ]
    head = report.environment() | {"rates": dataclasses.asdict(H200)}
    report.publish("What a prefill costs at least on an H200", rows, head, parser.parse_args().out)


if __name__ == "__main__":
    main()

"""Kernels and programs of the real sizes, compiled for an H200 on a machine without one."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from research.compile_report import compile_prefill, prefill_bounds
from research.compiled import SLOTS, abstract_runner, compile_for, compile_program
from research.thunks import first_layers
from vlcache_jax.benchmarks.floor import MODELS
from vlcache_jax.device.programs.base import MOVED_PAGES
from vlcache_jax.device.programs.compress import Compact, Observe, ReadPages, WritePages
from vlcache_jax.device.programs.encode import Encode
from vlcache_jax.device.programs.layers import BLOCK, Block, Layer
from vlcache_jax.device.programs.memory import KeepLayer, KeepRows, Link, Recall
from vlcache_jax.device.programs.window import CompressedWindow, Window
from vlcache_jax.device.sampler import Choice
from vlcache_jax.models import Rows, abstract_model, bind
from vlcache_jax.models.layers import FEW, SPLIT_K
from vlcache_jax.models.registry import published_config
from vlcache_jax.pallas_kernels import (
    CODECS,
    PAGE,
    attention,
    attention_statistics,
    link,
    norm_residual,
    paged_attention,
    rotate_write,
)
from vlcache_jax.pallas_kernels.rows.api import WIDEST_OF_PARTIALS
from vlcache_jax.pallas_kernels.shapes import (
    ATTENTION,
    LINK,
    ROWS,
    STATISTICS,
    AttentionShape,
    LinkShape,
    RowsShape,
    StatisticsShape,
)

pytestmark = pytest.mark.cuda_gate

CONFIG = MODELS["Qwen3-VL-8B"]
USUAL = ("cold 4096", "decode 64 x 4096")
POOL_BYTES = 2 * SLOTS * CONFIG.text.num_kv_heads * CONFIG.text.head_dim * 2  # of a layer


@pytest.fixture(scope="module")
def runner():
    return abstract_runner(CONFIG)


def shapes(*, paged: bool) -> list[pytest.param]:
    """All of the model that is measured; of others, which differ in their heads alone, the usual ones."""
    return [
        pytest.param(
            shape,
            id=f"{model}: {shape.name}",
            marks=() if model == "Qwen3-VL-8B" or shape.name in USUAL else pytest.mark.thorough,
        )
        for model, of_model in ATTENTION.items()
        for shape in of_model
        if (shape.has_pages if paged else not shape.has_pages or shape.name == "cold 4096")
    ]


@pytest.mark.parametrize("shape", shapes(paged=True))
def test_paged_attention_spills_nothing_and_copies_no_pool(shape: AttentionShape) -> None:
    config = shape.work("mosaic_gpu").config

    def attend(q, k, v, work, end=None):
        return paged_attention(q, k, v, work, end=end, implementation="mosaic_gpu")

    ends = (jax.ShapeDtypeStruct((shape.N,), jnp.int32),) if shape.is_decode else ()  # of a window, from the device
    compiled = compile_program(attend, (*shape.paged_specs(), config.abstract(), *ends))
    assert compiled.spills == 0
    assert compiled.operations <= 4  # the kernel, merging, and what packs the rows
    # Packed queries and results, with the intervals of their rows, and sums of partials in float32.
    packed = 8 * (config.octets + config.tile) * (2 * 2 * shape.H * shape.D + 2 * 4 * config.group)
    partials = 4 * 8 * config.partial_boxes * (shape.D + 2)
    assert compiled.temp < packed + partials + 2**20


@pytest.mark.parametrize("shape", shapes(paged=False))
def test_attention_spills_nothing_and_copies_no_pool(shape: AttentionShape) -> None:
    compiled = compile_program(functools.partial(attention, implementation="mosaic_gpu"), shape.specs())
    assert compiled.spills == 0
    # In vision towers padded operands; intervals of the packed rows.
    operands = 2 * 4 * (shape.N + 8) * shape.H * 96 * (1 if shape.D % 32 else 0)
    assert compiled.temp < operands + 2 * 4 * 2 * shape.N * shape.H // shape.K + 2**20


@pytest.mark.parametrize(
    ("rows", "slots", "heads", "kv_heads", "width", "dtype"),
    [
        (1, 1, 4, 1, 64, "bfloat16"),
        (3, 40, 7, 1, 128, "float16"),
        (9, 130, 6, 2, 72, "bfloat16"),
        (20, 300, 5, 5, 24, "bfloat16"),
        (1500, 900, 9, 1, 128, "bfloat16"),
    ],
)
def test_odd_sizes(rows: int, slots: int, heads: int, kv_heads: int, width: int, dtype: str) -> None:
    q, k = (jax.ShapeDtypeStruct((n, h, width), dtype) for n, h in ((rows, heads), (slots, kv_heads)))
    index = jax.ShapeDtypeStruct((rows,), jnp.int32)
    compiled = compile_program(functools.partial(attention, implementation="mosaic_gpu"), (q, k, k, index, index))
    assert compiled.spills == 0


@pytest.mark.parametrize(
    "shape",
    [
        *STATISTICS["Qwen3-VL-8B"],
        *STATISTICS["Qwen2.5-VL-7B"],
        StatisticsShape(7, 3, 6, 2, 64),
        StatisticsShape(1, 1, 3, 3, 80),
    ],
    ids=lambda shape: f"{shape.N} of {shape.slots}, {shape.H}/{shape.K}x{shape.D}",
)
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_statistics_hold_nothing_of_rows_times_keys(shape: StatisticsShape, implementation: str) -> None:
    compiled = compile_program(functools.partial(attention_statistics, implementation=implementation), shape.specs())
    packed = 2 * (shape.N + 64) * shape.H * (shape.D + 31)  # queries, packed; no more that grows with the pages
    if implementation == "xla":  # the scores of a tile of rows and a few pages
        assert compiled.temp < packed + 2**24
        return
    assert compiled.spills == 0
    assert compiled.operations <= 7
    assert compiled.temp < packed + 2**21


@pytest.mark.parametrize("shape", [LinkShape(5, 41, 2, 64), LinkShape(64, 41, 3, 128)])
def test_linking_odd_sizes(shape: LinkShape) -> None:
    compiled = compile_program(functools.partial(link, implementation="mosaic_gpu"), shape.specs(), (0, 1))
    assert compiled.spills == 0
    assert compiled.alias == 2 * shape.S * shape.K * shape.D * 2


@pytest.mark.parametrize(
    "shape", [pytest.param(s, id=f"{model}: {s.T}") for model, shapes in LINK.items() for s in shapes]
)
def test_linking_is_one_operation_in_place(shape: LinkShape) -> None:
    compiled = compile_program(functools.partial(link, implementation="mosaic_gpu"), shape.specs(), (0, 1))
    assert compiled.spills == 0
    assert compiled.alias == 2 * shape.S * shape.K * shape.D * 2
    assert compiled.temp == 0
    assert compiled.operations == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("constant", ["bias", "weight"])
def test_linking_what_is_coded(codec: str, constant: str) -> None:
    """Beside the kernel one operation, which collects the scales."""
    shape = LinkShape(4096, SLOTS, 8, 128, layers=3, codec=codec)
    write = functools.partial(link, layer=1, codec=codec, implementation="mosaic_gpu")
    values = jax.ShapeDtypeStruct((8, 128) if constant == "bias" else (128,), jnp.bfloat16)
    compiled = compile_program(
        lambda *args: write(*args[:-1], **{constant: args[-1]}), (*shape.specs(), values), (0, 1)
    )
    assert compiled.spills == 0
    assert compiled.alias == POOL_BYTES
    assert compiled.temp == 2 * shape.T * CODECS[codec].buffers(8, 128)[1]
    assert compiled.operations == 2


@pytest.mark.parametrize("shape", [LinkShape(24, 41, 2, 64, codec="int8"), LinkShape(20, 41, 3, 128, codec="int4")])
def test_linking_what_is_coded_of_odd_sizes(shape: LinkShape) -> None:
    write = functools.partial(link, codec=shape.codec, implementation="mosaic_gpu")
    compiled = compile_program(write, shape.specs(), (0, 1))
    assert compiled.spills == 0
    assert compiled.alias == 2 * shape.S * shape.K * shape.D * 2


def test_linking_copies_nothing_for_padding(monkeypatch, tmp_path) -> None:
    """Each copy into the pool stands behind a branch on its slot: what a copy out of range does, PTX does not say."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shape = LinkShape(64, 41, 4, 128)
    compile_program(functools.partial(link, implementation="mosaic_gpu"), shape.specs(), (0, 1))
    [file] = tmp_path.glob("*.ptx")
    ptx, copy = file.read_text(), "global.shared::cta"
    guarded = rf"setp\.gt\.u32\s+(%p\d+), %r\d+, {shape.S - 1};[^%]*@\1 bra\s+(\$L\w+);.*?^\2:"
    assert ptx.count(copy) == 2 * 8  # K and V of eight tokens
    assert copy not in re.sub(guarded, "", ptx, flags=re.DOTALL | re.MULTILINE)


ROWS_SHAPES = [
    *(pytest.param(s, id=f"{model}: {s.N}") for model, shapes in ROWS.items() for s in shapes),
    pytest.param(RowsShape(3, 128, 5, 1, 64, has_norms=True, S=41), id="odd"),
]


@pytest.mark.parametrize(
    ("shape", "partials"),
    [
        *(pytest.param(*param.values, 0, id=param.id) for param in ROWS_SHAPES),
        (ROWS_SHAPES[0].values[0], SPLIT_K),
        pytest.param(RowsShape(FEW, WIDEST_OF_PARTIALS, 64, 8, 128, has_norms=True), SPLIT_K, id="the widest"),
    ],
)
def test_a_norm_with_residual_is_one_operation(shape: RowsShape, partials: int) -> None:
    norm = functools.partial(norm_residual, eps=1e-6, implementation="mosaic_gpu")
    compiled = compile_program(norm, shape.norm_specs(partials=partials))
    assert compiled.spills == 0
    assert compiled.temp == 0
    assert compiled.operations == 1


@pytest.mark.parametrize("shape", ROWS_SHAPES)
@pytest.mark.parametrize("return_kv", [False, True])
def test_rotation_and_writing_are_one_operation_in_place(shape: RowsShape, return_kv: bool) -> None:
    """Beside the one that puts cosines and sines side by side."""
    (*given, k, v), options = shape.rotate_specs()

    def write(k, v, given, options):
        return rotate_write(*given, k, v, **options, return_kv=return_kv, implementation="mosaic_gpu")

    compiled = compile_program(write, (k, v, given, options), (0, 1))
    assert compiled.spills == 0
    assert compiled.alias == 2 * shape.S * shape.K * shape.D * 2
    assert compiled.temp <= 2 * 2 * shape.N * shape.D + 1024
    assert compiled.operations <= 2


@pytest.mark.parametrize(
    ("size", "keep", "return_kv", "implementation"),
    [
        *((*sizes, False, "mosaic_gpu") for sizes in ((4096, 4096), (4096, 64), (512, 512), (64, 64), (1, 1))),
        *((4096, 64, True, kernels) for kernels in ("mosaic_gpu", "xla")),
        *(
            pytest.param(*sizes, True, "mosaic_gpu", marks=pytest.mark.thorough)
            for sizes in ((4096, 4096), (512, 512), (64, 64), (1, 1))
        ),
    ],
)
def test_a_layer_step_updates_the_pool_in_place(size: int, keep: int, return_kv: bool, implementation: str) -> None:
    text = CONFIG.text
    graph, state = nnx.split(abstract_model(CONFIG, jnp.bfloat16).language_model.layers[0])
    x = jax.ShapeDtypeStruct((size, text.hidden_size), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((SLOTS, text.num_kv_heads, text.head_dim), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((size,), jnp.int32)
    rows = Rows(index, jax.ShapeDtypeStruct((3, size), jnp.int32), index, index, index)

    def step(params, x, memory, rows, deepstack):
        return bind(graph, params)(
            x, memory, rows, deepstack, keep=keep, return_kv=return_kv, implementation=implementation
        )

    compiled = compile_program(step, (nnx.to_pure_dict(state), x, [pool, pool], rows, x), (2,))
    assert compiled.spills == (0 if implementation == "mosaic_gpu" else None)
    assert compiled.alias == POOL_BYTES
    # A few arrays of the rows, in float32, and nothing that grows with the pool.
    row_bytes = 4 * (4 * text.hidden_size + 3 * text.intermediate_size + 4 * text.num_heads * text.head_dim)
    assert compiled.temp < size * row_bytes + 64 * 2**20
    assert compiled.operations < 40


@pytest.mark.parametrize("size", [pytest.param(4096, marks=pytest.mark.thorough), 64])
def test_a_layer_step_with_experts(size: int) -> None:
    """Of Qwen3-VL-30B-A3B: of 1.2 GB of experts a few matrices are at hand, and rows stand once for each of theirs."""
    config = published_config("Qwen3-VL-30B-A3B")
    text, experts = config.text, config.text.experts
    assert experts is not None
    compiled = compile_for(abstract_runner(config), Layer(size, size, False))
    pool = 2 * SLOTS * text.num_kv_heads * text.head_dim * 2
    assert compiled.spills == 0
    assert compiled.alias == pool + 2 * size * text.hidden_size
    matrices = 3 * 2 * text.hidden_size * experts.intermediate_size
    row = experts.chosen * (4 * text.hidden_size + 3 * experts.intermediate_size)
    assert compiled.temp < 2 * size * row + 4 * matrices + 16 * 2**20
    assert compiled.looped == 0
    assert compiled.operations < 40


def test_linear_attention_updates_its_states_in_place() -> None:
    """Of Qwen3.5-9B, by XLA: a loop over blocks of tokens, whose length the device knows, and a choice in it."""
    runner, size = abstract_runner(published_config("Qwen3.5-9B"), implementation="xla"), 64
    text = runner.config.text
    compiled = compile_for(runner, Layer(size, size, False))
    states = runner.shapes.num_states * text.kind_of(0).sequence_bytes(jnp.bfloat16)
    assert compiled.alias == states + 2 * size * text.hidden_size
    assert compiled.temp < 32 * 2**20
    assert compiled.operations <= 30
    assert compiled.looped <= 16
    assert compiled.predicates == 2


@pytest.mark.thorough_for("Qwen2.5-VL-3B")
@pytest.mark.parametrize("name", ["Qwen2.5-VL-3B", "Qwen3-VL-8B"])
def test_one_row_passes_matrix_products(name: str) -> None:
    """XLA would take it for a vector, and write what it makes of small matrices value by value."""
    runner = abstract_runner(published_config(name))
    compiled = compile_for(runner, Layer(1, 1, False))
    matrices = {leaf.size for leaf in jax.tree.leaves(runner.shapes.text["layers"][0]) if leaf.size > 100_000}
    assert compiled.products == len(matrices) == 4
    assert not matrices & {math.prod(shape) for shape in compiled.written - {runner.shapes.pool.shape}}


@pytest.mark.parametrize(("size", "operations"), [pytest.param(1, 13, marks=pytest.mark.thorough), (64, 13)])
def test_a_window_updates_the_pool_in_place(runner, size, operations) -> None:
    compiled = compile_for(runner, Window(size, "greedy", runner.buckets.window))
    decode_slots = sum(x.size * x.dtype.itemsize for x in runner.shapes.decode_slots)
    assert compiled.spills == 0
    assert compiled.alias == CONFIG.text.num_layers * POOL_BYTES + decode_slots
    # Logits in float32, and nothing that grows with the pool.
    assert compiled.temp < 16 * 2**20 + size * 4 * CONFIG.text.vocab_size * 4
    assert compiled.operations + compiled.looped < operations * CONFIG.text.num_layers
    assert compiled.predicates == 0


@pytest.mark.parametrize(("choice", "steps"), [("drawn", 8), pytest.param("any", 1, marks=pytest.mark.thorough)])
def test_a_window_that_draws_asks_the_host_nothing(choice: Choice, steps: int) -> None:
    """It compiles in less than a minute where nothing else runs, without a sort of the vocabulary."""
    runner, size = first_layers("Qwen3-VL-8B", 1), 64
    compiled = compile_for(runner, Window(size, choice, steps))
    decode_slots = sum(x.size * x.dtype.itemsize for x in runner.shapes.decode_slots)
    assert compiled.spills == 0
    assert compiled.alias == POOL_BYTES + decode_slots
    assert compiled.temp < 16 * 2**20 + size * 8 * CONFIG.text.vocab_size * 4
    assert compiled.predicates == 0


@pytest.mark.thorough
def test_compressing_a_prompt_and_decoding_behind_it() -> None:
    """The compressed pool, which is that of all layers, is updated in place, and no layer of the other is copied."""
    text, slots, pages = CONFIG.text, 2**17, 64
    runner = abstract_runner(CONFIG, compressed_slots=slots)
    pool = 2 * slots * text.num_kv_heads * text.head_dim * 2
    sums = 4 * text.num_layers * (text.num_kv_heads * PAGE * pages + text.num_heads)
    decode_slots = sum(x.size * x.dtype.itemsize for x in runner.shapes.decode_slots)

    window = compile_for(runner, CompressedWindow(16, pages, "greedy", runner.buckets.window))
    assert window.spills == 0
    assert window.alias == pool + decode_slots
    assert window.temp < 16 * 2**20 + 16 * 8 * text.vocab_size * 4
    assert window.operations + window.looped < 30 * text.num_layers
    assert window.predicates == 0

    observe = compile_for(runner, Observe(pages))
    assert observe.spills == 0
    assert observe.alias == sums
    assert observe.temp < 2 * sums + 64 * 2**20

    compact = compile_for(runner, Compact(pages))
    moved = 2 * PAGE * pages * text.num_kv_heads * text.head_dim * 2
    assert compact.alias == pool
    assert compact.temp < 2 * moved + 64 * 2**20

    # To host memory and back.
    most = MOVED_PAGES[-1]
    moved = 2 * PAGE * most * text.num_kv_heads * text.head_dim * 2
    read, written = compile_for(runner, ReadPages(most)), compile_for(runner, WritePages(most))
    assert (read.alias, written.alias) == (0, pool)
    assert max(read.temp, written.temp) <= 2 * moved


def test_the_encoder(runner) -> None:
    compiled = compile_for(runner, Encode(4096))
    assert compiled.spills == 0
    assert compiled.temp < 256 * 2**20
    assert compiled.operations < 20 * CONFIG.vision.depth


@pytest.mark.parametrize(("size", "count"), [pytest.param(4096, 1, marks=pytest.mark.thorough), (1024, 16)])
def test_linking_layers_together(runner, size: int, count: int) -> None:
    layers = runner.shapes.link_groups[0].count
    compiled = compile_for(runner, Link(size, count, layers))
    assert compiled.spills == 0
    assert compiled.alias == layers * POOL_BYTES
    assert compiled.temp < 8 * 2**20 * max(1, count * size // 4096)  # the angles, and no layer of what is stored
    assert compiled.operations < count * layers + 8 + 2 * count  # one for a layer of an image, and those of the angles


@pytest.mark.thorough_for("int8", "int4")
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_linking_from_the_device_and_into_it(codec: str | None) -> None:
    """Nothing of the device tier is copied, and a link that also writes into it does so in place."""
    tokens, size = 65536, 4096
    runner = abstract_runner(CONFIG, codec=CODECS.get(codec or ""), kept_tokens=tokens)
    layers = runner.shapes.link_groups[0].count
    kept = runner.shapes.kept, runner.shapes.kept_rows
    of_layer = sum(buffer.size * buffer.dtype.itemsize for buffer in kept[0][0])
    angles = 8 * 2**20

    recalled = compile_for(runner, Recall(size, layers))
    assert recalled.spills == 0
    assert recalled.alias == layers * POOL_BYTES
    assert recalled.temp < angles + layers * size * of_layer // tokens // 4  # scales, no codes
    assert recalled.operations < layers * (1 if codec is None else 2) + 10

    linked = compile_for(runner, Link(size, 1, layers))
    assert linked.spills == 0
    assert linked.alias == layers * (POOL_BYTES + of_layer)

    keeping = compile_for(runner, KeepLayer(size))
    assert keeping.alias == of_layer
    assert keeping.temp <= 2 * size * of_layer // tokens
    rows = compile_for(runner, KeepRows())
    assert rows.alias == kept[1].size * 2
    assert rows.temp < 2**20


@pytest.mark.thorough
def test_layers_that_are_one_program(runner) -> None:
    one, compiled = compile_for(runner, Layer(512, 512, False)), compile_for(runner, Block(512))
    assert compiled.spills == 0
    assert compiled.alias == BLOCK * POOL_BYTES + 512 * CONFIG.text.hidden_size * 2
    assert compiled.temp < 2 * one.temp  # what a layer holds, it gives back to the next
    assert compiled.operations <= BLOCK * one.operations


@pytest.mark.thorough
def test_moving_linked_keys_and_values(runner) -> None:
    text = CONFIG.text
    plain, moving = (compile_for(runner, Layer(512, 512, False, moves)) for moves in (False, True))
    assert moving.spills == 0
    assert moving.alias == plain.alias  # the pool is moved where it lies
    chunk = 1024 * text.num_kv_heads * text.head_dim * 4  # of tokens, in float32
    assert moving.temp < plain.temp + 64 * 2**20 + 4 * chunk
    assert moving.operations + moving.looped < plain.operations + 40


@pytest.mark.thorough
def test_a_whole_prefill(runner) -> None:
    compiled = compile_prefill(runner, prefill_bounds(CONFIG.text.num_layers, shrinking=True))
    assert compiled.spills == 0
    assert compiled.alias == CONFIG.text.num_layers * POOL_BYTES
    assert compiled.temp < 512 * 2**20
    assert compiled.operations < 25 * CONFIG.text.num_layers

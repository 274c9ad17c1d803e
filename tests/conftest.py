"""Tiny checkpoints of uneven shapes, the reference models that read the same files, and textured images."""

from __future__ import annotations

import base64
import csv
import dataclasses
import functools
import gc
import io
import itertools
import os
import pathlib
import signal
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

# Before jax is imported: tests run on the CPU unless the caller says otherwise, and never reach for the network.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads of XLA's CPU client: interpreted kernels wait in them for each other.
os.environ.setdefault("NPROC", "16")
# Each worker has a core, so LLVM in several threads only costs: a sixth of the seconds that compiling takes.
if "xla_cpu_parallel_codegen_split_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = (os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import pytest

if TYPE_CHECKING:
    import numpy as np

# Where xdist runs tests in processes of their own, the first one also reads this file, but runs no test. So jax and the
# package, which take seconds, are imported only by what tests use.

PROGRAMS_KEPT = 200  # by a process of tests for other engines: each takes about 14 MB, and comes from disk in 0.2 s

# The matrix precision is not pinned here: float32 models pin their own, and a global setting would hide a place that
# forgets to. Each configuration differs from the others in depth, head ratio, head width, windows or DeepStack, and
# names, files and layout, so that no two numbers of a model can be taken for each other.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"model_type": "qwen2_vl", "seed": 7},
    "qwen2_vl-flat-tied": {
        "model_type": "qwen2_vl",
        "seed": 8,
        "layout": "flat",
        "tie_word_embeddings": True,
        "text": {
            "hidden_size": 60,
            "intermediate_size": 84,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
        },
        "vision": {"depth": 3, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 3},
    },
    "qwen2_vl-library-names": {
        "model_type": "qwen2_vl",
        "seed": 9,
        "names": "library",
        "shards": 2,
        "text": {
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "vocab_size": 283,
        },
        "vision": {"depth": 5, "embed_dim": 40, "num_heads": 1, "mlp_ratio": 2, "patch_size": 12},
    },
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "seed": 1},
    "qwen2_5_vl-flat-tied": {
        "model_type": "qwen2_5_vl",
        "seed": 2,
        "layout": "flat",
        "tie_word_embeddings": True,
        "text": {
            "hidden_size": 72,
            "intermediate_size": 100,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "rms_norm_eps": 1e-5,
        },
        "vision": {
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 60,
            "num_heads": 3,
            "window_size": 84,
            "fullatt_block_indexes": [2],
        },
    },
    "qwen2_5_vl-library-names": {
        "model_type": "qwen2_5_vl",
        "seed": 3,
        "names": "library",
        "shards": 2,
        "text": {
            "hidden_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "vocab_size": 301,
        },
        "vision": {
            "depth": 5,
            "hidden_size": 40,
            "intermediate_size": 56,
            "window_size": 112,
            "fullatt_block_indexes": [0, 3],
        },
    },
    "qwen3_5": {"model_type": "qwen3_5", "seed": 14},
    "qwen3_vl": {"model_type": "qwen3_vl", "seed": 4},
    "qwen3_vl-tied": {
        "model_type": "qwen3_vl",
        "seed": 5,
        "tie_word_embeddings": True,
        "text": {
            "hidden_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
        },
        "vision": {
            "depth": 5,
            "hidden_size": 48,
            "intermediate_size": 100,
            "num_heads": 3,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 2, 4],
        },
    },
    "qwen3_vl-sharded": {
        "model_type": "qwen3_vl",
        "seed": 6,
        "shards": 3,
        "text": {
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 5,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "vocab_size": 290,
        },
        "vision": {
            "depth": 3,
            "hidden_size": 36,
            "intermediate_size": 64,
            "num_heads": 1,
            "num_position_embeddings": 144,
            "deepstack_visual_indexes": [2],
        },
    },
    "qwen3_vl_moe-every": {"model_type": "qwen3_vl_moe", "seed": 10},
    "qwen3_vl_moe-tied": {
        "model_type": "qwen3_vl_moe",
        "seed": 11,
        "tie_word_embeddings": True,
        "text": {
            "hidden_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
        "vision": {"depth": 3, "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3_vl_moe-sharded": {
        "model_type": "qwen3_vl_moe",
        "seed": 12,
        "names": "library",
        "shards": 3,
        "text": {
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 5,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "vocab_size": 290,
            "num_experts": 13,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
        },
        "vision": {"depth": 3, "num_position_embeddings": 144, "deepstack_visual_indexes": [2]},
    },
    # The last layer has linear attention, as many heads of values as of keys, and values of another width.
    "qwen3_5-tied": {
        "model_type": "qwen3_5",
        "seed": 14,
        "tie_word_embeddings": True,
        "text": {
            "hidden_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "head_dim": 48,
            "rms_norm_eps": 1e-5,
            "layer_types": None,
            "full_attention_interval": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
        "vision": {"depth": 3, "hidden_size": 48, "num_heads": 3, "num_position_embeddings": 49},
    },
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", "seed": 15},
    "qwen3_5_moe-sharded": {
        "model_type": "qwen3_5_moe",
        "seed": 16,
        "names": "library",
        "shards": 3,
        "text": {
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 290,
            "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 12,
            "num_experts": 13,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 28,
        },
        "vision": {"depth": 3, "num_position_embeddings": 144},
    },
}


@pytest.hookimpl(tryfirst=True)  # before marks choose what runs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item, kind in itertools.product(items, ("slow", "thorough")):
        names = tuple(name for mark in item.iter_markers(f"{kind}_for") for name in mark.args)
        given = getattr(item, "callspec", None)
        if names and given is not None:
            values = (*map(str, given.params.values()), *given.id.split("-"))  # parameters may be named by their ids
            if any(one.startswith(names) for one in values):
                item.add_marker(kind)


def pytest_collection_finish() -> None:
    """Keep what has been imported and collected out of garbage collections, which tests also ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def same_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What somebody measured on this machine, and what others leave of its memory, decides nothing in tests."""
    from vlcache_jax.device import memory_plan
    from vlcache_jax.preparation import planner

    home = tmp_path_factory.mktemp("cache-home")
    with pytest.MonkeyPatch.context() as context:
        context.setattr(planner, "cache_home", lambda: home)
        context.setattr(memory_plan, "free_bytes", lambda device: 2**32)
        yield


@pytest.fixture
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that set no bucket sizes have those of other tests, so that few programs are compiled for them."""
    from tests.helper import BUCKETS
    from vlcache_jax.device import memory_plan

    monkeypatch.setattr(memory_plan, "default_buckets", lambda *_: BUCKETS)


@pytest.fixture(scope="session", autouse=True)
def programs_made_once() -> Iterator[None]:
    """Engines of the same model and sizes share their compiled programs: compiling is most of what tests take.

    What an engine says that it has compiled stays its own, and so does what it launches.
    """
    import jax

    from vlcache_jax.device.programs import compile_cache, compress, memory, states, table, window
    from vlcache_jax.device.programs.base import Program, Shapes, abstract
    from vlcache_jax.reuse import shift

    known: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()
    of_compressed = (
        compress.EmptyCompressed, compress.Compact, window.CompressedWindow, compress.ReadPages, compress.WritePages,
    )  # fmt: skip
    of_records = (
        memory.Link, memory.Recall, memory.Code, memory.EmptyTier, memory.KeepLayer, memory.KeepRows, memory.Restage,
        states.LoadMaps, states.StoreMaps,
    )  # fmt: skip
    init, lower, check = Shapes.__init__, table.Programs._lower, table.check_maps

    def noted(self: Shapes, config: Any, params: Any, normalization: Any, **sizes: Any) -> None:
        init(self, config, params, normalization, **sizes)
        leaves, tree = jax.tree.flatten(abstract((params, normalization)))
        for name in ("compressed_slots", "codec", "kept_tokens"):  # most programs do not know of them
            sizes.pop(name, None)
        sizes["maps"] = bool(sizes.get("maps"))  # programs do not know what their tokens are
        buckets = sizes["buckets"]  # a program has its own number of sequences
        sizes["buckets"] = dataclasses.replace(buckets, sequences=buckets.sequences[-1:])
        self.description = (config, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), tuple(sizes.items()))  # type: ignore[attr-defined]

    class Once:
        """In the place of what is lowered, and need not be."""

        def __init__(self, own: table.Programs, program: Program[Any]):
            self.own, self.program = own, program
            shapes: Any = own.shapes
            patched = (Shapes, type(program), shift)  # in some tests
            rules = tuple(id(one) for where in patched for one in vars(where).values())
            compressed = shapes.compressed_slots if isinstance(program, of_compressed) else None
            records = (shapes.kv.codec, shapes.kept_tokens) if isinstance(program, of_records) else None
            settings = tuple(map(repr, jax.config.values.items()))
            self.place = shapes.description, compressed, records, settings, rules, program
            self.found = known.pop(self.place, None)
            if self.found is not None:
                known[self.place] = self.found  # the last to leave
            self.lowered = None if self.found else lower(own, program)

        def compile(self, options: dict[str, bool] | None = None) -> Any:
            if self.lowered is not None:
                self.found = known[self.place] = self.lowered.compile(options), self.own.kernels.get(self.program)
                if len(known) > PROGRAMS_KEPT:
                    known.popitem(last=False)
            assert self.found is not None
            compiled, kernels = self.found
            if kernels is not None:
                self.own.kernels[self.program] = kernels
            return compiled

        def as_text(self) -> str:
            return (self.lowered or lower(self.own, self.program)).as_text()

    def check_maps(program: Program[Any]) -> None:
        try:
            check(program)
        except MemoryError:
            known.clear()
            check(program)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(Shapes, "__init__", noted)
        context.setattr(table.Programs, "_lower", lambda own, program: Once(own, program))
        context.setattr(table, "check_maps", check_maps)
        context.setattr(
            compile_cache, "_are_kept", lambda devices: False
        )  # jax keeps them, whatever tests have replaced
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_compiled_ahead() -> Iterator[None]:
    """Most of what requests would call for when they come again no test needs; whoever does, clears `_stopped`."""
    from vlcache_jax.engine.compile_ahead import Ahead

    init = Ahead.__init__

    def stopped(self: Ahead, programs: Any) -> None:
        init(self, programs)
        self._stopped = True

    with pytest.MonkeyPatch.context() as context:
        context.setattr(Ahead, "__init__", stopped)
        yield


@pytest.fixture(scope="session", autouse=True)
def spread_over_devices() -> Iterator[None]:
    """Spread engines over four devices if VLCACHE_TENSOR_PARALLEL=4 and the test sets no number. Skip tests whose model
    cannot be spread.
    """
    if (count := int(os.environ.get("VLCACHE_TENSOR_PARALLEL", "1"))) == 1:
        yield
        return
    from vlcache_jax import service
    from vlcache_jax.device.mesh import Devices, find_devices

    class Spread(Devices):
        @classmethod
        def of(cls, devices: list[Any], config: Any) -> Devices:
            try:
                return Devices.of(devices, config)
            except ValueError as error:
                pytest.skip(str(error))

    with pytest.MonkeyPatch.context() as context:
        context.setattr(service, "find_devices", lambda given: find_devices(count if given == 1 else given))
        context.setattr(service, "Devices", Spread)
        yield


@pytest.fixture(scope="session", autouse=True)
def portable_attention() -> Iterator[None]:
    """Emulate the portable attention kernel if VLCACHE_EMULATED=1 and the test sets no implementation."""
    if os.environ.get("VLCACHE_EMULATED") != "1":
        yield
        return
    from tests.emulation import emulated

    with emulated(None):
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """The directory of a configuration by its name; made once."""
    from vlcache_jax.testing import make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: make_checkpoint(root / name, **CONFIGURATIONS[name]))


# The decoder of Qwen2-VL is that of Qwen2.5-VL, and the first configuration of both compiles the same programs for it.
# Of mixtures of experts, the tied one has layers of both kinds.
IN_FULL = (
    "qwen2_vl-flat-tied", "qwen2_vl-library-names", "qwen3_vl_moe-every", "qwen3_vl_moe-sharded",
    "qwen3_5", "qwen3_5_moe-sharded",
)  # fmt: skip


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in IN_FULL)) for name in CONFIGURATIONS],
)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """Each configuration in turn."""
    return checkpoints(request.param)


@pytest.fixture(scope="session", params=["qwen2_5_vl-flat-tied", "qwen3_vl"])
def family_checkpoint(request: pytest.FixtureRequest, checkpoints: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """One configuration of two families, for what depends on neither shapes nor towers; see `helper.each_family`."""
    return checkpoints(request.param)


@pytest.fixture(scope="session")
def load_oracle() -> Callable[..., Any]:
    """(directory, dtype="float32") -> the library's model of a checkpoint; loaded once."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # models are so small that a second thread would only wait, which takes time, too

    @functools.cache
    def load(directory: pathlib.Path, dtype: str = "float32") -> Any:
        # Eager attention rounds where the published models were evaluated; the dtype argument keeps the rotary
        # frequencies in float32, which a later cast would not. Grouped products of experts know no float64.
        experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
        return AutoModelForImageTextToText.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="eager", **experts
        ).eval()

    return load


@pytest.fixture(scope="session")
def textured_image() -> Callable[..., np.ndarray]:
    """(height, width, seed=0) -> uint8 [height, width, 3]: gradients and noise, other ones in each channel."""
    import numpy as np

    def make(height: int, width: int, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng((seed, height, width))
        y, x = np.mgrid[:height, :width] / max(height, width)
        slope = rng.uniform(-120, 120, (2, 3))
        ramp = 128 + y[..., None] * slope[0] + x[..., None] * slope[1]
        return np.clip(ramp + rng.normal(0, 40, (height, width, 3)), 0, 255).astype(np.uint8)

    return make


@pytest.fixture(scope="session")
def engines() -> Iterator[weakref.WeakSet[Any]]:
    """Every `Service` that was opened."""
    from vlcache_jax.service import Service

    opened: weakref.WeakSet[Any] = weakref.WeakSet()
    init = Service.__init__

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        opened.add(self)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(Service, "__init__", noted)
        yield opened


@pytest.fixture(autouse=True)
def no_page_leaks(engines: weakref.WeakSet[Any]) -> Iterator[None]:
    """Every page is free or resident in the end, whatever a test did.

    The thread that prepares a cancelled request ends it once it is prepared, so this may take a moment.
    """
    from tests.helper import eventually

    yield
    for service in list(engines):
        pages = service.cache.pages
        eventually(lambda pages=pages: pages.stats().in_use == 0)
        assert pages.stats().in_use == 0


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, here and in processes started here, also where tests run behind a shell's `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def questions_tsv(tmp_path):
    """A file of three questions, each about a picture of its own."""
    import numpy as np
    from PIL import Image

    def image(seed):
        file = io.BytesIO()
        noise = np.random.default_rng(seed).integers(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    path = tmp_path / "toy.tsv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["index", "question", "answer", "image"])
        writer.writerows([[str(i), f"What is {i}?", "a cat", image(i)] for i in range(3)])
    return path


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """A tiny hybrid whose outputs can be compared to the last bit on every machine.

    XLA's CPU computes products of fewer than 16 columns, here two for each value head, in ways that depend on the
    number of rows, on some machines. Released models have at least 32.
    """
    from vlcache_jax.testing import make_checkpoint

    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    return make_checkpoint(tmp_path_factory.mktemp("hybrid") / "qwen3_5", "qwen3_5", seed=14, text=heads)

"""Compiled programs on disk: a second start makes nothing again, and no fault of a file changes an answer."""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helper import SIZES
from vlcache_jax import LLM
from vlcache_jax.common import checks
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.programs import base, compile_cache, layers
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.device.runner import Runner
from vlcache_jax.pallas_kernels import CODECS

SCRIPT = pathlib.Path(__file__).with_name("opened_engine.py")


def run(cases, model, home, seed):
    """What came of the cases, one after the other in a new process."""
    made = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), *cases],
        env=os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return dict(zip(cases, json.loads(made.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def starts(checkpoints, tmp_path_factory):
    """The first start, and by name what came of all that came after."""
    home, model = tmp_path_factory.mktemp("home"), checkpoints("qwen3_vl-tied")
    first = run(["opened"], model, home, "1")["opened"]
    return first, run(["opened", "replaced", "damaged", "misled", "again"], model, home, "2")


@pytest.mark.slow
def test_a_second_start_traces_and_compiles_nothing(starts):
    first, later = starts
    count = first["programs"]
    assert first["lowered"] == first["compiled"] == count > 5
    assert (first["stats"], first["shown"]) == ([count, count, True, False], ["compiling"])
    read = {"lowered": 0, "compiled": 0, "stats": [count, 0, False, True], "shown": ["loading"]}
    assert later["opened"] == first | read
    assert later["again"] == later["opened"]


@pytest.mark.slow
def test_what_is_read_for_its_text_is_loaded_too(starts):
    """It is traced again, and not compiled."""
    count = starts[0]["programs"]
    assert starts[1]["replaced"]["stats"] == [count, 0, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["damaged", "misled", "replaced"])
def test_an_answer_is_the_same_whatever_happens_to_files(starts, case):
    first, later = starts
    assert later[case]["answer"] == first["answer"]
    assert later[case]["kernels"] == first["kernels"]


@pytest.mark.slow
def test_what_is_damaged_is_compiled_again(starts):
    _, later = starts
    damaged, misled = later["damaged"], later["misled"]
    assert (damaged["lowered"], damaged["compiled"], damaged["messages"]) == (3, 3, 3)
    # What is compiled is found by what is lowered; the log tells of each file.
    assert (misled["lowered"], misled["compiled"], misled["messages"]) == (misled["programs"], 0, misled["programs"])


@pytest.mark.slow
def test_where_a_function_is_replaced_programs_are_found_by_what_they_compute(starts):
    _, later = starts
    assert later["replaced"]["lowered"] == later["replaced"]["programs"]
    assert later["replaced"]["compiled"] == 0


@pytest.mark.thorough
def test_where_there_is_no_room_all_is_made_anew(checkpoints, tmp_path):
    came = run(["opened", "full", "unwritable", "by_jax"], checkpoints("qwen3_vl-tied"), tmp_path, "4")
    for case, one in came.items():
        assert one["answer"] == came["opened"]["answer"], case
    for case in ("full", "unwritable"):
        assert came[case]["compiled"] == came[case]["programs"]
    assert 0 < came["full"]["left"] <= came["full"]["programs"]
    assert came["by_jax"]["left"] == 0  # whoever has jax keep programs finds them there alone


@pytest.fixture
def kept(tmp_path):
    """Two programs' files."""
    paths = [tmp_path / (letter * 64) for letter in "ab"]
    for number, path in enumerate(paths):
        compile_cache._write(path, jax.jit(lambda x, more=number: x + 1 + more).lower(np.float32(1)).compile())
    return paths


def test_a_program_under_another_name_is_none(kept, caplog):
    one, other = kept
    assert compile_cache._read(one) is not None
    one.write_bytes(other.read_bytes())
    assert compile_cache._read(one) is None
    assert (one.exists(), compile_cache._read(other) is None) == (False, False)
    assert f"the cached program {one} is damaged; it is deleted and will be recompiled" in caplog.text


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"index": "b", "program": "%b", "choices": []}', b"\xff", b"[" * 10**5,
     b'{"index": "a", "program": "../%b", "choices": []}', b'{"index": "a", "program": "%b", "choices": 3}'],
)  # fmt: skip
def test_an_index_that_is_none_is_deleted(tmp_path, content):
    place = tmp_path / "a.json"
    place.write_bytes(b'{"index": "a", "program": "%b", "choices": [["k", "c", "xla", "w"]]}'.replace(b"%b", b"0" * 64))
    assert compile_cache._read_index(place) == ("0" * 64, (compile_cache.Choice("k", "c", "xla", "w"),))
    place.write_bytes(content.replace(b"%b", b"0" * 64))
    assert compile_cache._read_index(place) is None
    assert not place.exists()
    assert compile_cache._read_index(place) is None


def test_the_oldest_files_go_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_cache.folder().mkdir(parents=True)
    for age, name in enumerate("cabd"):
        (compile_cache.folder() / name).write_bytes(bytes(10))
        os.utime(compile_cache.folder() / name, (1000 + age, 1000 + age))
    for most, left in ((40, "abcd"), (39, "bd"), (20, "bd"), (19, "d")):
        monkeypatch.setattr(compile_cache, "MAX_BYTES", most)
        compile_cache._make_room()
        assert "".join(sorted(path.name for path in compile_cache.folder().iterdir())) == left


@pytest.fixture(scope="module")
def engine(checkpoints):
    with LLM(checkpoints("qwen3_vl"), compressed_kv_bytes=2**22, use_tqdm=False, **SIZES) as llm:
        yield llm


@dataclasses.dataclass(frozen=True)
class Foreign:
    size: int = 1


def test_everything_that_makes_a_value_is_told():
    layer = Layer(64, 32, True)
    assert compile_cache.identity(layer) == (
        "vlcache_jax.device.programs.layers.Layer(size=64, keep=32, has_deepstack=True, shifts=False, like=[0])"
    )
    kinds = [KVShape(2, 2, 8, np.dtype(dtype), codec) for dtype in (jnp.float32, jnp.bfloat16) for codec in
              (None, *CODECS.values())]  # fmt: skip
    assert len({compile_cache.identity(kind) for kind in kinds}) == len(kinds)
    assert compile_cache.identity(1) != compile_cache.identity(True) != compile_cache.identity("True")


@pytest.mark.parametrize("value", [Foreign(), (1, Foreign()), object(), {1, 2}, lambda: 1])
def test_what_others_make_is_not_told(value):
    with pytest.raises(compile_cache.UnidentifiedError):
        compile_cache.identity(value)


def test_all_code_counts():
    known = {path.resolve() for _, path in compile_cache.source_files()}
    loaded = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "vlcache_jax"]
    assert {pathlib.Path(file).resolve() for file in loaded} <= known
    assert any("attention" in path.parts for path in known)


def test_code_that_changes_under_a_process_is_not_told(monkeypatch):
    newest = max(max(path.stat()[-2:]) for _, path in compile_cache.source_files()) + 1
    monkeypatch.setattr(compile_cache, "_PROCESS_START", newest)
    assert compile_cache._sources.__wrapped__()
    monkeypatch.setattr(compile_cache, "_PROCESS_START", newest - 2)
    with pytest.raises(compile_cache.UnidentifiedError, match="must not change after the process has started"):
        compile_cache._sources.__wrapped__()
    monkeypatch.setattr(compile_cache, "_PROCESS_START", newest)
    monkeypatch.setattr(compile_cache, "source_files", list)  # of a package that lies in an archive
    with pytest.raises(compile_cache.UnidentifiedError, match=r"got none for vlcache_jax\."):
        compile_cache._sources.__wrapped__()


def test_a_constant_that_is_replaced_counts(monkeypatch):
    before = compile_cache.code()
    monkeypatch.setattr(layers, "BLOCK", 2)
    assert compile_cache.code() != before
    monkeypatch.undo()
    monkeypatch.setattr(base, "LINKED", (1,))
    assert compile_cache.code() != before
    monkeypatch.undo()
    monkeypatch.setattr(checks, "GROUP", 16)  # of codecs
    assert compile_cache.code() != before


def test_every_package_that_programs_are_traced_from_is_there():
    for name in compile_cache._TRACED:
        assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_TRACED", ()),
        ("_sources", lambda: "others"),
        ("_machine", lambda: "another"),
        ("_sizes", lambda shapes: ""),
        ("_settings", lambda: "others"),
    ],
)
def test_each_part_of_what_a_program_is_made_of_counts(name, value, monkeypatch):
    """Another place for the same program, so that none of another origin is found there."""
    monkeypatch.setattr(compile_cache, "_sizes", lambda shapes: "sizes")
    place = compile_cache.ProgramFiles(None, {})._index(Layer(64, 32, True))
    assert place == compile_cache.ProgramFiles(None, {})._index(Layer(64, 32, True))
    assert place != compile_cache.ProgramFiles(None, {})._index(Layer(64, 64, True))
    assert place != compile_cache.ProgramFiles(None, {"a": True})._index(Layer(64, 32, True))
    monkeypatch.setattr(compile_cache, name, value)
    assert place != compile_cache.ProgramFiles(None, {})._index(Layer(64, 32, True))


def _other(leaf, **changes):
    return jax.ShapeDtypeStruct(**{"shape": leaf.shape, "dtype": leaf.dtype} | changes)


def _in_first(change):
    """A tree whose first leaf is another one."""

    def changed(tree):
        [first, *rest], kind = jax.tree.flatten(tree)
        return jax.tree.unflatten(kind, [change(first), *rest])

    return changed


SIZES_OF_AN_ENGINE = {
    "config": [
        lambda one: dataclasses.replace(one, text=dataclasses.replace(one.text, rms_norm_eps=1e-3)),
        lambda one: dataclasses.replace(one, vision=dataclasses.replace(one.vision, merge_size=3)),
    ],
    **{
        name: [lambda one: (one or 0) + 128]
        for name in ("num_slots", "max_pages", "kept_tokens", "compressed_slots", "num_snapshots")
    },
    "buckets": [lambda one: dataclasses.replace(one, window=one.window + 1)],
    "implementation": [lambda one: "another"],
    "kv": [
        lambda one: dataclasses.replace(one, width=one.width + 8),
        lambda one: dataclasses.replace(one, maps="ends-0.1"),
    ],
    **{
        name: [
            _in_first(lambda leaf: _other(leaf, shape=(*leaf.shape, 1))),
            _in_first(lambda leaf: _other(leaf, dtype=jnp.float16)),
            lambda one: [one],
        ]
        for name in ("visual", "normalization", "text", "head")
    },
}


def test_no_size_of_an_engine_is_forgotten():
    """A program that another engine left would not take this one's arrays."""
    weights = {"visual", "text", "head"}  # `params`
    known = SIZES_OF_AN_ENGINE.keys() - weights - {"kv"} | {"params", "codec", "maps"}
    assert known == inspect.signature(Runner).parameters.keys() - {"devices"}  # the files are for one CPU


@pytest.mark.parametrize("name", SIZES_OF_AN_ENGINE)
def test_each_size_of_an_engine_counts(engine, name):
    shapes = engine.service.device.runner.programs.shapes
    before = compile_cache._sizes(shapes)
    for change in SIZES_OF_AN_ENGINE[name]:
        changed = copy.copy(shapes)
        setattr(changed, name, change(getattr(shapes, name)))
        assert compile_cache._sizes(changed) != before


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (compile_cache.sys, "version", "3"),
        (compile_cache.metadata, "version", lambda name: "1" if name == "jax" else "2"),
        (compile_cache.metadata, "version", lambda name: "1" if name == "jaxlib" else "2"),
        (compile_cache.metadata, "version", lambda name: "1" if name == "flax" else "2"),
        (compile_cache.metadata, "version", lambda name: "1" if name == "numpy" else "2"),
        (compile_cache, "_processor", lambda: ["another"]),
        (compile_cache.os, "cpu_count", lambda: 7),
        (compile_cache.os, "sched_getaffinity", lambda _: range(7)),
        (compile_cache.jax, "devices", lambda: [Device("cpu", "another")]),
        (compile_cache.jax, "devices", lambda: [Device("another", "cpu")]),
    ],
)
def test_each_part_of_a_machine_counts(where, name, value, monkeypatch):
    monkeypatch.setattr(compile_cache.metadata, "version", lambda name: "2")
    monkeypatch.setattr(compile_cache.jax, "devices", lambda: [Device("cpu", "cpu")])
    before = compile_cache._machine()
    monkeypatch.setattr(where, name, value)
    assert compile_cache._machine() != before


@pytest.mark.parametrize("name", ["NPROC", "XLA_CPU_SOMETHING"])
def test_variables_that_the_compiler_reads_count(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = compile_cache._machine()
    monkeypatch.setenv(name, "3")
    assert compile_cache._machine() != before


class Device:
    """As jax has one."""

    def __init__(self, kind, version):
        self.device_kind, self.client = kind, types.SimpleNamespace(platform_version=version)


LOWERED = {"text": "text", "args_info": "args", "in_tree": "in", "out_tree": "out", "used": {1, 3}}


@pytest.mark.parametrize("name", LOWERED)
def test_each_part_of_what_is_lowered_counts(name, monkeypatch):
    """The text, what it takes and gives, and which of its arguments it uses."""
    monkeypatch.setattr(compile_cache, "_sizes", lambda shapes: "sizes")
    own = compile_cache.ProgramFiles(None, {})

    def digest(text, args_info, in_tree, out_tree, used):
        lowering = types.SimpleNamespace(compile_args={"kept_var_idx": used})
        parts = {"args_info": args_info, "in_tree": in_tree, "out_tree": out_tree, "_lowering": lowering}
        return own._digest_of(types.SimpleNamespace(as_text=lambda: text, **parts))

    other = {1, 2} if name == "used" else "other"
    assert digest(**LOWERED) == digest(**LOWERED) != digest(**LOWERED | {name: other})


def test_each_part_of_where_it_is_compiled_counts_for_what_is_lowered(monkeypatch):
    monkeypatch.setattr(compile_cache, "_sizes", lambda shapes: "sizes")
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
    digest = compile_cache.ProgramFiles(None, {})._digest_of(lowered)
    assert digest == compile_cache.ProgramFiles(None, {})._digest_of(lowered)
    assert digest != compile_cache.ProgramFiles(None, {"a": True})._digest_of(lowered)
    with jax.default_matmul_precision("bfloat16"):
        assert digest != compile_cache.ProgramFiles(None, {})._digest_of(lowered)
    monkeypatch.setattr(compile_cache, "_machine", lambda: "another")
    assert digest != compile_cache.ProgramFiles(None, {})._digest_of(lowered)


def test_parts_do_not_run_into_each_other():
    """Whatever stands in them: not even those that hold what stands between two."""
    given = [("a", "b"), ("b", "a"), ("ab", ""), ("a", "b", ""), ("a\nb",), ("a\n1 b",), ("ab",)]
    assert len({compile_cache._digest(*parts) for parts in given}) == len(given)


def test_a_file_of_other_bytes_is_no_program(tmp_path, monkeypatch):
    """What is not what its digest says is not unpacked."""
    monkeypatch.setattr(compile_cache.serialize_executable, "serialize", lambda compiled: (compiled, "takes", "gives"))
    monkeypatch.setattr(compile_cache.serialize_executable, "deserialize_and_load", lambda *given, **_: given)
    path = tmp_path / "program"
    compile_cache._write(path, "executable")
    assert compile_cache._read(path) == ("executable", "takes", "gives")
    unpacked, content, loads = [], path.read_bytes(), compile_cache.pickle.loads
    monkeypatch.setattr(compile_cache.pickle, "loads", lambda content: unpacked.append(content) or loads(content))
    other = compile_cache.zlib.compress(
        compile_cache.pickle.dumps(("other", "takes", "gives"))
    )  # which could be unpacked
    damaged = [bytes([content[0] ^ 1]) + content[1:], content[:-1], content[: compile_cache._CHECKSUM] + other]
    for one in damaged:
        path.write_bytes(one)
        assert compile_cache._read(path) is None
        assert not path.exists()
    assert not unpacked


def test_flags_of_the_compiler_count(monkeypatch):
    before = compile_cache._machine()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_onednn=false")
    assert compile_cache._machine() != before
    monkeypatch.setenv("XLA_FLAGS", "/tmp/flags")
    with pytest.raises(compile_cache.UnidentifiedError, match="XLA_FLAGS must list its flags, got a file"):
        compile_cache._machine()


def test_settings_of_a_thread_count():
    before = compile_cache._settings()
    with jax.default_matmul_precision("bfloat16"):
        assert compile_cache._settings() != before


def made_by(factor):
    def function(x, more=1):
        return factor * x + more

    return function


class Own:
    @property
    def value(self):
        return 1

    @staticmethod
    def plain():
        return 1

    @classmethod
    def named(cls):
        return 1


class Other:
    @property
    def value(self):
        return 2

    @staticmethod
    def plain():
        return 2

    @classmethod
    def named(cls):
        return 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: x in {"a", "b"}, lambda x: x in {"a", "c"}),
        (lambda x: [y for y in x if y], lambda x: [y for y in x if not y]),
        (lambda x=1: x, lambda x=2: x),
        (made_by(2), made_by(3)),
        (jax.jit(made_by(2)), jax.jit(made_by(3))),
        (functools.cache(made_by(2)), functools.cache(made_by(3))),
        (functools.partial(made_by(2)), functools.partial(made_by(3))),
        (functools.partial(made_by(2), 1), functools.partial(made_by(2), 2)),
        *((vars(Own)[name], vars(Other)[name]) for name in ("value", "plain", "named")),
        ((1, 2), (1, 3)),
        ({"a": 1}, {"a": 2}),
    ],
)
def test_what_stands_in_a_module_is_told_apart(one, other):
    assert compile_cache._identity_of(one) == compile_cache._identity_of(one) != compile_cache._identity_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((lambda a, b: a + 1, (4, 4)), (lambda a, b: b + 1, (4, 4))),
        ((lambda a, b: a + 1, (4, 5)), (lambda a, b: a + 1, (4, 6))),
        ((lambda a, b: (a, b), (4, 4)), (lambda a, b: [a, b], (4, 4))),
        ((lambda a, b: a * np.arange(4), (4, 4)), (lambda a, b: a * np.arange(4)[::-1], (4, 4))),
    ],
)
def test_what_is_lowered_is_told_apart(one, other, monkeypatch):
    monkeypatch.setattr(compile_cache, "_sizes", lambda shapes: "sizes")
    own = compile_cache.ProgramFiles(None, {})

    def digest(function, sizes):
        function.__name__ = "f"
        return own._digest_of(jax.jit(function).lower(*(jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes)))

    assert digest(*one) == digest(*one) != digest(*other)


def test_what_cannot_be_written_is_compiled_all_the_same(tmp_path, monkeypatch):
    """A program that calls the host, as interpreted kernels do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_sizes", lambda shapes: "sizes")
    monkeypatch.setattr(compile_cache, "is_kept_by_jax", lambda: False)
    own, seen, layer = compile_cache.ProgramFiles(None, {}), [], Layer(64, 32, True)

    def calls(x):
        jax.debug.callback(seen.append, x)
        return x + 1

    compiled, is_read = own.make(layer, jax.jit(calls).lower(jnp.zeros(2)), ())
    np.testing.assert_array_equal(compiled(jnp.ones(2)), np.full(2, 2))
    jax.effects_barrier()
    assert len(seen) == 1
    assert not is_read
    assert own.find(layer) is None


@pytest.mark.parametrize("wrong", ["open to all", "a link", "a file"])
def test_only_a_folder_of_ones_own_is_read(wrong, tmp_path):
    place = tmp_path / "programs"
    if wrong == "open to all":
        place.mkdir()
        place.chmod(0o777)
    elif wrong == "a link":
        place.symlink_to(tmp_path)
    else:
        place.touch()
    with pytest.raises(PermissionError, match="must be a directory that you own and only you can write to"):
        compile_cache.check_owner(place)
    (tmp_path / "own").mkdir(mode=0o700)
    compile_cache.check_owner(tmp_path / "own")


def test_every_program_can_be_told(engine):
    """Those of all named ways to reuse, and of compression; each says another thing of itself."""
    programs, found = engine.service.device.runner.programs, {}
    for reuse in ("off", "exact", "approximate", "full", "shift-0.1", "mpic-4", "cacheblend-0.15", "0.1"):
        for program in programs.family_of(engine.service.policy_of(reuse)):
            found[program] = compile_cache.identity(program)
            assert found[program] == compile_cache.identity(copy.deepcopy(program))
    assert {"window", "compressed_window", "score_rows", "choose"} <= {program.name for program in found}
    assert len(set(found.values())) == len(found)


def test_each_size_of_a_program_counts(engine):
    programs, seen = engine.service.device.runner.programs, set()
    for program in programs.family_of(engine.service.policy_of("shift-0.1")):
        for field in dataclasses.fields(program):
            value = getattr(program, field.name)
            if type(value) in (int, bool):
                changed = dataclasses.replace(
                    program, **{field.name: type(value)(value + 1 if type(value) is int else not value)}
                )
                assert compile_cache.identity(changed) != compile_cache.identity(program)
                seen.add(program.name)
    assert {"layer", "window", "compressed_window", "link"} <= seen

"""Compiled programs on disk: a second start makes nothing anew, and no fault of a file changes an answer."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.programs import files
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.pallas_kernels import CODECS

SCRIPT = pathlib.Path(__file__).with_name("opened_engine.py")


def run(cases, model, home, seed, **environment):
    """What came of the cases, one after the other in a new process."""
    made = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), *cases],
        env=os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()} | environment,
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
    return first, run(["opened", "replaced", "damaged", "again", "full", "unwritable", "by_jax"], model, home, "2")


@pytest.mark.ladder
def test_a_second_start_traces_and_compiles_nothing(starts):
    first, later = starts
    assert first["lowered"] == first["compiled"] == first["programs"] > 5
    assert later["opened"] == first | {"lowered": 0, "compiled": 0}
    assert later["again"] == later["opened"]


@pytest.mark.ladder
@pytest.mark.parametrize("case", ["damaged", "replaced", "full", "unwritable", "by_jax"])
def test_an_answer_is_the_same_whatever_happens_to_files(starts, case):
    first, later = starts
    assert later[case]["answer"] == first["answer"]
    assert later[case]["kernels"] == first["kernels"]


@pytest.mark.ladder
def test_what_is_damaged_is_compiled_again(starts):
    _, later = starts
    assert later["damaged"]["lowered"] == later["damaged"]["compiled"] == later["damaged"]["programs"]


@pytest.mark.ladder
def test_where_a_function_is_replaced_programs_are_found_by_what_they_compute(starts):
    _, later = starts
    assert later["replaced"]["lowered"] == later["replaced"]["programs"]
    assert later["replaced"]["compiled"] == 0


@pytest.mark.ladder
def test_where_there_is_no_room_all_is_made_anew(starts):
    _, later = starts
    for case in ("full", "unwritable"):
        assert later[case]["compiled"] == later[case]["programs"]
    assert later["by_jax"]["left"] == 0  # whoever has jax keep programs finds them there alone


def test_the_oldest_files_go_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files.folder().mkdir(parents=True)
    for age, name in enumerate("cabd"):
        (files.folder() / name).write_bytes(bytes(10))
        os.utime(files.folder() / name, (1000 + age, 1000 + age))
    for most, left in ((40, "abcd"), (39, "bd"), (20, "bd"), (19, "d")):
        monkeypatch.setattr(files, "MOST_BYTES", most)
        files._make_room()
        assert "".join(sorted(path.name for path in files.folder().iterdir())) == left


@dataclasses.dataclass(frozen=True)
class Foreign:
    size: int = 1


def test_everything_that_makes_a_value_is_told():
    layer = Layer(64, 32, True)
    assert files.told(layer) == (
        "vlcache_jax.device.programs.layers.Layer(size=64, keep=32, has_deepstack=True, shifts=False, like=[0])"
    )
    shapes = [KVShape(2, 2, 8, np.dtype(dtype), codec) for dtype in (jnp.float32, jnp.bfloat16) for codec in
              (None, *CODECS.values())]  # fmt: skip
    assert len({files.told(shape) for shape in shapes}) == len(shapes)
    assert files.told(1) != files.told(True) != files.told("True")


@pytest.mark.parametrize("value", [Foreign(), (1, Foreign()), object(), {1, 2}, lambda: 1])
def test_what_others_make_is_not_told(value):
    with pytest.raises(files.UntoldError):
        files.told(value)


def test_all_code_counts():
    known = {path.resolve() for _, path in files.source_files()}
    loaded = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "vlcache_jax"]
    assert {pathlib.Path(file).resolve() for file in loaded} <= known
    assert any("attention" in path.parts for path in known)


@pytest.mark.parametrize(
    ("name", "value"),
    [("_TRACED", ()), ("_sources", lambda: "others"), ("_machine", lambda: "another"), ("_engine", lambda shapes: "")],
)
def test_each_part_of_what_a_program_is_made_of_counts(name, value, monkeypatch):
    """Another place for the same program, so that none of another origin is found there."""
    monkeypatch.setattr(files, "_engine", lambda shapes: "sizes")
    place = files.ProgramFiles(None, {})._index(Layer(64, 32, True))
    assert place == files.ProgramFiles(None, {})._index(Layer(64, 32, True))
    assert place != files.ProgramFiles(None, {})._index(Layer(64, 64, True))
    assert place != files.ProgramFiles(None, {"a": True})._index(Layer(64, 32, True))
    monkeypatch.setattr(files, name, value)
    assert place != files.ProgramFiles(None, {})._index(Layer(64, 32, True))


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "VLCACHE_EMULATED"])
def test_variables_that_decide_what_is_compiled_count(variable, monkeypatch):
    before = files._machine()
    monkeypatch.setenv(variable, "other")
    assert files._machine() != before

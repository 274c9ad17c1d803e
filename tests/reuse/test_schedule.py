"""Schedule files."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest

from vlcache_jax.reuse.schedule import Schedule

GOOD = {
    "format": "vlcache-schedule/1",
    "model": {"model_type": "qwen3_vl", "num_layers": 3, "fingerprint": "ab"},
    "unit": "1/500",
    "levels": [50, 10, 0],
    "rounding": "floor",
    "mean": "0.0400",
    "made_by": {"method": "dp", "scores_sha256": "cd", "predicted_mse": 0.5, "samples": 40},
}


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(GOOD))
    schedule = Schedule.load(path)
    assert (schedule.levels, schedule.model_type, schedule.fingerprint) == ((50, 10, 0), "qwen3_vl", "ab")
    schedule.save(path)
    assert json.loads(path.read_text()) == GOOD
    assert Schedule.load(path) == schedule
    assert Schedule.load(path, allow_other_model=True).allow_other_model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": "vlcache-schedule/2"},
            "format of schedule .* must be 'vlcache-schedule/1', got 'vlcache-schedule/2'",
        ),
        ({"unit": "1/100"}, "unit of"),
        ({"levels": [10, 50, 0]}, "must not increase"),
        ({"levels": [50, 10]}, "levels of .* must be a list of num_layers = 3"),
        ({"levels": [501, 10, 0]}, "integers from 0 to 500"),
        ({"levels": [5.5, 1, 0]}, "integers from 0 to 500"),
        ({"levels": [True, False, False]}, "integers from 0 to 500"),
        ({"levels": "abc"}, "levels of"),
        ({"rounding": "round"}, "rounding must be"),
        ({"mean": "0.5"}, "mean of .* must equal the mean of its levels, '0.0400', got '0.5'"),
        ({"mean": 0.04}, "mean of"),
        ({"extra": 1}, "schedule .* has unknown keys: extra. Known keys: format, "),
        ({"model": {"model_type": "x", "num_layers": 3}}, "model of .* must have the keys fingerprint, got only"),
        ({"model": {"model_type": "x", "num_layers": "3", "fingerprint": "f"}}, "num_layers .* must be of type int"),
        ({"model": []}, "model of .* must be an object"),
        ({"made_by": {"method": "magic"}}, "made_by must have a method"),
        ({"made_by": {"method": "dp", "x": 1}}, "made_by has unknown keys: x"),
    ],
)
def test_bad_files(tmp_path, change, message):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match=message):
        Schedule.load(path)


def test_files_that_are_none(tmp_path):
    (tmp_path / "broken.json").write_text('{"format": ')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.json").write_text("[]")
    for name in ("missing.json", "broken.json", "binary.json", "list.json"):
        with pytest.raises(ValueError, match="schedule"):
            Schedule.load(tmp_path / name)


def test_a_pipe_a_device_or_a_folder_is_not_read(tmp_path):
    pipe, folder = tmp_path / "pipe.json", tmp_path / "folder.json"
    folder.mkdir()
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)
    release = threading.Timer(5, os.close, [end])  # so that whoever reads it fails instead of waiting for ever
    release.start()
    for path in (pipe, folder, "/dev/null"):
        with pytest.raises(
            ValueError,
            match=f"schedule must be .* got '{path}': it must be a regular file",
        ):
            Schedule.load(path)
    release.cancel()
    os.close(end)


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 200_000, "readable JSON file, got .*: maximum recursion depth"),
        (json.dumps(GOOD).replace("[50", "[" + HUGE), "readable JSON file, got .*: Exceeds the limit"),
        (json.dumps(GOOD).replace("[50", "[" + HUGE[:4000]), "integers from 0 to 500"),
        (json.dumps(GOOD).replace('"num_layers": 3', f'"num_layers": {HUGE[:4000]}'), "list of num_layers = 999"),
        (json.dumps(GOOD).replace("[50", "[1e999"), "integers from 0 to 500"),
        (json.dumps(GOOD).ljust(2**20 + 1), "readable JSON file, got .*: it must have at most 1048576 bytes"),
        (json.dumps(GOOD | {"format": HUGE}), "format of schedule .*must be"),
        (json.dumps(GOOD | {"rounding": HUGE}), "rounding must be"),
        (json.dumps(GOOD | {"mean": HUGE}), "mean of schedule .*must equal"),
        (json.dumps(GOOD | {HUGE: 1}), "has unknown keys: 999"),
        (json.dumps({HUGE: 1}), "must have the keys .*, got only 999"),
    ],
    ids=lambda text: text[:25],
)
def test_files_beyond_measure_are_named_in_short_messages(tmp_path, content, message):
    path = tmp_path / "schedule.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        Schedule.load(path)
    assert f"'{path}'" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_largest_file_is_loaded(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(GOOD).ljust(2**20))
    assert Schedule.load(path).levels == (50, 10, 0)


def test_bad_schedules():
    assert Schedule(np.array([5, 3]), "m", "f").levels == (5, 3)
    for levels in (5, (0.5,), (), ("5",), (10**5000,)):
        with pytest.raises(ValueError, match="levels must be integers"):
            Schedule(levels, "m", "f")
    with pytest.raises(ValueError, match="made_by must have a method"):
        Schedule((5,), "m", "f", made_by={"method": "mine"})


def test_the_model_is_checked():
    schedule = Schedule((5, 3), "qwen3_vl", "weights")
    schedule.check_model("qwen3_vl", 2, "weights")
    for model in (("qwen2_5_vl", 2, "weights"), ("qwen3_vl", 2, "others"), ("qwen3_vl", 3, "weights")):
        with pytest.raises(ValueError, match="reuse must be a schedule"):
            schedule.check_model(*model)
    other = Schedule((5, 3), "qwen3_vl", "weights", allow_other_model=True)
    other.check_model("qwen2_5_vl", 2, "others")
    with pytest.raises(ValueError, match=r"3 layers"):
        other.check_model("qwen3_vl", 3, "weights")

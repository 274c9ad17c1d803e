"""Files that commands write."""

from __future__ import annotations

import os

import pytest

from vlcache_jax.common.files import PICTURES, check_all_readable, check_writable, write_whole
from vlcache_jax.study.report import WorkLog


def test_a_file_appears_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.txt"
    check_writable("out", path)
    assert list(path.parent.iterdir()) == []  # asking leaves nothing behind
    write_whole(path, "first")
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(OSError, match="cut off"):
            write_whole(path, b"second")
    assert path.read_text() == "first"
    write_whole(path, b"second")
    assert path.read_text() == "second"
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable("out", pipe)
    write_whole(pipe, "content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert not pipe.is_file()


def test_what_cannot_be_written_is_known_before(tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path, tmp_path / "file" / "below", "/proc/nothing/below"):
        with pytest.raises(ValueError, match=f"out must be a file that can be written, got {path}: "):
            check_writable("out", path)
    with pytest.raises(ValueError, match=r"figure must end in \.png or \.pdf or \.svg, got a\.xyz"):
        check_writable("figure", "a.xyz", PICTURES)
    check_writable("out", None)
    check_writable("out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("content", ["[1,\n 2,\n 3]", '{"format": "vlcache-schedule/1"}', "12", "index\tquestion"])
def test_a_file_of_another_kind_is_no_work_log(tmp_path, content):
    (tmp_path / "other").write_text(content)
    with pytest.raises(ValueError, match=r"work must be a new file or one that an earlier run .*other"):
        WorkLog(tmp_path / "other", "mine")
    assert (tmp_path / "other").read_text() == content


def test_a_work_log_goes_on_behind_a_line_that_was_cut_off(tmp_path):
    log = WorkLog(tmp_path / "work", "mine")
    log.add("a", [1])
    WorkLog(tmp_path / "work", "another's").add("a", [2])
    with open(tmp_path / "work", "a") as file:
        file.write('["mine", "b", [')
    log.add("c", 3)
    again = WorkLog(tmp_path / "work", "mine")
    assert (again.get("a"), again.get("b"), again.get("c")) == ([1], None, 3)


def test_files_to_read_are_there_and_named_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    check_all_readable("data", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match=r"data must name each file once, got .*link twice"):
        check_all_readable("data", [tmp_path / "a", tmp_path / "b", tmp_path / "link"])
    with pytest.raises(ValueError, match=r"data must be a file that can be read, got .*nothing: no such file"):
        check_all_readable("data", [tmp_path / "a", tmp_path / "nothing"])
    with pytest.raises(ValueError, match=r"data must be a file that can be read, got .*: not a regular file"):
        check_all_readable("data", [tmp_path])

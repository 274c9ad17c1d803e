"""Files that one process at a time holds: what waits for one says so, and not for ever."""

import itertools
import os
import warnings

import pytest

from vlcache_jax.cache import folders, items
from vlcache_jax.cache.folders import held
from vlcache_jax.cache.items import Items
from vlcache_jax.cache.tiers import disk
from vlcache_jax.cache.tiers.disk import DiskTier


def test_what_waits_says_for_what_and_ends(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(folders, "_TICK", 0.0)
    path = tmp_path / "lock"
    with held(path) as is_mine:
        assert is_mine
        clock, told = (
            itertools.count(0.0, 2.0).__next__,
            rf"unlocked within 9 s, but process {os.getpid()} on .* holds the",
        )
        with pytest.raises(TimeoutError, match=told), held(path, timeout=9.0, clock=clock):
            pytest.fail("held twice")
        with held(path, waits=False) as is_mine:
            assert not is_mine
    [line] = caplog.messages
    assert line.startswith(f"waiting for the lock {path}, held by process {os.getpid()} on ")
    with held(path, timeout=0.0) as is_mine:
        assert is_mine


def test_who_says_nothing_is_another_process(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    with held(path):
        path.write_bytes(b"\xff\x00")
        with pytest.raises(TimeoutError, match="but another process holds the lock"), held(path, timeout=0.0):
            pytest.fail("held twice")


def test_a_free_file_names_no_holder(tmp_path):
    path = tmp_path / "lock"
    with held(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert path.read_bytes() == b""
    with pytest.raises(KeyError), held(path):
        raise KeyError
    assert path.read_bytes() == b""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_what_is_no_file_is_refused_and_closed(tmp_path, monkeypatch):
    path, opened, closed = tmp_path / "lock", [], []
    os.mkfifo(path)
    real_open, real_close = os.open, os.close

    def note_open(name, *given):
        descriptor = real_open(name, *given)
        if name == path:
            opened.append(descriptor)
        return descriptor

    def note_close(descriptor):
        closed.append(descriptor)
        real_close(descriptor)

    monkeypatch.setattr(folders.os, "open", note_open)
    monkeypatch.setattr(folders.os, "close", note_close)
    with pytest.raises(OSError, match=rf"^{path} must be a regular file; delete the existing one$"), held(path):
        pytest.fail("a pipe was held")
    assert len(opened) == 1
    assert set(opened) <= set(closed)


def test_opening_waits_for_a_while(tmp_path, monkeypatch):
    DiskTier(tmp_path, 10**6).close()
    monkeypatch.setattr(disk, "LOCK_TIMEOUT", 0.0)
    told = r"^disk must be a usable directory.* or end it"
    with held(tmp_path / disk.FOLDER / "lock"), pytest.raises(ValueError, match=told):
        DiskTier(tmp_path, 10**6)
    DiskTier(tmp_path, 10**6).close()
    library = Items(tmp_path)
    assert library.count(None, "a") == 0
    library.close()
    monkeypatch.setattr(items, "LOCK_TIMEOUT", 0.0)
    told = r"the index of libraries .* or end it"
    with held(tmp_path / items.FOLDER / "opening"), pytest.raises(ValueError, match=told):
        library.count(None, "a")
    assert library.count(None, "a") == 0
    library.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_closes_nothing_of_its_parent(tmp_path):
    tier, library = DiskTier(tmp_path, 10**6), Items(tmp_path)
    library.begin(None, "a" * 64, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads of this process do not go on in the child
        child = os.fork()
    if not child:
        try:
            tier.close()
            library.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [path.stem for path in tier.directory.glob("*.writer")] == [tier._me]
    assert [one.entry for one in library.loose(None)] == ["a" * 64]
    with pytest.MonkeyPatch.context() as patches:  # who opens the directory next sees that it lives
        patches.setattr(disk, "LOCK_TIMEOUT", 0.0)
        DiskTier(tmp_path, 10**6).close()
    assert [path.stem for path in tier.directory.glob("*.writer")] == [tier._me]
    tier.close()
    library.close()
    assert not list(tier.directory.glob("*.writer"))

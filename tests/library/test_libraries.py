"""Libraries: pictures under names, with and without their bytes, over restarts, kills, changes and faults."""

import contextlib
import io
import json
import math
import pathlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from tests.helper import SIZES, some_cases
from vlcache_jax import LLM, AsyncLLM, CacheConfig, RequestError, SamplingParams
from vlcache_jax.cache.items import FOLDER
from vlcache_jax.cache.keys import TenantSalt, owner_key
from vlcache_jax.library import Library

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
SYSTEM = "You sell shoes."


def opened(directory, disk=None, **changes):
    cache = CacheConfig(disk=disk, **changes)
    return LLM(directory, cache=cache, use_tqdm=False, **SIZES)


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def pictures(textured_image):
    return [textured_image(64 + 32 * (i % 3), 96, i) for i in range(8)]


@pytest.fixture(scope="module")
def shared(directory):
    with opened(directory) as engine:
        yield engine


@pytest.fixture
def llm(shared):
    shared.reset_mm_cache()
    yield shared
    for salt in (None, "a", "b"):
        library = Library(shared, "products", salt)
        for item in library.items():
            library.remove(item.id)


def named(name, library="products"):
    return {"type": "image", "library": library, "id": name}


def shown(picture):
    return {"type": "image", "image": picture}


def ask(llm, *parts, reuse=None, salt=None, system=SYSTEM, on_error="raise"):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": [*parts, "What is it?"]}]
    [output] = llm.chat([messages], GREEDY, reuse=reuse, cache_salt=salt, use_tqdm=False, on_error=on_error)
    return output


def scored_tokens(output):
    """Tokens and their log-probabilities, which tell pictures apart that a model of random weights answers alike."""
    return np.array([(one.token, one.chosen) for one in output.outputs[0].logprobs])


def same(one, other):
    return np.allclose(one, other, rtol=0, atol=1e-4)


def test_a_named_picture_answers_as_its_bytes_and_is_not_computed(llm, pictures):
    expected = scored_tokens(ask(llm, shown(pictures[0]), reuse="off"))
    library = Library(llm, "products", system=SYSTEM)
    item = library.add(pictures[0], "one", metadata={"price": 3})
    assert (item.id, item.metadata, item.file) == ("one", {"price": 3}, None)
    assert library.items() == [library.get("one")] or library.items()[0].version == item.version
    llm.reset_prefix_cache()
    output = ask(llm, named("one"))
    assert same(scored_tokens(output), expected)
    [image] = output.cache.images
    assert (image.match, image.encoder, image.kv) == ("exact", "none", "host")
    # Elsewhere it is known, too: other words before it, beside others, behind its own picture as bytes.
    for numbers in ((1, "one"), ("one", 1), (0, "one")):
        by_name = [named("one") if number == "one" else shown(pictures[number]) for number in numbers]
        by_bytes = [shown(pictures[0 if number == "one" else number]) for number in numbers]
        found, cold = ask(llm, "Look: ", *by_name), ask(llm, "Look: ", *by_bytes, reuse="off")
        assert same(scored_tokens(found), scored_tokens(cold))
        assert found.cache.images[numbers.index("one")].encoder != "computed"
    assert ask(llm, "Others: ", named("one"), reuse="full").cache.images[0].match == "approximate"


@pytest.mark.parametrize("reuse", ["exact", "full", 0.3, "mpic-4"])
def test_every_policy(llm, pictures, reuse):
    Library(llm, "products", system=SYSTEM).add(pictures[0], "one")
    by_name = ask(llm, "Look: ", named("one"), reuse=reuse)
    by_bytes = ask(llm, "Look: ", shown(pictures[0]), reuse=reuse)
    assert same(scored_tokens(by_name), scored_tokens(by_bytes))


def test_who_may_name_what(llm, pictures):
    """An owner's is for the owner alone, the operator's for all; what is another's is like what there is not."""
    Library(llm, "products", "a").add(pictures[0], "own")
    Library(llm, "products").add(pictures[1], "everyone's")
    there_is_none = r"images\[0\] must be an existing item, but library 'products' has no "
    for salt, name, sees in (
        ("a", "own", True), ("b", "own", False), (None, "own", False),
        ("a", "everyone's", True), ("b", "everyone's", True), (None, "everyone's", True),
    ):  # fmt: skip
        if sees:
            assert ask(llm, named(name), salt=salt, system="x").cache.images[0].encoder != "computed"
        else:
            with pytest.raises(RequestError, match=there_is_none + "'own'"):
                ask(llm, named(name), salt=salt)
    assert [item.id for item in Library(llm, "products", "a").items()] == ["own"]
    assert Library(llm, "products", "b").items() == []
    assert "own" not in Library(llm, "products", "b")
    assert not Library(llm, "products", "b").remove("own")
    # One of the same name: an owner's own comes first.
    Library(llm, "products", "b").add(pictures[2], "everyone's")
    keys = {salt: ask(llm, named("everyone's"), salt=salt, reuse="full").cache.images[0] for salt in ("a", "b")}
    assert keys["a"].tokens != keys["b"].tokens or keys["a"].key != keys["b"].key
    # What is a tenant's is there for each of its requests, whatever salt these name.
    tenant = TenantSalt("secret of a tenant", "")
    Library(llm, "products", tenant).add(pictures[3], "tenant's")
    for salt in (tenant, TenantSalt("secret of a tenant", "more")):
        assert ask(llm, named("tenant's"), salt=salt, reuse="full").cache.images[0].encoder != "computed"
    with pytest.raises(RequestError, match=there_is_none):
        ask(llm, named("tenant's"), salt=TenantSalt("of another", ""))
    assert Library(llm, "products", tenant).remove("tenant's")


def test_what_is_wrong_is_said_and_nothing_is_kept(llm, pictures, tmp_path):
    library = Library(llm, "products")
    library.add(pictures[0], "one")
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    records = llm.cache.stats().kv_records
    for work, message in (
        (lambda: library.add(pictures[1], "one"), r"^id must be new \(`update` replaces an item\), got 'one'$"),
        (lambda: library.update(pictures[1], "two"), "^id must be an item of library 'products', got 'two'$"),
        (lambda: library.add(broken, "two"), "^image must be an image that Pillow can read"),
        (lambda: library.add(None, "two"), "^image must be an image, got None$"),
        (lambda: library.add(tmp_path / "none.png", "two"), "^image must be"),
        (lambda: library.add(pictures[1], ""), "^id must be a non-empty string, got ''$"),
        (lambda: library.add(pictures[1], "\ud800"), r"^id must be text, got '\\ud800' at character 0"),
        (lambda: library.add(pictures[1], "a\nb"), "^id must be at most 256 printable"),
        (lambda: library.add(pictures[1], "x" * 257), "^id must be at most 256 printable characters"),
        (lambda: library.add(pictures[1], "two", metadata={1: 2}), "^metadata must be a dict with strings as keys"),
        (lambda: library.add(pictures[1], "two", metadata={"a": {1, 2}}), "^metadata must be JSON-serializable"),
        (lambda: library.add(pictures[1], "two", metadata={"a": float("nan")}), "^metadata must be JSON-serializable"),
        (lambda: library.add(pictures[1], "two", expires=-1), "^expires must be a positive number of seconds or None"),
        (lambda: library.get("two"), "^id must be an item"),
        (lambda: library.describe("two", {}), "^id must be an item"),
        (lambda: library.image("one"), "bytes are not stored"),
        (lambda: Library(llm, ""), "^name must be a non-empty string"),
        (lambda: Library(llm, "products", 3), "^owner must be a string or None, got"),
        (lambda: Library(llm, "products", tier="disk"), "^tier='disk' needs a disk tier"),
        (lambda: Library(llm, "products", keep_bytes=True), "^keep_bytes=True needs a disk tier"),
        (lambda: Library(llm, "products", tier="tape"), "^tier must be one of"),
        (lambda: Library("model", "products"), "^llm must be an LLM or an AsyncLLM, got str$"),
        (lambda: library.add_many(3), "^images must be a dict, or a list"),
        (lambda: library.add_many(["ab"]), r"^images\[0\] must be \(id, image\)"),
    ):
        with pytest.raises(ValueError, match=message):
            work()
    assert llm.cache.stats().kv_records == records
    assert [item.id for item in library.items()] == ["one"]
    for part, message in (
        ({"type": "image", "library": "products"}, "id must be a non-empty string"),
        ({"type": "image", "id": "one"}, "library must be a non-empty string"),
        (
            named("one") | {"image": pictures[0]},
            "an item of a library.: unknown field 'image'; expected one of type, library, id",
        ),
        (named("one") | {"min_pixels": 4096}, "unknown field 'min_pixels'; expected one of type, library, id"),
        (named("one", "others"), "but library 'others' has no 'one'"),
    ):
        with pytest.raises(RequestError, match=message):
            ask(llm, part)
    assert ask(llm, named("none"), on_error="return").error is not None


def test_records_that_do_not_fit_are_told_and_the_item_is_not_there(directory, pictures):
    with opened(directory, pinned_share=0.0) as llm:
        library = Library(llm, "products")
        with pytest.raises(ValueError, match="pinned_share"):
            library.add(pictures[0], "one")
        assert library.items() == []
        assert library.add_many([("one", pictures[0])], use_tqdm=False).failed.keys() == {"one"}


def test_many_of_which_some_are_wrong(llm, pictures, tmp_path):
    library = Library(llm, "products")
    rows = {f"{i}": picture for i, picture in enumerate(pictures)} | {"wrong": b"no picture", "none": tmp_path / "none"}
    report = library.add_many(rows, use_tqdm=False)
    assert set(report.added) == {f"{i}" for i in range(8)}
    assert report.failed.keys() == {"wrong", "none"}
    assert "Pillow" in report.failed["wrong"]
    before = {item.id: item.version for item in library.items()}
    again = library.add_many([(*row, {"n": 1}) for row in rows.items()], use_tqdm=False)
    assert (set(again.added), again.failed.keys()) == (set(report.added), report.failed.keys())
    assert {item.id: item.version for item in library.items()} == before
    stats = library.stats()
    assert (stats.items, stats.kept, stats.with_bytes) == (8, 8, 0)
    assert all(ask(llm, named(f"{i}"), reuse="full").cache.images[0].encoder != "computed" for i in range(8))


def test_the_same_name_twice_in_one_call(llm, pictures):
    library = Library(llm, "products")
    report = library.add_many([("a", pictures[0]), ("a", pictures[1]), ("b", pictures[2])], use_tqdm=False)
    assert report.added == ("a", "b")
    assert library.add_many([("b", pictures[0]), ("a", pictures[0])], use_tqdm=False).added == ("b", "a")
    assert library.add_many([([], pictures[0]), (3, pictures[0])], use_tqdm=False).failed.keys() == {"[]", "3"}
    report = library.add_many([("x", pictures[0]), ("\ud800", pictures[0]), ("y", pictures[0])], use_tqdm=False)
    assert (report.added, list(report.failed)) == (("x", "y"), ["\ud800"])
    assert library.get("a").image_key.height == pictures[0].shape[0]


def test_a_disk_that_takes_nothing_is_told(directory, pictures, tmp_path):
    with opened(directory, tmp_path, disk_bytes=1000) as llm:
        library = Library(llm, "products")
        with pytest.raises(ValueError, match=r"^image must fit on the disk"):
            library.add(pictures[0], "one")
        assert len(library) == 0
        assert Library(llm, "products", tier="memory").add(pictures[0], "one").id == "one"


def test_a_library_is_written_whatever_the_tier_admits(directory, pictures, tmp_path):
    with opened(directory, tmp_path, admit="second_use") as llm:
        Library(llm, "products", system=SYSTEM).add(pictures[0], "one")
    with opened(directory, tmp_path, admit="second_use") as llm:
        assert ask(llm, named("one")).cache.images[0].kv == "disk"


def test_two_names_of_one_picture_share_its_records(llm, pictures):
    library = Library(llm, "products")
    one, two = library.add(pictures[0], "one"), library.add(pictures[0], "two")
    assert one.entry == two.entry
    assert library.remove("one")
    assert not library.remove("one")
    assert ask(llm, named("two"), reuse="full").cache.images[0].encoder != "computed"
    library.remove("two")
    assert not llm.service.cache.store.knows(one.entry)
    assert llm.cache.stats().pinned_bytes == 0


def test_time(directory, pictures, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with opened(directory) as llm:
        llm.service.items._clock = lambda: now[0]
        library = Library(llm, "products")
        item = library.add(pictures[0], "one", expires=60)
        library.add(pictures[1], "two")
        assert item.expires == 1060
        assert ask(llm, named("one")).outputs
        now[0] += 61
        assert [item.id for item in library.items()] == ["two"]
        with pytest.raises(RequestError, match="has no 'one'"):
            ask(llm, named("one"))
        library.add(pictures[2], "one")  # the name is free, and what had it is gone
        assert not llm.service.cache.store.knows(item.entry)
        assert library.describe("one", {"a": 1}, expires=5).expires == now[0] + 5
        assert library.get("one").metadata == {"a": 1}
        now[0] += 1
        assert library.describe("one", {"a": 2}).expires == now[0] + 4  # whoever says nothing of it leaves it
        assert library.update(pictures[1], "one").expires == now[0] + 4
        assert library.update(pictures[2], "one", expires=7).expires == now[0] + 7
        assert library.describe("one", {}, expires=math.inf).expires is None
        assert library.update(pictures[1], "one").expires is None


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_an_owner_keeps_what_the_operator_keeps_too(directory, pictures, tmp_path, tier):
    """Records of one's own: the operator's may go, and the item is linked all the same."""
    with opened(directory, tmp_path) as llm:
        everyones = Library(llm, "everyone's", tier=tier)
        everyones.add(pictures[0], "one")
        mine = Library(llm, "mine", "a", tier=tier)
        item = mine.add(pictures[0], "one")
        assert item.entry != everyones.get("one").entry
        assert everyones.remove("one")
        output = ask(llm, named("one", "mine"), salt="a")
        assert output.cache.images[0].key == item.entry
        assert output.cache.images[0].encoder != "computed"


def test_a_state_is_one_librarys(directory, pictures, tmp_path):
    """Each change of it makes another one, in whatever process; others' changes make none, so that no search looks."""
    now = [1000.0]
    with opened(directory, tmp_path) as llm, opened(directory, tmp_path) as other:
        llm.service.items._clock = lambda: now[0]
        library, there = Library(llm, "products"), Library(other, "products")
        seen = [library.state()]
        for change in (
            lambda: library.add(pictures[0], "one"),
            lambda: library.update(pictures[1], "one"),
            lambda: library.describe("one", {"a": 1}),
            lambda: there.describe("one", {"a": 2}, expires=60),
            lambda: now.append(now.pop() + time.time()),  # the other's clock is the machine's
            lambda: there.remove("one"),
        ):
            change()
            seen.append(library.state())
        assert len(set(seen)) == len(seen)
        Library(llm, "others").add(pictures[2], "one")
        Library(llm, "products", "a").add(pictures[2], "one")
        assert library.state() == seen[-1]


def test_a_restart(directory, pictures, tmp_path):
    picture = io.BytesIO()
    Image.fromarray(pictures[1]).save(picture, "PNG")
    with opened(directory, tmp_path) as llm:
        library = Library(llm, "products", system=SYSTEM, keep_bytes=True)
        plain = Library(llm, "plain", "a", system=SYSTEM)
        library.add_many({"one": pictures[0], "two": picture.getvalue()}, use_tqdm=False)
        plain.add(pictures[2], "three", metadata={"x": 1})
        expected = [scored_tokens(ask(llm, shown(one), reuse="off")) for one in pictures[:3]]
    with opened(directory, tmp_path) as llm:  # no library is opened
        before = llm.cache.stats()
        found = [ask(llm, named(name)) for name in ("one", "two")] + [ask(llm, named("three", "plain"), salt="a")]
        assert all(map(same, map(scored_tokens, found), expected))
        assert [output.cache.images[0].kv for output in found] == ["disk"] * 3
        assert [output.cache.images[0].match for output in found] == ["exact"] * 3
        assert llm.cache.stats().misses == before.misses
        library, plain = Library(llm, "products"), Library(llm, "plain", "a")
        assert library.image("two") == picture.getvalue()
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(library.image("one")))), pictures[0])
        assert library.stats().file_bytes > 0
        assert plain.get("three").metadata == {"x": 1}
        # Records that are gone: computed from the bytes where these were kept, else a clear error.
        llm.cache.delete(library.get("one").entry, shared=True)
        llm.cache.delete(plain.get("three").entry, cache_salt="a")
        llm.reset_mm_cache()
        assert same(scored_tokens(ask(llm, named("one"))), expected[0])
        with pytest.raises(RequestError, match=r"'three' of library 'plain': .* add it again with keep_bytes=True"):
            ask(llm, named("three", "plain"), salt="a")
        assert (library.stats().kept, plain.stats().kept) == (1, 0)
        assert library.remove("one")
        assert len(list((tmp_path / "libraries-1").glob("[0-9a-f]*"))) == 1
    with opened(directory) as llm, pytest.raises(RequestError, match="has no 'two'"):
        ask(llm, named("two"))


def test_damaged_records_of_a_picture_without_bytes(directory, pictures, tmp_path):
    """K, V that are damaged are computed again, as encoder rows are there."""
    with opened(directory, tmp_path) as llm:
        Library(llm, "products", system=SYSTEM).add(pictures[0], "one")
        expected = scored_tokens(ask(llm, named("one"), reuse="exact"))
    for path in tmp_path.rglob("*kv*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[-100:] = bytes(100)
            path.write_bytes(content)
    with opened(directory, tmp_path) as llm:
        output = ask(llm, named("one"))
        assert same(scored_tokens(output), expected)
        assert output.cache.images[0].match == "exact" or output.cache.images[0].encoder in ("disk", "host")


def test_requests_see_one_version_or_the_other(directory, pictures):
    """While an item changes, every answer is that of one of its pictures."""
    pictures = pictures[:3]
    with opened(directory) as llm:
        library = Library(llm, "products", system=SYSTEM)
        expected = [scored_tokens(ask(llm, shown(one), reuse="off")) for one in pictures]
        assert not any(same(expected[i], expected[i - 1]) for i in range(3))
        library.add(pictures[0], "one")
        ended, answers, errors = threading.Event(), [], []

        def keep_asking():
            while not ended.is_set():
                try:
                    answers.append(scored_tokens(ask(llm, named("one"))))
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=keep_asking) for _ in range(3)]
        for thread in threads:
            thread.start()
        for i in range(12):
            library.update(pictures[(i + 1) % 3], "one")
        ended.set()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(answers) > 3
        assert all(any(same(answer, one) for one in expected) for answer in answers)
        assert same(scored_tokens(ask(llm, named("one"))), expected[0])
        library.update(pictures[1], "one")
        library._clean()
        assert llm.service.items.loose(library.salt) == []


def test_a_request_under_way_keeps_what_it_began_with(llm, pictures):
    """Its picture and records stay until it has ended, though the item is removed meanwhile."""
    library = Library(llm, "products", system=SYSTEM)
    item = library.add(pictures[0], "one")
    entry = item.entry
    del item
    engine = AsyncLLM(llm.service)

    import asyncio

    async def asked():
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [named("one"), "What is it?"]}]
        stream = engine.generate(messages, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        await anext(stream)
        assert await asyncio.to_thread(library.remove, "one")
        assert llm.service.cache.store.knows(entry)
        with pytest.raises(RequestError, match="has no 'one'"):
            await anext(engine.generate(messages, GREEDY))
        async for output in stream:
            last = output
        return last

    output = asyncio.run(asked())
    assert output.finished
    del output
    library._clean()
    assert not llm.service.cache.store.knows(entry)


KILLED = """
import sys, pathlib
sys.path[:] = {path!r}
import numpy as np
from tests.library.test_libraries import opened
from vlcache_jax.library import Library
llm = opened({model!r}, {disk!r})
library = Library(llm, "products", keep_bytes=True)
for round in range(1000):
    rows = {{f"{{round}}-{{i}}": np.full((32, 32, 3), (7 * round + i) % 256, np.uint8) for i in range(6)}}
    library.add_many(rows, use_tqdm=False)
    print("ready", flush=True)
"""


@pytest.mark.parametrize("kills", some_cases(2, 40))
def test_killed_while_it_adds(directory, tmp_path, kills):
    """Each item is there whole, or not at all, and nothing is left behind."""
    rng = np.random.default_rng(0)
    code = KILLED.format(path=sys.path, model=str(directory), disk=str(tmp_path))
    counts = []
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.2, 1.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with opened(directory, tmp_path) as llm:
            library = Library(llm, "products")
            items = library.items()
            counts.append(len(items))
            stats = library.stats()
            assert (stats.items, stats.kept, stats.with_bytes) == (len(items),) * 3
            assert llm.service.items.loose(library.salt) == []
            files = {path.name for path in (tmp_path / "libraries-1").glob("[0-9a-f]*")}
            assert files == {item.file for item in items}
            for item in items[-3:]:
                output = ask(llm, named(item.id), reuse="full")
                assert output.cache.images[0].encoder != "computed"
                assert len(library.image(item.id)) > 0
    assert counts[-1] > 0


@pytest.mark.parametrize("damage", ["bytes", "rows", "another"])
def test_a_damaged_index_is_named_with_what_to_do(directory, pictures, tmp_path, damage):
    with opened(directory, tmp_path) as llm:
        Library(llm, "products").add(pictures[0], "one")
    index = pathlib.Path(tmp_path, "libraries-1", "index.sqlite")
    if damage == "bytes":
        index.write_bytes(b"nothing of SQLite" * 100)
    elif damage == "rows":
        content = bytearray(index.read_bytes())
        content[4096:] = bytes(len(content) - 4096)
        index.write_bytes(content)
    else:
        index.unlink()
        index.mkdir()
    with opened(directory, tmp_path) as llm:
        assert ask(llm, shown(pictures[0])).outputs  # whoever names no library does not mind
        with pytest.raises(ValueError, match=r"the index of libraries in .*libraries-1 cannot be used"):
            Library(llm, "products").items()
        with pytest.raises(RequestError, match=r"the index of libraries in .* cannot be used"):
            ask(llm, named("one"))


def test_json_of_a_report(llm, pictures):
    Library(llm, "products").add(pictures[0], "one")
    json.dumps(ask(llm, named("one")).to_dict())


def test_a_change_that_happened_is_told_though_its_cleaning_fails(llm, pictures, monkeypatch, caplog):
    library = Library(llm, "products")
    library.add(pictures[0], "one", metadata={"n": 1})

    def full(*given):
        raise ValueError("database or disk is full")

    with monkeypatch.context() as patches:
        patches.setattr(llm.service.items, "forget", full)
        changed = library.update(pictures[1], "one", metadata={"n": 2})
        assert (changed.metadata, library.get("one").image_key.height) == ({"n": 2}, pictures[1].shape[0])
        assert library.remove("one")
        assert "one" not in library
        assert Library(llm, "products").stats().uncleaned == library.stats().uncleaned == 2
    assert caplog.text.count("cleanup of library 'products' failed and will be retried: database or disk is full") == 3
    library.add(pictures[2], "two")  # what was left is cleaned with the next change
    assert library.stats().uncleaned == 0


@pytest.fixture
def kept(directory, pictures, tmp_path):
    """An engine with a library whose items have bytes, and its index, for changes from outside."""
    with opened(directory, tmp_path) as llm:
        library = Library(llm, "products", system=SYSTEM, keep_bytes=True)
        for number, name in enumerate(("one", "two")):
            library.add(pictures[number], name)
        with contextlib.closing(sqlite3.connect(tmp_path / FOLDER / "index.sqlite")) as index:
            yield llm, library, index


@pytest.mark.slow_for("metadata", "limits", "width", "added", "expires")
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("content", "x"), ("height", -1), ("width", "wide"), ("limits", "[]"), ("limits", '{"fps": 1}'),
        ("entry", "../a"), ("file", "../../secret"), ("metadata", "{"), ("metadata", "3"), ("added", "now"),
        ("expires", "soon"), ("version", b"v"),
    ],
)  # fmt: skip
def test_an_entry_that_no_library_wrote_is_damaged(kept, column, value, caplog):
    llm, library, index = kept
    expected, before = scored_tokens(ask(llm, named("two"))), llm.service.items.damaged
    index.execute(f"UPDATE items SET {column} = ? WHERE id = 'one'", (value,))
    index.commit()
    with pytest.raises(RequestError, match="has no 'one'"):
        ask(llm, named("one"))
    assert same(scored_tokens(ask(llm, named("two"))), expected)  # others are as they were
    assert ([item.id for item in library.items()], library.stats().damaged - before) == (["two"], 1)
    assert caplog.text.count("item 'one' of library 'products' is damaged and deleted") == 1
    assert index.execute("SELECT COUNT(*) FROM items").fetchone() == (1,)


def test_what_is_to_be_cleaned_names_files_of_libraries_alone(kept, tmp_path):
    _, library, index = kept
    secret = tmp_path / "secret"
    secret.touch()
    for entry, file in (("0" * 64, "../secret"), (str(secret), None)):
        owner = owner_key(library.salt)
        index.execute("INSERT INTO loose (owner, entry, file) VALUES (?, ?, ?)", (owner, entry, file))
    index.commit()
    library._clean()
    assert secret.exists()
    assert (library.stats().uncleaned, index.execute("SELECT COUNT(*) FROM loose").fetchone()) == (0, (0,))


def test_bytes_that_show_another_picture_are_damaged(kept, tmp_path):
    """Their records would be kept under the item's key."""
    llm, library, _ = kept
    one, two = (tmp_path / FOLDER / library.get(name).file for name in ("one", "two"))
    one.write_bytes(two.read_bytes())
    llm.cache.delete(library.get("one").entry, shared=True)
    llm.reset_prefix_cache()
    with pytest.raises(RequestError, match="is 'one' of library 'products': its bytes are damaged, add it again"):
        ask(llm, named("one"))
    assert not llm.service.cache.store.knows(library.get("one").entry)
    assert (one.exists(), library.stats().damaged) == (False, 1)
    assert ask(llm, named("two")).error is None


def test_vectors_that_are_none_are_damaged(kept):
    _, library, index = kept
    versions = {item.id: item.version for item in library.items()}
    library.put_vectors("e", {name: (version, np.ones(3)) for name, version in versions.items()})
    for blob in (b"abc", np.float32([1, np.nan, 1]).tobytes(), "text"):
        index.execute("UPDATE vectors SET vector = ? WHERE id = 'one'", (blob,))
        index.commit()
        assert library.vectors("e").keys() == {"two"}
        library.put_vectors("e", {"one": (versions["one"], np.ones(3))})
    assert library.vectors("e").keys() == {"one", "two"}

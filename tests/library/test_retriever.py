"""Finding items: planted ones, by filters, as the library changes, with a model of its own, and among many vectors."""

import functools
import time
from typing import NamedTuple

import numpy as np
import pytest

from tests.helper import SIZES
from vlcache_jax import LLM, CacheConfig
from vlcache_jax.library import Hit, Library, Retriever
from vlcache_jax.library.retriever import _Index, _nearest, _neighbor_index
from vlcache_jax.testing import make_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("retriever") / "model", "qwen3_vl", seed=5,
        tie_word_embeddings=True, corpus=["yes", "no"] * 50,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(directory, tmp_path_factory):
    with LLM(directory, cache=CacheConfig(disk=tmp_path_factory.mktemp("disk")), use_tqdm=False, **SIZES) as engine:
        yield engine


@pytest.fixture
def library(llm):
    library = Library(llm, "products")
    yield library
    for item in library.items():
        library.remove(item.id)


class Ranked(NamedTuple):
    """As of `LLM.rerank`."""

    index: int
    score: float


def plain(value):
    return np.full((32, 32, 3), value, np.uint8)


def shown(picture):
    return {"type": "image", "image": picture}


def means(inputs):
    """An embedder that is a function: how bright pictures are, and words for that."""
    words = {"dark": 0, "grey": 128, "bright": 255}
    values = [words[one] if isinstance(one, str) else np.mean(_rgb(one)) for one in inputs]
    angles = np.array(values) / 255 * np.pi / 2
    return np.stack([np.cos(angles), np.sin(angles)], 1) * 7


def _rgb(part):
    import io

    from PIL import Image

    image = part["image"]
    return np.asarray(Image.open(io.BytesIO(image))) if isinstance(image, bytes) else image


def test_what_is_alike_comes_first(library):
    retriever = Retriever(library, means)
    assert retriever.search("dark") == []
    kinds = {0: "even", 85: "odd", 170: "even", 255: "odd"}
    library.add_many([(f"{v}", plain(v), {"value": v, "kind": kind}) for v, kind in kinds.items()], use_tqdm=False)
    hits = retriever.search("bright", k=3)
    assert [hit.id for hit in hits] == ["255", "170", "85"]
    assert hits[0] == Hit("255", pytest.approx(1), {"value": 255, "kind": "odd"})
    assert hits[1].score == pytest.approx(np.cos(np.pi / 6), abs=1e-3)
    assert [hit.id for hit in retriever.search(shown(plain(80)), k=1)] == ["85"]
    assert [hit.id for hit in retriever.search("bright", filter={"kind": "even"})] == ["170", "0"]
    assert [hit.id for hit in retriever.search("bright", filter=lambda said: said["value"] < 100)] == ["85", "0"]
    assert [hit.id for hit in retriever.search("bright", 1, filter={"kind": "even"})] == ["170"]  # not the nearest
    assert retriever.search("bright", filter={"kind": "none"}) == retriever.search("bright", filter={"other": 1}) == []


def test_it_sees_the_library_as_it_is(library):
    calls = []

    def counted(inputs):
        calls.append(len(inputs))
        return means(inputs)

    retriever = Retriever(library, counted, name="brightness")
    library.add(plain(255), "a", metadata={"n": 1})
    library.add(plain(0), "b")
    assert calls == [1, 1]  # when they were added
    assert [hit.id for hit in retriever.search("bright")] == ["a", "b"]
    library.update(plain(255), "b")
    library.update(plain(0), "a")
    assert [hit.id for hit in retriever.search("bright")] == ["b", "a"]
    library.describe("a", {"n": 2})
    assert retriever.search("dark", k=1)[0].metadata == {"n": 2}
    library.remove("a")
    assert [hit.id for hit in retriever.search("bright")] == ["b"]
    # Another retriever of the same embedder finds what the first one has kept.
    del calls[:]
    assert [hit.id for hit in Retriever(library, counted, name="brightness").search("bright")] == ["b"]
    assert calls == [1]  # the query


def test_equal_ones_come_by_their_ids(library):
    """And so do those that are left out."""
    retriever, near = Retriever(library, means), Retriever(library, means, exact=0)
    library.add_many({name: plain(0) for name in "fcadbe"} | {"z": plain(255)}, use_tqdm=False)
    for k in (7, 6, 3, 1):
        assert [hit.id for hit in retriever.search("dark", k)] == list("abcdefz")[:k]
    assert [hit.id for hit in near.search("dark", 7)] == list("abcdefz")


def test_an_update_that_it_did_not_see(llm, library):
    """The vector of an item's old version is not that of its new one."""
    retriever = Retriever(library, means)
    library.add_many({"a": plain(255), "b": plain(128)}, use_tqdm=False)
    assert [hit.id for hit in retriever.search("bright")] == ["a", "b"]
    other = Library(llm, "products", keep_bytes=True)  # its changes are embedded by nobody
    other.update(plain(0), "a")
    for searching in (retriever, Retriever(library, means)):
        assert [hit.id for hit in searching.search("bright")] == ["b", "a"]
        assert [hit.id for hit in searching.search("dark", 1)] == ["a"]


def test_what_was_there_before(llm, library):
    """Pictures are read where their bytes were kept; else the embedder never sees them, and that is told."""
    kept = Library(llm, "products", keep_bytes=True)
    kept.add(plain(255), "kept")
    library.add(plain(0), "not kept")
    retriever = Retriever(library, means)
    assert retriever.prepare() == 1
    assert [hit.id for hit in retriever.search("dark")] == ["kept"]
    assert retriever.missing.keys() == {"not kept"}
    assert "bytes are not stored" in retriever.missing["not kept"]
    # The library's own model sees them by their names.
    own = Retriever(library, llm)
    assert own.prepare() == 2
    assert not own.missing
    assert own.search(shown(plain(0)), k=1)[0].id == "not kept"


def test_one_item_that_cannot_be_seen_leaves_the_others(llm, library):
    library.add_many({"a": plain(77), "b": plain(255)}, use_tqdm=False)
    llm.cache.delete(library.get("a").entry, shared=True)
    retriever = Retriever(library, llm)
    assert [hit.id for hit in retriever.search(shown(plain(255)))] == ["b"]
    assert "cache entries cannot be used" in retriever.missing["a"]
    library.update(plain(9), "a")
    assert [hit.id for hit in retriever.search(shown(plain(9)), k=1)] == ["a"]
    assert not retriever.missing


@pytest.mark.thorough
@pytest.mark.slow
def test_a_planted_item_among_a_thousand(directory):
    with LLM(directory, use_tqdm=False, **SIZES) as llm:
        _find_planted(llm, Library(llm, "many"))


def _find_planted(llm, library):
    rng = np.random.default_rng(0)
    retriever = Retriever(library, llm)
    rows = {f"{i}": np.repeat(np.repeat(rng.integers(0, 256, (2, 2, 3), np.uint8), 16, 0), 16, 1) for i in range(999)}
    planted = rng.integers(0, 256, (32, 32, 3), np.uint8)
    assert not library.add_many(rows | {"planted": planted}, use_tqdm=False).failed
    before = llm.cache.stats().stored
    [best, *_] = retriever.search(shown(planted), k=10)
    assert best.id == "planted"
    assert best.score == pytest.approx(1, abs=1e-4)
    assert llm.cache.stats().stored <= before + 1  # no picture is computed for a search


def test_a_reranker(llm, library):
    library.add_many({f"{v}": plain(v) for v in (0, 100, 200)}, use_tqdm=False)
    retriever = Retriever(library, llm, reranker=llm)
    hits = retriever.search("grey", k=2)
    names = ("0", "100", "200")
    scores = {one.index: one.score for one in llm.rerank("grey", list(map(library.part, names)), use_tqdm=False)}
    best = sorted(scores, key=lambda i: -scores[i])[:2]
    assert [hit.id for hit in hits] == [names[i] for i in best]
    assert [hit.score for hit in hits] == pytest.approx([scores[i] for i in best], abs=1e-4)


def test_a_reranker_sees_more_than_are_wanted(llm):
    """Four times as many, so that it may bring up what the vectors do not; of fewer, all."""
    seen = []

    class Reversed:
        def rerank(self, query, documents, **options):
            seen.append(len(documents))
            return [Ranked(i, float(i)) for i in reversed(range(len(documents)))]

    kept = Library(llm, "ranked", keep_bytes=True)
    names = [f"{value}" for value in range(250, 150, -10)]  # from the brightest
    kept.add_many({name: plain(int(name)) for name in names}, use_tqdm=False)
    retriever = Retriever(kept, means, reranker=Reversed())
    assert [hit.id for hit in retriever.search("bright", 1)] == [names[3]]
    assert [hit.id for hit in retriever.search("bright", 2)] == [names[7], names[6]]
    assert [hit.id for hit in retriever.search("bright", 4)] == names[:5:-1]
    assert seen == [4, 8, 10]


def test_another_owner(llm):
    mine = Library(llm, "mine", "a")
    retriever = Retriever(mine, llm)
    mine.add(plain(9), "one")
    assert [hit.id for hit in retriever.search(shown(plain(9)))] == ["one"]
    assert Retriever(mine, llm, reranker=llm).search("x")[0].id == "one"
    own = Retriever(mine, llm, name="anew")
    assert own.prepare() == 1
    assert Retriever(Library(llm, "mine", "b"), llm).search("x") == []
    mine.remove("one")


def test_what_is_wrong_is_said(llm, library):
    library.add(plain(1), "one")
    retriever = Retriever(library, means)

    def broken(inputs):
        return np.ones((1, 2, 3))

    class Other:
        def rerank(self, query, documents, **options):
            pytest.fail("it is asked for pictures that it cannot see")

    nameless = r"^name is required for an embedder without a fingerprint or qualified name, got "
    for work, message in (
        (lambda: Retriever(library, lambda inputs: means(inputs)), nameless),
        (lambda: Retriever(library, broken), nameless),  # so is every other function that this one makes
        (lambda: Retriever(library, functools.partial(means)), nameless),
        (lambda: Retriever(library, means, name=3), "^name must be a string or None, got 3$"),
        (lambda: Retriever("products", means), "^library must be a Library, got str$"),
        (lambda: Retriever(library, 3), "^embedder must be an LLM or a function of inputs, got int$"),
        (lambda: Retriever(library, means, reranker=3), "^reranker must be an LLM or None, got int$"),
        (lambda: Retriever(library, means, exact=-1), "^exact must be"),
        (lambda: Retriever(library, llm, reranker=Other()).search("dark"), "^reranker must be the library's model"),
        (lambda: retriever.search("dark", k=0), "^k must be a positive integer, got 0$"),
        (lambda: retriever.search("dark", filter=3), "^filter must be a function, a dict or None, got 3$"),
        (lambda: Retriever(library, llm).search("dark", instruction=3), "^instruction must be"),
        (lambda: Retriever(library, broken, name="x").vectors([plain(1)]), "^embedder must return a finite vector"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            work()
    two = Retriever(library, means, name="two")
    library.update(plain(2), "one")
    two._embedder = lambda inputs: np.ones((len(inputs), 3))
    with pytest.raises(ValueError, match=r"^embedder must return vectors of the same length, got 3 for a query and 2"):
        two.search("dark")
    with pytest.raises(ValueError, match=r"^instruction must be None if embedder is a function, got 'x'$"):
        retriever.search("dark", instruction="x")


@pytest.mark.slow
@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_neighbours_of_many(count):
    """Of the ten nearest of so many vectors in clusters usearch finds more than 99 of 100, and filters pass."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(1000, 64))
    vectors = (centres[rng.integers(0, 1000, count)] + 0.4 * rng.normal(size=(count, 64))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    class Numbered(int):
        metadata = property(lambda self: {"n": int(self)})

    items = [Numbered(i) for i in range(len(vectors))]
    exact, near = _Index(0, items, items, vectors), _Index(0, items, items, vectors, _neighbor_index(vectors))
    queries = vectors[rng.integers(0, len(vectors), 200)] + 0.05 * rng.normal(size=(200, 64)).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    seconds, found = {}, {}
    for name, index in (("exact", exact), ("near", near)):
        start = time.perf_counter()
        found[name] = [_nearest(index, query, 10, None) for query in queries]
        seconds[name] = (time.perf_counter() - start) / len(queries)
    recall = np.mean([len({i for i, _ in a} & {i for i, _ in b}) / 10 for a, b in zip(*found.values(), strict=True)])
    assert recall >= 0.99
    print(f"recall@10 {recall:.4f}; ms a search: {1e3 * seconds['exact']:.2f}, by usearch {1e3 * seconds['near']:.2f}")
    # A filter that few pass: as many are found all the same.
    rare = _nearest(near, queries[0], 10, lambda item: item % 997 == 0)
    assert [i for i, _ in rare] == [i for i, _ in _nearest(exact, queries[0], 10, lambda item: item % 997 == 0)]


def test_beyond_the_limit_neighbours_are_asked(library, monkeypatch):
    import vlcache_jax.library.retriever as module

    made = []
    monkeypatch.setattr(
        module, "_neighbor_index", lambda vectors: made.append(len(vectors)) or _neighbor_index(vectors)
    )
    retriever = Retriever(library, means, exact=20)
    library.add_many({f"{v}": plain(v) for v in range(0, 250, 10)}, use_tqdm=False)
    assert [hit.id for hit in retriever.search("bright", k=2)] == ["240", "230"]
    assert made == [25]

"""Which engine gets a request: by the bytes of its images, within bounds, and without looking into them."""

import base64
import collections
import json
import math

import numpy as np
import pytest
from PIL import Image

from vlcache_jax.router.affinity import Affinity, LeastLoaded, RoundRobin, SeenImages, look, look_at, rule_of

ENGINES = [f"engine-{i}" for i in range(8)]
IDLE = dict.fromkeys(ENGINES, 0)


def shows(*names, size=1, **more):
    return SeenImages({look_at(name.encode())[0]: size for name in names}, **more)


def chat(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def picture(content, media="image/png"):
    return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{base64.b64encode(content).decode()}"}}


def test_a_picture_goes_to_one_engine_and_pictures_to_all():
    rule, again = Affinity(), Affinity()
    places = collections.Counter()
    for i in range(4000):
        [first, *rest] = rule.order(shows(f"picture {i}"), IDLE)
        assert sorted([first, *rest]) == ENGINES
        assert (
            again.order(shows(f"picture {i}"), dict(reversed(IDLE.items())))[0] == first
        )  # whoever asks, in any order
        places[first] += 1
    assert all(400 < count < 600 for count in places.values()), places


def test_engines_that_come_and_go_move_their_share_alone():
    rule = Affinity()
    names = [f"picture {i}" for i in range(1000)]
    before = [rule.order(shows(name), IDLE)[0] for name in names]
    more = {**IDLE, "engine-8": 0}
    after = [rule.order(shows(name), more)[0] for name in names]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"engine-8"}
    assert 60 < len(moved) < 170  # a ninth
    left = {name: 0 for name in ENGINES if name != "engine-3"}
    gone = [rule.order(shows(name), left)[0] for name in names]
    assert all(new == old for old, new in zip(before, gone, strict=True) if old != "engine-3")


def test_whoever_came_and_went_slots_are_given_alike():
    """All places of a slot, also those behind the first; in whatever order engines are named."""
    rng = np.random.default_rng(0)
    rule, here = Affinity(), ENGINES[:1]
    seen = [shows(f"picture {i}") for i in range(100)]
    for _ in range(12):
        here = [name for name in here if rng.random() < 0.7] + [f"{rng.integers(1000)}" for _ in range(rng.integers(5))]
        here = here or ["last"]
        loads = dict.fromkeys(rng.permutation(here).tolist(), 0)
        anew = Affinity()
        assert [rule.order(one, loads) for one in seen] == [anew.order(one, loads) for one in seen]
        places = [rule.order(one, loads)[:4] for one in seen]
        assert places == [rule.order(one, dict.fromkeys(here, 0))[:4] for one in seen]


def test_without_engines_there_is_no_order():
    rule = Affinity()
    assert rule.order(shows("a"), {}) == rule.holders(shows("a"), []) == []
    rule.order(shows("a"), IDLE)
    assert rule.order(shows("a"), {}) == rule.holders(shows("a"), []) == []
    with pytest.raises(UnicodeEncodeError):
        rule.order(shows("a"), {**IDLE, "\ud800": 0})
    assert len(rule.order(shows("a"), IDLE)) == len(ENGINES)


def test_who_held_a_picture_is_among_its_holders():
    rule = Affinity()
    seen = [shows(f"picture {i}") for i in range(200)]
    first = [rule.order(one, IDLE)[:2] for one in seen]
    assert [rule.holders(one, ENGINES) for one in seen] == first
    more = [rule.holders(one, [*ENGINES, "engine-8"]) for one in seen]  # of which some are the new one's now
    assert all(owner in holders for (owner, _), holders in zip(first, more, strict=True))
    assert rule.holders(SeenImages(), ENGINES) == []


def test_the_order_of_pictures_says_nothing():
    rule = Affinity()
    for i in range(50):
        names = [f"{i} {j}" for j in range(6)]
        assert rule.order(shows(*names), IDLE) == rule.order(shows(*reversed(names)), IDLE)


def test_one_engine_has_all():
    rule = Affinity()
    assert rule.order(shows("a", "b"), {"alone": 3}) == ["alone"]
    assert rule.holders(shows("a", "b"), ["alone"]) == ["alone"]


def test_a_busy_engine_is_passed_by():
    rule = Affinity(factor=1.25, slack=4)
    seen = shows("picture")
    first, second, *_ = rule.order(seen, IDLE)
    assert rule.order(seen, {**IDLE, first: 3})[0] == first  # so many run together
    busy = {**IDLE, first: 4}
    assert rule.limit(busy) == 4
    assert rule.order(seen, busy)[0] == second
    even = dict.fromkeys(ENGINES, 16)
    assert rule.limit(even) == math.ceil(1.25 * 129 / 8) == 21
    assert rule.order(seen, {**even, first: 20})[0] == first
    assert rule.order(seen, {**even, first: 22})[0] == second
    assert Affinity(math.inf).order(seen, {**IDLE, first: 10**6})[0] == first
    alone = rule.order(seen, {"engine-0": 10**6})
    assert alone == ["engine-0"]  # somebody must


def test_of_several_pictures_most_bytes_count():
    rule = Affinity()
    for i in range(50):
        small = [shows(f"{i} small {j}", size=10).images for j in range(3)]
        [(large, _)] = shows(f"{i} large").images.items()
        images = {**small[0], **small[1], **small[2], large: 1000}
        assert rule.order(SeenImages(images), IDLE)[0] == rule.order(shows(f"{i} large"), IDLE)[0]
    assert SeenImages(images).largest == large


def test_texts_go_to_whom_has_least_to_do_and_conversations_to_whom_answered():
    rule = Affinity()
    loads = {**dict.fromkeys(ENGINES, 5), "engine-6": 1}
    first = look(chat("What is a star?"))
    assert (first.goes_on, first.images) == (False, {})
    assert rule.order(first, loads)[0] == "engine-6"
    rule.sent(first, "engine-6")
    later = look(chat("What is a star?", "A sun.", "And a moon?"))
    assert (later.goes_on, later.opening) == (True, first.opening)
    busy = {**dict.fromkeys(ENGINES, 5), "engine-6": 6}
    assert rule.order(later, busy)[0] == "engine-6"
    assert rule.order(later, {**busy, "engine-6": 9})[0] != "engine-6"
    assert rule.order(first, busy)[0] != "engine-6"  # another client's beginning
    other = Affinity()  # which has not heard the beginning: the same place each time
    assert other.order(later, IDLE)[0] == Affinity().order(later, IDLE)[0]


def test_what_one_engine_has_goes_there():
    rule = Affinity()
    busy = {**IDLE, "engine-2": 10**6}
    assert rule.order(SeenImages(engine="engine-2"), busy)[0] == "engine-2"
    assert rule.order(SeenImages(engine="engine-9"), busy)[0] != "engine-2"  # it has gone: whoever is asked says so


def test_the_same_bytes_are_the_same_picture(tmp_path):
    content = np.random.default_rng(0).bytes(1000)
    (tmp_path / "a.png").write_bytes(content)
    digest, size = look_at(content)
    assert size == 1000
    assert look_at(tmp_path / "a.png") == look_at(str(tmp_path / "a.png")) == (digest, size)
    assert look_at(str(tmp_path / "a.png"), reads_files=False) != (
        digest,
        size,
    )  # a server's clients name no files of it
    assert look_at(str(tmp_path / "missing.png"))[1] == 1
    as_url = [look(chat([picture(content, media)])).images for media in ("image/png", "image/jpeg")]
    assert as_url[0] == as_url[1]
    [(_, told)] = as_url[0].items()
    assert abs(told - 1000) < 4
    assert look_at(np.zeros((2, 2, 3), np.uint8)) == look_at(Image.new("RGB", (2, 2)))
    assert look_at(3)[1] == 1  # whatever it is: the engine says what is wrong


def test_pictures_are_found_wherever_requests_have_them():
    url = "https://host/a.png"
    [(digest, _)] = look(chat([{"type": "image_url", "image_url": {"url": url}}])).images.items()
    shapes = [
        chat([{"type": "image_url", "image_url": url}]),
        chat([{"image_url": {"url": url}}]),
        chat([{"type": "image", "url": url}]),
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        {"query": "?", "documents": [{"content": [{"type": "image_url", "image_url": {"url": url}}]}]},
        {"prompt": "<|image_pad|>", "multi_modal_data": {"image": [url]}},
        {"prompt": "<|image_pad|>", "multi_modal_data": {"image": url}},
    ]
    assert [list(look(shape).images) for shape in shapes] == [[digest]] * len(shapes)
    named = look({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-0a"}]}]})
    assert (named.file, len(named.images)) == ("file-0a", 1)
    for source, own in (
        ({"type": "base64", "media_type": "image/png", "data": "QUJD"}, "data:image/png;base64,QUJD"),
        ({"type": "url", "url": "https://a.b/c.png"}, "https://a.b/c.png"),
    ):
        expected = look(chat([{"type": "image_url", "image_url": own}])).images
        assert look(chat([{"type": "image", "source": source}])).images == expected  # Anthropic's form
    assert look(chat([{"type": "image_url", "image_url": {"url": "file-id:file-0a"}}])) == look(
        chat([{"type": "image_url", "image_url": "file-id:file-0a"}])
    )
    item = look(chat([{"type": "image", "library": "signs", "id": "stop"}]))
    assert len(item.images) == 1
    assert look(chat([{"type": "image", "library": "signs", "id": "go"}])).images != item.images
    assert look({"input": ["a", "b"]}).images == look({"messages": 3}).images == {}


def test_what_is_nested_deeply_is_read():
    deep = json.loads("[" * 900 + "1" + "]" * 900)
    for _ in range(100):
        deep = [deep]
    assert look({"input": [deep], "tools": deep}).images == {}


def test_a_router_decodes_nothing(monkeypatch):
    """Decoding twenty pictures takes longer than the reuse of all saves."""

    def forbidden(*_, **__):
        raise AssertionError("a router decoded")

    contents = [np.random.default_rng(i).bytes(10_000) for i in range(20)]
    body = json.dumps(chat([*map(picture, contents), {"type": "text", "text": "?"}]))
    for owner, name in ((base64, "b64decode"), (base64, "decodebytes"), (Image, "open"), (Image, "frombytes")):
        monkeypatch.setattr(owner, name, forbidden)
    seen = look(json.loads(body))
    assert len(seen.images) == 20
    assert len(Affinity().order(seen, IDLE)) == 8


def test_other_rules():
    assert LeastLoaded().order(SeenImages(), {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    turns = RoundRobin()
    firsts = []
    for _ in range(4):
        firsts.append(turns.order(SeenImages(), {"a": 9, "b": 0, "c": 0})[0])
        turns.sent(SeenImages(), firsts[-1])
    assert firsts == ["a", "b", "c", "a"]
    assert isinstance(rule_of("least-loaded"), LeastLoaded)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Affinity(0.5), "factor must be a number of at least 1, got 0.5"),
        (lambda: Affinity(slack=-1), "slack must be a non-negative integer, got -1"),
        (lambda: rule_of("random"), "rule must be one of bounded, hash, least-loaded, round-robin, got 'random'"),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

import tracemalloc

import numpy as np
import pytest
from blake3 import blake3

from vlcache_jax.cache.keys import _digest, alias_key, content_key, context_keys, entry_key, owner_key


@pytest.fixture
def rgb():
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


SETTINGS = {"min_pixels": 3136, "max_pixels": 12845056, "mean": (0.5, 0.5, 0.5), "resample": 3}
ENTRY = {
    "content": "c" * 64,
    "settings": SETTINGS,
    "fingerprint": "model",
    "codec": "bfloat16",
    "salt": "salt",
    "format_version": 1,
}


def make_entry_key(**changes):
    parts = {**ENTRY, **changes}
    return entry_key(parts.pop("content"), **parts)


def test_keys_are_whole_digests(rgb):
    for key in (content_key(rgb), alias_key(b"file"), make_entry_key()):
        assert len(key) == 64
        assert set(key) <= set("0123456789abcdef")


def test_content_key_is_stable_across_processes_and_versions():
    # Written out from the definition: a list of four; of each a letter, the length in 8 bytes, the content.
    framed = (
        b"l"
        + bytes(7)
        + b"\x04"
        + b"s"
        + bytes(7)
        + b"\x04rgb8"
        + b"i"
        + bytes(7)
        + b"\x011"
        + b"i"
        + bytes(7)
        + b"\x012"
    )
    framed += b"b" + bytes(7) + b"\x06" + bytes(range(6))
    pixels = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    assert content_key(pixels) == blake3(framed).hexdigest()


def test_every_pixel_counts_in_the_content_key(rgb):
    key = content_key(rgb)
    for index in np.ndindex(rgb.shape):
        changed = rgb.copy()
        changed[index] ^= 1
        assert content_key(changed) != key


def test_the_shape_counts_in_the_content_key():
    pixels = np.zeros((4, 6, 3), np.uint8)
    shapes = [(4, 6, 3), (6, 4, 3), (2, 12, 3), (1, 24, 3), (24, 1, 3)]
    assert len({content_key(pixels.reshape(shape)) for shape in shapes}) == len(shapes)


def test_the_memory_layout_does_not_count_in_the_content_key(rgb):
    assert content_key(np.asfortranarray(rgb)) == content_key(rgb)
    assert content_key(rgb[:, ::-1][:, ::-1]) == content_key(rgb)


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 2, 3), np.float32), np.zeros((2, 2), np.uint8), np.zeros((2, 2, 4), np.uint8)]
)
def test_content_key_refuses_other_arrays(wrong):
    with pytest.raises(ValueError, match=r"rgb must be uint8 \[H, W, 3\], got"):
        content_key(wrong)


def test_large_buffers_are_hashed_without_a_copy():
    rgb = np.zeros((2048, 2048, 3), np.uint8)
    encoded = bytes(rgb.nbytes)
    tracemalloc.start()
    content_key(rgb)
    alias_key(encoded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024


def test_alias_key_depends_on_bytes_and_salt():
    keys = [
        alias_key(b"file"),
        alias_key(b"filf"),
        alias_key(b"file", "a"),
        alias_key(b"file", "b"),
        alias_key(b"file", ""),
    ]
    assert len(set(keys)) == len(keys)
    assert alias_key(b"file", "a") == keys[2]


@pytest.mark.parametrize(
    "change",
    [
        {"content": "d" * 64},
        {"settings": {**SETTINGS, "max_pixels": 12845055}},
        {"settings": {**SETTINGS, "min_pixels": 3137}},
        {"settings": {**SETTINGS, "mean": (0.5, 0.5, 0.5000001)}},
        {"settings": {**SETTINGS, "patch_size": 14}},
        {"settings": {}},
        {"fingerprint": "other"},
        {"codec": "float32"},
        {"salt": None},
        {"salt": ""},
        {"salt": "Salt"},
        {"format_version": 2},
    ],
)
def test_every_component_changes_the_entry_key(change):
    assert make_entry_key(**change) != make_entry_key()


def test_entry_key_ignores_the_order_of_settings():
    assert make_entry_key(settings=dict(reversed(SETTINGS.items()))) == make_entry_key()


def text(*token_ids):
    return np.array(token_ids, np.int32)


def context_key(before):
    """Of an image behind these."""
    return list(context_keys([*before, "x" * 64]))[-1]


def test_context_key_tells_all_contexts_apart():
    a, b = "a" * 64, "b" * 64
    contexts = [
        [],
        [text()],
        [text(), text()],
        [text(0)],
        [text(0, 0)],
        [text(1)],
        [text(256)],
        [text(1, 2)],
        [text(2, 1)],
        [text(1), text(2)],
        [a],
        [a, a],
        [a + a],
        [a, b],
        [b, a],
        [a + b],
        [np.frombuffer(a.encode(), np.int32)],  # an image is not the text of the same bytes
        [text(1), a],
        [a, text(1)],
        [text(1), a, text(2)],
        [text(2), a, text(1)],
        [text(1, 2), a],
        [text(1), a, text(), b],
        [text(1), a, b],
        [text(1), b, text(), a],
        [text(1), b, text(2)],
    ]
    assert len({context_key(before) for before in contexts}) == len(contexts)


def test_context_key_is_stable_across_processes_and_layouts():
    def sized(letter, content):
        return letter + len(content).to_bytes(8) + content

    framed = sized(b"b", bytes([7, 0, 0, 0, 0, 1, 0, 0])) + sized(b"s", b"k" * 64)
    expected = blake3(framed).hexdigest()
    for token_ids in (text(7, 256), text(7, 0, 256)[::2], np.array([7, 256], ">i4"), np.array([7, 256])):
        assert context_key([token_ids, "k" * 64]) == expected


def test_owner_key_tells_salts_apart_and_does_not_show_them():
    keys = {owner_key(salt) for salt in (None, "", "a", "A", "None", "owner")}
    assert len(keys) == 6
    assert all(len(key) == 64 for key in keys)
    with pytest.raises(ValueError, match="cache_salt must be a string or None, got 3"):
        owner_key(3)


def test_framing_tells_all_lists_of_parts_apart():
    lists = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        ("", "abc"),
        (b"abc",),
        (("abc",),),
        (("ab", "c"),),
        (("ab",), "c"),
        ({"ab": "c"},),
        ({"a": "bc"},),
        ({"ab": "c"}, None),
        (),
        ((),),
        ({},),
        (None,),
        (None, None),
        (False,),
        (True,),
        (0,),
        (1,),
        ("1",),
        (b"1",),
        (1.0,),
        (-1,),
        (1, 2),
        (12,),
        (0.0,),
        (-0.0,),
        (2**70,),
        ("",),
        (b"",),
        ("n",),
        (b"s\x00\x00\x00\x00\x00\x00\x00\x01a",),
        ("a",),
    ]
    assert len({_digest(*parts) for parts in lists}) == len(lists)


def test_framing_refuses_what_it_cannot_tell_apart():
    with pytest.raises(TypeError, match="part of a key must be a plain value, got set"):
        make_entry_key(settings={"a": {1, 2}})

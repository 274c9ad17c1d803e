"""Where the library at the models' release and the library of today differ: one test a row.

| | release (4.49, 4.57) | today (5.24) | here, and why |
|---|---|---|---|
| text behind a video, Qwen2-VL and Qwen2.5-VL | behind the greatest position of all axes | behind the size of a frame | release: the weights were trained so, and the paper says it |
| markers around a video, Qwen3-VL | replaced with the placeholder | stay around the chunks' own | release: trained so |
| frames without a rate | 2 a second (Qwen2.5-VL) | 24 a second | release: Qwen's utility says so for every family |
| seconds of a chunk that are no integers | 4.49 keeps them, 4.57 cuts them off | kept | today: absolute time is what was trained, and 4.49 did it |
| `rope_theta` left out, Qwen3-VL | 5e6 | 5e5 | release: what the published files say |
| `rope_theta` left out, Qwen3.5 | not looked up | 1e4 | 1e7: what the published files say |
| `tie_word_embeddings` where levels disagree | that of the text | that of the top (Qwen2-VL, Qwen2.5-VL: any) | today: the library saves true in the text of untied experts; a head too many is refused, without one it embeds |
| transparent pictures in files | black or white, as the hidden colours are | so too, painted on nothing | white: Qwen's utility and vLLM paint them so |
| learned positions in bfloat16, Qwen3-VL | weights and sums rounded | float32, rounded once | today: nearer to float32 |
"""  # noqa: E501 -- a table

from __future__ import annotations

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests import release
from vlcache_jax.convert.plan import PlanError
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.inputs.images import read_image
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.inputs.prompt import PromptRenderer
from vlcache_jax.inputs.video_processor import VideoProcessor
from vlcache_jax.inputs.videos import NO_OPTIONS, read_video
from vlcache_jax.models.qwen3_vl import Qwen3VLVisionTower, encoder_tables
from vlcache_jax.models.registry import FAMILIES, load_config
from vlcache_jax.models.rope import mrope_positions
from vlcache_jax.testing import make_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of a family, without weights. Its tokenizer has a token for a blank and what follows it."""
    root = tmp_path_factory.mktemp("rules")

    def make(name):
        if not (root / name).exists():
            make_checkpoint(root / name, name, weights=False, corpus=[" <"] * 9)
        return root / name

    return make


def cut(directory, video):
    """What the model sees of a video, and the processor that says it."""
    config, image = load_config(directory), ImageProcessor.from_pretrained(directory)
    processor = VideoProcessor.from_pretrained(directory, config, image)
    return processor, processor.cut(video.film.head(), NO_OPTIONS, is_file=False)


# The first position of the text behind a video and of the answer: 4 tokens, 4 x 6 patches, 2 frames a second, 4 tokens.
@pytest.mark.parametrize(
    ("name", "frames", "text", "answer"),
    [
        ("qwen2_5_vl", 8, 11, 15),  # today 7, 11
        ("qwen2_5_vl", 20, 23, 27),  # today 7, 23
        ("qwen2_vl", 8, 8, 12),  # today 7, 11
        ("qwen2_vl", 20, 14, 18),  # today 7, 14
    ],
)
def test_text_behind_a_video(directory, name, frames, text, answer):
    chunks, config = frames // 2, load_config(directory(name))
    times = FAMILIES[name].video.times(config.vision, chunks, 1.0)
    starts = [4 + 6 * i for i in range(chunks)]
    positions, delta = mrope_positions(8 + 6 * chunks, starts, [(2, 3)] * chunks, times)
    assert positions[:, -4:].tolist() == [list(range(text, text + 4))] * 3
    assert positions.shape[1] + delta == answer
    is_text = np.repeat([True, False, True], [4, 6 * chunks, 4])
    expected = release.rope_index(is_text, [(chunks, 2, 3)], [times[1]])
    np.testing.assert_array_equal(positions, expected[0])
    assert delta == expected[1]


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What?",
        "See <|vision_start|><|video_pad|><|vision_end|> and <|vision_start|><|video_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>",
        "<|im_start|><|video_pad|>",
        "See <|video_pad|>.",
        "<|vision_start|><|video_pad|>.<|vision_end|>",
    ],
)
def test_markers_around_a_video(directory, text):
    """And the text of the first time is one with what stands before it, as if the whole had been tokenised at once."""
    renderer = PromptRenderer.from_pretrained(directory("qwen3_vl"))
    tokens = lambda words: np.array(renderer.tokenizer(words)["input_ids"], np.int32)  # noqa: E731
    assert len(tokens(" <")) == 1
    videos = FAMILIES["qwen3_vl"].video
    shown = [videos.text(seconds) for seconds in ([0.25, 1.25], [3.0])][: text.count("<|video_pad|>")]
    expected = release.with_videos(text, [one.replace("<|video_pad|>", "<|video_pad|>" * 3) for one in shown])
    insets = [renderer.expander.video_inset(one, 3, videos.markers) for one in shown]
    ids, starts, lengths = renderer.expander.expand(tokens(text), insets)
    assert ids.tolist() == tokens(expected).tolist()
    assert renderer.expander.expansion(tokens(text), insets).length == len(ids)
    pad = renderer.video_token_id
    assert [ids[start : start + 3].tolist() for start in starts] == [[pad] * 3] * len(lengths)
    assert not any(ids[start - 1] == pad or ids[start + 3 : start + 4].tolist() == [pad] for start in starts)


def test_ids_that_no_text_has_stay_as_they_came(directory):
    renderer = PromptRenderer.from_pretrained(directory("qwen3_vl"))
    inset = renderer.expander.video_inset("<1.0 seconds><|vision_start|><|video_pad|><|vision_end|>", 2)
    given = np.array([0xC3, 32, renderer.video_token_id], np.int32)  # half a letter
    assert renderer.expander.expand(given, [inset])[0][:3].tolist() == [0xC3, 32, ord("<")]


def test_frames_without_a_rate(directory):
    with pytest.warns(UserWarning, match="video should have fps: 2 frames per second are assumed"):
        video = read_video(np.zeros((10, 56, 56, 3), np.uint8))
    processor, seen = cut(directory("qwen2_5_vl"), video)
    assert (processor.times(seen), seen.step) == ((0, 2, 4, 6, 8), 1.0)
    processor, seen = cut(directory("qwen3_vl"), video)
    assert processor.text(seen).startswith("<0.2 seconds><|vision_start|><|video_pad|><|vision_end|><1.2 seconds>")


@pytest.mark.parametrize(
    ("fps", "times"),
    [
        (4.0, (0, 1, 2, 3, 4)),  # 4.57: all 0
        (4 / 3, (0, 3, 6, 9, 12)),  # 4.57: 0, 2, 4, 6, 8
    ],
)
def test_fractional_seconds(directory, fps, times):
    video = read_video(np.zeros((10, 56, 56, 3), np.uint8), metadata={"fps": fps})
    processor, seen = cut(directory("qwen2_5_vl"), video)
    assert processor.times(seen) == times


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen3_vl", 5e6), ("qwen3_vl_moe", 5e6), ("qwen3_5", 1e7), ("qwen3_5_moe", 1e7)]
)
def test_rope_theta(tmp_path, name, expected):
    path = make_checkpoint(tmp_path, name, weights=False) / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config))
    assert load_config(tmp_path).text.rope_theta == expected


@pytest.mark.parametrize(
    ("name", "has_head", "top", "text", "expected"),
    [
        ("qwen2_5_vl", False, False, True, True),
        ("qwen2_5_vl", False, True, False, True),  # 4.57 would draw a head
        ("qwen3_vl", True, False, True, False),  # 4.57 would take the embeddings
        ("qwen3_vl", False, True, False, True),  # 4.57 would draw a head
        ("qwen3_vl", False, False, True, True),  # today's library would draw a head; with a warning that it embeds
        ("qwen3_vl", True, True, False, "lm_head"),
    ],
)
def test_tied_embeddings_where_the_levels_disagree(tmp_path, name, has_head, top, text, expected):
    path = make_checkpoint(tmp_path, name, tie_word_embeddings=not has_head) / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = top, text
    path.write_text(json.dumps(config))
    if expected == "lm_head":
        with pytest.raises(PlanError, match=expected):
            open_checkpoint(tmp_path, dtype="float32")
    else:
        assert open_checkpoint(tmp_path, dtype="float32").config.tie_word_embeddings is expected


def test_learned_positions_in_bfloat16(directory):
    config = load_config(directory("qwen3_vl")).vision
    tower = nnx.eval_shape(lambda: Qwen3VLVisionTower(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    learned = rng.standard_normal((config.num_position_embeddings, config.hidden_size)).astype(jnp.bfloat16)
    tables = encoder_tables(config, [(1, 14, 10)], 140)
    taps, weights = np.asarray(learned, np.float64)[tables["tap"]], tables["tap_weight"][:, :, None]
    exact = (taps * weights).sum(axis=1)

    def rounded(values):
        return np.asarray(values, jnp.bfloat16).astype(np.float64)

    at_release = 0.0
    for i in range(4):
        at_release = rounded(at_release + rounded(taps[:, i] * rounded(weights[:, i])))
    tower.pos_embed.embedding = nnx.Param(jnp.asarray(learned))
    tower.patch_embed = lambda *_: np.zeros((140, config.hidden_size), jnp.bfloat16)
    tower.blocks, tower.merger = nnx.List([]), lambda x: x
    ours = np.asarray(tower(None, None, {**tables, "start": None, "end": None})[0], np.float64)
    assert np.abs(ours - exact).max() <= 2.0**-8 * np.abs(exact).max()
    assert np.linalg.norm(ours - exact) < np.linalg.norm(at_release - exact) / 1.5


def test_transparent_pictures():
    picture = Image.new("RGBA", (30, 20), (0, 0, 0, 0))
    picture.paste((0, 0, 0, 255), (5, 5, 10, 10))
    file = io.BytesIO()
    picture.save(file, "PNG")
    for given in (picture, file.getvalue()):
        rgb = read_image(given).decode()
        assert (rgb[0, 0].tolist(), rgb[7, 7].tolist()) == ([255] * 3, [0] * 3)

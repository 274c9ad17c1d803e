"""Videos before the model: which frames, in which size, seen when; against the library's own functions."""

from __future__ import annotations

import base64
import builtins
import dataclasses
import importlib
import io
import itertools
import json
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from PIL import Image

from tests.inputs.test_images import fetched
from vlcache_jax.assets import PICTURES
from vlcache_jax.inputs import images
from vlcache_jax.inputs.access import Access
from vlcache_jax.inputs.messages import read_settings
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.inputs.prompt import IMAGE_TOKEN, VIDEO_TOKEN, PromptRenderer
from vlcache_jax.inputs.video_processor import KINDS, VideoProcessor
from vlcache_jax.inputs.videos import NO_OPTIONS, VideoFile, VideoHeader, VideoOptions, read_video
from vlcache_jax.models import load_config

FPS = {"fps": 2.0}


def noise(count, height=40, width=60):
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def processor(request, checkpoints):
    directory = checkpoints(request.param)
    return VideoProcessor.from_pretrained(directory, load_config(directory), ImageProcessor.from_pretrained(directory))


@pytest.fixture(scope="module")
def library():
    """The library's modules of video processors. They ask for torchvision when they are imported, but what is compared
    here does not use it."""
    pytest.importorskip("torch")
    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    before = {name: sys.modules.get(name) for name in names}
    sys.modules |= {name: types.ModuleType(name) for name in names}
    try:
        return {
            f"Qwen{i}VLVideoProcessor": importlib.import_module(
                f"transformers.models.qwen{i}_vl.video_processing_qwen{i}_vl"
            )
            for i in (2, 3)
        }
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def theirs(library, processor):
    """The library's module for this kind, and its class."""
    [kind] = [name for name, kind in KINDS.items() if kind is processor.kind]
    return library[kind], vars(library[kind])[kind]


def head(frames, fps=24.0, height=40, width=60):
    return VideoHeader(frames, height, width, fps, None, frames)


@pytest.mark.parametrize("asked", [{"fps": 2}, {"fps": 0.7}, {"num_frames": 6}, {"fps": 5, "min_frames": 6}])
def test_frames_are_the_librarys(library, processor, asked):
    _, kind = theirs(library, processor)
    for frames, fps in itertools.product((4, 7, 31, 100, 301, 2000), (23.976, 5.0)):
        if asked.get("num_frames", 0) > frames:
            continue
        metadata = types.SimpleNamespace(total_num_frames=frames, fps=fps)
        own = types.SimpleNamespace(
            num_frames=None, fps=None, min_frames=asked.get("min_frames", 4), max_frames=40, temporal_patch_size=2
        )
        given = {key: asked[key] for key in ("fps", "num_frames") if key in asked}
        expected = [int(i) for i in kind.sample_frames(own, metadata, **given)]
        cut = processor.cut(head(frames, fps), VideoOptions(**asked, max_frames=40), is_file=True)
        assert list(dict.fromkeys(i for chunk in cut.chunks for i in chunk)) == expected
        assert all(len(chunk) == 2 for chunk in cut.chunks)
        assert cut.step == pytest.approx(2 / (len(expected) / frames * fps))


def test_sizes_are_the_librarys(library, processor):
    module, _ = theirs(library, processor)
    counts = module.smart_resize.__code__.co_varnames[0] == "num_frames"
    block = processor.image.patch_size * processor.image.merge_size
    limits = {"min_pixels": 20_000, "max_pixels": 200_000}
    for frames, height, width in itertools.product((2, 3, 4, 9, 30), (20, 70, 333, 1080), (33, 84, 640, 1920)):
        given = {"num_frames": frames} if counts else {}
        expected = module.smart_resize(height=height, width=width, factor=block, **given, **limits)
        own = dataclasses.replace(processor, **limits)
        cut = own.cut(head(frames, 1.0, height, width), NO_OPTIONS, is_file=False)
        side = processor.image.patch_size
        assert cut.grid == (1, expected[0] // side, expected[1] // side), (frames, height, width)


def test_times_are_the_librarys(processor):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    for frames, fps in ((7, 3.0), (10, 23.976)):
        cut = processor.cut(head(frames, fps), VideoOptions(), is_file=False)
        assert list(cut.seconds) == Qwen3VLProcessor._calculate_timestamps(None, list(range(frames)), fps)
    numbered = VideoHeader(3, 40, 60, 10.0, (0, 15, 31), 60)
    cut = processor.cut(numbered, VideoOptions(), is_file=False)
    assert (cut.chunks, cut.seconds) == (((0, 1), (2, 2)), (0.75, 3.1))
    assert cut.step == pytest.approx(2 / (3 / 60 * 10))


def test_settings_are_where_the_library_looks(tmp_path, checkpoints):
    directory = checkpoints("qwen3_vl")
    config, image = load_config(directory), ImageProcessor.from_pretrained(directory)
    read = lambda: VideoProcessor.from_pretrained(tmp_path, config, image)  # noqa: E731
    assert (read().max_pixels, read().fps, read().do_sample_frames) == (32 * 32 * 768, 2, True)
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text(
        json.dumps({"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 1, "max_frames": None})
    )
    assert (read().min_pixels, read().max_pixels, read().fps, read().max_frames) == (4096, 25165824, 1, 768)
    nested = {"video_processor": {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_frames": 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert (read().max_pixels, read().min_frames, read().fps) == (2, 3, 2)
    for wrong, message in (
        ({"video_processor_type": "Other"}, "video_processor_type of .* must be Qwen2VLVideoProcessor or"),
        ({"image_mean": [0.1, 0.5, 0.5]}, r"image_mean of .* must match the image processor's \(0.5, 0.5, 0.5\), got"),
        ({"fps": "fast"}, "fps of .* must be a finite number"),
        ({"size": {"shortest_edge": 9, "longest_edge": 2}}, "min_pixels must be at most max_pixels 2, got 9"),
    ):
        (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": wrong}))
        with pytest.raises(ValueError, match=message):
            read()


def test_a_video_in_a_prompt(checkpoints):
    """The placeholder becomes what the library's processors put in its place."""
    renderer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl"))
    text = renderer.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}]}], tokenize=False, add_generation_prompt=True
    )
    families = {name: load_config(checkpoints(name)).model_type for name in ("qwen2_5_vl", "qwen3_vl")}
    from vlcache_jax.models.registry import FAMILIES

    expected = {
        "qwen2_5_vl": VIDEO_TOKEN * 6,
        "qwen3_vl": "".join(f"<{t} seconds><|vision_start|>{VIDEO_TOKEN * 3}<|vision_end|>" for t in ("0.2", "1.5")),
    }
    for name, family in families.items():
        videos = FAMILIES[family].video
        inset = renderer.expander.video_inset(videos.text([0.25, 1.5]), 3, videos.markers)
        ids, starts, lengths = renderer.expander.expand(
            np.array(renderer.tokenizer(text)["input_ids"], np.int32), [inset]
        )
        replaced = VIDEO_TOKEN if name == "qwen2_5_vl" else f"<|vision_start|>{VIDEO_TOKEN}<|vision_end|>"
        assert ids.tolist() == renderer.tokenizer(text.replace(replaced, expected[name]))["input_ids"]
        assert lengths.tolist() == [3, 3]
        assert [ids[start : start + 3].tolist() for start in starts] == [[renderer.video_token_id] * 3] * 2


def test_pairs_with_metadata(checkpoints):
    """As vLLM has them, alone and in a list; numbers of frames may be an array."""
    renderer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl"))
    told = {"duration": 2.0, "video_backend": "opencv", "do_sample_frames": False}
    pair = noise(4), {"fps": 2.0, "frames_indices": np.arange(4) * 15, "total_num_frames": np.int64(60), **told}
    for data, count in ((pair, 1), ([pair, pair], 2)):
        text = count * f"<|vision_start|>{VIDEO_TOKEN}"
        prompt = renderer.from_prompt({"prompt": text, "multi_modal_data": {"video": data}})
        heads = [source.film.head() for source in prompt.videos]
        assert heads == [VideoHeader(4, 40, 60, 2.0, (0, 15, 30, 45), 60)] * count
        assert [source.options for source in prompt.videos] == [VideoOptions(do_sample_frames=False)] * count
    asked = {"mm_processor_kwargs": {"do_sample_frames": True}}  # comes before what the metadata say, as in vLLM
    prompt = renderer.from_prompt({"prompt": VIDEO_TOKEN, "multi_modal_data": {"video": pair}, **asked})
    assert prompt.videos[0].options == VideoOptions(do_sample_frames=True)


@pytest.mark.parametrize("kind", ["uint8", "float32", "float16", "int64"])
def test_tensors_are_frames(kind, processor, checkpoints):
    """Of torch and of numpy, channels first or last."""
    torch = pytest.importorskip("torch")
    frames = noise(4)
    expected = cut_of(processor, checkpoints, frames, fps=2)
    last = torch.from_numpy(frames).to(getattr(torch, kind))
    for value in (last, last.permute(0, 3, 1, 2), last.permute(0, 3, 1, 2).contiguous().numpy(), last.numpy()):
        film = read_video(value, metadata=FPS).film
        assert cut_of(processor, checkpoints, value, fps=2) == expected
        np.testing.assert_array_equal(list(film.decode(range(4))), frames)
    assert read_video(last, metadata=FPS).film.same != read_video(last[:2], metadata=FPS).film.same
    with pytest.raises(ValueError, match=r"^video must be an array .*, got a Parameter: .* Use tensor.detach"):
        read_video(torch.nn.Parameter(last.float()), metadata=FPS)


def test_what_qwens_utility_returns(processor, checkpoints):
    """Its videos, and its arguments of them, as they are: nothing is sampled again, and nothing warns."""
    torch = pytest.importorskip("torch")
    renderer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl"))
    tensors = [torch.from_numpy(noise(count)).permute(0, 3, 1, 2).float() for count in (4, 8)]

    def cuts(videos, images=None, **asked):
        text = f"{VIDEO_TOKEN}\n" * len(videos or []) + f"{IMAGE_TOKEN}\n" * len(images or [])
        data = {"image": images, "video": videos}
        prompt = renderer.from_prompt(
            {"prompt": text or "none", "multi_modal_data": data, "mm_processor_kwargs": asked}, name="prompts[1]"
        )
        assert len(prompt.images) == len(images or [])
        return [processor.cut(one.film.head(), one.options, is_file=False) for one in prompt.videos]

    for asked in ({"fps": [2.0, 0.5]}, {"fps": (2.0, 0.5), "do_sample_frames": False}):
        assert [(len(one.chunks), one.step) for one in cuts(tensors, **asked)] == [(2, 1.0), (4, 4.0)]
    assert cuts(None, fps=[], do_sample_frames=False) == []
    assert cuts(None, [Image.new("RGB", (56, 56))], fps=[], do_sample_frames=False) == []
    told = [  # a part of a film, from its seconds 2 to 4; and frames whose rate was said
        {"fps": 30.0, "frames_indices": torch.tensor([60, 80, 99, 119]), "total_num_frames": 60, "video_backend": "a"},
        {"fps": 29.97, "frames_indices": list(range(8)), "total_num_frames": 8 / 0.5 * 29.97},
    ]
    first, second = cuts(list(zip(tensors, told, strict=True)), do_sample_frames=False)
    assert (first.chunks, first.step) == (((0, 1), (2, 3)), 1.0)
    assert first.seconds == pytest.approx((70 / 30, 109 / 30))
    assert (len(second.chunks), second.step) == (4, pytest.approx(4.0))
    for rates in ([], [2.0], [1.0, 2.0, 3.0]):
        message = rf"^prompts\[1\] mm_processor_kwargs fps must be one .*, got {len(rates)} for 2 videos$"
        with pytest.raises(ValueError, match=message):
            cuts(tensors, fps=rates)
    with pytest.raises(ValueError, match=r"^prompts\[1\] mm_processor_kwargs fps must be a finite number .*, got 'x'"):
        cuts(tensors, fps=[2.0, "x"])
    with pytest.raises(ValueError, match=r"^mm_processor_kwargs fps must be a finite number .*, got \[2.0\]"):
        read_settings({"fps": [2.0]}, of_request=False)  # an engine's videos are not counted


def test_rates_of_a_conversations_videos(checkpoints):
    renderer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl"))
    messages = [{"role": "user", "content": [part_of(noise(4)), part_of(noise(4), fps=5)]}]
    prompt = renderer.from_conversation(messages, settings=read_settings({"fps": [1.0, 2.0]}))
    assert [one.film.fps for one in prompt.videos] == [1.0, 5]  # what stands beside a video comes first
    with pytest.raises(ValueError, match=r"^conversation mm_processor_kwargs fps must be .* got 1 for 2 videos"):
        renderer.from_conversation(messages, settings=read_settings({"fps": [1.0]}))
    assert renderer.alone(messages[0]["content"][0], {"fps": [3.0]}).videos[0].film.fps == 3.0


def part_of(value, **said):
    return {"type": "video", "video": value, **said}


def cut_of(processor, checkpoints, value, **said):
    source = PromptRenderer.from_pretrained(checkpoints("qwen3_vl")).video(part_of(value, **said))
    return processor.cut(source.film.head(), source.options, is_file=source.film.digest is not None)


def test_the_rate_of_frames(processor, checkpoints):
    """As Qwen's utility has it: beside frames `fps` is theirs, as `sample_fps` is, unless their metadata say it."""
    frames = list(noise(8))
    for said in ({"fps": 4}, {"sample_fps": 4.0}, {"video_metadata": {"fps": 4}}):
        cut = cut_of(processor, checkpoints, frames, **said)
        assert (len(cut.chunks), cut.step, cut.seconds[-1]) == (4, 0.5, 1.625)
    for said in ({"sample_fps": 4.0}, {"video_metadata": {"fps": 4}}):
        cut = cut_of(processor, checkpoints, frames, fps=2, **said)
        assert (len(cut.chunks), cut.step) == (2, 1.0)


def test_the_same_frames_at_other_rates_are_other_videos(checkpoints):
    renderer, frames = PromptRenderer.from_pretrained(checkpoints("qwen3_vl")), noise(4)
    films = [renderer.video(part_of(frames, fps=fps)).film for fps in (1, 2, 2)]
    assert films[0].same != films[1].same == films[2].same


def test_frames_of_a_longer_film_are_sampled_by_its_seconds(processor, checkpoints):
    """20 frames, one a second."""
    metadata = {"fps": 30, "frames_indices": [30 * i for i in range(20)], "total_num_frames": 600}
    cut = cut_of(processor, checkpoints, noise(20), fps=0.5, video_metadata=metadata)
    assert (len(cut.chunks), cut.step) == (5, 4.0)


@pytest.mark.parametrize(("height", "width"), [(333, 640), (75, 103), (1080, 1920)])
def test_areas_are_those_of_qwens_utility(processor, height, width):
    """Limits beside a video are of each frame, in every family."""
    block = processor.image.patch_size * processor.image.merge_size
    side = processor.image.patch_size
    for frames, given in itertools.product(
        (4, 5, 20),
        (
            {"min_pixels": 4 * block**2, "max_pixels": 30 * block**2},
            {"min_pixels": 90 * block**2, "max_pixels": 100 * block**2},
            {"min_pixels": 4 * block**2, "max_pixels": 60 * block**2, "total_pixels": 200 * block**2},
            {"min_pixels": 20 * block**2, "max_pixels": 60 * block**2, "total_pixels": 20 * block**2},
            {"max_pixels": 2 * block**2},
            {"resized_height": 100, "resized_width": 213},
            {"resized_height": 9, "resized_width": 40},
        ),
    ):
        cut = processor.cut(head(frames, 1.0, height, width), VideoOptions(**given), is_file=False)
        wish = given
        if "resized_height" not in given:
            least, most = given.get("min_pixels", 0), given["max_pixels"]
            if "total_pixels" in given:
                most = min(most, max(given["total_pixels"] / frames * 2, int(least * 1.05)))
            wish = {"min_pixels": least, "max_pixels": most}
        expected = fetched(height, width, block, wish)
        assert cut.grid == (1, expected[0] // side, expected[1] // side), (frames, given)


def test_a_part_of_a_file(processor, checkpoints, tmp_path):
    """Seconds, from the first frame at or after the start to the last one at or before the end."""
    data = encoded(np.repeat(noise(2), 10, axis=0))  # 5 a second
    told = {"video_start": 0.5, "video_end": 2.1}
    cut = cut_of(processor, checkpoints, data, do_sample_frames=False, **told)
    assert cut.chunks == ((3, 4), (5, 6), (7, 8), (9, 10))
    assert (cut.seconds[0], cut.step) == (pytest.approx(0.7), pytest.approx(0.4))
    cut = cut_of(processor, checkpoints, data, nframes=4, **told)
    chosen = [i for chunk in cut.chunks for i in chunk]
    assert (len(chosen), chosen[0]) == (4, 3)
    assert max(chosen) <= 10
    assert cut.step == pytest.approx(2 / (4 / 8 * 5))


def test_settings_of_a_request(checkpoints):
    """`mm_processor_kwargs` of the engine, the request and beside the video: the nearest counts."""
    renderer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl"))
    renderer.video_options = VideoOptions(fps=1, max_frames=9)
    data = encoded(noise(4))

    def options(asked, **said):
        prompt = {"prompt": VIDEO_TOKEN, "multi_modal_data": {"video": [part_of(data, **said)]}}
        found = renderer.from_prompt(prompt | {"mm_processor_kwargs": asked})
        told = renderer.from_conversation(
            [{"role": "user", "content": [part_of(data, **said)]}], settings=read_settings(asked)
        )
        assert found.videos[0].options == told.videos[0].options
        assert found.limits == told.limits == {}
        return found.videos[0].options

    assert options(None) == VideoOptions(fps=1, max_frames=9)
    assert options({"fps": 3}) == VideoOptions(fps=3, max_frames=9)
    assert options({"fps": 3, "max_frames": None}, fps=5, max_frames=4) == VideoOptions(fps=5, max_frames=4)
    assert options({"fps": 3}, num_frames=2) == VideoOptions(num_frames=2, max_frames=9)
    assert options({"num_frames": 2}) == VideoOptions(num_frames=2, max_frames=9)


def test_size_is_another_spelling_of_the_limits():
    size = {"shortest_edge": 28 * 28, "longest_edge": 1280 * 28 * 28}
    assert read_settings({"size": size, "fps": 1}) == read_settings(
        {"min_pixels": 28 * 28, "max_pixels": 1280 * 28 * 28, "fps": 1}
    )
    assert read_settings({"size": {"longest_edge": 5}}).limits == {"max_pixels": 5}
    for given, message in (
        ({"size": {"height": 3}}, "size must be a dict with shortest_edge and longest_edge, in pixels of area, got"),
        ({"size": 3}, "size must be a dict with shortest_edge and longest_edge"),
        ({"size": size, "max_pixels": 5}, "size and min_pixels or max_pixels are mutually exclusive, got both"),
        ({"size": {"shortest_edge": 9, "longest_edge": 5}}, "min_pixels must be at most max_pixels 5, got 9"),
        ({"fps": "fast"}, "fps must be a finite number"),
        ({"fps": 1, "num_frames": 2}, "fps and num_frames are mutually exclusive, got both"),
        (
            {"total_pixels": 1},
            "unknown field 'total_pixels'; expected one of min_pixels, max_pixels, size, fps, num_frames, ",
        ),
        (3, "must be a dict with min_pixels, max_pixels, size, fps"),
    ):
        with pytest.raises(ValueError, match=f"^mm_processor_kwargs:? {re.escape(message)}"):
            read_settings(given)


def encoded(frames, container="mp4", codec="mpeg4"):
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as writer:
        stream = writer.add_stream(codec, rate=5)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            writer.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        writer.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("container", ["mp4", "matroska"])  # the second does not say how many frames it has
def test_files(container, tmp_path):
    data = encoded(np.repeat(noise(2), 5, axis=0), container)
    (tmp_path / "a.bin").write_bytes(data)
    film = read_video(tmp_path / "a.bin").film
    assert film.head() == VideoHeader(10, 40, 60, 5.0, None, 10)
    every, some = list(film.decode(range(10))), list(film.decode([0, 7, 7]))
    assert [frame.shape for frame in every] == [(40, 60, 3)] * 10
    np.testing.assert_array_equal(some, [every[0], every[7], every[7]])
    assert film.names([(0, 7)]) == [(film.digest, 0, 7)] == read_video(data).film.names([(0, 7)])
    with pytest.raises(
        ValueError, match="video must have as many frames as its header declares, but frame 10 is missing"
    ):
        list(film.decode([10]))


def test_frames_that_grow_are_not_decoded():
    """Whatever the head says, a frame has no more pixels than are allowed."""
    film = read_video(encoded(noise(4))).film
    for most in (100, 2000):
        with pytest.raises(ValueError, match=r"^video must"):
            list(film.decode([0, 1], most))


def test_a_playlist_opens_nothing(tmp_path):
    """A file that names others is refused, wherever they are."""
    (tmp_path / "a.mp4").write_bytes(encoded(noise(4)))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{tmp_path / 'a.mp4'}\n#EXT-X-ENDLIST\n".encode()
    concat = f"ffconcat version 1.0\nfile '{tmp_path / 'a.mp4'}'\n".encode()
    for value in (playlist, concat):
        with pytest.raises(ValueError, match="video must be a video that FFmpeg can read"):
            read_video(value).film.head()


def test_names_of_encoded_frames():
    def png(frame):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        return file.getvalue()

    one, two = (png(frame) for frame in noise(2))
    film = read_video([one, two, one, noise(1)[0]], metadata=FPS).film
    names = film.names([(0, 1), (2, 1), (0, 2), (3, 3)])
    assert names[0] == names[1] != names[2]
    assert names[3] is None


def sent(frames):
    """JPEG frames as data URLs, and as the one URL in which clients of vLLM send them."""
    texts = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG")
        texts.append(base64.b64encode(file.getvalue()).decode())
    return [f"data:image/jpeg;base64,{text}" for text in texts], f"data:video/jpeg;base64,{','.join(texts)}"


def test_frames_of_one_url_are_the_list_of_them(checkpoints):
    renderer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl"))
    for count in (1, 5):
        urls, url = sent(noise(count))
        expected = read_video(urls, metadata=FPS)
        shapes = [
            ({"type": "video_url", "video_url": {"url": url}}, {}),
            ({"video_url": url.replace("data:video/jpeg", "data:VIDEO/JPEG")}, {}),
            ({"type": "video", "video": url}, {}),
            ({"type": "video", "url": url}, {}),
        ]
        for part, said in shapes:
            found = renderer.video({**part, "video_metadata": FPS, **said})
            assert found.film.same == expected.film.same
            pairs = [(i, i) for i in range(count)]
            assert found.film.names(pairs) == expected.film.names(pairs)
            np.testing.assert_array_equal(
                list(found.film.decode(range(count))), list(expected.film.decode(range(count)))
            )
    with pytest.warns(UserWarning, match="2 frames per second are assumed"):
        assert renderer.video({"video_url": url}).film.fps is None


def test_frames_of_one_url_are_counted_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(images, "_decode_data_url", lambda *_: pytest.fail("a frame was decoded"))
    with pytest.raises(ValueError, match="clip must have 1 to 65536 frames in one URL, got 65537: send a file"):
        read_video("data:video/jpeg;base64," + "," * 65536, metadata=FPS, name="clip")


BAD = {
    "nothing of a URL": ("data:video/jpeg;base64,", {}, "frames[0] must not be empty, got 0 bytes"),
    "a frame of a URL": (f"{sent(noise(1))[1]},@@", {}, "frames[1] must be valid base64, got '@@'"),
    "metadata of a URL": (
        sent(noise(2))[1],
        {"video_metadata": {"fps": 1, "frames_indices": [3]}},
        "must be 2 ascending numbers within",
    ),
    "nothing": ([], {}, "must have 1 to 1048576 frames, got 0"),
    "sizes": ([noise(1)[0], noise(1, 40, 61)[0]], {}, "frames[1] must be 40x60 like the frames before it, got 40x61"),
    "corrupt": (
        b"\0\0\0\x20ftypisom nonsense",
        {},
        "must be a video that FFmpeg can read, got 21 bytes: Invalid data found",
    ),
    "picture file": ((PICTURES / "picture.png").read_bytes(), {}, "its format is none of mov, mp4, m4a, "),
    "array": (
        noise(2)[..., :2],
        {},
        "must be an array [T, H, W, 3] or [T, 3, H, W] of whole numbers from 0 to 255, got uint8 (2",
    ),
    "whole": (noise(2) + 0.5, {}, "from 0 to 255, got float64 from 0.5 to 255.5 in frame 0: scale or round them"),
    "scaled": (noise(2) / np.float32(255), {}, "from 0 to 255, got float32 from 0 to 1 in frame 0: scale or round"),
    "not a number": (np.full((1, 3, 4, 4), np.nan), {}, "from 0 to 255, got float64 from nan to nan in frame 0"),
    "negative": (noise(2).astype(np.int16) - 1, {}, "from 0 to 255, got int16 from -1 to 254 in frame 0"),
    "truth": (noise(2) > 0, {}, "of whole numbers from 0 to 255, got bool (2, 40, 60, 3)"),
    "picture": (Image.new("RGB", (9, 9)), {}, "must be a list of frames, an array [T, H, W, 3] or [T, 3, H, W] of"),
    "frame": ([noise(1)[0], 5], {}, "frames[1] must be a path, bytes"),
    "long and thin": (noise(2, 1, 300), {}, "must have an aspect ratio of at most 200, got 1x300"),
    "order": (noise(4), {"min_frames": 9, "max_frames": 3}, "min_frames must be at most max_frames 3, got 9"),
    "order with the checkpoint": (noise(4), {"fps": 1, "min_frames": 800}, "min_frames must be at most max_frames 768"),
    "both": (noise(4), {"fps": 2, "num_frames": 2}, "fps and num_frames are mutually exclusive, got both"),
    "more than there are": (noise(4), {"num_frames": 6}, "num_frames must be at most its 4 frames, got 6"),
    "rate": (noise(4), {"fps": 0}, "fps must be a finite number from 1e-06 to 1e+06 or null, got 0"),
    "key": (noise(4), {"speed": 2}, "unknown field 'speed'"),
    "metadata": (
        noise(4),
        {"video_metadata": {"speed": 2}},
        "video_metadata: unknown field 'speed'; expected one of fps, ",
    ),
    "numbers": (
        noise(2),
        {"video_metadata": {"fps": 1, "frames_indices": [3, 1]}},
        "must be 2 ascending numbers within",
    ),
    "one side": (
        noise(4),
        {"resized_height": 56},
        "resized_height and resized_width must be set together, got one of them",
    ),
    "two names": (noise(4), {"nframes": 2, "num_frames": 2}, "num_frames and nframes are mutually exclusive, got both"),
    "start of frames": (noise(4), {"video_start": 1}, "video_start and video_end require a video file"),
    "order of seconds": (
        noise(4),
        {"video_start": 3, "video_end": 1},
        "video_start must be at most video_end 1",
    ),
    "order of areas": (
        noise(4),
        {"min_pixels": 12, "max_pixels": 9},
        "min_pixels must be at most max_pixels 9, got 12",
    ),
    "thin": (
        noise(4),
        {"resized_height": 9, "resized_width": 2000},
        "must have an aspect ratio of at most 200, got 9x",
    ),
    "rate of a file": (
        b"abc",
        {"sample_fps": 2},
        "sample_fps applies to frames only, a file has its own rate: set fps",
    ),
    "metadata of a file": (
        b"abc",
        {"video_metadata": FPS},
        "video_metadata applies to frames only, a file has its own",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_videos(name, processor, checkpoints):
    value, said, message = BAD[name]
    renderer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl"))
    if not isinstance(value, bytes):
        said = {"video_metadata": FPS, **said}

    def look():
        source = renderer.video({"type": "video", "video": value, **said}, "videos[3]")
        processor.cut(source.film.head(), source.options, is_file=False, name=source.name)

    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        look()
    assert str(caught.value).startswith("videos[3] ") or "videos[3]: " in str(caught.value)


def test_files_need_pyav(monkeypatch):
    def blocked(name, *args, **options):
        if name == "av":
            raise ImportError(name)
        return real(name, *args, **options)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(
        ValueError, match=re.escape('requires PyAV to decode video files: install "vlcache-jax[video]"')
    ):
        VideoFile("video", b"abc").head()


def test_access_holds_for_videos(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"abc")
    for value in (tmp_path / "a.mp4", [tmp_path / "a.mp4"], "https://example.com/a.mp4"):
        with pytest.raises(ValueError, match=r"allowed_local_media_path|allow_remote_images"):
            read_video(value, access=Access(allowed_local_media_path=None))


def test_decoders_are_imported_ahead(tmp_path, textured_image):
    """What warm-up calls; after it no picture, and no video, imports anything."""
    for name in ("a.png", "b.jpg", "c.webp", "d.gif", "e.bmp", "f.tiff"):
        Image.fromarray(textured_image(30, 40)).save(tmp_path / name)
    program = (
        "import pathlib, sys\n"
        "from vlcache_jax.inputs.videos import import_decoders\n"
        "from vlcache_jax.inputs.images import read_image\n"
        "import_decoders()\n"
        "before = set(sys.modules)\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    assert read_image(path).decode().shape == (30, 40, 3), path\n"
        "try:\n"
        "    import av\n"
        "except ImportError:\n"
        "    pass\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"

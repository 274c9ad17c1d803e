"""Videos through the public engine: against transformers, and reused against cold runs."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from blake3 import blake3
from PIL import Image

import vlcache_jax.engine.prefilling as prefilling
import vlcache_jax.inputs.layout as layout
from tests import release
from tests.helper import BUCKETS
from tests.inputs.test_videos import encoded
from tests.test_llm import open_llm as open_plain_llm
from tests.test_reuse import FORCED, GREEDY, assert_close, chat, falling, kv_records, logits, open_llm, tokens
from vlcache_jax.cache import keys
from vlcache_jax.engine import request as requests
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.inputs.videos import VideoFile
from vlcache_jax.models.rope import mrope_positions
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.policies import Scheduled


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return [{"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}]


def video(frames, fps=2.0, **more):
    return {"type": "video", "video": frames, "video_metadata": {"fps": fps}, **more}


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def film(textured_image):
    """Seven frames of odd sides."""
    return [textured_image(75, 103, seed) for seed in range(7)]


@pytest.fixture(scope="module")
def picture(textured_image):
    return {"type": "image", "image": textured_image(90, 60, 9)}


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def directory(request, checkpoints):
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    engine.reset_mm_cache()
    return engine


@pytest.fixture
def from_records(llm, monkeypatch):
    """What comes again is linked, though its pages may be there."""
    monkeypatch.setattr(llm.service.preparation.planner, "_keeps_pages", False)


@pytest.fixture
def decoded(monkeypatch):
    """The frames that are decoded."""
    frames = []
    for kind in (ImageSource, VideoFile):
        real = kind.decode

        def counted(self, *args, real=real):
            frames.append(self.name)
            return real(self, *args)

        monkeypatch.setattr(kind, "decode", counted)
    return frames


def matches(output):
    return [(one.video, one.chunk, one.match) for one in output.cache.images]


# Parity.


@pytest.mark.slow_for("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe-every", "qwen3_5"])
def test_answers_are_the_librarys(name, checkpoints, load_oracle, film, picture):
    """Videos with times that reach beyond their size and with an odd number of frames, and a picture and text behind:
    tower, logits, and what is said, at the positions of the release."""
    torch = pytest.importorskip("torch")
    model = load_oracle(checkpoints(name))
    config = model.config
    other = [frame[:60, :58] for frame in film[:6]]
    conversation = user("See ", video(other, 0.3), picture, " and ", video(film[:5], 3.0), "? Tell.")
    with open_plain_llm(checkpoints(name), buckets=BUCKETS) as llm:
        [output] = chat(llm, conversation, reuse="off", params=GREEDY)
        answer = output.outputs[0].token_ids
        [score] = llm.score([conversation], [answer], reuse="off", keep_logits=True, use_tqdm=False)
        [request] = llm.service.preparation.identifier.identify(
            [llm.service.renderer.from_conversation(conversation)], lookup=False
        )
        images = list(zip(request.images, request.moments, strict=True))
        rows = [
            np.asarray(llm.service.device.runner.encode([one.patches.pixels], [one.grid]))[:, : one.num_tokens]
            for one, _ in images
        ]
        values = llm.service.preparation.processor.pixel_values
        pixels = [
            torch.tensor(np.concatenate([values(i.patches) for i, m in images if (m is None) == p])) for p in (1, 0)
        ]
        options = ResolvedOptions(reuse=llm.service.policy)
        planned = llm.service.preparation.planner.plan(request, options).layout
    assert [(m.video, m.chunk) for _, m in images if m] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    [chunk, *_, last] = [one.grid for one, moment in images if moment]
    grids = torch.tensor([[3, *chunk[1:]], [3, *last[1:]]])
    still = torch.tensor([one.grid for one, moment in images if moment is None])
    ids = torch.tensor(request.token_ids.astype(np.int64))[None]
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    inputs = {"mm_token_type_ids": kinds, "image_grid_thw": still, "video_grid_thw": grids}
    merged = [(t, h // 2, w // 2) for t, h, w in (*grids[:1].tolist(), *still.tolist(), *grids[1:].tolist())]
    second = getattr(config.vision_config, "tokens_per_second", None)
    steps = [1, 0, 1] if second is None else [second * 2 / 0.3, 0, second * 2 / 3.0]
    if "qwen3" in name:  # text between chunks
        merged, steps = [(1, h, w) for t, h, w in merged for _ in range(t)], [0] * 7
    positions, delta = release.rope_index((kinds == 0).numpy()[0], merged, steps)
    np.testing.assert_array_equal(planned.positions, positions)
    assert planned.delta == delta
    inputs["position_ids"] = torch.tensor(positions)[:, None]
    with torch.no_grad():
        features = model.model.get_video_features(pixels[1], grids)
        levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
        expected = np.stack([torch.cat(level).numpy() for level in levels])
        ours = np.concatenate([row for row, (_, moment) in zip(rows, images, strict=True) if moment], axis=1)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)
        model.model.rope_deltas = None
        out = model(input_ids=ids, pixel_values=pixels[0], pixel_values_videos=pixels[1], use_cache=True, **inputs)
        said, found = [], []
        for i in range(len(answer)):
            found.append(out.logits[0, -1].numpy())
            said.append(int(found[-1].argmax()))
            place = torch.full((3, 1, 1), ids.shape[1] + planned.delta + i)
            cache = {"cache" if hasattr(out, "cache") else "past_key_values": out.past_key_values}
            out = model(input_ids=torch.tensor([said[-1:]]), position_ids=place, **cache)
    assert tuple(said) == answer
    np.testing.assert_allclose(score.logits, np.stack(found), rtol=0, atol=2e-5)


# Reuse.


@pytest.mark.usefixtures("from_records")
def test_the_same_context_is_exact(llm, film, picture):
    """P2: behind the same, a video and a picture are linked as they are, whatever the policy."""
    target = user("One ", video(film[:4]), " two ", picture, video(film[4:], 1.0), " three")
    [first] = chat(llm, target)
    cold = logits(llm, target, reuse="off")
    for reuse in ("exact", 0.3, "full"):
        [output] = chat(llm, target, reuse=reuse)
        assert matches(output) == [(v, c, "exact") for v, c in ((0, 0), (0, 1), (None, None), (1, 0), (1, 1))]
        assert output.cache.exact
        assert output.num_cached_tokens == sum(one.tokens for one in output.cache.images)
        assert tokens([output]) == tokens([first])
        assert_close(logits(llm, target, reuse=reuse), cold)


def test_chunks_hit_in_other_cuts_and_behind_other_text(llm, film, picture, decoded):
    """P1: whatever hits, an answer with everything computed is that of a cold run; nothing that is known is decoded."""
    files = [png(frame) for frame in film[:6]]
    chat(llm, user("Look: ", video(files), picture, " well"))
    llm.cache.flush()  # a request may decode frames whose encoder output is still on its way to the host
    cuts = {"other text": files, "end cut": files[:4], "front cut": files[2:], "both videos": files[2:4]}
    for name, frames in cuts.items():
        behind = [video(files[4:])] if name == "both videos" else []
        target = user("Elsewhere, and longer: ", video(frames), *behind, "?")
        decoded.clear()
        [output] = chat(llm, target, reuse=1)
        assert {one.match for one in output.cache.images} == {"approximate"}, name
        assert {one.encoder for one in output.cache.images} == {"host"}, name
        assert not decoded, name
        cold = chat(llm, target, reuse="off")
        assert tokens([output]) == tokens(cold), name
        assert_close(logits(llm, target, reuse=1), logits(llm, target, reuse="off"))
        decoded.clear()
        [approximate] = chat(llm, target, reuse="full")
        images = sum(one.tokens for one in approximate.cache.images)
        assert approximate.cache.approximate_tokens == images, name
        assert set(approximate.cache.rows) == {
            len(approximate.prompt_token_ids) - images - approximate.num_cached_tokens
        }
        assert not decoded, name
    assert chat(llm, user(video([*files, png(film[6])])), reuse="exact")[0].cache.images[-1].encoder == "computed"
    assert decoded  # the counter does count


def test_a_film_is_not_opened_again(llm, film, decoded, monkeypatch):
    data = encoded(np.repeat([frame[:64, :96] for frame in film], 3, axis=0))
    shown = {"type": "video", "video": data, "num_frames": 6}
    [first] = chat(llm, user(shown, "?"))
    assert len(decoded) == 1
    monkeypatch.setattr(VideoFile, "_opened", lambda self: pytest.fail("it was opened"))
    [again] = chat(llm, user("Now ", shown, "?"))
    assert [one.encoder for one in again.cache.images] == ["host"] * 3
    assert [one.key for one in again.cache.images] == [one.key for one in first.cache.images]
    assert len(decoded) == 1


def test_p3_shrinking_early_changes_nothing(llm, film, monkeypatch):
    chat(llm, user("Elsewhere ", video(film[:4]), video(film[2:6], 1.0)))
    target = user("Two: ", video(film[2:6]), " and ", video(film[:4]), "?")
    policy = Scheduled(falling(llm, 400, 300, 100, 20))
    early = logits(llm, target, reuse=policy)
    real = prefilling.prefill_steps

    def late(*args):
        return [
            dataclasses.replace(step, bounds=(step.bounds[0],) * (len(step.bounds) - 1) + step.bounds[-1:])
            for step in real(*args)
        ]

    monkeypatch.setattr(prefilling, "prefill_steps", late)
    assert_close(logits(llm, target, reuse=policy), early)


def test_time_is_a_part_of_the_context(llm, film):
    """The same frames at another rate: other positions or other text before them, so nothing but the first is exact, in
    records and in pages."""
    seen = set()
    for fps in (2.0, 0.5, 2.0, 0.5):
        target = user("See ", video(film[:6], fps), ".")
        [output] = chat(llm, target)
        assert [one.match for one in output.cache.images][1:] == ["exact" if fps in seen else "miss"] * 2
        assert_close(logits(llm, target), logits(llm, target, reuse="off"))
        seen.add(fps)


def todays_positions(num_tokens, starts, grids, times):
    """What the library of today does, and this package did: text begins behind a video's size, not behind its end."""
    positions, _ = mrope_positions(num_tokens, starts, grids)
    for start, (h, w), time in zip(starts, grids, times, strict=True):
        positions[0, start : start + h * w] += time
    return positions, int(positions.max()) + 1 - num_tokens


def contexts_with_bare_times(parts):
    """The digests under which K, V of such positions were kept."""
    digest = blake3()
    for part in parts:
        if isinstance(part, str):
            yield digest.hexdigest()
        keys._write(digest.update, part.astype("<i4").tobytes() if isinstance(part, np.ndarray) else part)


@pytest.mark.usefixtures("from_records")
def test_what_was_kept_by_another_rule_of_positions_is_not_found(llm, film, picture, monkeypatch):
    """Behind the end of a video; what stands before one, and chunks that no time stands before, are found."""
    target = user(picture, " One ", video(film[:6], 0.3), " two ", picture, " three")
    with monkeypatch.context() as before:
        before.setattr(layout, "mrope_positions", todays_positions)
        before.setattr(requests, "context_keys", contexts_with_bare_times)
        chat(llm, target)
        assert {one.match for one in chat(llm, target)[0].cache.images} == {"exact"}
    expected = ["exact"] * 5 if llm.service.checkpoint.config.model_type == "qwen3_vl" else ["exact"] * 2 + ["miss"] * 3
    assert [one.match for one in chat(llm, target)[0].cache.images] == expected
    assert_close(logits(llm, target), logits(llm, target, reuse="off"))


def test_a_turn_goes_on_behind_what_was_said_about_a_video(llm, film):
    """What is generated stands where the same tokens of a prompt do, and is found as these."""
    shown = user("x" * 100, video(film[:4], 0.05), ".")
    answer = {"role": "assistant", "content": FORCED}
    turn = [*shown, answer, *user("And?")]
    cold = logits(llm, turn, reuse="off")
    for _ in range(2):  # the second time all is linked, and nothing has to be computed whole to be kept
        llm.score([shown], [FORCED], use_tqdm=False)
    [output] = chat(llm, turn)
    assert output.num_cached_tokens >= 128
    assert_close(logits(llm, turn), cold)


def test_rows_of_a_call_may_show_the_same_frames_at_other_rates(llm, film):
    rows = [user("See ", video(film[:4], fps), ".") for fps in (2.0, 0.3)]
    expected = [logits(llm, row, reuse="off") for row in rows]
    assert_close(logits(llm, *rows, reuse="off"), np.concatenate(expected))


def test_what_is_kept_of_a_video(llm, film):
    part = video([png(frame) for frame in film[:4]])
    chat(llm, user(part, "?"))
    count = len(kv_records(llm))
    assert llm.cache.keys(part) == [one.key for one in chat(llm, user(part, "?"))[0].cache.images]
    with pytest.raises(ValueError, match="`keys` returns the keys of a video's chunks"):
        llm.cache.key(part)
    with pytest.raises(ValueError, match=r"image must be a path, .*, video message part or entry key, got \{"):
        llm.cache.pin({"type": "image", "image": film[0]})
    assert llm.cache.pin(part) == 2 * count
    assert llm.cache.evict(part) == 0
    assert llm.cache.delete(part) == 2 * count
    assert [one.match for one in chat(llm, user(part, "?"))[0].cache.images] == ["miss"] * 2
    [salted] = chat(llm, user(part, "?"), cache_salt="other")
    assert [(one.match, one.encoder) for one in salted.cache.images] == [("miss", "computed")] * 2


def test_wrong_videos_are_told_of(llm, film):
    rows = {
        "videos[0] must have 1 to": user(video([]), "?"),
        "videos[1] must be a video that FFmpeg can read": user(video(film[:2]), {"type": "video", "video": b"\0" * 99}),
        "must fit in max_model_len = 1024": user(video(film[:4] * 60), "?"),
        "must be a dict of type text": user({"type": "film", "film": film}),
        "videos[0]: unknown field 'speed'": user(video(film[:2], speed=2)),
    }
    outputs = chat(llm, *rows.values(), on_error="return")
    for message, output in zip(rows, outputs, strict=True):
        assert message in output.error, output.error
    llm.service.renderer.max_videos = 1
    try:
        with pytest.raises(ValueError, match="must have at most 1 videos, got 2"):
            chat(llm, user(video(film[:2]), "and", video(film[:2])))
    finally:
        llm.service.renderer.max_videos = None


def test_prompts_without_a_template(llm, film):
    whole = video(film[:4])
    [expected] = chat(llm, user(whole))
    prompt = {"prompt": expected.prompt, "multi_modal_data": {"video": whole}}
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert tokens([output]) == tokens([expected])
    assert [one.match for one in output.cache.images] == ["exact"] * 2


def test_the_script_of_qwens_model_cards(llm, film, picture):
    """What `process_vision_info` returns beside a prompt of the processor: tensors of floats, channels first."""
    torch = pytest.importorskip("torch")
    image, array = Image.fromarray(picture["image"]), np.stack(film[:4])
    [expected] = chat(llm, user(video(array), picture, "?"))
    tensor = torch.from_numpy(array).permute(0, 3, 1, 2).float()
    metadata = {"fps": 30.0, "frames_indices": [0, 15, 30, 45], "total_num_frames": 60, "video_backend": "decord"}
    for video_inputs, video_kwargs in (
        ([tensor], {"fps": [2.0]}),
        ([tensor], {"do_sample_frames": False, "fps": [2.0]}),
        ([(tensor, metadata)], {"do_sample_frames": False}),
    ):
        data = {"image": [image], "video": video_inputs}
        [output] = llm.generate(
            [{"prompt": expected.prompt, "multi_modal_data": data, "mm_processor_kwargs": video_kwargs}],
            sampling_params=GREEDY,
            use_tqdm=False,
        )
        np.testing.assert_array_equal(output.prompt_token_ids, expected.prompt_token_ids)
        assert tokens([output]) == tokens([expected])
        assert [one.key for one in output.cache.images] == [one.key for one in expected.cache.images]
        assert [one.match for one in output.cache.images] == ["exact"] * 3
    data = {"image": None, "video": None}
    asked = {"do_sample_frames": False, "fps": []}
    assert llm.generate([{"prompt": "Tell.", "multi_modal_data": data, "mm_processor_kwargs": asked}], GREEDY)

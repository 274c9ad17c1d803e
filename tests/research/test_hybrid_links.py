"""`research.linked_layers` against transformers, the engine and the arithmetic of maps; `research.hybrid_links`."""

from __future__ import annotations

import functools
import io

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from research import hybrid_links as links
from vlcache_jax import LLM, BucketSizes, CacheConfig, SamplingParams
from vlcache_jax.assets import TINY_HYBRID, TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.device import kv_shape
from vlcache_jax.models.linear_attention import update_block
from vlcache_jax.reuse.edges import Edges
from vlcache_jax.reuse.policies import spread_ranks
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.study.accuracy import Protocol
from vlcache_jax.study.report import WorkLog

torch = pytest.importorskip("torch")
from research.linked_layers import moved_keys  # noqa: E402


@pytest.fixture(scope="module")
def samples():
    """A question about one image, and one about two."""
    return [load_samples([], questions=1, images=count)[0] for count in (1, 2)]


@pytest.fixture(scope="module", params=["hybrid", "full"])
def study(request, samples, tiny_hybrid):
    torch.set_num_threads(1)
    directory = tiny_hybrid if request.param == "hybrid" else TINY_VQA
    return links.Study(links.LayerWise(directory), samples, links.load_decoys(5))


@pytest.fixture(scope="module")
def tiny_hybrid(tmp_path_factory):
    """The trained hybrid's shape with random weights, whose heads remember from 10 to 5000 tokens."""
    from research.tiny_vqa.train import Trainer

    run = tmp_path_factory.mktemp("run")
    Trainer(run, variant="hybrid", seed=0, learning_rate=0.0).export(run / "model")
    return run / "model"


def differ(one, other):
    return float((one.logits - other.logits).abs().max())


def nothing(kept):
    return [{name: torch.full_like(array, np.nan) for name, array in own.items()} for own in kept]


@pytest.mark.parametrize("i", [0, 1], ids=["one image", "two"])
def test_runs_are_the_librarys_and_all_rows_or_the_same_context_change_nothing(study, samples, i, load_oracle):
    prompt = study.prompt("text_first", i)
    cold = study.model.run(prompt)
    ids = torch.tensor([prompt.ids])
    pixels = study.model.processor([Image.open(io.BytesIO(image)) for image in samples[i].images], return_tensors="pt")
    oracle = load_oracle(study.model.directory)
    with torch.no_grad():
        logits = oracle(input_ids=ids, mm_token_type_ids=(ids == study.model.image_token).int(), **pixels).logits[0]
    np.testing.assert_allclose(cold.logits, logits[-prompt.answer - 1 : -1], atol=2e-5 * float(logits.abs().max()))

    own = [links.image_rows(cold.kept, span) for span in prompt.spans]
    every = links.Setting("all", 100.0, shift=("full", "linear"))
    assert differ(study.linked(prompt, cold, [nothing(kept) for kept in own], every), cold) == 0
    no_rows = {k: links.Link(kept, np.zeros((6, len(kept[0]["k"])), bool)) for k, kept in enumerate(own)}
    assert differ(study.model.run(prompt, no_rows), cold) <= 1e-5
    few = links.Setting("few", 0.0)
    assert torch.isnan(study.linked(prompt, cold, [nothing(kept) for kept in own], few).logits).any()


def test_the_first_layer_is_exact_once_the_convolution_sees_no_other_text(study):
    """P7: its inputs are embeddings and encoder output, which have no context."""
    prompt = study.prompt("text_first", 0)
    cold = study.model.run(prompt)
    [kept] = study.donors("text_first", links.NEUTRAL, 0)
    true = links.image_rows(cold.kept, prompt.spans[0])
    mixed = [*kept[:1], *true[1:]]
    found = {}
    for count in (0, links.LEAST):
        computed = np.tile(np.arange(len(kept[0]["k"])) < count, (6, 1))
        found[count] = differ(study.model.run(prompt, {0: links.Link(mixed, computed)}), cold)
    assert found[links.LEAST] <= 1e-5
    assert (found[0] > 1e-4) == (study.model.kinds[0] == "linear")


def test_an_image_changes_a_state_by_a_map(study):
    """The inputs of the rule, computed in one context, act on another state as A S + B with A and B of their own."""
    if "linear" not in study.model.kinds:
        pytest.skip("no layer has states")
    [kept] = study.donors("text_first", links.NEUTRAL, 0)
    norms = study.model.map_norms(kept)
    rng = np.random.default_rng(0)
    for layer in norms:
        k, v, beta, decay = (kept[layer][name].numpy() for name in ("k", "v", "beta", "decay"))
        k = k.reshape(len(k), 2, 64).swapaxes(0, 1)
        k /= np.sqrt(np.square(k).sum(-1, keepdims=True) + 1e-6)
        v = v.reshape(len(v), 2, 2, 64).transpose(1, 2, 0, 3)
        beta, decay = (x.reshape(len(x), 2, 2).transpose(1, 2, 0) for x in (beta, decay))

        def through(state, values, k=k, beta=beta, decay=decay):
            for first in range(0, k.shape[1], 64):
                own = slice(first, first + 64)
                _, state = update_block(
                    k[:, own], k[:, own], values[:, :, own], beta[:, :, own], decay[:, :, own], state
                )
            return np.asarray(state)

        before = rng.standard_normal((2, 2, 64, 64)).astype(np.float32)
        zeros, unit = np.zeros_like(v), np.broadcast_to(np.eye(64, dtype=np.float32), before.shape)
        # Both parts come from one scan with wider values: [V | 0] from the state [0 | I].
        both = through(jnp.concatenate([jnp.zeros_like(before), unit], -1), np.concatenate([v, zeros], -1))
        b, a = both[..., :64], both[..., 64:]
        np.testing.assert_allclose(a @ before + b, through(before, v), atol=1e-5 * max(1, np.abs(b).max()))
        np.testing.assert_allclose(norms[layer], np.linalg.norm(a, 2, (-2, -1)).ravel(), atol=1e-4)


@pytest.mark.parametrize("ends", [False, True])
def test_maps_link_as_their_inputs_do(study, ends):
    """In the whole model, with two images; codes come near, and a threshold removes A."""
    if "linear" not in study.model.kinds:
        pytest.skip("no layer has states")
    prompt = study.prompt("text_first", 1)
    cold = study.model.run(prompt)
    donors = study.donors("text_first", links.NEUTRAL, 1)

    def error(code, reference=None):
        setting = links.Setting("", 10.0, ends=ends, shift=("full",), code=code)
        run = study.linked(prompt, cold, donors, setting)
        return run if reference is None else differ(run, reference)

    inputs = error(None)
    exact, half, coded, without = (
        error(code, inputs)
        for code in (links.MapCode(), links.MapCode(16), links.MapCode(8), links.MapCode(32, np.inf))
    )
    assert exact <= 2e-5 < half < 0.05
    assert half < coded < without
    assert error(links.MapCode(32, 1e-6), inputs) <= 2e-5


def computed_rows(setting, model, prompt, k):
    """Return whether each layer computes a token of image `k` under a setting of the engine, [layers, tokens]."""
    _, rows, columns = (prompt.grids[k] // torch.tensor([1, 2, 2])).tolist()
    if model == "hybrid":
        first, last = Edges(parse_policy(setting), 3).counts(rows * columns)
        return np.tile(
            (np.arange(rows * columns) < first) | (np.arange(rows * columns) >= rows * columns - last), (6, 1)
        )
    ranks = spread_ranks(rows, columns) if "shift" in setting else np.arange(rows * columns)
    return np.tile(ranks < len(ranks) // 10, (6, 1))


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("full", "0.1"),
        ("full", "shift-0.1"),
        *(("hybrid", name) for name in ("full", "0.1", "ends-0.1", "shift-first-0.1", "shift-ends-0.1")),
    ],
)
def test_the_engine_links_alike(samples, tiny_hybrid, model, setting, monkeypatch):
    """It has the same logits if it computes the same tokens. Its maps are from steps with 64 rows."""
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 1)
    directory = tiny_hybrid if model == "hybrid" else TINY_VQA
    study = links.Study(links.LayerWise(directory), samples, ())
    protocol = Protocol("text_first", donors="neutral")
    sizes = {"buckets": BucketSizes(rows=(64, 256), patches=(1024,), sequences=(4,)), "max_model_len": 1024}
    sizes["reuse"] = setting
    with LLM(directory, dtype="float32", cache=CacheConfig(load="kv"), **sizes) as llm:
        for i in range(2):
            llm.reset_mm_cache()
            llm.cache.precompute(list(samples[i].images))
            prompt = study.prompt("text_first", i)
            answer = prompt.ids[-prompt.answer :]
            [score] = llm.score([protocol.formal(samples, i)], [answer], keep_logits=True, use_tqdm=False)
            assert all(image.match == "approximate" for image in score.cache.images)
            donors = study.donors("text_first", "neutral", i)
            shift = ("full",) * ("shift" in setting)
            linked = {
                k: links.Link(kept, computed_rows(setting, model, prompt, k), shift) for k, kept in enumerate(donors)
            }
            run, cold = study.model.run(prompt, linked), study.model.run(prompt)
            assert differ(run, cold) > 1e-3
            np.testing.assert_allclose(score.logits, run.logits, atol=2e-5 * float(run.logits.abs().max()))


@pytest.mark.parametrize(
    ("setting", "tokens", "first", "last"),
    [
        (links.Setting("", 0.0), 100, 3, 0),
        (links.Setting("", 10.0), 64, 6, 0),
        (links.Setting("", 10.0, ends=True), 100, 5, 5),
        (links.Setting("", 5.0, ends=True), 100, 3, 2),
        (links.Setting("", 0.0, ends=True), 100, 3, 0),
        (links.Setting("", 100.0, ends=True), 7, 7, 7),
        (links.Setting("", 0.0), 2, 2, 0),
    ],
)
def test_tokens_that_are_computed(setting, tokens, first, last):
    rows = setting.computed(tokens, 2)
    assert rows.shape == (2, tokens)
    expected = (np.arange(tokens) < first) | (np.arange(tokens) >= tokens - last)
    assert (rows == expected).all()


def test_a_schedule_computes_fewer_tokens_from_layer_to_layer():
    rows = links.Setting("", (20.0, 10.0, 0.0)).computed(100, 3)
    assert rows.sum(1).tolist() == [20, 10, 3]
    with pytest.raises(ValueError, match="computed must have no token in a layer that the layer before does not"):
        links.Link([], rows[::-1])


def test_shifted_keys_keep_their_lengths(study):
    [kept] = study.donors("text_first", links.NEUTRAL, 0)
    keys, weight = kept[5]["k"], torch.linspace(0.5, 2, 64)
    moved = moved_keys(keys, torch.ones(keys.shape[1:]), weight=weight)
    assert (moved - keys).abs().max() > 0.1
    np.testing.assert_allclose((moved / weight).norm(dim=-1), (keys / weight).norm(dim=-1), rtol=1e-5)


def test_a_resumed_study_equals_one_in_one_go_and_its_table_compares_with_no_reuse(study, samples, tmp_path):
    settings = links.SETTINGS[:1] + links.SETTINGS[-1:]
    measured = functools.partial(links.measure, study, 2, (links.NEUTRAL, links.TOGETHER), settings)
    once = measured(WorkLog(tmp_path / "work", "one"))
    lines = (tmp_path / "work").read_text().splitlines(keepends=True)
    (tmp_path / "work").write_text("".join(lines[: len(lines) // 2]) + '["one", "cut')
    assert measured(WorkLog(tmp_path / "work", "one")) == once
    rows = links.table(samples, once)
    assert len(rows) == 2 * 2 * 2 * 2  # arrangements, donors, settings, numbers of images
    for row in rows:
        assert (row["MSE"] == row["KL"] == row["difference"] == 0) == (row["setting"] == "all rows")
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["worst low"] <= row["difference"]
        assert row["questions"] == 1


def test_a_schedule_comes_from_the_layers_that_matter(study, monkeypatch):
    scores = np.tile(np.linspace(1, 0, len(links.LEVELS)), (6, 1)) * np.array([0, 0, 5, 1, 0, 0])[:, None]
    monkeypatch.setattr(links.Study, "layer_scores", lambda *_: scores)
    five, ten = links.schedules(study, 1)
    assert five.percent[2] > 0 == five.percent[4]
    assert np.mean(ten.percent[1:]) > np.mean(five.percent[1:])
    assert all((np.diff(one.percent) <= 0).all() for one in (five, ten))


def test_sensitivity_falls_with_the_rows_of_a_layer(study, monkeypatch):
    monkeypatch.setattr(links, "LEVELS", np.array([0.0, 100.0]))
    scores = study.layer_scores("text_first", 1)
    assert scores.shape == (6, 2)
    assert scores[:, 1].min() < scores[:, 0].min()
    np.testing.assert_allclose(*scores[0], rtol=1e-3)  # the first layer has no context


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"donors must be one of neutral, .*, got 'mine'"):
        links.chosen("donors", ["mine"], links.DONORS, str)


def test_the_shipped_hybrid_answers_as_transformers_does_and_mostly_right():
    """By the engine, whose tokens are most likely for transformers' modules, too."""
    asked = load_samples([], questions=4)
    model, protocol = links.LayerWise(TINY_HYBRID), Protocol("text_first")
    with LLM(TINY_HYBRID, dtype="float32", buckets=BucketSizes(rows=(256,), patches=(1024,), sequences=(4,))) as llm:
        prompts = [protocol.formal(asked, i) for i in range(len(asked))]
        outputs = llm.chat(prompts, SamplingParams(temperature=0, max_tokens=32), reuse="off", use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert sum(sample.score(text) for sample, text in zip(asked, texts, strict=True)) >= 0.8 * len(asked)
    for conversation, text in zip(prompts, texts, strict=True):
        prompt = model.prompt(conversation, text)
        assert model.run(prompt).logits.argmax(-1).tolist() == prompt.ids[-prompt.answer :]

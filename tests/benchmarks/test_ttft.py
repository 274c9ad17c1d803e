"""Times to the first token: the rows of the table, what is counted, and what must not pass for a measurement."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vlcache_jax import BucketSizes
from vlcache_jax.benchmarks import floor as floor_module
from vlcache_jax.benchmarks import random_models, ttft
from vlcache_jax.benchmarks.floor import DeviceRates, floor, pairs
from vlcache_jax.benchmarks.known_images import edge_ranks
from vlcache_jax.benchmarks.settings import TtftSetup, split_images
from vlcache_jax.benchmarks.ttft import check_found, check_logprobs, check_model, make_engines
from vlcache_jax.benchmarks.ttft_table import SHIFT_ENDS, STEPS
from vlcache_jax.cache.store import Store
from vlcache_jax.commands.cli import app
from vlcache_jax.device import kv_shape
from vlcache_jax.device.checkpoint import policy_for
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.engine.completions import Logprob
from vlcache_jax.models.family import PublishedSize
from vlcache_jax.models.registry import SIZES, load_config, published_config
from vlcache_jax.reuse.policies import Plan
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.model_support import slots_for

CONFIGURATIONS = [
    "cold", "encoder cached", "r = 0.3", "r = 0.2", "r = 0.1", "r = 0", "schedule, mean 0.0333", "shift, r = 0.03",
]  # fmt: skip
ENGINE = {"buckets": BucketSizes(rows=(64,), patches=(64,), sequences=(4,)), "max_rows": 64, "use_tqdm": False}
SETUP = TtftSetup(random_weights="small", layers=3, dtype="float32", images=1, tokens=16, text_before=7, repeats=1)


@pytest.fixture(autouse=True)
def small(monkeypatch, checkpoints):
    """A published shape of four layers, and rates that take no time to measure."""
    file = json.loads((checkpoints("qwen3_vl") / "config.json").read_text())
    monkeypatch.setitem(SIZES, "small", PublishedSize("qwen3_vl", file["text_config"], file["vision_config"]))
    monkeypatch.setattr(ttft, "measure_rates", lambda dtype: DeviceRates(matrix=1e11, memory=1e10, host=float("inf")))
    return load_config(checkpoints("qwen3_vl"))


@pytest.mark.slow
def test_the_table(tmp_path, capsys):
    out, picture = tmp_path / "ttft.json", tmp_path / "ttft.png"
    setup = dataclasses.replace(SETUP, images=None, image_tokens=(16, 24), codecs=("auto", "int8"), repeats=2)
    ttft.measure(setup, out=out, picture=picture, **ENGINE)
    found = json.loads(out.read_text())
    rows = {(row["image tokens"], row["codec"], row["configuration"]): row for row in found["rows"]}
    assert list(rows) == [
        (size, "-" if name in CONFIGURATIONS[:2] else codec, name)
        for size in (16, 24)
        for codec, names in (("auto", CONFIGURATIONS), ("int8", CONFIGURATIONS[2:]))
        for name in names
    ]
    assert found["model"] == "shape of small, random weights, 3 of 4 layers"
    assert found["layers"] == 3
    assert found["rates"] == {"matrix": 1e11, "memory": 1e10, "host": "read where it lies"}
    for (size, codec, name), row in rows.items():
        cold, cached = rows[size, "-", "cold"]["TTFT ms"], rows[size, "-", "encoder cached"]["TTFT ms"]
        assert row["over cold"] == pytest.approx(cold / row["TTFT ms"])
        assert row["over encoder cached"] == pytest.approx(cached / row["TTFT ms"])
        assert row["times floor"] == pytest.approx(row["TTFT ms"] / row["floor ms"])
        compute = row["encode ms"] + row["prefill ms"]
        assert row["TTFT minus compute %"] == pytest.approx(100 * (1 - compute / row["TTFT ms"]))
        assert all(row[f"{step} ms"] >= 0 for step in STEPS)
        assert row["K, V in"] == ("-" if codec == "-" else "host")
        if codec == "int8":  # which is read in fewer bytes
            alike = rows[size, "auto", name]
            assert row["floor ms"] < alike["floor ms"]
            assert [row[key] for key in ("rows a layer", "pairs a layer")] == [
                alike[key] for key in ("rows a layer", "pairs a layer")
            ]
    # Of 16 tokens behind 7 and a mark, and 7 behind them: r = 0.3 computes the first four.
    fresh = [*range(8), *range(8, 12), *range(24, 31)]
    assert rows[16, "auto", "r = 0.3"]["rows a layer"] == len(fresh)
    assert rows[16, "auto", "r = 0.3"]["tokens reused"] == 12
    # The last layer asks for the last token alone.
    seen = [sum(slot <= query for slot in range(31)) for query in fresh]
    assert rows[16, "auto", "r = 0.3"]["pairs a layer"] == pytest.approx((2 * sum(seen) + 31) / 3)
    assert rows[16, "-", "cold"]["pairs a layer"] == pytest.approx((2 * 31 * 32 / 2 + 31) / 3)
    assert np.ptp(np.asarray(Image.open(picture).convert("L"))) > 0
    told = capsys.readouterr().out
    assert all(f"\n{size}" in told for size in (16, 24))
    assert "20 text tokens" not in told
    assert "7 text tokens, images of 1 x 16, 2 x 12 tokens, 6 text tokens" in told


def test_pairs_are_those_of_a_count_one_by_one(small):
    text = dataclasses.replace(small.text, num_layers=5)
    rng = np.random.default_rng(0)
    depth, slot = rng.integers(0, 6, 40).astype(np.int16), rng.permutation(40).astype(np.int32)
    for plan in (Plan(depth), Plan(depth, slot=slot)):
        slots = plan.slots
        expected = tuple(
            sum(int(slots[key] <= slots[query]) for query in range(40) if depth[query] > layer + 1 for key in range(40))
            for layer in range(5)
        )
        assert pairs(plan, text) == expected
        assert expected[-1] < expected[0]


def test_the_floor_reads_what_a_codec_keeps(small):
    plan, given = Plan(np.array([4, 0, 0, 5], np.int16)), DeviceRates(memory=1.0, matrix=1e30)
    values = 2 * small.text.num_kv_heads * small.text.head_dim
    plain, coded = (floor(small, plan, given, itemsize=4, kept=kept).parts for kept in (None, values))
    assert plain["link"] - coded["link"] == 2 * 4 * 3 * values  # tokens, layers, bytes less of each value
    assert {**plain, "link": 0} == {**coded, "link": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "message"),
    [("auto", "repeated prompt must be an exact cache hit"), ("int8", "images of encoder cached must be")],
)
def test_what_is_no_hit_is_not_measured(codec, message, monkeypatch):
    monkeypatch.setattr(Store, "publish", lambda store, record: store.withdraw(record))
    with pytest.raises(ValueError, match=message):
        ttft.measure(dataclasses.replace(SETUP, codecs=(codec,)), **ENGINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "message"),
    [
        ({"host_bytes": 0}, "host_bytes must hold the KV of the 1 images of a prompt, got 0"),
        (
            {"device_bytes": "600KB", "images": None, "tokens": 130, "image_tokens": (8, 390)},
            "device_bytes must hold .* 6 pages of .* bytes, got",
        ),
    ],
)
def test_what_has_no_room_is_not_measured(room, message):
    with pytest.raises(ValueError, match=message):
        ttft.measure(dataclasses.replace(SETUP, **room), **ENGINE)


def test_a_hit_must_be_the_one_that_is_claimed():
    def output(*images, tokens=(1,)):
        report = types.SimpleNamespace(images=[types.SimpleNamespace(encoder=e, match=m, kv=kv) for e, m, kv in images])
        return types.SimpleNamespace(cache=report, outputs=[types.SimpleNamespace(token_ids=tokens)])

    hit, miss = ("none", "approximate", "host"), ("host", "miss", "none")
    check_found("r = 0", "host", output(hit, hit))
    check_found("encoder cached", "host", output(miss))
    check_found("cold", "host", output(("computed", "miss", "none")))
    for name, place, images in (
        ("r = 0", "host", (hit, miss)), ("r = 0", "disk", (hit,)), ("cold", "host", (miss,)), ("r = 0", "host", ()),
        ("encoder cached", "host", (hit,)), ("r = 0", "host", (("computed", "approximate", "host"),)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"images of {name} must be"):
            check_found(name, place, output(*images))
    with pytest.raises(ValueError, match="must return one output of one token"):
        check_found("r = 0", "host", output(hit, tokens=()))


@pytest.mark.slow
@pytest.mark.parametrize(("fill", "message"), [(np.nan, "finite"), (0.0, "log-probabilities of cold must be finite")])
def test_weights_that_answer_nothing_are_not_measured(monkeypatch, fill, message):
    load = random_models._RandomCheckpoint.load
    filled = lambda self, *args: jax.tree.map(lambda x: np.full_like(x, fill), load(self, *args))  # noqa: E731
    monkeypatch.setattr(random_models._RandomCheckpoint, "load", filled)
    with pytest.raises(ValueError, match=message):
        ttft.measure(dataclasses.replace(SETUP, codecs=("int8",)), **ENGINE)


def test_log_probabilities_must_mean_something():
    def told(*values):
        return [Logprob(chosen=values[0], top=dict(enumerate(values)), token=0, rank=1)]

    check_logprobs({"cold": told(-1.0, -2.0), "r = 0": told(-1.0, -2.5)})
    for values in ((-1.0, np.nan), (-1.0, -np.inf), (-1.0, -1.0)):
        with pytest.raises(ValueError, match="log-probabilities of r = 0 must be finite and not all equal"):
            check_logprobs({"cold": told(-1.0, -2.0), "r = 0": told(*values)})
    with pytest.raises(ValueError, match="log-probabilities of cold must be finite"):
        check_logprobs({"cold": []})
    with pytest.raises(ValueError, match="got the same ones for cold and r = 0"):
        check_logprobs({"cold": told(-1.0, -2.0), "r = 0": told(-1.0, -2.0)})


@pytest.mark.parametrize("name", ["Qwen3-VL-8B", "Qwen2.5-VL-32B", "Qwen2-VL-7B"])
def test_random_models_have_the_published_shapes(tmp_path, name):
    directory, title = random_models.make_random_model(tmp_path, name.lower(), 8)
    found, published = load_config(directory), published_config(name)
    assert (found.model_type, found.vision) == (published.model_type, published.vision)
    assert found.tie_word_embeddings == published.tie_word_embeddings
    assert found.text == dataclasses.replace(published.text, num_layers=8)
    assert title == f"shape of {name}, random weights, 8 of {published.text.num_layers} layers"
    with pytest.raises(ValueError, match=f"layers must be from . to {published.text.num_layers}"):
        random_models.make_random_model(tmp_path, name.lower(), 0)


def test_the_small_hybrid_has_full_attention_in_every_fourth_layer(tmp_path):
    directory, title = random_models.make_random_model(tmp_path, "hybrid")
    text = load_config(directory).text
    assert (text.num_layers, text.hidden_size, text.paged_layers) == (12, 768, (3, 7, 11))
    assert title == "768 wide, linear attention, random weights, 12 layers"
    with pytest.raises(ValueError, match="layers must be from 4 to 12, the layers of the model, got 3"):
        random_models.make_random_model(tmp_path, "hybrid", 3)


def test_a_random_model_must_be_one_of_those():
    with pytest.raises(ValueError, match=r"random_weights must be one of hybrid, .*qwen3-vl-8b, .*, got 'qwen3-vl-9b'"):
        random_models.make_random_model("", "qwen3-vl-9b")
    with pytest.raises(ValueError, match="layers must be from 4 to 12, the layers of the model, got 13"):
        random_models.make_random_model("", layers=13)


def test_images_share_tokens_equally():
    assert [split_images(total, 1024) for total in (16, 1024, 3072, 5120, 1500)] == [
        (1, 16), (1, 1024), (3, 1024), (5, 1024), (2, 750),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"divisible by 3, the number of images of at most 1024 tokens, got 2500"):
        split_images(2500, 1024)


def test_rates_are_measured():
    found = floor_module.measure_rates("bfloat16", size=64, copied=2**16, repeats=2)
    assert 0 < found.matrix < 1e15
    assert 0 < found.memory < 1e14
    assert found.host == float("inf")
    assert all(floor_module._put_seconds(2**16, parts) > 0 for parts in (1, 4))


def test_of_rates_the_best_count():
    assert floor_module.best([DeviceRates(1.0, 5.0, 2.0), DeviceRates(4.0, 3.0, 2.0)]) == DeviceRates(4.0, 5.0, 2.0)


@pytest.mark.slow
def test_records_on_device_and_disk_are_measured_beside_those_in_host_memory(tmp_path):
    out = tmp_path / "ttft.json"
    ttft.measure(
        dataclasses.replace(SETUP, codecs=("auto",), device_bytes="16MB", disk=str(tmp_path / "records")),
        out=out,
        **ENGINE,
    )
    rows = json.loads(out.read_text())["rows"]
    places = [row["K, V in"] for row in rows]
    assert {place: places.count(place) for place in places} == {"-": 2, "device": 6, "disk": 6, "host": 6}


@pytest.mark.thorough
def test_the_longest_prompts_of_the_paper(tmp_path):
    """10K and 20K image tokens, for half an hour: each step of each configuration is told."""
    out = tmp_path / "long.json"
    command = f"bench ttft --image-tokens 10240,20480 --repeats 1 --out {out}".split()
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    rows = json.loads(out.read_text())["rows"]
    by_size = {size: [row for row in rows if row["image tokens"] == size] for size in (10240, 20480)}
    assert len(by_size[10240]) == len(by_size[20480]) == len(rows) // 2
    for row in rows:
        steps = sum(row[f"{step} ms"] for step in STEPS)
        assert 0 < steps <= 1.05 * row["TTFT ms"]
    for size, own in by_size.items():
        rows_a_layer = {row["configuration"]: row["rows a layer"] for row in own}
        assert rows_a_layer["r = 0"] < 64 < 0.11 * size > rows_a_layer["r = 0.1"]


@pytest.mark.slow
def test_a_hybrid_is_measured_in_the_modes_that_it_supports(tmp_path, capsys, checkpoints):
    """On disk, so that a second engine would have nothing to measure."""
    out = tmp_path / "ttft.json"
    setup = TtftSetup(
        model=str(checkpoints("qwen3_5")), dtype="float32", images=1, tokens=16, text_before=7, repeats=1,
        disk=str(tmp_path / "entries"),
    )  # fmt: skip
    ttft.measure(setup, out=out, **ENGINE)
    found = json.loads(out.read_text())
    assert [row["configuration"] for row in found["rows"]] == CONFIGURATIONS[:2]
    # One of the four layers has full attention and is the last one, which has a query for the last token only.
    assert [row["pairs a layer"] for row in found["rows"]] == [31 / 4] * 2
    assert f"not measured: {found['left out']}\n" in capsys.readouterr().out
    reasons = found["left out"].split("; ")
    least = "images must have at least 256 tokens, got 16"
    assert [reason for reason in reasons if reason.endswith(least)] == [f'"full": {least}', f'"approximate": {least}']
    assert any(reason.startswith("schedule (mean 3.25 %): reuse must be 'exact', 'off', or a") for reason in reasons)


@pytest.mark.slow
def test_each_mode_of_a_hybrid_has_an_engine(tmp_path, hybrid, monkeypatch):
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 1)
    out = tmp_path / "ttft.json"
    setup = TtftSetup(
        model=str(hybrid), dtype="float32", images=2, tokens=16, text_before=7, repeats=1, codecs=("auto", "int8"),
        ratios=("0.4",),
    )  # fmt: skip
    ttft.measure(setup, out=out, **ENGINE)
    found = json.loads(out.read_text())
    rows = {(row["codec"], row["configuration"]): row for row in found["rows"]}
    fresh = {"cold": 16, "encoder cached": 16, "r = 0.4": 6, "r = 0": 3, SHIFT_ENDS: 3 + 1}
    assert list(rows) == [
        *(("-", name) for name in CONFIGURATIONS[:2]),
        *((codec, name) for codec in ("auto", "int8") for name in ("r = 0.4", "r = 0", SHIFT_ENDS)),
    ]
    assert found["left out"].startswith("schedule (mean 3.25 %): ")
    kv = KVShape.of(load_config(hybrid), np.float32, maps="full")
    for (codec, name), row in rows.items():
        assert row["rows a layer"] == 7 + 2 * (fresh[name] + 2) + 6
        assert row["tokens reused"] == 2 * (16 - fresh[name])
        assert (row["MB moved"] == 0) == (name == "cold")
        if codec == "auto":
            assert row["MB moved"] >= 2 * (16 * kv.stored_bytes + kv.map_bytes) / 1e6
        if codec == "int8":  # which has codes for maps
            assert row["MB moved"] < rows["auto", name]["MB moved"] / 2
            assert row["floor ms"] < rows["auto", name]["floor ms"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"schedule": "falling.json"}, "schedule must be None for qwen3_5, got falling.json: its layers with linear"),
        ({"device_bytes": "2MB"}, "device_bytes must be 0 for qwen3_5, got 2000000: the copies of cache entries in"),
    ],
)
def test_what_a_hybrid_does_not_support_is_refused(checkpoints, asked, message, monkeypatch):
    monkeypatch.setattr(Schedule, "load", lambda path: None)
    config = load_config(checkpoints("qwen3_5"))
    check_model(dataclasses.replace(SETUP, ratios=("0.1",), codecs=("auto", "int8"), device_bytes="0"), config)
    with pytest.raises(ValueError, match=message):
        check_model(dataclasses.replace(SETUP, **asked), config)


@pytest.mark.parametrize("asked", [{"ratios": ("0.1",)}, {"codecs": ("auto", "int8")}])
def test_keys_and_values_of_different_width_are_not_linked(checkpoints, asked):
    config = load_config(checkpoints("qwen3_5-tied"))
    setup = TtftSetup(model="tied", tokens=256)
    check_model(setup, config)
    [(_, modes)], others = make_engines(setup, config)
    assert [*modes] == CONFIGURATIONS[:2]
    assert [*others] == ["r = 0", "schedule, mean 0.0333", SHIFT_ENDS]
    with pytest.raises(ValueError, match=r"linear_key_head_dim 8 and linear_value_head_dim 12, which differ"):
        check_model(dataclasses.replace(setup, **asked), config)


def test_engines_have_slots_for_the_images_of_the_longest_prompt(checkpoints):
    config = load_config(checkpoints("qwen3_5"))
    setup = TtftSetup(model="hybrid", image_tokens=(1024, 3072))
    engines, others = make_engines(setup, config)
    assert [own.get("reuse") for own, _ in engines] == [None, "full", "approximate"]
    assert [own.get("state_snapshots") for own, _ in engines[1:]] == [slots_for(3)] * 2
    assert slots_for(3) >= 3 * 3
    assert [*others] == ["schedule, mean 0.0325"]
    assert policy_for("approximate", config).name == SHIFT_ENDS.replace(", r = ", "-")


@pytest.mark.parametrize("ratio", ["0", "1", "ends-0.1", "1e-1", "", "0.0"])
def test_ratios_are_numbers_between_0_and_1(ratio):
    with pytest.raises(ValueError, match=r'ratios must be numbers above 0 and below 1 like "0.1,0.2", got'):
        TtftSetup(ratios=("0.1", ratio))


def test_the_plan_of_an_edge_policy_has_its_tokens():
    ranks = edge_ranks(10, 3)
    assert np.flatnonzero(ranks < 5).tolist() == [0, 1, 2, 8, 9]
    assert sorted(ranks) == list(range(10))

"""Load or recompute: the choice, the files of rates, and what requests come to, forced and by rates.

The reference is a cold run of the same engine.
"""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest
from typer.testing import CliRunner

from tests.helper import SIZES, assert_nothing_left, user
from vlcache_jax import LLM, CacheConfig, SamplingParams
from vlcache_jax.cache.lookups import CacheStats
from vlcache_jax.commands import calibrate as commands
from vlcache_jax.commands.cli import app
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.models.registry import load_config
from vlcache_jax.preparation import planner
from vlcache_jax.preparation.planner import Image, Rates, choose, identity_of, place
from vlcache_jax.study import calibration
from vlcache_jax.study.calibration import calibrate
from vlcache_jax.testing import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
RATES = Rates({"host": 2.0}, link=3.0, stage=5.0, row=100.0, encode=7.0, decode=11.0)
DEAR_LINK = Rates({"host": 1.0}, link=1.0, stage=1e-9, row=1e-6, encode=1e-6, decode=1e-6)
DEAR_RECORDS = dataclasses.replace(DEAR_LINK, stage=1.0)
CHEAP_LINK = Rates({"host": 1e-12}, link=1e-12, stage=1.0, row=1.0, encode=1.0, decode=1.0)
IMAGE = Image(tokens=10, patches=40, kv_bytes=400, encoder_bytes=80)


# The choice.


def test_costs_are_sums_of_what_is_done():
    link, encoder, compute = 400 * 2 + 10 * 3, 80 * 5 + 10 * 100, 40 * (7 + 11) + 10 * 100
    assert RATES.costs(IMAGE) == {"kv": link, "encoder": encoder, "none": compute}
    fresh = dataclasses.replace(IMAGE, fresh=0.25)  # of its rows, which enter as encoder rows
    assert RATES.costs(fresh)["kv"] == link + 0.25 * encoder
    without = dataclasses.replace(fresh, encoder_bytes=None)  # they need the whole image encoded
    assert RATES.costs(without) == {"kv": link + 0.25 * 10 * 100 + 40 * 18, "none": compute}
    assert list(RATES.costs(dataclasses.replace(IMAGE, kv_bytes=None))) == ["encoder", "none"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "kv"),
        ({"transfer": {"host": 5.0}}, "encoder"),
        ({"link": 1000.0}, "encoder"),
        ({"link": 1000.0, "stage": 20.0}, "none"),
        ({"link": 1000.0, "encode": 0.0, "decode": 0.0}, "none"),
        ({"transfer": {"host": 0.0}, "link": 140.0}, "kv"),  # 10 * 140 == 80 * 5 + 10 * 100
        ({"link": 1000.0, "stage": 9.0}, "encoder"),  # 80 * 9 == 40 * (7 + 11)
    ],
)
def test_the_cheapest_is_chosen_and_of_equal_ones_the_first(changes, expected):
    assert choose(dataclasses.replace(RATES, **changes), IMAGE) == expected


def test_what_is_not_there_is_not_chosen():
    cheap_rows = dataclasses.replace(RATES, row=0.0, encode=0.0, decode=0.0)
    assert choose(cheap_rows, IMAGE) == "none"
    assert choose(cheap_rows, dataclasses.replace(IMAGE, has_pixels=False)) == "encoder"
    no_rows = dataclasses.replace(IMAGE, has_pixels=False, encoder_bytes=None)
    assert choose(cheap_rows, no_rows) == "kv"
    assert choose(cheap_rows, dataclasses.replace(no_rows, fresh=0.1)) == "kv"  # as nothing can be computed
    assert choose(RATES, Image(10, 40, None, None)) == "none"


def test_recomputing_most_of_it_is_no_gain():
    assert choose(RATES, dataclasses.replace(IMAGE, fresh=0.3)) == "kv"
    assert choose(RATES, dataclasses.replace(IMAGE, fresh=0.9)) == "encoder"


# Files.


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Rates are kept there."""
    monkeypatch.setattr(planner, "cache_home", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints("qwen3_vl")


@pytest.fixture
def identity(directory):
    config = load_config(directory)
    return identity_of(config, "cpu", KVShape.of(config, "float32"))


def test_files_come_back(home, identity, caplog):
    assert Rates.load(identity) is None
    path = RATES.save(identity)
    assert path.is_relative_to(home)
    assert Rates.load(identity) == RATES
    for changes in ({"device": "NVIDIA H200"}, {"codec": "int8"}, {"dtype": "bfloat16"}, {"layers": 36}):
        assert Rates.load(identity | changes) is None
    tiers = dataclasses.replace(RATES, transfer={"host": 2.0, "device": 0.0})
    tiers.save(identity)
    assert Rates.load(identity) == tiers
    assert not caplog.records


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace("rates/1", "rates/0"),
        lambda text: text.replace('"row": 100.0', '"row": -1.0'),
        lambda text: text.replace('"row": 100.0', '"row": NaN'),
        lambda text: text.replace('"row": 100.0', '"rows": 100.0'),
        lambda text: text.replace('"host"', '"remote"'),
        lambda text: text.replace('"cpu"', '"another machine"'),
    ],
)
def test_a_damaged_or_foreign_file_is_like_none(home, identity, damage, caplog):
    path = RATES.save(identity)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with caplog.at_level(logging.WARNING):
        assert Rates.load(identity) is None
    [record] = caplog.records
    assert "vlcache calibrate" in record.getMessage()
    assert str(path) in record.getMessage()


def test_a_wrong_load_is_named():
    with pytest.raises(ValueError, match=r"load must be one of \('auto', 'kv', 'encoder', 'none'\), got 'disk'"):
        CacheConfig(load="disk")


# Requests.


def open_llm(directory, load, **changes):
    cache = CacheConfig(load=load, **changes.pop("cache", {}))
    settings = {"enable_prefix_caching": False, "use_tqdm": False, "cache": cache}
    return LLM(directory, **SIZES | settings | changes)


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory, "kv") as llm:
        yield llm


@pytest.fixture
def loading(engine):
    """(load) -> an engine whose cache is empty, as if it had been opened so."""

    def loading(load, keeps_pages=False):
        engine.reset_mm_cache()
        engine.service.cache.store.config = dataclasses.replace(engine.service.cache.store.config, load=load)
        engine.service.cache.store._counts = CacheStats()
        engine.service.preparation.planner._keeps_pages = keeps_pages
        return engine

    yield loading
    assert_nothing_left(engine)
    assert engine.cache.stats().pinned == 0


def chat(llm, *conversations, reuse=None):
    outputs = llm.chat(list(conversations), GREEDY, reuse=reuse, use_tqdm=False)
    llm.cache.flush()
    return outputs


def image_reports(output):
    """What is told of each image."""
    images = output.cache.images
    return [(image.match, image.kv, image.encoder, image.why and image.why.value) for image in images]


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def kept(llm):
    return {record.meta.name: record for record in llm.service.cache.store.tier.records() if record.is_ready}


@pytest.fixture(scope="module")
def a(textured_image):
    return textured_image(150, 210, 1)


@pytest.fixture(scope="module")
def b(textured_image):
    return textured_image(190, 120, 2)


PASSED = "cheaper_to_compute"
FORCED = {
    "kv": ("exact", "host", "none", None),
    "encoder": ("miss", "none", "host", PASSED),
    "none": ("miss", "none", "computed", PASSED),
}


@pytest.mark.parametrize("load", FORCED)
def test_a_load_can_be_forced(loading, a, b, load):
    prompt = user("First ", a, " then ", b, " compare.")
    llm = loading(load)
    cold = chat(llm, prompt, reuse="off")
    first = chat(llm, prompt)
    assert image_reports(first[0]) == [("miss", "none", "computed", "unknown_image")] * 2
    before = kept(llm)
    assert len(before) == 4
    again = chat(llm, prompt)
    assert image_reports(again[0]) == [FORCED[load]] * 2
    assert answers(again) == answers(first) == answers(cold)
    assert again[0].cache.exact
    computes = load != "kv"
    assert again[0].cache.rows[-1] == (cold if computes else again)[0].cache.rows[-1]
    assert (again[0].num_cached_tokens == 0) == computes
    after = kept(llm)
    assert after == before  # the same records, each in its place
    stats = llm.cache.stats()
    assert (stats.hits_exact, stats.misses, stats.passed_over) == ((0, 2, 2) if computes else (2, 2, 0))
    assert stats.encoder_hits == (0 if load == "none" else 2)
    assert (stats.stored, stats.evicted, stats.pinned) == (4, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("load", FORCED)
def test_elsewhere_an_image_is_a_miss_of_its_new_context(loading, a, load):
    here, there = user("Here ", a), user("Over there: ", a)
    llm = loading(load)
    cold = chat(llm, there, reuse="off")
    chat(llm, here)
    [output] = chat(llm, there, reuse="full")
    expected = ("approximate", "host", "none", "other_context") if load == "kv" else FORCED[load]
    assert image_reports(output) == [expected]
    assert output.cache.exact == (load != "kv")
    assert llm.cache.stats().kv_records == (1 if load == "kv" else 2)
    if load != "kv":
        assert answers([output]) == answers(cold)
        records = kept(llm)
        [again] = chat(llm, there, reuse="full")  # now its own record is passed over
        assert image_reports(again) == [FORCED[load]]
        assert kept(llm) == records
    [output] = chat(llm, user("A third place ", a), reuse="exact")
    encoder = "computed" if load == "none" else "host"
    assert image_reports(output) == [("miss", "none", encoder, "other_context")]  # nothing could have been linked


def test_a_full_cache_evicts_nothing_for_what_is_there(loading, a, b, monkeypatch):
    llm = loading("none")
    chat(llm, user(a))
    chat(llm, user(b))
    monkeypatch.setattr(llm.service.cache.store.tier, "capacity", llm.cache.stats().bytes)
    for prompt in (user(a), user(b), user(a)):
        [output] = chat(llm, prompt)
        assert image_reports(output) == [FORCED["none"]]
    assert (llm.cache.stats().stored, llm.cache.stats().evicted) == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("load", ["encoder", "none"])
@pytest.mark.parametrize("keeps_pages", [False, True])
@pytest.mark.parametrize("reuse", ["exact", "approximate"])
def test_a_call_means_the_same_as_one_by_one(loading, a, b, load, keeps_pages, reuse):
    prompts = [user("One ", a), user("Two ", b, a), user("One ", a), user("Three ", a, b), user("Two ", b, a)]
    llm = loading(load, keeps_pages)
    single = [output for prompt in prompts for output in chat(llm, prompt, reuse=reuse)]
    names, stats = set(kept(llm)), llm.cache.stats()
    assert stats.passed_over
    llm = loading(load, keeps_pages)
    together = chat(llm, *prompts, reuse=reuse)
    assert answers(together) == answers(single)
    assert list(map(image_reports, together)) == list(map(image_reports, single))
    assert set(kept(llm)) == names
    now = llm.cache.stats()
    assert (now.stored, now.passed_over, now.misses) == (stats.stored, stats.passed_over, stats.misses)


def test_files_seen_before_are_decoded_where_they_are_computed(loading, a, tmp_path):
    from PIL import Image as Pictures

    Pictures.fromarray(a).save(tmp_path / "a.png")
    prompt = [{"role": "user", "content": [{"type": "image", "path": str(tmp_path / "a.png")}]}]
    llm = loading("none")
    first = chat(llm, prompt)
    again = chat(llm, prompt)
    assert again[0].metrics.decode_image == 0  # it was known by its bytes, and decoded later
    assert image_reports(again[0]) == [FORCED["none"]]
    assert answers(again) == answers(first)


def test_verify_and_off_are_as_ever(loading, a):
    llm = loading("encoder")
    chat(llm, user(a))
    [output] = llm.chat([user(a)], GREEDY, use_tqdm=False, verify=True)
    assert image_reports(output) == [FORCED["encoder"]]
    assert output.verification.max_logit_difference < 1e-4
    [off] = chat(llm, user(a), reuse="off")
    assert image_reports(off) == [("miss", "none", "computed", "reuse_off")]
    assert llm.cache.stats().passed_over == 1


def test_what_is_in_pages_stays_there(loading, a):
    llm = loading("none", keeps_pages=True)
    conversation = user("Words before ", a, " and behind it, as many as it takes. " * 6)
    first = chat(llm, conversation)
    again = chat(llm, conversation)
    assert image_reports(again[0]) == [("exact", "kv_pool", "none", None)]
    assert answers(again) == answers(first)


@pytest.mark.slow
def test_coded_records_are_passed_over_too(directory, a):
    with open_llm(directory, "encoder", cache={"codec": "int8"}) as llm:
        chat(llm, user(a))
        for _ in range(2):
            [output] = chat(llm, user(a), reuse="full")
            assert image_reports(output) == [FORCED["encoder"]]
        assert (llm.cache.stats().kv_records, llm.cache.stats().stored) == (1, 2)


@pytest.mark.parametrize(
    ("rates", "load"), [(None, "kv"), (CHEAP_LINK, "kv"), (DEAR_LINK, "encoder"), (DEAR_RECORDS, "none")]
)
def test_auto_goes_by_the_rates_of_this_machine(home, directory, identity, a, rates, load):
    if rates is not None:
        rates.save(identity)
    with open_llm(directory, "auto") as llm:
        cold = chat(llm, user(a), reuse="off")
        chat(llm, user(a))
        again = chat(llm, user(a))
        assert image_reports(again[0]) == [FORCED[load]]
        assert answers(again) == answers(cold)
        CHEAP_LINK.save(identity)  # rates are those of when it was opened
        assert image_reports(chat(llm, user(a))[0]) == [FORCED[load]]
    with open_llm(directory, "kv") as llm:  # which asks for no rates
        chat(llm, user(a))
        assert image_reports(chat(llm, user(a))[0]) == [FORCED["kv"]]


@pytest.mark.slow
def test_auto_weighs_what_a_policy_computes_anyway(home, directory, identity, a):
    """A token takes 1 to link and 2 to compute: of an image of which most is computed anyway, linking is no gain."""
    Rates({"host": 0.0}, link=1.0, stage=0.0, row=2.0, encode=1.0, decode=1.0).save(identity)
    with open_llm(directory, "auto") as llm:
        chat(llm, user("Here ", a))
        assert image_reports(chat(llm, user("There ", a), reuse=0.2)[0])[0][0] == "approximate"
        [output] = chat(llm, user("Far away ", a), reuse=0.8)
        assert image_reports(output) == [FORCED["encoder"]]


def test_a_trusted_id_is_never_decoded_for_speed(home, directory, identity, a, b):
    """Under an id that is trusted there may be another picture, or none worth the name."""
    DEAR_RECORDS.save(identity)
    with open_llm(directory, "auto", cache={"trust_uuids": True}) as llm:
        content = [[{"type": "image", "image": image, "uuid": "mine"}] for image in (a, b)]
        chat(llm, [{"role": "user", "content": content[0]}])
        [output] = chat(llm, [{"role": "user", "content": content[1]}])
        assert image_reports(output)[0][0] in ("exact", "miss")
        assert image_reports(output)[0][2] != "computed"


# Measuring.


@pytest.mark.slow
def test_a_calibrated_engine_goes_by_what_was_measured(home, tmp_path_factory, a):
    """A narrow model, but its K, V are wide, so that what is linked is more than noise."""
    text = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 256}
    vision = {"depth": 1, "deepstack_visual_indexes": [0]}
    model = make_checkpoint(tmp_path_factory.mktemp("calibrated"), "qwen3_vl", text=text, vision=vision)
    found = calibrate(str(model), dtype="float32", grids=((6, 7), (16, 20)), repeats=5)
    rates = found.rates
    assert rates.transfer == {"host": 0.0}  # a CPU reads records where they lie
    single = {name: rate for name, rate in dataclasses.asdict(rates).items() if name != "transfer"}
    assert all(0 < rate < 1 for rate in single.values()), single
    assert (found.image.tokens, found.image.patches) == (320, 1280)
    assert Rates.load(found.identity) is None  # measuring writes nothing
    rates.save(found.identity)
    with open_llm(model, "auto", kv_cache_bytes=64 * 2**20) as llm:
        assert llm.service.preparation.planner.rates == rates
        chat(llm, user(a))
        expected = choose(rates, found.image)
        assert image_reports(chat(llm, user(a))[0]) == [FORCED[expected]]


def test_rates_that_are_not_positive_are_measured_again_and_then_an_error(home, directory, monkeypatch):
    counted = []

    def measure(llm, grids, repeats):
        counted.append(grids)
        return {"hit": {1: [2.0], 3: [2.0]}, "row": {1: [1.0], 2: [2.0]}}, IMAGE

    monkeypatch.setattr(calibration, "_measure", measure)
    with pytest.raises(
        ValueError,
        match=rf"rates must be positive, got {{'hit': 0.0}} seconds in the last of {calibration.ATTEMPTS} attempts",
    ):
        calibrate(str(directory), dtype="float32", grids=((2, 2), (4, 4)))
    assert len(counted) == calibration.ATTEMPTS
    assert not planner.folder().exists()


def test_the_command_says_what_pays_and_keeps_it(home, monkeypatch, identity):
    found = calibration.Calibration(identity, RATES, dataclasses.replace(IMAGE, tokens=1000))
    monkeypatch.setattr(commands, "calibrate", lambda *_, **__: found)
    result = CliRunner().invoke(app, ["calibrate", "tiny-vqa", "--codec", "int8"])
    assert result.exit_code == 0, result.output
    shown = dict(re.split(r"  +", line) for line in result.stdout.splitlines() if re.search(r"\S  +\d", line))
    assert float(shown["load its KV"]) == 1e3 * (400 * 2 + 1000 * 3)
    assert float(shown["compute it from its pixels"]) == 1e3 * (1000 * 100 + 40 * 18)
    assert "loading the KV pays if less than 96 % of its tokens are recomputed" in result.stdout
    assert Rates.load(identity) == RATES
    assert CliRunner().invoke(app, ["calibrate", "tiny-vqa", "--codec", "zip"]).exit_code == 1
    [line] = [line for line in CliRunner().invoke(app, ["doctor"]).stdout.splitlines() if line.startswith("rates")]
    assert "qwen3_vl of 4 layers x 64 in float32, codec auto, on cpu" in line
    place(identity).write_text("{")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"to do: {place(identity)} must be a JSON file" in result.stdout

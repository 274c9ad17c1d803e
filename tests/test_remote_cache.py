"""Records on other machines, with a model: a shared store, peers, and what happens when they go wrong."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tests.cache.tiers.redis_server import Server
from tests.cache.tiers.test_object_store import running_bucket
from tests.helper import SIZES, assert_nothing_left, user
from vlcache_jax import LLM, CacheConfig, SamplingParams
from vlcache_jax.cache.tiers import peer_server
from vlcache_jax.cache.tiers.discovered_peers import RecentPeers
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.tiers.peer_server import PeerServer
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.outputs import Why

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def open_llm(path, **cache):
    return LLM(path, enable_prefix_caching=False, use_tqdm=False, cache=CacheConfig(**cache), **SIZES)


def ask(llm, *conversations, **options):
    outputs = llm.chat(list(conversations), PARAMS, use_tqdm=False, **options)
    llm.cache.flush()
    for channel in llm.service.cache.store.channels:  # also what goes elsewhere
        channel.flush()
    return outputs


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def where(outputs):
    return [(image.kv, image.encoder) for output in outputs for image in output.cache.images]


@pytest.fixture
def picture(textured_image):
    return textured_image(60, 90, 1)


@pytest.fixture
def conversations(picture, textured_image):
    other = textured_image(90, 60, 2)
    return user("See ", picture, " and ", other, " what?"), user("And ", other, "?")


@contextlib.contextmanager
def serving(directory, **options):
    """What `vlcache cache serve` does."""
    tier = DiskTier(directory, 2**40)
    with PeerServer(tier, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.address[1]}"
        finally:
            server.close()
            thread.join()
            tier.close()


@pytest.mark.parametrize("kind", ["remote", "peer", "discovered_peer"])
def test_another_machine_takes_up_what_one_has_computed(checkpoints, tmp_path, conversations, kind, monkeypatch):
    directory, token = tmp_path / "shared", "secret"
    first = {"remote": directory.as_uri()} if kind == "remote" else {"disk": directory}
    with open_llm(checkpoints("qwen3_vl"), **first) as llm:
        cold = ask(llm, *conversations, reuse="off")
        assert tokens(ask(llm, *conversations)) == tokens(cold)
    with contextlib.ExitStack() as stack:
        if kind == "remote":
            second = first
        else:
            _, url = stack.enter_context(serving(directory, token=token))
            second = {"peers": [url], "peer_token": token}
        if kind == "discovered_peer":  # of those that are named, one has gone
            holders, kind = RecentPeers(), "peer"
            holders.note(["http://127.0.0.1:9", url])
            second = {"discovered_peers": holders, "peer_token": token}
        llm = stack.enter_context(open_llm(checkpoints("qwen3_vl"), disk=tmp_path / "own", **second))
        monkeypatch.setattr(llm.service.device.runner, "encode", lambda *_: pytest.fail("encoded"))
        monkeypatch.setattr(ImageProcessor, "patches", lambda *_: pytest.fail("cut"))
        outputs = ask(llm, *conversations)
        assert tokens(outputs) == tokens(cold)
        assert where(outputs) == [(kind, "none")] * 3
        image = outputs[1].cache.images[0]
        record = next(
            r
            for r in llm.service.cache.store.records(image.key)
            if r.meta.context is not None
            and r.meta.name in {line.name for line in llm.service.cache.store.channels[0].tier.lines()}
        )
        assert image.bytes_moved == record.meta.nbytes + record.meta.part_bytes * len(record.meta.parts)
        counted = llm.cache.stats().tiers
        assert (counted[kind].loaded, counted[kind].failed, counted["disk"].stored) == (3, 0, 3)
        llm.cache.flush()
        llm.reset_mm_cache()
        assert where(ask(llm, *conversations)) == [("disk", "none")] * 3  # it was kept on the way
        assert_nothing_left(llm)


def test_a_repeat_brings_no_bytes_over_the_network(checkpoints, conversations, monkeypatch):
    """Records come once; what a repeat moves comes from this machine's memory (F34)."""
    with running_bucket(monkeypatch) as bucket:
        with open_llm(checkpoints("qwen3_vl"), remote="s3://bucket") as llm:
            cold = ask(llm, *conversations)
        assert bucket.sent == 0
        with open_llm(checkpoints("qwen3_vl"), remote="s3://bucket") as llm:
            outputs, sent = [], []
            for _ in range(2):
                before = bucket.sent
                outputs.append(ask(llm, *conversations))
                sent.append(bucket.sent - before)
            assert tokens(outputs[0]) == tokens(outputs[1]) == tokens(cold)
            assert [where(one) for one in outputs] == [[("remote", "none")] * 3, [("host", "none")] * 3]
            first, again = ([image.bytes_moved for one in told for image in one.cache.images] for told in outputs)
            # What a request reports is what came, and what goes from memory to the device; a repeat has the latter.
            assert sent[0] > 0 == sent[1]
            assert all(new > old > 0 for new, old in zip(first, again, strict=True))
            # Requests that want the same record at once may each bring it; records have heads besides.
            once = sum({image.key: image.bytes_moved for one in outputs[0] for image in one.cache.images}.values())
            assert once < sent[0] < sum(first) + (16 << 10)
            llm.reset_mm_cache()
            before = bucket.sent
            ask(llm, *conversations)
            assert bucket.sent > before


def test_peers_do_not_take_what_is_not_theirs(checkpoints, tmp_path, conversations):
    """Another codec has other keys, and is refused besides; so is who does not know the token."""
    with open_llm(checkpoints("qwen3_vl"), disk=tmp_path) as llm:
        cold = ask(llm, *conversations)
    with serving(tmp_path, token="secret", codecs=("float32",)) as (_, url):
        for cache in ({"peer_token": "guess"}, {"peer_token": "secret", "codec": "int8"}):
            with open_llm(checkpoints("qwen3_vl"), peers=[url], **cache) as llm:
                outputs = ask(llm, *conversations)
                assert tokens(outputs) == tokens(cold)
                assert where(outputs)[0] == ("none", "computed")
                assert llm.cache.stats().tiers["peer"].refused > 0


def test_a_peer_that_stalls_half_way(checkpoints, tmp_path, conversations, monkeypatch, caplog):
    """Nobody waits for longer than the time limit, and the answer is that of a cold run."""
    with open_llm(checkpoints("qwen3_vl"), disk=tmp_path) as llm:
        cold = ask(llm, *conversations)
    released, opened = threading.Event(), peer_server._open

    def stalling(directory, file):
        released.wait(20)
        return opened(directory, file)

    monkeypatch.setattr(peer_server, "_open", stalling)
    with (
        caplog.at_level("CRITICAL"),
        serving(tmp_path) as (_, url),
        open_llm(checkpoints("qwen3_vl"), peers=[url], timeout=0.3) as llm,
    ):
        outputs = ask(llm, *conversations)
        assert tokens(outputs) == tokens(cold)
        whys = {image.why for output in outputs for image in output.cache.images}
        assert whys <= {Why.timeout, Why.load_failed, Why.unknown_image}
        assert llm.cache.stats().tiers["peer"].late + llm.cache.stats().tiers["peer"].failed > 0
        released.set()
        assert_nothing_left(llm)


@pytest.mark.servers
def test_a_server_that_is_killed_paused_and_restarted(checkpoints, tmp_path, conversations, picture, caplog):
    """No request fails, none waits for longer than a look takes, and entries come back afterwards."""
    server = Server(tmp_path)
    try:
        with (
            caplog.at_level("CRITICAL"),
            open_llm(checkpoints("qwen3_vl"), remote=server.url, timeout=0.5, host_bytes="1MB") as llm,
        ):
            now = [llm.service.cache.store._steady()]
            llm.service.cache.store._steady = llm.service.cache.store.channels[0]._clock = lambda: now[0]
            llm.service.cache.store.channels[0]._breaker._clock = lambda: now[0]
            cold = ask(llm, *conversations, reuse="off")

            def again():
                llm.reset_mm_cache()
                now[0] += 120  # looks are forgotten, and the breaker lets one try through
                outputs = ask(llm, *conversations)
                assert tokens(outputs) == tokens(cold)
                return where(outputs)[0][0]

            assert again() == "none"
            assert again() == "remote"
            with server.paused():
                assert again() == "none"
            counted = llm.cache.stats().tiers["remote"]
            assert counted.late + counted.failed > 0
            assert again() in ("remote", "none")
            assert again() == "remote"
            server.kill()
            before = llm.cache.stats().tiers["remote"].failed
            assert again() == "none"
            assert llm.cache.stats().tiers["remote"].failed > before
            server.start()  # empty
            assert again() == "none"
            again()
            assert again() == "remote"
            assert_nothing_left(llm)
    finally:
        server.client.close()
        server.kill()

"""Tenants of one server: what they share is nothing, and what each may take is its own."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading

import pytest

from tests.helper import WITHIN, eventually
from tests.server.helper import data_url, shows
from tests.server.test_entrance import answered_to, coming
from vlcache_jax import CacheConfig
from vlcache_jax.cache.keys import payer
from vlcache_jax.server.config import ServerConfig, served_cache

CHAT, ADMIN = "/v1/chat/completions", "root"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}


def written(path, tenants="", **keys):
    """A file of keys, each of the tenant that is named."""
    parts = [
        f'[[keys]]\nname = "{key}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'
        for key, tenant in keys.items()
    ]
    path.write_text("".join(parts) + tenants)
    return str(path)


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "keys.toml"


@pytest.fixture
def fresh(engine):
    engine.service.reset_mm_cache()
    engine.service.reset_prefix_cache()


def ask(served, key, *pictures, text="What is it?", **more):
    """Status and answer."""
    body = HELLO | {"messages": shows(*map(data_url, pictures), text=text), "return_cache_report": True} | more
    return served.json("POST", CHAT, body, Authorization=f"Bearer {key}")


def matches(served, key, *pictures, **more):
    status, found = ask(served, key, *pictures, **more)
    assert status == 200, found
    return [image["match"] for image in found["cache"]["images"]], found["usage"]["prompt_tokens_details"]


@pytest.mark.usefixtures("fresh")
def test_tenants_share_nothing_and_their_keys_do(serve, keys, textured_image):
    served = serve(api_keys=written(keys, a1="alice", a2="alice", b="bob"), admin_key=ADMIN)
    picture = textured_image(64, 96)
    assert matches(served, "a1", picture)[0] == ["miss"]
    for key in ("b", ADMIN):
        found, usage = matches(served, key, picture)
        assert (found, usage["cached_tokens"]) == (["miss"], 0)
    reports = [ask(served, key, picture)[1]["cache"] for key in ("a1", "b")]
    assert all(report["request_known"] for report in reports)
    assert len({report["request_key"] for report in reports}) == 2
    assert not ask(served, "b", picture, cache_salt="new")[1]["cache"]["request_known"]
    for key in ("a1", "a2", "b", ADMIN):
        found, usage = matches(served, key, picture)
        assert found == ["exact"]
        assert usage["cached_tokens"] > 0
    # A tenant's own salts keep its users apart, and are nobody else's.
    for key in ("a1", "b"):
        assert matches(served, key, picture, cache_salt="s")[0] == ["miss"]
    assert matches(served, "a2", picture, cache_salt="s")[0] == ["exact"]


@pytest.mark.usefixtures("fresh")
def test_text_is_kept_apart_too(serve, keys):
    served = serve(api_keys=written(keys, a="alice", b="bob"), admin_key=ADMIN)
    text = "The secret word is swordfish. " * 20

    def cached(key, **more):
        told = HELLO | {"messages": [{"role": "user", "content": text}]} | more
        status, found = served.json("POST", CHAT, told, Authorization=f"Bearer {key}")
        assert status == 200
        return found["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("a") == cached("b") == cached("a", cache_salt="s") == cached("b", cache_salt="s") == 0
    assert cached("a") == cached("b") == cached("a", cache_salt="s") > 0


@pytest.mark.usefixtures("fresh")
def test_what_an_admin_keeps_for_everyone_everyone_finds(serve, keys, textured_image):
    served = serve(api_keys=written(keys, a="alice", b="bob"), admin_key=ADMIN, allow_reuse=["approximate"])
    picture = textured_image(64, 96)
    asked = {"images": [data_url(picture)], "shared": True}
    assert served.ask("POST", "/cache/precompute", asked, Authorization=f"Bearer {ADMIN}")[0] == 200
    for key in ("a", "b"):
        assert matches(served, key, picture, reuse="approximate")[0] != ["miss"]


def test_who_comes_in(serve, keys):
    served = serve(api_keys=written(keys, a="alice"), admin_key=ADMIN)
    for path, of_tenants in (("/v1/models", 200), ("/docs", 200), ("/metrics", 403), ("/load", 403), ("/cache", 403)):
        status = {key: served.ask("GET", path, Authorization=f"Bearer {key}")[0] for key in ("a", "b", ADMIN)}
        assert status == {"a": of_tenants, "b": 401, ADMIN: 200}, path
        assert served.ask("GET", path)[0] == 401
    for path in ("/health", "/ready"):
        assert served.ask("GET", path)[0] == 200


def test_without_an_admin_key_nobody_sees_what_all_do(serve, keys):
    served = serve(api_keys=written(keys, a="alice"))
    assert served.ask("GET", "/metrics", Authorization="Bearer a")[0] == 403


@pytest.mark.usefixtures("fresh")
def test_a_tenant_has_its_share_of_the_requests(serve, keys, engine, monkeypatch):
    served = serve(api_keys=written(keys, "[tenants.alice]\nrequests = 2\n", a1="alice", a2="alice", b="bob"))
    go_on, window = threading.Event(), engine.service.device.runner.window
    monkeypatch.setattr(engine.service.device.runner, "window", lambda *given: (go_on.wait(), window(*given))[1])
    statuses = []
    asking = [
        threading.Thread(target=lambda key=key: statuses.append(ask(served, key, max_tokens=4, ignore_eos=True)[0]))
        for key in ("a1", "a2", "b", "b", "b")
    ]
    for thread in asking:
        thread.start()
    assert eventually(lambda: served.server.admission.inside == 5)
    large = HELLO | {"user": "a" * 2**22}  # which nobody reads
    status, headers, body = served.ask("POST", CHAT, large, Authorization="Bearer a1")
    assert (status, headers["retry-after"]) == (429, "1")
    assert b"has 2 of 2 requests in flight" in body
    go_on.set()
    for thread in asking:
        thread.join()
    assert statuses == [200] * 5
    assert ask(served, "a1")[0] == 200


@pytest.mark.usefixtures("fresh")
def test_a_tenants_slow_bodies_shut_no_other_out(serve, keys):
    """Nor do they count as its requests in flight."""
    tenants = "[tenants.alice]\nrequests = 1\n"
    served = serve(api_keys=written(keys, tenants, a="alice", b="bob"), admin_key=ADMIN, max_waiting=4)
    with contextlib.ExitStack() as stack:
        bobs = stack.enter_context(coming(served, Authorization="Bearer b"))  # the slowest of all
        slow = [stack.enter_context(coming(served, Authorization="Bearer a")) for _ in range(3)]
        for key in ("b", "a", ADMIN):
            assert ask(served, key)[0] == 200
            slow.append(stack.enter_context(coming(served, Authorization="Bearer a")))
        assert eventually(lambda: answered_to(slow) == [True] * 3 + [False] * 3)
        assert answered_to([bobs]) == [False]


@pytest.mark.usefixtures("fresh")
def test_lanes_go_round(serve, keys, engine, monkeypatch):
    """Whatever priority a tenant's requests name, unless its file lets it count beside those of others."""
    tenants = "[tenants.carl]\npriority = true\n"
    served = serve(api_keys=written(keys, tenants, a="alice", b="bob", c="carl"), admin_key=ADMIN)
    loop, salts = engine.service.loop, served.server.register.salts
    names = {salts.salt(name).tenant: name for name in ("alice", "bob", "carl")}
    go_on, submitted, admitted = threading.Event(), [], []
    submit, admit = loop.submit, loop.engine.scheduler.admit

    def submitting(sequences, *given):
        submit(sequences, *given)
        submitted.extend(sequences)

    def admitting():
        assert go_on.wait(WITHIN)
        found = admit()
        admitted.extend(names[one.planned.options.tenant] for one in found)
        return found

    monkeypatch.setattr(loop, "submit", submitting)
    monkeypatch.setattr(loop.engine.scheduler, "admit", admitting)
    asking = []
    urgent = -(2**62)
    for key, priority in [*[("a", urgent)] * 9, ("b", 0), ("c", 1), ("b", 0), ("c", -1)]:
        asking.append(threading.Thread(target=ask, args=(served, key), kwargs={"priority": priority}))
        asking[-1].start()
        assert eventually(lambda: len(submitted) == len(asking))
    go_on.set()
    for thread in asking:
        thread.join()
    # The first one alone had come when decode slots were given first; then there are seven.
    assert admitted[:8] == ["alice", "carl", "bob", "alice", "bob", "alice", "alice", "alice"]
    assert admitted[8:] == ["alice"] * 4 + ["carl"]


@pytest.mark.usefixtures("fresh")
def test_each_answer_counts(serve, keys, engine, monkeypatch):
    served = serve(api_keys=written(keys, "[tenants.alice]\nrequests = 3\n", a="alice", b="bob"))
    status, found = ask(served, "a", n=4, temperature=1)
    assert (status, found["error"]["param"]) == (400, "n")  # never, whoever waits
    go_on, window = threading.Event(), engine.service.device.runner.window
    monkeypatch.setattr(engine.service.device.runner, "window", lambda *given: (go_on.wait(), window(*given))[1])
    asking = threading.Thread(target=ask, args=(served, "a"), kwargs={"n": 2, "temperature": 1})
    asking.start()
    assert eventually(lambda: engine.stats().running)
    assert ask(served, "a", n=2, temperature=1)[0] == 429
    go_on.set()
    asking.join()
    assert ask(served, "a", n=3, temperature=1)[0] == 200


def test_the_admins_key_is_no_tenants(serve, keys):
    with pytest.raises(ValueError, match="keys must not contain the admin key"):
        serve(api_keys=written(keys, a="alice", b="bob"), admin_key="b")
    served = serve(api_keys=written(keys, a="alice"), admin_key=ADMIN)
    written(keys, **{ADMIN: "alice"})
    with pytest.raises(ValueError, match="keys must not contain the admin key"):
        served.server.register.reload()
    assert served.ask("GET", "/cache", Authorization=f"Bearer {ADMIN}")[0] == 200


@pytest.mark.usefixtures("fresh")
def test_an_admin_reaches_what_is_a_tenants(serve, keys, textured_image):
    served = serve(api_keys=written(keys, a="alice", b="bob"), admin_key=ADMIN)
    picture = textured_image(64, 96)
    asked = [ask(served, "a", picture, **more) for more in ({}, {"cache_salt": "s"})]
    own, salted = (found["cache"]["images"][0]["key"] for _, found in asked)

    def do(verb, **body):
        return served.json("POST", f"/cache/{verb}", body, Authorization=f"Bearer {ADMIN}")

    assert do("pin", image=own) == do("pin", image=own, tenant="bob") == (200, {"records": 0})
    assert do("pin", image=own, tenant="alice") == do("pin", image=data_url(picture), tenant="alice", cache_salt="s")
    assert do("unpin", image=own, tenant="alice")[1]["records"] > 0
    for key, more in ((own, {}), (salted, {"cache_salt": "s"})):
        assert do("delete", image=key, tenant="alice", **more)[1]["records"] > 0
        assert matches(served, "a", picture, **more)[0] == ["miss"]
    assert do("precompute", images=[data_url(picture)], tenant="bob")[0] == 200
    assert matches(served, "b", picture)[0] == ["exact"]
    for wrong in ({"tenant": "eve"}, {"tenant": "alice", "shared": True}):
        status, found = do("pin", image=own, **wrong)
        assert (status, found["error"]["param"]) == (400, "tenant")


@pytest.mark.usefixtures("fresh")
def test_an_admin_sets_a_uuid_free(serve, keys, textured_image):
    """Of one tenant, under the salt that it named."""
    served = serve(api_keys=written(keys, a="alice", b="bob"), admin_key=ADMIN)

    def show(key, seed, **more):
        part = {"type": "image_url", "image_url": {"url": data_url(textured_image(64, 96, seed))}, "uuid": "front door"}
        body = HELLO | {"messages": [{"role": "user", "content": [part]}]} | more
        return served.json("POST", CHAT, body, Authorization=f"Bearer {key}")[0]

    def free(**body):
        return served.json("POST", "/cache/release_uuid", body, Authorization=f"Bearer {ADMIN}")

    assert [show(key, 1) for key in ("a", "b")] == [show("a", 1, cache_salt="s")] * 2 == [200] * 2
    assert [show(key, 2) for key in ("a", "b")] == [400] * 2
    assert free(uuid="front door") == free(uuid="back door", tenant="alice") == (200, {"released": False})
    assert free(uuid="front door", tenant="alice") == (200, {"released": True})
    assert [show("a", 2), show("a", 2, cache_salt="s"), show("b", 2)] == [200, 400, 400]
    assert free(uuid="front door", tenant="alice", cache_salt="s")[1] == {"released": True}
    assert show("a", 2, cache_salt="s") == 200
    for wrong, param in (({}, "uuid"), ({"uuid": ""}, "uuid"), ({"uuid": "a", "shared": True}, "shared")):
        status, found = free(**wrong)
        assert (status, found["error"]["param"]) == (400, param)
    assert served.ask("POST", "/cache/release_uuid", {"uuid": "a"}, Authorization="Bearer a")[0] == 403


@pytest.mark.usefixtures("fresh")
def test_a_tenant_has_its_share_of_the_cache_whatever_its_salts(serve, keys, engine, textured_image):
    pictures = [textured_image(64, 96, seed) for seed in range(5)]
    served = serve(api_keys=written(keys, b="bob"))
    matches(served, "b", pictures[0])
    engine.cache.flush()
    one = sum(record.meta.nbytes for record in engine.service.cache.store.tier.records())
    served = serve(api_keys=written(keys, f"[tenants.alice]\ncache_bytes = {2 * one}\n", a="alice", b="bob"))
    for i, picture in enumerate(pictures):
        matches(served, "a", picture, cache_salt=f"salt {i}")
        matches(served, "b", picture)
    engine.cache.flush()
    taken = {}
    for record in engine.service.cache.store.tier.records():
        who = payer(record.meta.owner)
        taken[who] = taken.get(who, 0) + record.meta.nbytes
    assert sorted(taken.values()) == [one, 2 * one, 5 * one]  # bob at the server before, alice, and bob
    engine.service.reset_prefix_cache()
    assert matches(served, "a", pictures[0], cache_salt="salt 0")[0] == ["miss"]
    assert matches(served, "a", pictures[4], cache_salt="salt 4")[0] == ["exact"]


@pytest.mark.usefixtures("fresh")
def test_own_donors_are_those_of_a_key(serve, keys, textured_image):
    served = serve(api_keys=written(keys, a1="alice", a2="alice"), allow_reuse=["approximate"])
    image, own = textured_image(64, 96), {"reuse": "approximate", "donors": "own"}

    def donor(key, text, **more):
        content = [{"type": "text", "text": text}, *shows(data_url(image))[0]["content"]]
        status, found = ask(served, key, messages=[{"role": "user", "content": content}], **more)
        assert status == 200, found
        [report] = found["cache"]["images"]
        return report["match"], report["donor"]

    assert donor("a1", "Mine: ") == ("miss", None)
    assert donor("a1", "New: ", **own) == ("approximate", "own")
    assert donor("a2", "New: ", **own) == ("approximate", "neutral")
    assert donor("a1", "New: ", **own | {"donors": "neutral"}) == ("approximate", "neutral")


def test_donors_that_requests_may_not_ask_for(serve):
    served = serve(allow_reuse=["approximate"])
    for donors, message in (
        ("own", "donors must not be own on this server, because its keys have no names"),
        ("some", "donors must be any or own or neutral"),
        (5, "donors must be"),
    ):
        status, found = ask(served, "none", donors=donors)
        assert (status, found["error"]["param"]) == (400, "donors")
        assert message in found["error"]["message"]
    assert ask(served, "none", donors="neutral")[0] == 200
    assert ask(served, "none", caller="alice")[0] == 400


def test_a_server_links_neutral_donors_unless_its_operator_says_otherwise(keys):
    """It checks this before a model is opened."""
    named = ServerConfig(api_keys=written(keys, a="alice"))
    for server in (ServerConfig(), named):
        assert served_cache(CacheConfig(), server).donors == "neutral"
        assert served_cache(CacheConfig(donors="any"), server).donors == "any"
    assert served_cache(CacheConfig(donors="own"), named).donors == "own"
    with pytest.raises(ValueError, match="donors must not be 'own' without api_keys, whose names tell callers apart"):
        served_cache(CacheConfig(donors="own"), ServerConfig())


def test_a_tenant_may_ask_for_its_own_ways(serve, keys):
    tenants = '[tenants.alice]\nreuse = ["full"]\n[tenants.carl]\nreuse = []\n'
    served = serve(api_keys=written(keys, tenants, a="alice", b="bob", c="carl"), allow_reuse=["approximate"])
    asked = {"a": ["full", "exact"], "b": ["approximate", "exact"], "c": ["exact"]}
    for key, allowed in asked.items():
        for reuse in ("exact", "full", "approximate"):
            assert ask(served, key, reuse=reuse)[0] == (200 if reuse in allowed else 400), (key, reuse)
        [model] = served.json("GET", "/v1/models", Authorization=f"Bearer {key}")[1]["data"]
        assert sorted(model["reuse"]) == sorted(allowed)
        assert model["reuse"][0] == "exact"  # the default


def test_a_tenant_may_compress_as_it_is_let(serve, keys):
    tenants = '[tenants.alice]\ncompress = ["vl-cache-0.5"]\n[tenants.carl]\ncompress = []\n'
    served = serve(api_keys=written(keys, tenants, a="alice", b="bob", c="carl"), allow_compress=["random-0.5"])
    for key, allowed in (("a", "vl-cache-0.5"), ("b", "random-0.5"), ("c", None)):
        for compress in ("vl-cache-0.5", "random-0.5"):
            assert ask(served, key, compress=compress)[0] == (200 if compress == allowed else 400), (key, compress)
    for way in ("reuse", "compress"):
        wrong = written(keys, f'[tenants.alice]\n{way} = ["most"]\n', a="alice")
        told = rf"^api_keys {re.escape(str(wrong))}: tenants.alice {way} must be .*'most'"
        with pytest.raises(ValueError, match=told):
            serve(api_keys=wrong)


def test_answers_of_all_prompts_count(serve):
    served = serve(max_n=4)
    body = {"prompt": ["a"] * 3, "max_tokens": 1}
    assert served.json("POST", "/v1/completions", body)[0] == 200
    status, found = served.json("POST", "/v1/completions", body | {"n": 2})
    assert (status, found["error"]["param"]) == (400, "n")


def test_keys_are_read_again(serve, keys):
    served = serve(api_keys=written(keys, a="alice"))
    register = served.server.register
    written(keys, b="bob")
    register.reload()
    assert [ask(served, key)[0] for key in ("a", "b")] == [401, 200]
    for wrong in ("[[keys", '[tenants.alice]\nreuse = ["no such way"]\n'):
        written(keys, wrong, a="alice")
        with pytest.raises(ValueError, match=r"api_keys|reuse"):
            register.reload()
        assert [ask(served, key)[0] for key in ("a", "b")] == [401, 200]

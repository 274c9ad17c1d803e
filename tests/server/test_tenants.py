"""Keys, tenants and their salts, without a server."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import subprocess
import sys

import pytest

from vlcache_jax.cache.keys import OWNER_DIGITS, TenantSalt, owner_key, payer
from vlcache_jax.server import tenants
from vlcache_jax.server.tenants import Salts, Tenant, Tenants, server_secret


def sha256(key):
    return hashlib.sha256(key.encode()).hexdigest()


FILE = f"""
[[keys]]
name = "notebook of alice"
sha256 = "{sha256("a1")}"
tenant = "alice"

[[keys]]
name = "robot of alice"
sha256 = "{sha256("a2").upper()}"
tenant = "alice"

[[keys]]
name = "bob"
sha256 = "{sha256("b")}"
tenant = "bob"

[tenants.alice]
reuse = ["approximate"]
cache_bytes = "1MiB"
requests = 2
"""


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "keys.toml"
        path.write_text(text)
        return path

    return written


def test_a_key_is_of_its_tenant(write):
    found = Tenants.load(write(FILE))
    alice = Tenant("alice", ("approximate",), 2**20, 2, key="notebook of alice")
    robot, bob = dataclasses.replace(alice, key="robot of alice"), Tenant("bob", key="bob")
    assert [found.of(key) for key in ("a1", "a2", "b", "", "A1", sha256("b"), "\udcff")] == [
        alice, robot, bob, None, None, None, None,
    ]  # fmt: skip
    assert sha256("a1") not in repr(found)


def test_a_key_is_compared_with_all(write, monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(tenants.hmac, "compare_digest", lambda a, b: compared.append(b) or real(a, b))
    found = Tenants.load(write(FILE))
    for key in ("a1", "b", "nobody's"):
        compared.clear()
        found.of(key)
        assert compared == list(found.by_digest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"keys must be tables under \[\[keys\]\], got None"),
        ("keys = 5", "keys must be tables .*, got 5"),
        ("[[keys]]", r"keys\[0\] name must be a non-empty string, got None"),
        (FILE.replace('name = "bob"', "name = 5"), r"keys\[2\] name must be a non-empty string, got 5"),
        (FILE.replace(sha256("b"), "b" * 63), r"keys\[2\] sha256 must be 64 hex digits, as sha256sum prints them$"),
        (
            FILE.replace(sha256("b"), sha256("")),
            r"keys\[2\] sha256 must be the digest of a key, got that of an empty",
        ),
        (FILE.replace(sha256("b"), "x" * 64), r"keys\[2\] sha256 must be 64 hex digits, as sha256sum prints them$"),
        (
            FILE.replace(sha256("b"), sha256("a1")),
            r"keys\[2\] sha256 must be unique, got .* an earlier key$",
        ),
        (
            FILE.replace('tenant = "bob"', 'tenent = "bob"'),
            r"keys\[2\]: unknown field 'tenent'.*; did you mean 'tenant'",
        ),
        (FILE.replace("requests = 2", "requests = 0"), "tenants.alice requests must be .*, got 0"),
        (FILE.replace("requests = 2", "requests = true"), "tenants.alice requests must be .*, got True"),
        (FILE.replace('["approximate"]', '"all"'), "tenants.alice reuse must be a list of strings, got 'all'"),
        (FILE.replace('"1MiB"', '"much"'), "tenants.alice cache_bytes must be"),
        (FILE.replace("requests", "request"), "tenants.alice: unknown field 'request'"),
        (FILE + "[tenants.eve]", r"tenants.eve must have a key: add one with this tenant under \[\[keys\]\]"),
        (FILE + "[more]", "the file: unknown field 'more'; expected one of keys, tenants"),
        ("tenants = 5\n" + FILE.partition("[tenants")[0], "tenants must be tables .*, got 5"),
        ("keys = " + "[" * 5000, "api_keys .* must be TOML: "),
        ("[[keys", "api_keys .* must be TOML: "),
    ],
)
def test_a_wrong_file_is_told(write, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        Tenants.load(write(text))
    assert str(caught.value).startswith("api_keys ")
    assert not any(sha256(key) in str(caught.value) for key in ("a1", "a2", "b"))


def test_no_key_is_the_admins(write):
    assert Tenants.load(write(FILE), "c").of("b")
    with pytest.raises(
        ValueError, match=r"^api_keys .*: keys must not contain the admin key: choose another admin_key$"
    ):
        Tenants.load(write(FILE), "b")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"^api_keys must be a readable file, got .*: No such file"):
        Tenants.load(tmp_path / "none")


def test_salts_are_of_tenant_and_request():
    salts = Salts(b"secret")
    asked = [(tenant, own) for tenant in ("a", "ab", "") for own in (None, "", "b", "bc")]
    made = [salts.salt(*one) for one in asked]
    assert len(set(made)) == len(asked)
    assert [salt.tenant for salt in made] == [salts.salt(tenant).tenant for tenant, _ in asked]
    assert len({salt.tenant for salt in made}) == 3
    owners = [owner_key(salt) for salt in made]
    assert len(set(owners)) == len(made)
    assert len({payer(owner) for owner in owners}) == 3
    assert {len(owner) for owner in owners} == {len(owner_key("a"))} == {OWNER_DIGITS}
    assert made == [Salts(b"secret").salt(*one) for one in asked]
    assert not set(made) & {Salts(b"other").salt(*one) for one in asked}


def test_a_salt_is_a_code_of_its_kind_its_tenant_and_what_the_request_names():
    """Records on a disk are found by these codes after a restart, and after an update."""

    def code(*parts):
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(b"secret", message, "sha256").hexdigest()

    salts = Salts(b"secret")
    assert salts.salt("a") == TenantSalt(code(b"tenant", b"a"), code(b"salt", b"a"))
    assert salts.salt("ä", "b") == TenantSalt(code(b"tenant", "ä".encode()), code(b"salt", "ä".encode(), b"b"))
    assert salts.salt("\udcff").tenant == code(b"tenant", b"\xff")


def test_a_secret_is_kept_for_its_owner_alone(tmp_path):
    folder = tmp_path / "new" / "cache"
    before = os.umask(0)
    try:
        secret = server_secret(folder)
    finally:
        os.umask(before)
    [path] = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert server_secret(folder) == secret == path.read_bytes()
    assert len(secret) == 32
    assert server_secret(tmp_path) != secret
    assert server_secret(None) != server_secret(None)
    path.chmod(0o640)
    with pytest.raises(ValueError, match=rf"must be readable by its owner only: chmod 600 {path}$"):
        server_secret(folder)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="must have 32 bytes, got a file of another size"):
        server_secret(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(
        ValueError,
        match=r"the secret of tenants must be a file that this user can read and create, got .*: Is a directory",
    ):
        server_secret(folder)


@pytest.mark.slow
def test_servers_that_begin_together_have_one_secret(tmp_path):
    code = f"from vlcache_jax.server.tenants import server_secret; print(server_secret({str(tmp_path)!r}).hex())"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [process.communicate()[0] for process in started]
    assert len(set(told)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tenants.secret"]

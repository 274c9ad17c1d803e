"""Tenants of a server: their keys, limits and salts, which separate their cached images.

The file of keys is TOML. It has the SHA-256 of each key, so that a reader of the file cannot use the key::

    [[keys]]
    name = "notebook of alice"    # required label of the key
    sha256 = "..."                # 64 hex digits: printf %s "$KEY" | sha256sum | cut -c1-64
    tenant = "alice"

    [tenants.alice]               # optional
    reuse = ["exact", "approximate"]
    cache_bytes = "1GiB"
    requests = 8
    priority = true
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import os
import secrets
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from vlcache_jax.cache.keys import TenantSalt
from vlcache_jax.common.checks import check_flags, check_text, check_whole, parse_bytes, short
from vlcache_jax.common.files import make_folder
from vlcache_jax.inputs.messages import check_keys
from vlcache_jax.request_options import RequestOptions

_KEY_FIELDS = ("name", "sha256", "tenant")
_TENANT_FIELDS = ("reuse", "cache_bytes", "requests", "compress", "priority")
_SECRET = "tenants.secret"
_SECRET_BYTES = 32


@dataclass(frozen=True)
class Tenant:
    """Tenant of a server. Its requests share cached images with each other and with no other tenant.

    Attributes:
      name: name in the file of keys.
      reuse: values of `reuse` that its requests may send in addition to the server's default. None: those of the
        server's `allow_reuse`.
      cache_bytes: maximum bytes of its cache entries, in host memory and on disk each. None: no quota.
      requests: maximum number of requests in flight. None: no limit except that of the server.
      compress: values of `compress` that its requests may send. None: those of the server's `allow_compress`.
      priority: if True, the `priority` of its requests also counts against those of other tenants. Otherwise it only
        orders the tenant's own requests.
      key: name of the API key of a request.

    Raises:
      ValueError: a value has the wrong type or is out of range.
    """

    name: str
    reuse: tuple[str, ...] | None = None
    cache_bytes: int | None = None
    requests: int | None = None
    compress: tuple[str, ...] | None = None
    priority: bool = False
    key: str = ""

    def __post_init__(self) -> None:
        check_text(self.name or None, "tenant", "a non-empty string")
        for name in ("reuse", "compress"):
            given: Any = getattr(self, name)
            if given is None:
                continue
            if not isinstance(given, list | tuple) or not all(isinstance(one, str) and one for one in given):
                raise ValueError(f"tenants.{self.name} {name} must be a list of strings, got {short(given)}")
            object.__setattr__(self, name, tuple(given))
        if self.cache_bytes is not None:
            object.__setattr__(self, "cache_bytes", parse_bytes(self.cache_bytes, f"tenants.{self.name} cache_bytes"))
        check_whole(f"tenants.{self.name} requests", self.requests, 1, or_none=True)
        check_flags(**{f"tenants.{self.name} priority": self.priority})


@dataclass(frozen=True)
class Tenants:
    """Tenants of a file of keys.

    Attributes:
      by_digest: the tenant of each key, by the key's SHA-256.
    """

    by_digest: Mapping[bytes, Tenant] = field(repr=False)

    def all(self) -> dict[str, Tenant]:
        """Return the tenants by name."""
        return {tenant.name: tenant for tenant in self.by_digest.values()}

    @classmethod
    def load(cls, path: str | os.PathLike[str], admin_key: str | None = None) -> Self:
        """Read a file of keys.

        Args:
          path: the file.
          admin_key: the admin key, which no tenant may have; None if there is none.

        Raises:
          ValueError: the file cannot be read, or a key or a tenant in it is wrong. No message shows a digest.
        """
        try:
            content = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"api_keys must be a readable file, got {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"api_keys {path} must be TOML: {error}") from error
        try:
            found = cls(_read(content))
            if admin_key is not None and found.of(admin_key) is not None:
                raise ValueError("keys must not contain the admin key: choose another admin_key")
        except ValueError as error:
            raise ValueError(f"api_keys {path}: {error}") from error
        return found

    def of(self, key: str) -> Tenant | None:
        """Return the tenant of a key; None if the key is unknown. The time does not depend on the keys in the file."""
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        fits = [hmac.compare_digest(digest, known) for known in self.by_digest]  # no early exit
        return next((tenant for tenant, found in zip(self.by_digest.values(), fits, strict=True) if found), None)


def _read(content: dict[str, Any]) -> dict[bytes, Tenant]:
    check_keys(content, ("keys", "tenants"), "the file")
    keys, settings = content.get("keys"), content.get("tenants", {})
    if not isinstance(keys, list) or not keys or not all(isinstance(one, dict) for one in keys):
        raise ValueError(f"keys must be tables under [[keys]], got {short(keys)}")
    if not isinstance(settings, dict) or not all(isinstance(one, dict) for one in settings.values()):
        raise ValueError(f"tenants must be tables such as [tenants.alice], got {short(settings)}")
    tenants = {}
    for name, one in settings.items():
        check_keys(one, _TENANT_FIELDS, f"tenants.{name}")
        tenants[name] = Tenant(name, **one)
    found: dict[bytes, Tenant] = {}
    for number, one in enumerate(keys):
        where = f"keys[{number}]"
        check_keys(one, _KEY_FIELDS, where)
        for name in _KEY_FIELDS:
            check_text(one.get(name) or None, f"{where} {name}", "a non-empty string")
        digest = _digest(one["sha256"], where)
        if digest in found:
            raise ValueError(f"{where} sha256 must be unique, got the digest of an earlier key")
        found[digest] = dataclasses.replace(tenants.get(one["tenant"]) or Tenant(one["tenant"]), key=one["name"])
    if unused := tenants.keys() - {tenant.name for tenant in found.values()}:
        raise ValueError(
            f"tenants.{min(unused)} must have a key: add one with this tenant under [[keys]], or remove the table"
        )
    return found


def _digest(text: str, where: str) -> bytes:
    digest = b""
    with contextlib.suppress(ValueError):
        digest = bytes.fromhex(text)
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"{where} sha256 must be 64 hex digits, as sha256sum prints them")
    if digest == hashlib.sha256().digest():  # `printf %s "$KEY"` prints nothing if KEY is not set
        raise ValueError(f"{where} sha256 must be the digest of a key, got that of an empty string; is KEY set?")
    return digest


class Salts:
    """Salts of tenants' requests. Without the secret, no client can produce the salt of another tenant.

    Args:
      secret: the secret of this server, 32 bytes; see `server_secret`.
    """

    def __init__(self, secret: bytes):
        self._secret = secret

    def salt(self, tenant: str, own: str | None = None) -> TenantSalt:
        """Return the salt of a tenant's request; `own` is the request's `cache_salt`."""
        return TenantSalt(self._mac("tenant", tenant), self._mac("salt", tenant, *([] if own is None else [own])))

    def _mac(self, *parts: str) -> str:
        mac = hmac.new(self._secret, digestmod="sha256")
        for part in parts:  # with their lengths, so that different lists have different digests
            content = part.encode(errors="surrogateescape")
            mac.update(len(content).to_bytes(8, "big") + content)
        return mac.hexdigest()


def server_secret(folder: str | os.PathLike[str] | None) -> bytes:
    """Return the secret of a server. It is stored with the cache entries, so that a restarted server finds them.

    Args:
      folder: folder of the cache entries on disk. None: a new secret, which lasts as long as the process.

    Returns:
      32 bytes.

    Raises:
      ValueError: the file of the secret cannot be read or written, has another size, or is readable by other users.
    """
    if folder is None:
        return secrets.token_bytes(_SECRET_BYTES)
    path = Path(folder).expanduser() / _SECRET
    try:
        make_folder(path.parent)
        part = path.with_name(f"{_SECRET}.{os.getpid()}.{secrets.token_hex(4)}.part")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            with contextlib.suppress(FileExistsError):  # of several processes, the first one's secret is used by all
                os.link(part, path)
        finally:
            part.unlink()
        with open(path, "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"the secret of tenants must be a file that this user can read and create, got {path}: {error.strerror}"
        ) from error
    if mode & 0o077:
        raise ValueError(f"the secret of tenants must be readable by its owner only: chmod 600 {path}")
    if len(secret) != _SECRET_BYTES:
        raise ValueError(
            f"the secret of tenants must have {_SECRET_BYTES} bytes, got a file of another size: {path}; delete it"
        )
    return secret


class Register:
    """Tenants of a running server.

    Args:
      path: the file of keys.
      admin_key: the admin key, which no tenant may have; None if there is none.
      secret: see `Salts`.
      apply: function that checks and applies the tenants before they become valid. It raises a ValueError if the server
        cannot serve them.

    Attributes:
      salts: salts of the tenants' requests.

    Raises:
      ValueError: see `reload`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        admin_key: str | None,
        secret: bytes,
        apply: Callable[[Salts, Tenants], object],
    ):
        self.salts = Salts(secret)
        self._path, self._admin_key, self._apply = path, admin_key, apply
        self.reload()

    def reload(self) -> None:
        """Read the file of keys again. Requests in flight continue.

        Raises:
          ValueError: the file is wrong. The tenants are unchanged.
        """
        found = Tenants.load(self._path, self._admin_key)
        self._apply(self.salts, found)
        self._tenants, self._names = found, frozenset(found.all())

    def of(self, key: str) -> Tenant | None:
        """Return the tenant of an API key; see `Tenants.of`."""
        return self._tenants.of(key)

    def names(self) -> Collection[str]:
        """Return the tenants' names."""
        return self._names


def salted(options: RequestOptions, register: Register | None, tenant: Tenant | None) -> RequestOptions:
    """Return the options of a request with its tenant's salt and its key as the caller; without a tenant, unchanged."""
    if register is None or tenant is None:
        return options
    own = cast(str | None, options.cache_salt)  # a body has no other type
    return dataclasses.replace(options, cache_salt=register.salts.salt(tenant.name, own), caller=tenant.key)


def owner_of(register: Register | None, tenant: Tenant | None) -> TenantSalt | None:
    """Return the owner of a client's own libraries; None if all clients share them."""
    return None if register is None or tenant is None else register.salts.salt(tenant.name).of_tenant

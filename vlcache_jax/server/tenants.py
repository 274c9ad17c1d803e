"""Users of one server, kept apart: who has which key, what each may ask for, and salts that nobody else can make.

A file of keys is TOML. A key stands in it as its SHA-256, so that who reads the file cannot use it::

    [[keys]]
    name = "notebook of alice"    # in logs
    sha256 = "..."                # 64 hex digits: printf %s "$KEY" | sha256sum | cut -c1-64
    tenant = "alice"

    [tenants.alice]               # may be left out
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
    """Whose requests share what is kept of their images, and nobody else's.

    Attributes:
      name: in the file.
      reuse: what its requests may ask to reuse, beside the server's own way; None: what everybody may.
      cache_bytes: of its records in host memory and on the disk, each; None: they have no limit of their own.
      requests: under way at a time; None: as many as the server takes.
      compress: what of prompts its requests may ask to go on with; None: what everybody may.
      priority: the `priority` of its requests counts beside those of other tenants, too, not among its own alone.

    Raises:
      ValueError: one is of another type or beyond its bounds.
    """

    name: str
    reuse: tuple[str, ...] | None = None
    cache_bytes: int | None = None
    requests: int | None = None
    compress: tuple[str, ...] | None = None
    priority: bool = False

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
    """Who has which key.

    Attributes:
      by_digest: SHA-256 of each key, and whose it is.
    """

    by_digest: Mapping[bytes, Tenant] = field(repr=False)

    def all(self) -> dict[str, Tenant]:
        """The tenants, by name."""
        return {tenant.name: tenant for tenant in self.by_digest.values()}

    @classmethod
    def load(cls, path: str | os.PathLike[str], admin_key: str | None = None) -> Self:
        """Reads a file of keys, none of which may be the admin's.

        Raises:
          ValueError: it cannot be read, or a key or a tenant in it is wrong. No error shows a digest.
        """
        try:
            told = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"api_keys must be a file that can be read, got {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"api_keys {path} must be TOML: {error}") from error
        try:
            found = cls(_read(told))
            if admin_key is not None and found.of(admin_key) is not None:
                raise ValueError("keys must be other ones than the admin key")
        except ValueError as error:
            raise ValueError(f"api_keys {path}: {error}") from error
        return found

    def of(self, key: str) -> Tenant | None:
        """Whose key it is; None: nobody's. How long it takes tells nothing of the keys in the file."""
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        fits = [hmac.compare_digest(digest, known) for known in self.by_digest]  # all of them, whichever fits
        return next((tenant for tenant, found in zip(self.by_digest.values(), fits, strict=True) if found), None)


def _read(told: dict[str, Any]) -> dict[bytes, Tenant]:
    check_keys(told, ("keys", "tenants"), "the file")
    keys, settings = told.get("keys"), told.get("tenants", {})
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
            raise ValueError(f"{where} sha256 must be that of another key than those above")
        found[digest] = tenants.get(one["tenant"]) or Tenant(one["tenant"])
    if unused := tenants.keys() - {tenant.name for tenant in found.values()}:
        raise ValueError(f"tenants.{min(unused)} must be the tenant of a key")
    return found


def _digest(told: str, where: str) -> bytes:
    digest = b""
    with contextlib.suppress(ValueError):
        digest = bytes.fromhex(told)
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"{where} sha256 must be 64 hex digits, as sha256sum prints them")
    if digest == hashlib.sha256().digest():  # what `printf %s "$KEY"` gives where there is no KEY
        raise ValueError(f"{where} sha256 must be that of a key, got that of an empty text, which is sent without one")
    return digest


class Salts:
    """Salts of tenants' requests. Who does not know the secret cannot make another tenant's, whatever it sends.

    Args:
      secret: of this server; see `server_secret`.
    """

    def __init__(self, secret: bytes):
        self._secret = secret

    def salt(self, tenant: str, own: str | None = None) -> TenantSalt:
        """That of a request of a tenant which names a salt itself, or does not."""
        return TenantSalt(self._mac("tenant", tenant), self._mac("salt", tenant, *([] if own is None else [own])))

    def _mac(self, *parts: str) -> str:
        mac = hmac.new(self._secret, digestmod="sha256")
        for part in parts:  # with their lengths: no two lists of parts are alike
            content = part.encode(errors="surrogateescape")
            mac.update(len(content).to_bytes(8, "big") + content)
        return mac.hexdigest()


def server_secret(folder: str | os.PathLike[str] | None) -> bytes:
    """The secret of a server, which is kept beside its records so that they are found after a restart.

    Args:
      folder: of the records; None: the secret lasts as long as the process.

    Raises:
      ValueError: the file of the secret cannot be read or written, is another one, or others may read it.
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
            with contextlib.suppress(FileExistsError):  # the first one that is whole is everybody's
                os.link(part, path)
        finally:
            part.unlink()
        with open(path, "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the secret of tenants must be a file of this user, got {path}: {error.strerror}") from error
    if mode & 0o077:
        raise ValueError(f"the secret of tenants must be for its owner alone: chmod 600 {path}")
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"the secret of tenants must be {_SECRET_BYTES} bytes, got another file: {path}")
    return secret


class Register:
    """The tenants of a running server.

    Args:
      path: file of keys.
      admin_key: that no tenant may have.
      secret: see `Salts`.
      suit: is told of all tenants before any of them is let in; raises a ValueError if the server cannot serve them.

    Attributes:
      salts: of their requests.

    Raises:
      ValueError: see `reload`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        admin_key: str | None,
        secret: bytes,
        suit: Callable[[Salts, Tenants], object],
    ):
        self.salts = Salts(secret)
        self._path, self._admin_key, self._suit = path, admin_key, suit
        self.reload()

    def reload(self) -> None:
        """Reads the file again. Requests under way stay.

        Raises:
          ValueError: it is wrong; then everything is as it was.
        """
        found = Tenants.load(self._path, self._admin_key)
        self._suit(self.salts, found)
        self._tenants, self._names = found, frozenset(found.all())

    def of(self, key: str) -> Tenant | None:
        """See `Tenants.of`."""
        return self._tenants.of(key)

    def names(self) -> Collection[str]:
        """Of the tenants."""
        return self._names


def salted(options: RequestOptions, register: Register | None, tenant: Tenant | None) -> RequestOptions:
    """The options of a body, with the salt under which its tenant's requests are answered."""
    if register is None or tenant is None:
        return options
    own = cast(str | None, options.cache_salt)  # bodies have no others
    return dataclasses.replace(options, cache_salt=register.salts.salt(tenant.name, own))


def owner_of(register: Register | None, tenant: Tenant | None) -> TenantSalt | None:
    """Whose libraries a client's own are; None: those of all clients."""
    return None if register is None or tenant is None else register.salts.salt(tenant.name).of_tenant

"""Public API of the image cache, `llm.cache`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from vlcache_jax.cache.device import DeviceTier
from vlcache_jax.cache.keys import SHARED, Salt, TenantSalt, alias_key, owner_key
from vlcache_jax.cache.lookups import CacheStats
from vlcache_jax.cache.record import Donors
from vlcache_jax.cache.records import Handle
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.writer import Writer
from vlcache_jax.calls.caller import Caller, in_order
from vlcache_jax.calls.groups import Call
from vlcache_jax.common.checks import check_flags, check_text, short
from vlcache_jax.engine.engine import CLOSED
from vlcache_jax.engine.pages import Pages
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.inputs.messages import VIDEO_TYPES, read_settings, typed
from vlcache_jax.inputs.processor import Grid
from vlcache_jax.inputs.prompt import Prompt, PromptRenderer
from vlcache_jax.outputs import RequestOutput
from vlcache_jax.preparation.identification import Identifier
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.sampling import SamplingParams


class ImageCache:
    """Image cache of an engine.

    An image is given as in messages: a path, bytes, a `data:` URL, a PIL image or an array. A video is given as the
    part of a message, a dict of type video, and stands for all its chunks. Many methods also accept an entry key; one
    that was made under another salt matches nothing.

    `cache_salt` and `mm_processor_kwargs` are those of the calls that use the image. `shared=True` addresses the images
    that `precompute` stored for all salts. Methods raise a ValueError for arguments of a wrong type and for images that
    cannot be read, and a RuntimeError if they read images or wait for the cache of a closed engine.
    """

    def __init__(
        self,
        store: Store,
        tier: DeviceTier,
        writer: Writer,
        pages: Pages,
        identifier: Identifier,
        renderer: PromptRenderer,
        caller: Caller,
    ):
        self._store, self._writer, self._identifier, self._renderer = store, writer, identifier, renderer
        self._tier, self._pages, self._caller = tier, pages, caller
        store.meter.also(self.stats)
        self._is_closed = False

    def precompute(
        self,
        images: Sequence[Any],
        system: str | None = None,
        *,
        shared: bool = False,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Compute images at the start of a user's turn and cache them; prompts that begin like this hit exactly.

        Args:
          images: list of images; each is computed in a prompt of its own.
          system: system message of those prompts, or None.
          shared: cache them for calls of every `cache_salt`, until the engine is closed or the cache is reset. Their
            prefix is only the system message, so no caller's context is in them.

        Returns:
          The entry keys of the images, in their order.

        Raises:
          ValueError: an argument or an image is wrong (`RequestError`), or `shared` is combined with `cache_salt`.
        """
        _salt(cache_salt, shared)
        if isinstance(images, (str, bytes)) or not isinstance(images, Sequence):
            raise ValueError(f"images must be a list of images, got {type(images).__name__}")
        for i, image in enumerate(images):
            if image is None:
                raise ValueError(f"images[{i}] must be an image, got None")
        if system is not None:
            check_text(system, "system")
        outputs = self._outputs(
            images, system, "images[{}]", mm_processor_kwargs, "raise", cache_salt, shared, apart=False
        )
        return [output.cache.images[0].key for output in outputs]

    def computed(
        self,
        images: Sequence[Any],
        system: str | None,
        name: str,
        mm_processor_kwargs: Mapping[str, Any] | None,
        *,
        shared: bool = False,
        cache_salt: str | TenantSalt | None = None,
    ) -> list[ValueError | None]:
        """Precompute images under a name for errors; return the error of each image, or None.

        The entries belong to this salt, even if shared entries of the images exist.
        """
        outputs = self._outputs(images, system, name, mm_processor_kwargs, "return", cache_salt, shared, apart=True)
        return [None if output.error is None else ValueError(output.error) for output in outputs]

    def _outputs(
        self,
        images: Sequence[Any],
        system: str | None,
        name: str,
        mm_processor_kwargs: Mapping[str, Any] | None,
        on_error: str,
        cache_salt: str | TenantSalt | None,
        shared: bool,
        *,
        apart: bool,
    ) -> list[RequestOutput]:
        before = [] if system is None else [{"role": "system", "content": system}]
        conversations = [
            [*before, {"role": "user", "content": [{"type": "image", "image": image}]}] for image in images
        ]
        self._check_open()
        settings = read_settings(mm_processor_kwargs)  # checked here, so that errors do not name an image

        def render(conversation: Sequence[Mapping[str, Any]], *, name: str) -> Prompt:
            return self._renderer.from_conversation(conversation, settings=settings, name=name, image_name=name)

        params, salt = SamplingParams(temperature=0, max_tokens=1), _salt(cache_salt, shared)
        options = ResolvedOptions(reuse=parse_policy("exact"), cache_salt=salt)
        call = Call(name, conversations, render, options, on_error, params, apart=apart)
        outputs = in_order(self._caller.answers([call], total=len(images), show=False))
        for image, output in zip(images, outputs, strict=True) if shared else ():
            if output.error is None:
                own = self.key(image, mm_processor_kwargs=mm_processor_kwargs)
                self._store.shared.put(own, output.cache.images[0].key)
        return outputs

    def key(
        self,
        image: Any,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the entry key of an image. It decodes an image that is not cached."""
        if isinstance(image, Mapping):
            raise ValueError("image must be an image, got a dict; `keys` returns the keys of a video's chunks")
        [key] = self.keys(image, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs)
        return key

    def keys(
        self,
        image: Any,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> list[str]:
        """Return the entry keys of an image, which has one, or of a video, which has one per chunk."""
        return [one.key for one in self._images(image, _salt(cache_salt, shared), mm_processor_kwargs)]

    def lookup(
        self,
        image: Any,
        context: str | None = None,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Find and pin the cache entries of an image; use the result in a `with` statement.

        Args:
          image: an image or an entry key; chunks of videos need their entry key.
          context: digest of the image's prefix (`Record.meta.context`). Default None: any context.
        """
        if context is not None and not isinstance(context, str):
            raise ValueError(f"context must be a string or None, got {context!r}")
        self.flush()
        if isinstance(image, Mapping):
            raise ValueError(
                "image must be an image or an entry key, got a dict; `keys` returns the keys of a video's chunks"
            )
        [(entry, grid)] = self._entries(image, cache_salt, mm_processor_kwargs)
        owner = owner_key(cache_salt)
        return self._store.lookup(entry, context or "", grid=grid, donors=Donors(), owner=owner, waits=True)

    def pin(
        self,
        image: Any,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> int:
        """Pin the present entries of an image, a video or an entry key until `unpin` or a reset of the cache.

        Entries on disk stay pinned until `unpin`, also after this process ends.

        Returns:
          The number of entries in host memory that were not pinned before.

        Raises:
          ValueError: the entries exceed `CacheConfig.pinned_share`. Nothing of the image is pinned then.
        """
        self.flush()
        count = 0
        for entry, _ in self._entries(image, cache_salt, mm_processor_kwargs, shared):
            count += self._store.keep(entry, True)
            self._store.keep_outside(entry, True)
        return count

    def unpin(
        self,
        image: Any,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> int:
        """Undo `pin` for an image, a video or an entry key; return the number of entries in host memory unpinned."""
        count = 0
        for entry, _ in self._entries(image, cache_salt, mm_processor_kwargs, shared):
            self._store.keep_outside(entry, False)
            count += self._store.keep(entry, False)
        return count

    def evict(
        self,
        image: Any,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> int:
        """Remove the entries of an image, a video or an entry key, except pinned ones; return their number.

        Prompts that contain the image are also removed from the KV pool.
        """
        self.flush()
        names: set[str] = set()
        for entry, _ in self._entries(image, cache_salt, mm_processor_kwargs, shared):
            self._pages.drop(entry)
            names |= self._store.evict(entry)
            pinned = {record.meta.name for record in self._store.records(entry)}
            names |= self._store.delete(entry, pinned)
        return len(names)

    def delete(
        self,
        image: Any,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> int:
        """Remove all entries of an image, a video or an entry key, pinned ones included; return their number."""
        self.unpin(image, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs, shared=shared)
        return self.evict(image, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs, shared=shared)

    def request(self, key: str, *, cache_salt: str | TenantSalt | None = None) -> tuple[str, ...] | None:
        """Return the entry keys of a request's images, found by its `CacheReport.request_key`, or None."""
        return self._store.requests.find(key, owner_key(cache_salt))

    def release_uuid(self, uuid: str, *, cache_salt: str | TenantSalt | None = None) -> bool:
        """Release an ID of `multi_modal_uuids` for another image; return whether it was bound to one.

        The cache entries of the former image stay.
        """
        check_text(uuid or None, "uuid", "a non-empty string")
        owner_key(cache_salt)  # checks the salt
        return self._store.image_keys.pop(alias_key(uuid, cache_salt)) is not None

    def verify(self) -> list[str]:
        """Check all entries against their checksums, remove damaged ones, and return their names."""
        self.flush()
        return self._store.verify()

    def stats(self) -> CacheStats:
        """Return counters and the current content of the cache."""
        device: Mapping[str, Any] = self._tier.counts()
        return dataclasses.replace(self._store.stats(), **device)

    @property
    def registry(self) -> CollectorRegistry:
        """Registry of `prometheus_client` with the values of `stats`, and bytes and seconds of each outer tier."""
        return self._store.meter.registry

    def flush(self) -> None:
        """Wait until everything computed so far is stored in host memory and on disk; remote tiers may take longer."""
        self._check_open()
        self._writer.flush()
        self._store.flush()

    def close(self) -> None:
        """Mark the engine as closed; reading images and waiting for the cache then raise a RuntimeError."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(CLOSED)

    def _entries(
        self,
        image: Any,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> list[tuple[str, Grid | None]]:
        """Return entry keys and grids of an image or video, or an entry key without a grid ("" for another salt)."""
        salt = _salt(cache_salt, shared)
        if isinstance(image, str) and re.fullmatch("[0-9a-f]{64}", image):
            owner = owner_key(salt)
            return [(image if self._store.is_owner(owner, image) else "", None)]  # no entry has the key ""
        found = {one.key: one.grid for one in self._images(image, salt, mm_processor_kwargs)}
        return list(found.items())

    def _images(self, image: Any, salt: Salt, mm_processor_kwargs: Mapping[str, Any] | None) -> tuple[ImageRef, ...]:
        self._check_open()
        if isinstance(image, Mapping) and typed(image).get("type") not in VIDEO_TYPES:
            raise ValueError(
                f"image must be a path, bytes, PIL image, array, video message part or entry key, got {short(image)}"
            )
        [request] = self._identifier.identify([self._renderer.alone(image, mm_processor_kwargs)], salt)
        return request.images


def _salt(cache_salt: str | TenantSalt | None, shared: bool) -> Salt:
    """Return the salt of a caller, or that of shared entries."""
    check_flags(shared=shared)
    if shared and cache_salt is not None:
        raise ValueError(f"cache_salt must be None if shared is set, got {cache_salt!r}")
    return SHARED if shared else cache_salt

"""`llm.cache`: what a user can see and do about the images that the engine keeps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from vlcache_jax.cache.device import DeviceTier
from vlcache_jax.cache.keys import SHARED, Salt, TenantSalt, alias_key, owner_key
from vlcache_jax.cache.lookups import CacheStats
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
    """The images of an engine.

    Wherever a method takes an image, it takes what messages take: a path, bytes, a `data:` URL, a PIL image, an array;
    or a video as the part of a message that shows it, a dict of type video, which stands for all its chunks.
    `cache_salt` and `mm_processor_kwargs` are those of the calls that are to find it; `keys`, `pin`, `unpin`, `evict`
    and `delete` also take `shared=True`, for what `precompute` keeps for everyone. Where it also takes an entry key,
    one that was made under another salt is like one that nobody knows.
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
        """Computes and keeps images as the first thing of a user's turn, so that prompts that begin so hit exactly.

        Args:
          images: each on its own.
          system: the system message that those prompts have, if any.
          shared: keep them for calls of every `cache_salt`. Such records were computed behind the system message alone,
            so that no caller's context is in them. It holds until the engine is closed or the cache is reset.

        Returns:
          The images' entry keys, in their order.

        Raises:
          ValueError: an image cannot be read, or a salt is given for what is shared.
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
        """The same, of images of which some may be wrong: of each what is, under this name. Their records are of this
        salt, even where others are kept for everyone."""
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
        settings = read_settings(mm_processor_kwargs)  # wrong ones are the call's, not an image's

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
        """The image's entry key. Decodes it if it was not seen before."""
        if isinstance(image, Mapping):
            raise ValueError("image must be an image, got a dict; `keys` gives those of a video's chunks")
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
        """The entry keys of an image, which has one, or of a video, which has one for each chunk."""
        return [one.key for one in self._images(image, _salt(cache_salt, shared), mm_processor_kwargs)]

    def lookup(
        self,
        image: Any,
        context: str | None = None,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Finds and pins what is kept for an image, to be used in a `with`. Takes an image or its entry key, which
        chunks of videos have, too.

        Args:
          context: digest of what stands before it (`Record.meta.context`); None: any.
        """
        if context is not None and not isinstance(context, str):
            raise ValueError(f"context must be a string or None, got {context!r}")
        self.flush()
        if isinstance(image, Mapping):
            raise ValueError(
                "image must be an image or an entry key, got a dict; `keys` gives those of a video's chunks"
            )
        [(entry, grid)] = self._entries(image, cache_salt, mm_processor_kwargs)
        owner = owner_key(cache_salt)
        return self._store.lookup(entry, context or "", grid=grid, approximate=True, owner=owner, waits=True)

    def pin(
        self,
        image: Any,
        *,
        cache_salt: str | TenantSalt | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> int:
        """Keeps an image's present records until `unpin` or until all are forgotten. Takes an image or its entry key.

        On the disk they stay until `unpin`, also after this process.

        Returns:
          How many records in host memory were not pinned before.

        Raises:
          ValueError: the records do not fit in `CacheConfig.pinned_share` any more; none of the image is pinned then.
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
        """Takes `pin` back; returns of how many records."""
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
        """Removes an image's records, but not pinned ones; returns how many. Takes an image or its entry key.

        Prompts that show the image leave the KV pool, too.
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
        """Removes an image's records everywhere, pinned ones too; returns how many. Takes an image or its entry key."""
        self.unpin(image, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs, shared=shared)
        return self.evict(image, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs, shared=shared)

    def request(self, key: str, *, cache_salt: str | TenantSalt | None = None) -> tuple[str, ...] | None:
        """The entry keys of a request's images, by `CacheReport.request_key`."""
        return self._store.requests.find(key, owner_key(cache_salt))

    def release_uuid(self, uuid: str, *, cache_salt: str | TenantSalt | None = None) -> bool:
        """Lets another picture come under an id of `multi_modal_uuids`; whether the id was bound to one.

        What is kept for the picture that it was bound to stays.
        """
        check_text(uuid or None, "uuid", "a non-empty string")
        owner_key(cache_salt)  # checks the salt
        return self._store.pictures.pop(alias_key(uuid, cache_salt)) is not None

    def verify(self) -> list[str]:
        """Checks every record against its checksums and removes damaged ones; returns their names."""
        self.flush()
        return self._store.verify()

    def stats(self) -> CacheStats:
        """Counters, and what is kept now."""
        device: Mapping[str, Any] = self._tier.counts()
        return dataclasses.replace(self._store.stats(), **device)

    @property
    def registry(self) -> CollectorRegistry:
        """Of `prometheus_client`: what `stats` says, and of each tier outside memory bytes and seconds."""
        return self._store.meter.registry

    def flush(self) -> None:
        """Waits until everything computed so far is kept, in host memory and on the disk. Nobody waits for what is on
        its way to other machines."""
        self._check_open()
        self._writer.flush()
        self._store.flush()

    def close(self) -> None:
        """The engine is closed; nothing can be asked any more."""
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
        """The entry keys of an image or of a video's chunks, and their grids; or an entry key as it came, unless it
        belongs to another salt."""
        salt = _salt(cache_salt, shared)
        if isinstance(image, str) and re.fullmatch("[0-9a-f]{64}", image):
            owner = owner_key(salt)
            return [(image if self._store.is_owner(owner, image) else "", None)]  # nothing is kept under ""
        found = {one.key: one.grid for one in self._images(image, salt, mm_processor_kwargs)}
        return list(found.items())

    def _images(self, image: Any, salt: Salt, mm_processor_kwargs: Mapping[str, Any] | None) -> tuple[ImageRef, ...]:
        self._check_open()
        if isinstance(image, Mapping) and typed(image).get("type") not in VIDEO_TYPES:
            raise ValueError(
                f"image must be an image itself, a video's part of a message, or an entry key, got {short(image)}"
            )
        [request] = self._identifier.identify([self._renderer.alone(image, mm_processor_kwargs)], salt)
        return request.images


def _salt(cache_salt: str | TenantSalt | None, shared: bool) -> Salt:
    """What stands for a caller, or for the operator."""
    check_flags(shared=shared)
    if shared and cache_salt is not None:
        raise ValueError(f"cache_salt must be None for what is shared, got {cache_salt!r}")
    return SHARED if shared else cache_salt

"""Between prompts and the engine: which images are known, what is linked, what is computed and kept (host).

Requests are looked up one after the other, in their order, as if each had run before the next came: a record gets
its place in the cache when it is planned, and is filled when the engine gets there. So a call means the same as its
requests run one by one. A request that links what another one is to compute stands on a higher level, and runs after
it.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import alias_key, content_key, context_key, entry_key, owner_key, request_key
from vlcache_jax.cache.memory import BusyError
from vlcache_jax.cache.record import Meta, Record
from vlcache_jax.cache.store import Handle, Picture, Store
from vlcache_jax.cache.why import Why
from vlcache_jax.cache.writer import Writer
from vlcache_jax.engine.ladder import round_up
from vlcache_jax.engine.request import ImageUse, Linked, Metrics, Request
from vlcache_jax.inputs.images import ImageProcessor, ImageSource, Patches
from vlcache_jax.inputs.layout import ImageRef, State, make_layout
from vlcache_jax.inputs.prompt import Prompt, PromptRenderer
from vlcache_jax.models import ModelConfig
from vlcache_jax.reuse.plan import Plan
from vlcache_jax.reuse.policies import Policy, make_plan
from vlcache_jax.reuse.selection import make_choice


class Linker:
    """Resolves the images of prompts.

    Args:
      config: of the model.
      store, writer: the cache.
      processor, renderer: of the checkpoint.
      fingerprint: of the weights; asked for when there is an image.
      dtype: of weights and records.
      token_rungs: to which records are padded.
      threads: hash, decode and cut images.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: Store,
        writer: Writer,
        processor: ImageProcessor,
        renderer: PromptRenderer,
        *,
        fingerprint: Callable[[], str],
        dtype: np.dtype,
        token_rungs: tuple[int, ...],
        threads: Executor,
    ):
        self.store, self.writer = store, writer
        self._config = config
        self._processor, self._renderer = processor, renderer
        self._fingerprint = fingerprint
        self._dtype = dtype
        self._token_rungs = token_rungs
        self._threads = threads

    # Identity.

    def identify(self, prompts: Sequence[Prompt], salt: str | None = None, *, lookup: bool = True) -> list[Request]:
        """Identifies all images, on several threads; each picture is decoded once, or not at all if it is known.

        Args:
          prompts: of a call.
          salt: see `vlcache_jax.cache`.
          lookup: whether the cache is asked; else every picture is decoded.

        Raises:
          ValueError: an image cannot be decoded or is too large, or its uuid is bound to another one, or the salt is no
            string.
        """
        owner = owner_key(salt)
        if any(prompt.images for prompt in prompts):
            self._fingerprint()  # once, not on each thread: a directory of the hub hashes all its weights
        tasks: dict[object, _Identification] = {}
        users: list[list[_Identification]] = []
        for prompt in prompts:
            users.append([])
            for source, uuid in zip(prompt.images, prompt.uuids, strict=True):
                settings = tuple(sorted(prompt.mm_processor_kwargs.items()))
                task = _Identification(self, source, uuid, prompt.mm_processor_kwargs, salt, lookup)
                users[-1].append(tasks.setdefault((task.source_id, uuid, settings), task))
        list(self._threads.map(_Identification.run, tasks.values()))
        if lookup:
            self._bind(tasks.values(), salt)
        images: dict[str, ImageRef] = {}
        requests = []
        counted: set[int] = set()
        for prompt, mine in zip(prompts, users, strict=True):
            metrics = Metrics()
            for task in mine:
                images.setdefault(task.image.key, task.image)
                if id(task) not in counted:  # the request with which an image comes first pays for it
                    counted.add(id(task))
                    metrics.lookup += task.lookup
                    metrics.decode_image += task.decode
                    metrics.preprocess += task.preprocess
            refs = tuple(images[task.image.key] for task in mine)
            token_ids, starts, _ = self._renderer.expand(prompt.token_ids, [image.num_tokens for image in refs])
            requests.append(Request(prompt, token_ids, tuple(starts.tolist()), refs, owner, metrics))
        return requests

    def entry_key(self, picture: Picture, limits: Mapping[str, int], salt: str | None) -> str:
        """Key of what is kept for a picture."""
        return entry_key(
            picture.content,
            settings=self._processor.settings(limits),
            fingerprint=self._fingerprint(),
            codec=str(self._dtype),
            salt=salt,
        )

    def image(
        self, picture: Picture, name: str, limits: Mapping[str, int], salt: str | None, load: Callable[[], Patches]
    ) -> ImageRef:
        """The image that a picture becomes.

        Raises:
          ValueError: it has more patches than the engine takes.
        """
        grid = self._processor.grid(picture.height, picture.width, limits, name=name)
        most = self._token_rungs[-1] * self._processor.merge_size**2
        if (patches := int(np.prod(grid))) > most:
            raise ValueError(
                f"{name} must have at most {most} patches, got {patches}: "
                "raise max_pixels, max_model_len or ladder.patches of the engine, or lower max_pixels of the request"
            )
        return ImageRef(self.entry_key(picture, limits, salt), grid, self._processor.num_tokens(grid), load)

    def _bind(self, tasks: Iterable[_Identification], salt: str | None) -> None:
        """Remembers what aliases stand for, after a check that no uuid stands for two pictures."""
        aliases: dict[str, Picture] = {}
        for task in tasks:
            if task.uuid is not None:
                alias = alias_key(task.uuid, salt)
                bound = aliases.setdefault(alias, self.store.picture(alias) or task.picture)
                if bound.content != task.picture.content:
                    raise task.wrong_uuid()
            if task.alias is not None:
                aliases[task.alias] = task.picture
        for alias, picture in aliases.items():
            self.store.remember_picture(alias, picture)

    # Planning.

    def plan(self, request: Request, policy: Policy, batch: Batch) -> Linked:
        """Looks a request up, plans it, and gives what it will compute a place in the cache.

        Args:
          batch: of requests planned before and not finished yet; takes over what this one needs.

        Raises:
          BusyError: what it computes can have its place in the cache only when the batch has run.
        """
        start = time.perf_counter()
        layers = self._config.text.num_layers
        contexts = self._contexts(request) if policy.links else []
        handles: list[Handle] = []
        made: list[Record] = []
        try:
            for context, image in zip(contexts, request.images, strict=False):
                found = self.store.lookup(image.key, context, grid=image.grid, approximate=policy.approximates)
                handles.append(found)
            states: list[State] = [
                "miss" if handle.kv is None else "exact" if handle.exact else "approximate" for handle in handles
            ]
            layout = make_layout(
                request.token_ids, request.starts, request.images, self._processor.merge_size, states or None
            )
            plan = make_plan(policy, layout, layers)
            uses = [ImageUse(span, why=Why.reuse_off) for span in layout.images]
            for use, handle in zip(uses, handles, strict=False):
                use.linked, use.has_encoder, use.why = handle.kv, handle.encoder is not None, handle.why
            made += self._reserve(uses, contexts, handles, plan, request.owner)
            for handle in handles:
                handle.hold()
            level = batch.take(handles, made, [use.linked for use in uses])
        except BaseException:
            for handle in handles:
                handle.release()
            for record in made:
                self.store.cancel(record)
            raise
        for handle in handles:
            self.store.count(handle)
        keys = [image.key for image in request.images]
        key = request_key(keys) if handles else None
        known = key is not None and self.store.remember_request(key, keys, request.owner)
        if key is not None and not known:
            batch.new_requests.append(key)
        request.metrics.lookup += time.perf_counter() - start
        return Linked(
            request, layout, plan, tuple(uses), level, make_choice(policy, layout, layers), policy.name, key, known
        )

    def _reserve(
        self, uses: list[ImageUse], contexts: list[str], handles: list[Handle], plan: Plan, owner: str
    ) -> list[Record]:
        """Gives what a request will compute a place in the cache: encoder rows, and K, V."""
        most = self.store.config.variants
        wanted: dict[str, tuple[Meta, ImageUse]] = {}
        variants: collections.Counter[str] = collections.Counter()
        canonical = True
        for use, context, handle in zip(uses, contexts, handles, strict=False):
            image = use.span.image
            canonical = canonical and use.span.state != "approximate"
            use.encoder = handle.encoder
            if use.encoder is None and plan.depth[use.span.tokens].any():
                meta = self._encoder_meta(image, owner)
                wanted.setdefault(meta.name, (meta, use))  # a request may show an image twice
            if use.linked is None and (most is None or variants[image.key] < most):
                variants[image.key] += 1
                meta = self._kv_meta(image, owner, context, canonical)
                wanted[meta.name] = meta, use
        if not wanted:
            return []
        made = self.store.reserve([meta for meta, _ in wanted.values()])
        for (meta, use), record in zip(wanted.values(), made, strict=True):
            if meta.context is None:
                use.encoder = record
            else:
                use.captured = record
                if record is None and use.why not in (Why.other_context, Why.displaced):
                    use.why = Why.too_large
        return [record for record in made if record is not None]

    def _contexts(self, request: Request) -> list[str]:
        """Digest of everything before each image."""
        contexts = []
        before: list[str | npt.NDArray[np.int32]] = []
        done = 0
        for start, image in zip(request.starts, request.images, strict=True):
            before.append(request.token_ids[done:start])
            contexts.append(context_key(before))
            before.append(image.key)
            done = start + image.num_tokens
        return contexts

    def _encoder_meta(self, image: ImageRef, owner: str) -> Meta:
        shape = 1 + self._config.vision.num_deepstack, self._padded(image), self._config.text.hidden_size
        return Meta(image.key, owner, None, True, image.grid, image.num_tokens, str(self._dtype), shape)

    def _kv_meta(self, image: ImageRef, owner: str, context: str, canonical: bool) -> Meta:
        text = self._config.text
        shape = text.num_layers, 2, self._padded(image), text.num_kv_heads, text.head_dim
        return Meta(image.key, owner, context, canonical, image.grid, image.num_tokens, str(self._dtype), shape)

    def _padded(self, image: ImageRef) -> int:
        return round_up(image.num_tokens, self._token_rungs)


class Batch:
    """Requests that are planned together, and the records they hold until they have run (a context manager).

    Attributes:
      new_requests: request keys that were not known before.
    """

    def __init__(self, linker: Linker):
        self.new_requests: list[str] = []
        self._linker = linker
        self._handles: list[Handle] = []
        self._made: list[Record] = []
        self._level: dict[int, int] = {}  # id of a record to be filled -> level of the request that computes it

    def add(self, request: Request, policy: Policy) -> Linked | None:
        """Plans a request. None: it has to wait until this batch has run."""
        try:
            return self._linker.plan(request, policy, self)
        except BusyError:  # never in an empty batch, which holds nothing
            return None

    def take(self, handles: list[Handle], made: list[Record], linked: Sequence[Record | None]) -> int:
        """Takes over what a request holds; returns its level."""
        level = 1 + max((self._level.get(id(record), -1) for record in linked), default=-1)
        self._handles += handles
        self._made += made
        self._level.update({id(record): level for record in made if record.meta.context is not None})
        return level

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is not None:
                self._linker.writer.flush()
        finally:
            for record in self._made:
                if kind is not None or not record.is_claimed:
                    self._linker.store.cancel(record)
            for handle in self._handles:
                handle.release()
            for key in self.new_requests if kind is not None else ():
                self._linker.store.forget_request(key)


class Reported(Protocol):
    """A result that tells of a request's run."""

    @property
    def metrics(self) -> Metrics: ...


def in_batches[T: Reported](
    linker: Linker, requests: Sequence[Request], policy: Policy, run: Callable[[list[Linked]], list[T]]
) -> list[T]:
    """Plans and runs requests in their order, as many together as the cache can hold at once."""
    results: list[T] = []
    waves = 0
    while len(results) < len(requests):
        with Batch(linker) as batch:
            group: list[Linked] = []
            for request in requests[len(results) :]:
                linked = batch.add(request, policy)
                if linked is None:
                    break
                group.append(linked)
            if not group:
                raise RuntimeError("records are held by requests that have ended; reset_mm_cache() helps")
            done = run(group)
        for result in done:
            result.metrics.wave += waves
        waves = 1 + max(result.metrics.wave for result in done)
        results += done
    return results


class _Identification:
    """Finds out which image a source is.

    Attributes:
      source_id: equal for sources that are the same for sure.
      alias: key under which its picture is found again without decoding; None: it has no encoded bytes.
      picture, image: the result.
      lookup, decode, preprocess: seconds.
    """

    picture: Picture
    image: ImageRef

    def __init__(
        self,
        linker: Linker,
        source: ImageSource,
        uuid: str | None,
        limits: Mapping[str, int],
        salt: str | None,
        lookup: bool,
    ):
        self.source, self.uuid = source, uuid
        self._linker, self._limits, self._salt, self._lookup = linker, limits, salt, lookup
        self._trusted = uuid if lookup and linker.store.config.trust_uuids else None
        self.source_id: object = self._trusted or source.encoded or id(source.value)
        self.alias: str | None = None
        self.lookup = self.decode = self.preprocess = 0.0

    def run(self) -> None:
        start = time.perf_counter()
        rgb = None
        known = None
        if self._lookup:
            named = self._trusted if self._trusted is not None else self.source.encoded
            self.alias = None if named is None else alias_key(named, self._salt)
            known = self._linker.store.picture(self.alias) if self.alias is not None else None
            self.lookup = time.perf_counter() - start
        if known is None:
            rgb = self._decode()
            known = _picture(rgb)
        self.picture = known
        self.image = self._linker.image(known, self.source.name, self._limits, self._salt, self._patches)
        if not (self._lookup and self._linker.store.knows(self.image.key)):
            # The pixels will be needed, as far as one can tell now.
            self.image.patches = self._patches() if rgb is None else self._cut(rgb)

    def _decode(self) -> npt.NDArray[np.uint8]:
        start = time.perf_counter()
        rgb = self.source.decode()
        self.decode += time.perf_counter() - start
        return rgb

    def _cut(self, rgb: npt.NDArray[np.uint8]) -> Patches:
        start = time.perf_counter()
        patches = self._linker._processor.patches(rgb, self._limits)
        self.preprocess += time.perf_counter() - start
        return patches

    def _patches(self) -> Patches:
        rgb = self._decode()
        if self._trusted is not None and _picture(rgb) != self.picture:
            raise self.wrong_uuid()  # kept under the other picture's key, it would mislead everyone
        return self._cut(rgb)

    def wrong_uuid(self) -> ValueError:
        return ValueError(
            f"uuid of {self.source.name} must stay with one picture, but {self.uuid!r} came with another one before; "
            "cache.release_uuid sets it free"
        )


def _picture(rgb: npt.NDArray[np.uint8]) -> Picture:
    return Picture(content_key(rgb), *rgb.shape[:2])

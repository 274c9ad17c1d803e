"""Plans requests: which images are known, what of them is linked, what is computed and kept (host).

Requests are looked up one after the other, in their order, as if each had run before the next came: a record gets
its place in the cache when it is planned, and is filled when the engine gets there. So a call means the same as its
requests run one by one.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import context_keys, request_key
from vlcache_jax.cache.record import Meta, Record, Why
from vlcache_jax.cache.records import Handle
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.writer import Writer
from vlcache_jax.device.ladder import round_up
from vlcache_jax.engine.request import Holding, ImageUse, Planned, Request
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, Layout, State, make_layout
from vlcache_jax.intake.costs import Image, Load, Rates, choose
from vlcache_jax.intake.forms import Forms
from vlcache_jax.models import ModelConfig
from vlcache_jax.reuse.plan import Plan
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import RowChoice, computing, decide


class Planner:
    """Plans requests whose images are identified.

    Args:
      config: of the model.
      store, writer: the cache.
      forms: of records.
      token_rungs: to which records are padded.
      rates: by which `CacheConfig.load` = "auto" decides; None: it decides nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: Store,
        writer: Writer,
        *,
        forms: Forms,
        token_rungs: tuple[int, ...],
        rates: Rates | None = None,
    ):
        self.store, self.writer, self.rates = store, writer, rates
        self._config = config
        self._forms, self._token_rungs = forms, token_rungs

    def plan(self, request: Request, policy: Policy) -> Planned:
        """Looks a request up, plans it, and gives what it will compute a place in the cache.

        Whoever asks for it ends `Planned.hold`, once.
        """
        start = time.perf_counter()
        layers = self._config.text.num_layers
        contexts = self._contexts(request) if policy.links else []
        handles: list[Handle] = []
        made: list[Record] = []
        try:
            # What is found, and wanted, decides what is computed.
            for context, image in zip(contexts, request.images, strict=False):
                handles.append(self._find(image, context, policy.approximates, request.owner))
                if (load := self.store.config.load) in ("encoder", "compute"):
                    handles[-1].pass_over(encoder=load == "compute" and image.has_pixels)
            layout, plan, choice = self._arrange(request, handles, policy)
            # What turns out not to be worth loading is let go, and computed.
            if self.rates is not None:
                dear = self._pass_over(layout, handles, _fresh(layout, plan, choice, layers))
                layout, plan, choice = computing(dear, layout, plan, choice, layers)
            # What each image takes from the cache, and the places of what it will give.
            brought = {name: tier for handle in handles for name, tier in handle.brought.items()}
            uses = [_use(span, handle, brought) for span, handle in zip(layout.images, handles, strict=False)]
            uses = uses or [ImageUse(span, why=Why.reuse_off) for span in layout.images]
            made += self._reserve(uses, contexts, handles, plan, request.owner)
            for handle in handles:
                handle.hold()
        except BaseException:
            for handle in handles:
                handle.release()
            for record in made:
                self.store.cancel(record)
            raise
        for handle in handles:
            self.store.count(handle)
        # Whether the same images came together before, for the report.
        keys = [image.key for image in request.images]
        key = request_key(keys) if handles else None
        known = key is not None and self.store.requests.remember(key, keys, request.owner)
        request.metrics.lookup += time.perf_counter() - start
        return Planned(
            request=request,
            layout=layout,
            plan=plan,
            uses=tuple(uses),
            choice=choice,
            policy=policy.name,
            keeps_pages=policy.links,
            request_key=key,
            request_known=known,
            hold=Holding(self.store, handles, made, None if known else key, request.items),
        )

    def _find(self, image: ImageRef, context: str, approximate: bool, owner: str) -> Handle:
        """What is kept of an image, under its own key or for everyone."""
        found: Handle | None = None
        for key in image.keys:
            if found is None or not found.exact:
                whose = owner if key == image.key else image.shared_owner
                handle = self.store.lookup(key, context, grid=image.grid, approximate=approximate, owner=whose)
                found = handle if found is None else found.prefer(handle)
        assert found is not None
        return found

    def _arrange(
        self, request: Request, handles: list[Handle], policy: Policy
    ) -> tuple[Layout, Plan, RowChoice | None]:
        """Where everything lies and what of it is computed, by what was found."""
        states: list[State] = [
            "miss" if handle.kv is None else "exact" if handle.exact else "approximate" for handle in handles
        ]
        layout = make_layout(
            request.token_ids,
            request.starts,
            request.images,
            self._config.vision.merge_size,
            states or None,
            request.moments,
        )
        return layout, *decide(policy, layout, self._config.text.num_layers)

    def _pass_over(self, layout: Layout, handles: list[Handle], fresh: list[float]) -> list[ImageSpan]:
        """Lets go of what is not to be used of what was found; returns the images whose K, V are among it.

        Args:
          fresh: see `Image`; of each image.
        """
        dear = []
        for span, handle, share in zip(layout.images, handles, fresh, strict=False):
            if (load := self._load(span, handle, share)) == "link":
                continue
            if handle.kv is not None:
                dear.append(span)
            handle.pass_over(encoder=load == "compute")
        return dear

    def _load(self, span: ImageSpan, handle: Handle, fresh: float) -> Load:
        """What is done with an image. It never depends on what happens to be decoded, so that a call means the same as
        its requests one by one."""
        assert self.rates is not None
        image, encoder = span.image, handle.encoder
        found = Image(
            tokens=image.num_tokens,
            patches=math.prod(image.grid),
            kv_bytes=None if handle.kv is None else handle.kv.meta.nbytes,
            encoder_bytes=None if encoder is None else encoder.meta.nbytes // encoder.meta.padded * image.num_tokens,
            fresh=fresh,
            # What comes under a known id may be no picture at all.
            has_pixels=image.has_pixels and not self.store.config.trust_uuids,
        )
        return choose(self.rates, found)

    def _reserve(
        self, uses: list[ImageUse], contexts: list[str], handles: list[Handle], plan: Plan, owner: str
    ) -> list[Record]:
        """Gives what a request will compute a place in the cache: encoder rows, and K, V. Its `uses` are told."""
        most = self.store.config.variants
        wanted: dict[str, tuple[Meta, int]] = {}  # by their names, and whose they are
        variants: collections.Counter[str] = collections.Counter()
        canonical = True
        for i, (context, handle) in enumerate(zip(contexts, handles, strict=True)):
            use, image = uses[i], uses[i].span.image
            canonical = canonical and use.span.state != "approximate"
            if use.encoder is None and plan.depth[use.span.tokens].any() and not _has(handle, None, True):
                meta = self._forms.encoder(image.key, owner, image.grid, self._padded(image))
                wanted.setdefault(meta.name, (meta, i))  # a request may show an image twice
            is_there = handle.is_coded or _has(handle, context, canonical)
            if use.linked is None and not is_there and (most is None or variants[image.key] < most):
                variants[image.key] += 1
                room = self._padded(image)
                meta = self._forms.keys_and_values(image.key, owner, context, canonical, image.grid, room)
                wanted[meta.name] = meta, i
        if not wanted:
            return []
        made = self.store.reserve([meta for meta, _ in wanted.values()])
        for (meta, i), record in zip(wanted.values(), made, strict=True):
            why = uses[i].why
            if meta.context is None:
                uses[i] = dataclasses.replace(uses[i], encoder=record)
                continue
            if record is None and why not in (Why.other_context, Why.displaced, Why.cheaper_to_compute):
                why = Why.too_large
            uses[i] = dataclasses.replace(uses[i], captured=record, why=why)
        return [record for record in made if record is not None]

    def _contexts(self, request: Request) -> list[str]:
        """Digest of everything before each image, and of where in time it stands behind it."""
        parts: list[str | int | npt.NDArray[np.int32]] = []
        done = 0
        for start, image, moment in zip(request.starts, request.images, request.moments, strict=True):
            parts.append(request.token_ids[done:start])
            if moment is not None and moment.time:
                parts.append(moment.time)
            parts.append(image.key)
            done = start + image.num_tokens
        return list(context_keys(parts))

    def _padded(self, image: ImageRef) -> int:
        return round_up(image.num_tokens, self._token_rungs)


def _use(span: ImageSpan, handle: Handle, brought: dict[str, str]) -> ImageUse:
    """What an image takes from the cache."""
    use = ImageUse(span, handle.kv, None, handle.encoder, handle.encoder is not None, handle.why)
    if not brought:
        return use
    kv_tier, encoder_tier = (
        "host" if record is None else brought.get(record.meta.name, "host") for record in (handle.kv, handle.encoder)
    )
    return dataclasses.replace(use, kv_tier=kv_tier, encoder_tier=encoder_tier)


def _fresh(layout: Layout, plan: Plan, choice: RowChoice | None, layers: int) -> list[float]:
    """Of each image the share of its rows, over all layers, that are computed."""
    chosen = 0.0
    if choice is not None:
        chosen = sum(choice.keep) / sum(span.length for span in layout.images if span.state == "approximate")
    before = np.concatenate([[0], np.cumsum(np.minimum(plan.depth, layers))])
    return [
        float((before[span.stop] - before[span.start]) / span.length + chosen * (span.state == "approximate")) / layers
        for span in layout.images
    ]


def _has(handle: Handle, context: str | None, canonical: bool) -> bool:
    """Whether a record was passed over that is as good as the one that would be made."""
    return any(r.meta.context == context and r.meta.canonical >= canonical for r in handle.passed_over)

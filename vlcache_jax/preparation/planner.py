"""Planning of requests: which images are cached, which KV is linked, what is computed and saved (host).

Requests are looked up one after the other, in order, as if each had run before the next one came. An entry is reserved
when it is planned, and filled when the engine gets there. Therefore a call gives the outputs of its requests run one by
one.

`Rates` compare the costs of linking an image, of computing it from encoder output, and of computing it from pixels.
They are measured once per machine, model, dtype and codec (`vlcache_jax.study.calibration`), and saved in a file. They
are slopes: they exclude costs that every prompt has.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from vlcache_jax.cache.keys import request_key
from vlcache_jax.cache.record import Donors, Meta, Record, Why
from vlcache_jax.cache.records import Handle, linked_bytes
from vlcache_jax.cache.store import Store, can_link
from vlcache_jax.cache.writer import Writer
from vlcache_jax.common.files import cache_home, write_whole
from vlcache_jax.common.json_files import OBJECT, check_fields, one_of, read_object, real
from vlcache_jax.device.buckets import round_up
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.engine.request import CacheReservation, ImageUse, Planned, Request
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, Layout, State, make_layout
from vlcache_jax.inputs.processor import Grid
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import TextConfig
from vlcache_jax.preparation.openings import Openings
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.edges import EdgePolicy, Edges
from vlcache_jax.reuse.policies import Plan, Policy
from vlcache_jax.reuse.selection import RowChoice, computing, decide, parse_policy

_log = logging.getLogger(__name__)

FORMAT = "vlcache-rates/1"
_RATE = real(0, 1e3)
_LEAST_LIMIT, _UNKNOWN_LIMIT = 1.0, 10.0  # seconds

Load = Literal["kv", "encoder", "none"]
"""Use of an image with cache entries: link its KV, compute its KV from stored encoder output, or compute it from
pixels."""

Identity = dict[str, str | int]


@dataclass(frozen=True)
class Image:
    """Costs of an image: its sizes, and its cache entries.

    Attributes:
      tokens, patches: numbers of the image.
      kv_bytes: bytes of its stored KV, as transferred; None: there is none to link.
      encoder_bytes: bytes of its stored encoder output; None: there is none.
      fresh: fraction of its tokens, averaged over layers, that are computed although it is linked.
      has_pixels: True if it can be computed from pixels.
    """

    tokens: int
    patches: int
    kv_bytes: int | None
    encoder_bytes: int | None
    fresh: float = 0.0
    has_pixels: bool = True


@dataclass(frozen=True)
class Rates:
    """Cost of each step in seconds per unit.

    Attributes:
      transfer: seconds per byte of KV brought to the device, by its tier.
      link: seconds per token linked in all layers, without its transfer.
      stage: seconds per byte of stored encoder output passed to a prefill chunk.
      row: seconds per token computed in all layers.
      encode: seconds per patch encoded.
      decode: seconds per patch decoded and cut from its file.
    """

    transfer: Mapping[str, float]
    link: float
    stage: float
    row: float
    encode: float
    decode: float

    def costs(self, image: Image, tier: str = "host") -> dict[Load, float]:
        """Return the seconds of each possible use, and of computing; infinite if there are no pixels.

        Args:
          image: sizes and entries of the image.
          tier: tier of the stored KV.
        """
        rows = image.tokens * self.row
        pixels = image.patches * (self.decode + self.encode) if image.has_pixels else math.inf
        costs: dict[Load, float] = {}
        if image.kv_bytes is not None:
            entering = pixels if image.encoder_bytes is None else image.fresh * image.encoder_bytes * self.stage
            recomputed = image.fresh * rows + entering if image.fresh else 0.0
            costs["kv"] = image.kv_bytes * self.transfer[tier] + image.tokens * self.link + recomputed
        if image.encoder_bytes is not None:
            costs["encoder"] = image.encoder_bytes * self.stage + rows
        return costs | {"none": pixels + rows}

    def save(self, identity: Identity) -> pathlib.Path:
        """Save the rates of a machine and a model.

        Returns:
          The path of the file.

        Raises:
          OSError: the file cannot be written.
        """
        content = {"format": FORMAT, "identity": identity, "seconds": dataclasses.asdict(self)}
        write_whole(path := place(identity), json.dumps(content, indent=1) + "\n")
        return path

    @staticmethod
    def load(identity: Identity) -> Rates | None:
        """Return the saved rates, or None. A damaged file counts as none, with a warning in the log."""
        path = place(identity)
        if not path.exists():
            return None
        try:
            found, rates = read_rates(path)
            if found != identity:
                raise ValueError(f"{path} must be measured on {identity}, got rates of {found}")
        except ValueError as error:
            _log.warning("ignored damaged rates, run `vlcache calibrate` to measure them again: %s", error)
            return None
        return rates


def choose(rates: Rates, image: Image) -> Load:
    """Return the fastest use; of equal ones the first of linking, encoder output and pixels."""
    costs = rates.costs(image)
    return min(costs, key=lambda load: costs[load])


def time_limit(rates: Rates | None, meta: Meta) -> float:
    """Return the seconds after which an awaited entry is computed instead: the time that computing it takes."""
    if rates is None:
        return _UNKNOWN_LIMIT
    computing = rates.costs(Image(meta.tokens, math.prod(meta.grid), None, None))["none"]
    return max(_LEAST_LIMIT, computing)


def identity_of(config: ModelConfig, device: str, kv: KVShape, count: int = 1) -> Identity:
    """Return the identity of the model and device that rates apply to.

    Args:
      config: configuration of the model.
      device: kind of the device.
      kv: shape and codec of the stored KV.
      count: number of devices.
    """
    text, vision = config.text, config.vision
    return {
        "device": device, "dtype": kv.dtype.name, "codec": kv.codec_name or "auto", "model": config.model_type,
        "layers": text.num_layers, "width": text.hidden_size, "mlp": text.intermediate_size,
        "heads": text.num_heads, "kv heads": kv.heads, "head": kv.width,
        "vision layers": vision.depth, "vision width": vision.hidden_size, "vision mlp": vision.intermediate_size,
        "vision heads": vision.num_heads, "patch": vision.patch_size, "merge": vision.merge_size,
        "deepstack": vision.num_deepstack,
        **_experts(text),
        **({} if count == 1 else {"devices": count}),
    }  # fmt: skip


def _experts(text: TextConfig) -> Identity:
    if (experts := text.experts) is None:
        return {}
    return {
        "experts": experts.count,
        "experts of a row": experts.chosen,
        "expert": experts.intermediate_size,
        "layers with experts": len(experts.layers),
    }


def folder() -> pathlib.Path:
    """Return the folder of the files of rates."""
    return cache_home() / "rates"


def place(identity: Identity) -> pathlib.Path:
    """Return the path of an identity's rates."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def read_rates(path: pathlib.Path) -> tuple[Identity, Rates]:
    """Return the identity and the rates in a file.

    Raises:
      ValueError: the file is damaged, or has no rates.
    """
    content = read_object(path)
    check_fields(content, {"format": one_of(FORMAT), "identity": OBJECT, "seconds": OBJECT}, path, required=True)
    seconds: dict[str, Any] = content["seconds"]
    single = [field.name for field in dataclasses.fields(Rates) if field.name != "transfer"]
    kinds = {"transfer": OBJECT} | dict.fromkeys(single, _RATE)
    check_fields(seconds, kinds, path, section="seconds.", required=True)
    tiers = dict.fromkeys({"host", *seconds["transfer"]}, _RATE)
    check_fields(seconds["transfer"], tiers, path, section="seconds.transfer.", required=True)
    return content["identity"], Rates(seconds["transfer"], **{name: seconds[name] for name in single})


_CONTEXT = re.compile("[0-9a-f]{64}")
_EXACT = parse_policy("exact")
_MAX_TOKENS = 2**31  # maximum of an image; larger shapes are refused


class MetaBuilder:
    """Builder of the metadata of cache entries, for reserving entries and for checking found ones.

    Args:
      config: configuration of the model.
      kv: shape and codec of the stored KV.
      fingerprint: returns the hash of the weights; called once there is an entry.
    """

    def __init__(self, config: ModelConfig, kv: KVShape, fingerprint: Callable[[], str]):
        self._config, self._kv, self._fingerprint = config, kv, fingerprint

    def encoder(self, entry: str, owner: str, grid: Grid, room: int) -> Meta:
        """Return the metadata of an image's encoder output, padded to `room` tokens."""
        shape = 1 + self._config.vision.num_deepstack, room, self._config.text.hidden_size
        return Meta(
            entry, owner, None, True, grid, self._tokens(grid), str(self._kv.dtype), shape,
            model=self._fingerprint(), codec=self._kv.stored_as,
        )  # fmt: skip

    def keys_and_values(self, entry: str, owner: str, context: str, canonical: bool, grid: Grid, room: int) -> Meta:
        """Return the metadata of an image's KV, padded to `room` tokens."""
        data = self._kv.record(room)
        return Meta(
            entry, owner, context, canonical, grid, self._tokens(grid), str(data.dtype), data.shape,
            self._kv.code_bytes, self._kv.entry_states, self._kv.entry_maps, self._fingerprint(), self._kv.form,
        )  # fmt: skip

    @property
    def is_coded(self) -> bool:
        """True if KV is stored by a codec, so that it is not linked exactly."""
        return bool(self._kv.code_bytes)

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the smallest image whose KV is stored, see `KVShape.min_tokens`."""
        return self._kv.min_tokens

    def of(self, found: Meta, grid: Grid) -> Meta:
        """Return the metadata that a found entry must have if its image has this grid; see `Form`."""
        side = self._config.vision.merge_size
        if min(grid) < 1 or grid[1] % side or grid[2] % side or (tokens := self._tokens(grid)) > _MAX_TOKENS:
            raise ValueError(
                f"grid must be [frames, rows, columns] of patches, with rows and columns in multiples of "
                f"{side}, got {grid!r:.80}"
            )
        if found.context is None:
            return self.encoder(found.entry, found.owner, grid, tokens)
        if not _CONTEXT.fullmatch(found.context):
            raise ValueError(f"context must be 64 hexadecimal digits, got {found.context!r:.80}")
        return self.keys_and_values(found.entry, found.owner, found.context, found.canonical, grid, tokens)

    def _tokens(self, grid: Grid) -> int:
        return math.prod(grid) // self._config.vision.merge_size**2


class Planner:
    """Planner of requests whose images are identified.

    Args:
      config: configuration of the model.
      store, writer: the image cache.
      forms: builder of entry metadata.
      token_buckets: bucket sizes that entries are padded to.
      rates: rates for `CacheConfig.load` = "auto"; None: costs are not compared.
      links_kv: link KV of images, and store it. False: only their encoder output is stored.
      keeps_pages: use the prefix cache for prompts.
      turn_token: ID of the token that begins a message; None: it is unknown.
      openings: neutral contexts of images; None: there are none.
      edges: tokens of linked images that are computed, in a model with states whose cache holds maps; else None.
      max_tokens: maximum tokens of a prompt.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: Store,
        writer: Writer,
        *,
        forms: MetaBuilder,
        token_buckets: tuple[int, ...],
        rates: Rates | None = None,
        links_kv: bool = True,
        keeps_pages: bool = True,
        turn_token: int | None = None,
        openings: Openings | None = None,
        edges: Edges | None = None,
        max_tokens: int = _MAX_TOKENS,
    ):
        self.store, self.writer, self.rates = store, writer, rates
        self._links_kv, self._keeps_pages = links_kv, keeps_pages
        self._turn_token = turn_token if config.text.has_states else None
        self._config, self._openings, self._edges, self._max_tokens = config, openings, edges, max_tokens
        self._forms, self._token_buckets, self._min_tokens = forms, token_buckets, forms.min_tokens

    def stores_kv(self, tokens: int) -> bool:
        """Return whether the KV of an image of this size is stored; if not, its encoder output is."""
        return self._links_kv and tokens >= self._min_tokens

    def donors_to_make(self, request: Request, options: ResolvedOptions, donors: Sequence[Donors]) -> Iterator[Planned]:
        """Yield planned prompts that compute images of a request in a neutral context, where no donor may be linked.

        A prompt has one image, or all chunks of a video. Images that no request had before are among them. So the
        outputs do not depend on what others asked.

        Args:
          request, options, donors: see `plan`, which is called for the request after these prompts.
        """
        makes_none = options.donors == "any" or self.store.config.load in ("encoder", "none")
        if self._openings is None or makes_none or not donors:
            return
        exact = dataclasses.replace(options, reuse=_EXACT, compress=None)
        for first, moment in enumerate(request.moments):
            if moment is not None and moment.chunk:  # it comes with the first chunk
                continue
            shown = [first] if moment is None else request.chunks(moment.video)
            # An image in its neutral context becomes a donor by the request itself, if it is then linked exactly.
            is_donor = not self._forms.is_coded and all(request.contexts[i] == donors[i].neutral for i in shown)
            if is_donor or all(self._can_link(request, i, donors[i]) for i in shown):
                continue
            alone = self._openings.alone(request, shown)
            if alone is None or len(alone.token_ids) > self._max_tokens:
                continue
            planned = self.plan(alone, exact, is_asked=False)
            if made := sum(use.saved is not None for use in planned.uses):
                self.store.donors_made += made
                yield planned
            elif planned.reservation is not None:  # there is no room for it, or another tier has it
                planned.reservation.leave()

    def _can_link(self, request: Request, i: int, donors: Donors) -> bool:
        """Return whether KV of an image is there that may be linked, under its own key or its shared one."""
        image, context = request.images[i], request.contexts[i]
        return any(
            can_link(self.store, key, context, grid=image.grid, donors=allowed, owner=owner)
            for key, owner, allowed in _keys(image, request.owner, donors)
        )

    def plan(
        self,
        request: Request,
        options: ResolvedOptions,
        donors: Sequence[Donors] | None = None,
        *,
        is_asked: bool = True,
    ) -> Planned:
        """Look a request up, plan it, and reserve cache entries for what it will compute.

        The caller must call `leave` of `Planned.reservation` once.

        Args:
          donors: donors of each image, see `donors`, which is called for None.
          is_asked: whether a caller asked for it, so that it is counted.
        """
        start, policy = time.perf_counter(), self._policy(options)
        layers = self._config.text.num_layers
        contexts = request.contexts if policy.links else []
        handles: list[Handle] = []
        made: list[Record] = []
        try:
            # Lookup: the entries that are found, and usable, decide what is computed.
            some = (self.donors(request, options) if donors is None else donors) or itertools.repeat(None)
            for context, image, allowed in zip(contexts, request.images, some, strict=False):
                handles.append(self._find(image, context, allowed, request.owner))
                if (load := self.store.config.load) in ("encoder", "none"):
                    handles[-1].pass_over(encoder=load == "none" and image.has_pixels)
            layout, plan, choice = self._arrange(request, handles, policy)
            # Entries that cost more to load than to compute are released.
            if self.rates is not None:
                dear = self._pass_over(layout, handles, _fresh(layout, plan, choice, layers))
                layout, plan, choice = computing(dear, layout, plan, choice, layers)
            # Entries that each image uses, and reservations for what it will save.
            brought = {name: tier for handle in handles for name, tier in handle.brought.items()}
            uses = [_use(span, handle, brought) for span, handle in zip(layout.images, handles, strict=False)]
            uses = [use if use.why is not Why.unknown_image else self._known(use) for use in uses]
            uses = uses or [ImageUse(span, why=Why.reuse_off) for span in layout.images]
            made += self._reserve(uses, contexts, handles, plan, request.owner)
            Handle.hold_all(handles)
        except BaseException:
            Handle.release_all(handles)
            for record in made:
                self.store.cancel(record)
            raise
        if is_asked:
            self.store.count(handles)
            self.store.requests.note_contexts(request.owner, options.caller, contexts)
        # Whether the same list of images was served before, for the report.
        keys = [image.key for image in request.images]
        key = request_key(keys) if handles and is_asked else None
        known = key is not None and self.store.requests.remember(key, keys, request.owner)
        request.metrics.lookup += time.perf_counter() - start
        return Planned(
            request=request,
            options=options,
            layout=layout,
            plan=plan,
            uses=tuple(uses),
            choice=choice,
            owner=request.owner if policy.links and self._keeps_pages else None,
            request_key=key,
            request_known=known,
            edges=self._edges,
            reservation=CacheReservation(self.store, handles, made, None if known else key, request.items),
        )

    def donors(self, request: Request, options: ResolvedOptions) -> list[Donors]:
        """Return the contexts from which the KV of each image may be linked; empty if only exact KV is."""
        if not self._policy(options).approximates:
            return []
        openings, is_own = self._openings, partial(self.store.requests.had_context, request.owner, options.caller)
        neutral = None if openings is None else openings.of_images(request.token_ids)
        of_image = Donors(neutral, options.donors, is_own)
        if not request.videos or openings is None:
            return [of_image] * len(request.images)
        videos = [openings.of_chunks(request, video) for video in range(len(request.videos))]
        return [
            of_image if moment is None else of_image._replace(neutral=videos[moment.video][moment.chunk])
            for moment in request.moments
        ]

    def _policy(self, options: ResolvedOptions) -> Policy:
        """Return the policy of a request. Compression observes states again, which maps do not allow."""
        if self._edges is None or not isinstance(options.reuse, EdgePolicy):
            return options.reuse
        return _EXACT if options.compress else dataclasses.replace(self._edges, policy=options.reuse)

    def _find(self, image: ImageRef, context: str, donors: Donors | None, owner: str) -> Handle:
        """Return the entries of an image under its own key, or else under its shared one."""
        found: Handle | None = None
        for key, whose, allowed in _keys(image, owner, donors):
            if found is None or not found.exact:
                handle = self.store.lookup(key, context, grid=image.grid, donors=allowed, owner=whose)
                found = handle if found is None else found.prefer(handle)
        assert found is not None
        return found

    def _arrange(
        self, request: Request, handles: list[Handle], policy: Policy
    ) -> tuple[Layout, Plan, RowChoice | None]:
        """Return the layout, the plan and the choice of tokens, given the entries."""
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
            self._turn_token,
        )
        return layout, *decide(policy, layout, self._config.text.num_layers)

    def _pass_over(self, layout: Layout, handles: list[Handle], fresh: list[float]) -> list[ImageSpan]:
        """Release entries that are not worth loading; return the images whose KV is among them.

        Args:
          layout: layout of the request.
          handles: entries of each image.
          fresh: see `Image`; of each image.
        """
        dear = []
        for span, handle, share in zip(layout.images, handles, fresh, strict=False):
            if (load := self._load(span, handle, share)) == "kv":
                continue
            if handle.kv is not None:
                dear.append(span)
            handle.pass_over(encoder=load == "none")
        return dear

    def _load(self, span: ImageSpan, handle: Handle, fresh: float) -> Load:
        """Return the use of an image's entries.

        It does not depend on what happens to be decoded, so that a call equals its requests run one by one.
        """
        assert self.rates is not None
        image, encoder = span.image, handle.encoder
        found = Image(
            tokens=image.num_tokens,
            patches=math.prod(image.grid),
            kv_bytes=None if handle.kv is None else linked_bytes(handle.kv.meta, is_exact=handle.exact),
            encoder_bytes=None if encoder is None else encoder.meta.nbytes // encoder.meta.padded * image.num_tokens,
            fresh=fresh,
            # An image under a trusted uuid may not be an image at all.
            has_pixels=image.has_pixels and not self.store.config.trust_uuids,
        )
        return choose(self.rates, found)

    def _reserve(
        self, uses: list[ImageUse], contexts: list[str], handles: list[Handle], plan: Plan, owner: str
    ) -> list[Record]:
        """Reserve entries for the encoder output and the KV that a request will compute, and update `uses`."""
        max_contexts = self.store.config.max_contexts_per_image
        wanted: dict[str, tuple[Meta, int]] = {}  # by entry name, with the index of the image
        variants: collections.Counter[str] = collections.Counter()
        canonical = True
        for i, (context, handle) in enumerate(zip(contexts, handles, strict=True)):
            use, image = uses[i], uses[i].span.image
            canonical = canonical and use.span.state != "approximate"
            if use.encoder is None and plan.depth[use.span.tokens].any() and not _has(handle, None, True):
                meta = self._forms.encoder(image.key, owner, image.grid, self._padded(image))
                wanted.setdefault(meta.name, (meta, i))  # a request may have an image twice
            is_there = not self.stores_kv(image.num_tokens) or handle.is_coded or _has(handle, context, canonical)
            if use.linked is None and not is_there and (max_contexts is None or variants[image.key] < max_contexts):
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
            if record is None and why not in (
                Why.other_context, Why.no_donor, Why.displaced, Why.cheaper_to_compute,
            ):  # fmt: skip
                why = Why.too_large
            uses[i] = dataclasses.replace(uses[i], saved=record, why=why)
        return [record for record in made if record is not None]

    def _known(self, use: ImageUse) -> ImageUse:
        """Return the use of an image without KV, with the reason if only its encoder output is stored."""
        is_stored = use.encoder is None or self.stores_kv(use.span.image.num_tokens)
        return use if is_stored else dataclasses.replace(use, why=Why.not_stored)

    def _padded(self, image: ImageRef) -> int:
        return round_up(image.num_tokens, self._token_buckets)


def _keys[D: Donors | None](image: ImageRef, owner: str, donors: D) -> Iterator[tuple[str, str | None, D]]:
    """Yield the keys of an image's entries, with their owner and donors: its own key, and that of shared entries."""
    yield image.key, owner, donors
    for key in image.keys[1:]:
        yield key, image.shared_owner, donors if donors is None else donors._replace(are_shared=True)


def _use(span: ImageSpan, handle: Handle, brought: dict[str, str]) -> ImageUse:
    """Return the entries that an image uses."""
    use = ImageUse(span, handle.kv, None, handle.encoder, handle.encoder is not None, handle.why, donor=handle.donor)
    if not brought:
        return use
    kv_tier, encoder_tier = (
        "host" if record is None else brought.get(record.meta.name, "host") for record in (handle.kv, handle.encoder)
    )
    return dataclasses.replace(use, kv_tier=kv_tier, encoder_tier=encoder_tier)


def _fresh(layout: Layout, plan: Plan, choice: RowChoice | None, layers: int) -> list[float]:
    """Return the fraction of each image's tokens, averaged over layers, that are computed."""
    chosen = 0.0
    if choice is not None:
        chosen = sum(choice.keep) / sum(span.length for span in layout.images if span.state == "approximate")
    before = np.concatenate([[0], np.cumsum(np.minimum(plan.depth, layers))])
    return [
        float((before[span.stop] - before[span.start]) / span.length + chosen * (span.state == "approximate")) / layers
        for span in layout.images
    ]


def _has(handle: Handle, context: str | None, canonical: bool) -> bool:
    """Return whether an entry that was found but not used is as good as a new one, which needs the same context."""
    as_good = [r for r in handle.passed_over if r.meta.context == context and r.meta.canonical >= canonical]
    return bool(as_good)

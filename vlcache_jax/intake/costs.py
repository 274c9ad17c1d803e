"""What it takes to link an image, to compute it from stored encoder rows, and to compute it from its pixels.

The rates are measured once on a machine, for a model, its dtype and its codec (`vlcache_jax.study.calibration`), and
kept in a file. They are slopes: what a prompt takes in any case is not in them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlcache_jax.cache.record import Meta
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.fields import OBJECT, check_fields, one_of, read_object, real
from vlcache_jax.files import cache_home, write_whole
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import TextConfig

_log = logging.getLogger(__name__)

FORMAT = "vlcache-rates/1"
_RATE = real(0, 1e3)
_LEAST_LIMIT, _UNKNOWN_LIMIT = 1.0, 10.0  # seconds

Load = Literal["link", "encoder", "compute"]
"""What is done with an image of which records are found: its K, V are linked; they are computed from its stored encoder
rows; or from its pixels."""

Identity = dict[str, str | int]


@dataclass(frozen=True)
class Image:
    """An image, and what is kept of it.

    Attributes:
      tokens, patches: of the image.
      kv_bytes: of its record of K, V, as they are moved; None: none can be linked.
      encoder_bytes: of its encoder rows; None: they are not kept.
      fresh: share of its rows, over all layers, that are computed though it is linked.
      has_pixels: whether it can be computed from its pixels.
    """

    tokens: int
    patches: int
    kv_bytes: int | None
    encoder_bytes: int | None
    fresh: float = 0.0
    has_pixels: bool = True


@dataclass(frozen=True)
class Rates:
    """Seconds that a little more of everything takes.

    Attributes:
      transfer: a byte of K, V brought to the device, by the tier that it comes from.
      link: a token linked in all layers, besides its transfer.
      stage: a byte of stored encoder rows handed to a step.
      row: a row computed in all layers.
      encode: a patch encoded.
      decode: a patch decoded and cut from its file.
    """

    transfer: Mapping[str, float]
    link: float
    stage: float
    row: float
    encode: float
    decode: float

    def costs(self, image: Image, tier: str = "host") -> dict[Load, float]:
        """Seconds of each load for which there are records, and of computing; infinite where pixels lack.

        Args:
          tier: where the record of K, V is.
        """
        rows = image.tokens * self.row
        pixels = image.patches * (self.decode + self.encode) if image.has_pixels else math.inf
        costs: dict[Load, float] = {}
        if image.kv_bytes is not None:
            entering = pixels if image.encoder_bytes is None else image.fresh * image.encoder_bytes * self.stage
            recomputed = image.fresh * rows + entering if image.fresh else 0.0
            costs["link"] = image.kv_bytes * self.transfer[tier] + image.tokens * self.link + recomputed
        if image.encoder_bytes is not None:
            costs["encoder"] = image.encoder_bytes * self.stage + rows
        return costs | {"compute": pixels + rows}

    def save(self, identity: Identity) -> pathlib.Path:
        """Writes them for a machine and a model.

        Returns:
          The file.

        Raises:
          OSError: it cannot be written.
        """
        content = {"format": FORMAT, "identity": identity, "seconds": dataclasses.asdict(self)}
        write_whole(path := place(identity), json.dumps(content, indent=1) + "\n")
        return path

    @staticmethod
    def load(identity: Identity) -> Rates | None:
        """Those that were measured; None where there are none. A damaged file is like none, and the log says so."""
        path = place(identity)
        if not path.exists():
            return None
        try:
            found, rates = read_rates(path)
            if found != identity:
                raise ValueError(f"{path} must be of {identity}, got {found}")
        except ValueError as error:
            _log.warning("rates are not used; `vlcache calibrate` measures them again: %s", error)
            return None
        return rates


def choose(rates: Rates, image: Image) -> Load:
    """The load that takes least; of equal ones the first of link, encoder, compute."""
    costs = rates.costs(image)
    return min(costs, key=lambda load: costs[load])


def time_limit(rates: Rates | None, meta: Meta) -> float:
    """Seconds after which a record that is awaited is computed instead: as long as that takes."""
    if rates is None:
        return _UNKNOWN_LIMIT
    computing = rates.costs(Image(meta.tokens, math.prod(meta.grid), None, None))["compute"]
    return max(_LEAST_LIMIT, computing)


def identity_of(config: ModelConfig, device: str, kv: KVShape, count: int = 1) -> Identity:
    """What rates hold for.

    Args:
      device: kind of the device.
      kv: of the model, as they are stored.
      count: of devices.
    """
    text, vision = config.text, config.vision
    return {
        "device": device,
        "dtype": kv.dtype.name,
        "codec": kv.codec_name or "auto",
        "model": config.model_type,
        "layers": kv.layers,
        "width": text.hidden_size,
        "mlp": text.intermediate_size,
        "heads": text.num_heads,
        "kv heads": kv.heads,
        "head": kv.width,
        "vision layers": vision.depth,
        "vision width": vision.hidden_size,
        "vision mlp": vision.intermediate_size,
        "vision heads": vision.num_heads,
        "patch": vision.patch_size,
        "merge": vision.merge_size,
        "deepstack": vision.num_deepstack,
        **_experts(text),
        **({} if count == 1 else {"devices": count}),
    }


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
    """Where the files of rates are."""
    return cache_home() / "rates"


def place(identity: Identity) -> pathlib.Path:
    """The file of an identity's rates."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:16]}.json"


def read_rates(path: pathlib.Path) -> tuple[Identity, Rates]:
    """What a file's rates hold for, and the rates.

    Raises:
      ValueError: the file is damaged, or none of rates.
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

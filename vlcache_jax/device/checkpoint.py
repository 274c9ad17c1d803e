"""Checkpoints for the engine: converted checkpoints and Hugging Face directories.

Opening reads no tensor, so errors in a checkpoint and its size are known at once. Loading reads tensor by tensor, so
the host never holds a second copy of the model.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import logging
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from vlcache_jax.common.checks import check_flags
from vlcache_jax.convert.manifest import (
    FORMAT,
    MANIFEST_FILE,
    WEIGHTS_DIRECTORY,
    Manifest,
    fingerprint,
    parameter_name,
    read_manifest,
)
from vlcache_jax.convert.partial import describe_leftovers
from vlcache_jax.convert.plan import (
    Source,
    aligned_empty,
    as_dtype,
    make_plan,
    source_config,
    source_digest,
    stored_dtype,
    tensor_digests,
)
from vlcache_jax.convert.restore import StoredWeights
from vlcache_jax.convert.source import locate
from vlcache_jax.convert.stream import check_contents, check_sizes
from vlcache_jax.device.mesh import ONE
from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.params import Parameter, Part, Path, parameters
from vlcache_jax.models.registry import load_config
from vlcache_jax.reuse.edges import EdgePolicy, Edges
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import APPROXIMATE_WITH_STATES, parse_policy

_log = logging.getLogger(__name__)
_HASHING = threading.Lock()

type Place = Callable[[Parameter, np.ndarray], jax.Array]


def edges_of(policy: Policy, config: ModelConfig) -> Edges | None:
    """Return which tokens of linked images a policy computes in a model with states; None for other models.

    Also None if the policy links no images of other contexts.

    Raises:
      ValueError: the policy computes other tokens than the first and the last ones, the same in each layer.
    """
    sizes = config.text.linear_attention
    if sizes is None or not policy.approximates:
        return None
    if not isinstance(policy, EdgePolicy):
        raise ValueError(
            "reuse must be 'exact', 'off', or a policy that computes the first or the last tokens of an image in each "
            f"layer, such as 'shift-ends-0.1', for {config.model_type}, got {policy.name!r}: its layers with linear "
            "attention take the other tokens as one map of their state"
        )
    if sizes.key_width != sizes.value_width:
        raise ValueError(
            f"reuse must be 'exact' or 'off' for {config.model_type} with linear_key_head_dim {sizes.key_width} and "
            f"linear_value_head_dim {sizes.value_width}, which differ, got {policy.name!r}"
        )
    return Edges(policy, sizes.taps - 1)


def policy_for(reuse: Any, config: ModelConfig) -> Policy:
    """Return the policy that a value of `reuse` stands for in a model: "approximate" depends on its layers.

    Raises:
      ValueError: there is no such policy, see `parse_policy`.
    """
    return parse_policy(APPROXIMATE_WITH_STATES if _is_recommended(reuse) and config.text.has_states else reuse)


def _is_recommended(reuse: Any) -> bool:
    return isinstance(reuse, str) and reuse == "approximate"


def links_images(config: ModelConfig) -> bool:
    """Return whether each layer of a model keeps KV, so that any policy can link images."""
    return not config.text.has_states


@dataclasses.dataclass(frozen=True)
class Checkpoint(abc.ABC):
    """An open checkpoint whose tensors have not been read yet.

    Attributes:
      directory: directory of the weights and the files of tokenizer and processor.
      config: configuration of the model.
      dtype: dtype of the weights that `load` returns.
      revision: commit on the hub, or None if it is unknown.
    """

    directory: pathlib.Path
    config: ModelConfig
    dtype: np.dtype
    revision: str | None

    def nbytes(self, dtype: Any = None) -> int:
        """Return the bytes of the weights in `dtype`, by default in the dtype that `load` returns."""
        used = self.dtype if dtype is None else as_dtype(dtype)
        return sum(parameter.nbytes(used) for parameter in parameters(self.config))

    @property
    @abc.abstractmethod
    def source_digest(self) -> str:
        """Digest of the source's tensors, independent of the present dtype. It costs as much as `fingerprint`."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Identifier of the weights, in the dtype they are loaded in, for cache keys.

        A Hugging Face directory and its conversion have the same fingerprint. The first use on a Hugging Face directory
        reads and hashes all weights on several threads. A converted checkpoint stores its fingerprint.
        """

    def edges_of(self, policy: Policy) -> Edges | None:
        """Return `edges_of` for the model."""
        return edges_of(policy, self.config)

    def policy_of(self, reuse: Any, own: Policy | None = None) -> Policy:
        """Return the policy of an engine, or of a request, see `policy_for`.

        Args:
          reuse: value of `reuse`.
          own: policy of the engine, for a request. A request for "approximate" has it if the model keeps states.

        Raises:
          ValueError: there is no such policy, it uses a schedule that was measured on another model, or it does not fit
            the layers that keep states, or the maps of these that the engine caches.
        """
        policy, cached = policy_for(reuse, self.config), None if own is None else self.edges_of(own)
        edges = self.edges_of(policy)
        if edges is not None and own is not None:
            if cached is not None and _is_recommended(reuse):
                return own
            if cached is None or cached.computed != edges.computed:
                given, others = (
                    reuse if isinstance(reuse, str) else policy.name,
                    f"{own.name!r}, " * (cached is not None),
                )
                raise ValueError(
                    f"reuse of a request must be {others}'exact' or 'off', got {given!r}: an engine of "
                    f"{self.config.model_type} links images of other contexts only by its own policy, for which it "
                    f"caches maps of states, and its policy is {own.name!r}"
                )
        if isinstance(schedule := getattr(policy, "schedule", None), Schedule):
            fingerprint = "" if schedule.allow_other_model else self.source_digest
            schedule.check_model(self.config.model_type, self.config.text.num_layers, fingerprint)
        return policy

    @property
    def num_parameters(self) -> int:
        """Number of arrays that `load` loads."""
        return len(parameters(self.config))

    @abc.abstractmethod
    def load(self, place: Place = ONE.place, loaded: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Return the parameters as nested dicts of arrays.

        Args:
          place: puts a parameter on the devices.
          loaded: called after each parameter.
        """


def open_checkpoint(
    path_or_hub_id: str | pathlib.Path,
    *,
    dtype: Any = None,
    verify_weights: bool = False,
) -> Checkpoint:
    """Open a converted checkpoint or a Hugging Face directory.

    If a killed conversion left files in the same folder, a log warning names them.

    Args:
      path_or_hub_id: local directory, or Hub ID of a model, which is downloaded.
      dtype: "float32", "bfloat16" or "float16", also as a dtype. None keeps the stored dtype.
      verify_weights: also read all weights of a converted checkpoint and compare them with the hashes in its manifest.

    Raises:
      FileNotFoundError: the checkpoint does not exist, or files are missing.
      ValueError: the model is not supported, the checkpoint is damaged, its tensors are not those of its model, or
        `verify_weights` is set for a checkpoint without hashes.
    """
    wanted = None if dtype is None else as_dtype(dtype)
    check_flags(verify_weights=verify_weights)
    if not isinstance(path_or_hub_id, (str, os.PathLike)):
        raise ValueError(f"model must be a checkpoint directory or a Hub ID, got {path_or_hub_id!r}")
    for leftover in describe_leftovers(pathlib.Path(path_or_hub_id).expanduser().absolute().parent):
        _log.warning(leftover)
    located = locate(path_or_hub_id)
    directory = located.directory
    if (directory / MANIFEST_FILE).exists():
        manifest = read_manifest(directory)
        config = dataclasses.replace(load_config(directory), dtype=manifest.dtype)
        check_sizes(directory, manifest, config)
        if verify_weights:
            check_contents(directory)
        return _ConvertedCheckpoint(directory, config, wanted or as_dtype(manifest.dtype), manifest.revision, manifest)
    if verify_weights:
        check_contents(directory)  # raises, because the directory has no hashes
    config = source_config(directory)
    plan = make_plan(directory, config)
    return _HubCheckpoint(directory, config, wanted or stored_dtype(plan, config), located.revision, tuple(plan))


@dataclasses.dataclass(frozen=True)
class _HubCheckpoint(Checkpoint):
    """A Hugging Face directory, opened without conversion."""

    plan: tuple[Source, ...] = dataclasses.field(repr=False)

    @property
    def source_digest(self) -> str:
        with _HASHING:  # a second thread waits instead of hashing the same weights
            return self._source_digest

    @functools.cached_property
    def _source_digest(self) -> str:
        return source_digest(self.plan, tensor_digests(self.plan))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.source_digest, [self.dtype.name])

    def load(self, place: Place = ONE.place, loaded: Callable[[], object] = lambda: None) -> dict[str, Any]:
        sources = {source.parameter.path: source for source in self.plan}
        return _load(self.config, lambda parameter: sources[parameter.path].read(self.dtype), place, loaded)


@dataclasses.dataclass(frozen=True)
class _ConvertedCheckpoint(Checkpoint):
    manifest: Manifest = dataclasses.field(repr=False)

    @property
    def source_digest(self) -> str:
        return self.manifest.source_digest

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint(self.dtype.name)

    def load(self, place: Place = ONE.place, loaded: Callable[[], object] = lambda: None) -> dict[str, Any]:
        weights, entries = StoredWeights(self.directory / WEIGHTS_DIRECTORY), self.manifest.parameters

        def stored(one: Parameter | Part) -> np.ndarray:
            return weights.read(one.path, one.dtype_in(self.dtype), entry=entries[parameter_name(one.path)])

        def read(parameter: Parameter) -> np.ndarray:
            if self.manifest.format == FORMAT or len(parameter.parts) == 1:
                return stored(parameter)
            out = aligned_empty(parameter.shape, parameter.dtype_in(self.dtype))
            for part in parameter.parts:
                place = part.of(out)
                place[...] = stored(part).reshape(place.shape)
            return out

        try:
            return _load(self.config, read, place, loaded)
        except ValueError as error:
            raise ValueError(f"weights of {self.directory} cannot be read: {error}") from error


def _load(
    config: ModelConfig,
    read: Callable[[Parameter], np.ndarray],
    place: Place,
    loaded: Callable[[], object],
) -> dict[str, Any]:
    # Largest first: the temporary memory of a large tensor is needed while most of the model is not loaded yet.
    ordered = sorted(parameters(config), key=lambda parameter: -math.prod(parameter.shape))
    arrays: dict[Path, jax.Array] = {}
    for parameter, array in zip(ordered, _ahead(read, ordered), strict=True):
        # Waiting bounds the memory of transfers to the device. Threads read the next tensors in the meantime.
        arrays[parameter.path] = place(parameter, array).block_until_ready()
        loaded()
    tree: dict[str, Any] = {}
    for parameter in parameters(config):
        _insert(tree, parameter.path, arrays[parameter.path])
    return tree


def _ahead(read: Callable[[Parameter], np.ndarray], wanted: Iterable[Parameter]) -> Iterator[np.ndarray]:
    """Map `read` over the parameters on up to four threads, with at most one unconsumed result per thread."""
    threads = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "vlcache-load") as pool:
        running: collections.deque[Future[np.ndarray]] = collections.deque()
        for parameter in wanted:
            if len(running) == threads:
                yield running.popleft().result()
            running.append(pool.submit(read, parameter))
        while running:
            yield running.popleft().result()


def _insert(tree: dict[Any, Any], path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf

"""Reuse modes that a model supports, by its configuration alone, so that errors come before its weights are loaded."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from vlcache_jax.convert.source import locate
from vlcache_jax.device.checkpoint import edges_of, links_images, policy_for
from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.registry import load_config
from vlcache_jax.reuse.selection import parse_policy


def read_config(model: str | pathlib.Path) -> ModelConfig:
    """Return the configuration of a checkpoint directory or Hub ID.

    Raises:
      FileNotFoundError, ValueError: the model does not exist or has an unknown architecture.
    """
    return load_config(locate(model, weights=False).directory)


def check_keeps_kv(config: ModelConfig, command: str) -> None:
    """Check that each layer of a model keeps KV, so that stored KV of images can be loaded.

    Args:
      config: configuration of the model.
      command: name of the command that loads or selects KV, for the error.

    Raises:
      ValueError: some layers keep states.
    """
    if not links_images(config):
        raise ValueError(
            f"model of `{command}` must keep KV in each layer, got {config.model_type}: its layers with linear "
            "attention keep a state of all earlier tokens"
        )


def check_modes(config: ModelConfig, modes: Iterable[Any]) -> None:
    """Check that one engine of a model supports some values of `reuse`, none of which is its own.

    Raises:
      ValueError: a value is invalid, or the model does not support it.
    """
    for mode in modes:
        if edges_of(policy_for(mode, config), config) is not None:
            raise ValueError(
                f"reuse must be 'exact' or 'off' for {config.model_type}, got {mode!r}: an engine of a model with "
                "linear attention links images of other contexts only by its own policy, and this command measures all "
                "modes with one engine"
            )


def supported_modes[T](config: ModelConfig, modes: Mapping[str, T]) -> tuple[dict[str, T], tuple[str, ...]]:
    """Return (values of `reuse` that a model supports, names of the others).

    Args:
      config: configuration of the model.
      modes: values of `reuse` by name.
    """
    if links_images(config):
        return dict(modes), ()
    supported = {name: mode for name, mode in modes.items() if not parse_policy(mode).approximates}
    return supported, tuple(name for name in modes if name not in supported)


def left_out(config: ModelConfig, names: Iterable[str]) -> str:
    """Return a sentence about modes that a measurement leaves out because a model does not support them."""
    return (
        f"{', '.join(names)}: {config.model_type} supports only exact and off, because its layers with linear "
        "attention keep a state of all earlier tokens"
    )

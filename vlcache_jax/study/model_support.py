"""Reuse modes that a model supports, by its configuration alone, so that errors come before its weights are loaded."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
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
        policy = policy_for(mode, config)
        if policy.approximates and not links_images(config):
            given = mode if isinstance(mode, str) else policy.name
            raise ValueError(
                f"reuse must be 'exact' or 'off' for {config.model_type}, got {given!r}: an engine of a model with "
                "linear attention links images of other contexts only by its own policy, and this command measures all "
                "modes with one engine"
            )


def check_one_mode(config: ModelConfig, modes: Sequence[Any]) -> None:
    """Check that one engine of a model supports some approximate values of `reuse`, one of which may be its own.

    Raises:
      ValueError: an engine of the model has one policy and `modes` is not one, or the model does not support it.
    """
    if links_images(config):
        return
    if len(modes) != 1:
        raise ValueError(
            f"reuse must be one approximate mode for {config.model_type}, got {', '.join(map(str, modes))}: an engine "
            "of a model with linear attention links images of other contexts only by its own policy; run the command "
            "once for each mode"
        )
    edges_of(policy_for(modes[0], config), config)


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
    """Return a sentence about modes that a measurement leaves out because one engine of a model has not all of them."""
    return (
        f"{', '.join(names)}: {config.model_type} needs an engine for each policy that links images of other contexts, "
        "and this command measures all modes with one"
    )


def refusal(config: ModelConfig, mode: Any) -> str:
    """Return why no engine of a model can have a value of `reuse` as its own policy; empty if one can."""
    try:
        edges_of(policy_for(mode, config), config)
    except ValueError as error:
        return str(error)
    return ""


def slots_for(images: int, prompts: int = 1) -> int:
    """Return the `state_snapshots` with which prompts that run together link or store each of their images.

    Storing takes three slots for each image and linking by a map two. The ends of images, of the prompt and of messages
    take others for snapshots.

    Args:
      images: largest number of images of a prompt.
      prompts: largest number of prompts that run together.
    """
    return prompts * (3 * images + 4)

"""The work lists of a window whose rows' prompts are compressed (host, numpy).

Every layer keeps as many tokens as it needs, and a list for each would cost the host more time than the device saves.
So layers that keep nearly as much share one, made for the most that any of them keeps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlcache_jax.device.programs.window import LISTS
from vlcache_jax.pallas_kernels import PAGE, WorkConfig, make_work

Index = npt.NDArray[np.int32]

_ALIKE = 0.6  # of the most that a layer of a list keeps


def alike_layers(kept: Index) -> list[list[int]]:
    """The layers that share a list, those that keep most first.

    Args:
      kept: tokens of each layer and prompt, [L, B].
    """
    total = kept.sum(1)
    classes: list[list[int]] = []
    for layer in np.argsort(-total, kind="stable").tolist():
        if classes and (total[layer] >= _ALIKE * total[classes[-1][0]] or len(classes) == LISTS):
            classes[-1].append(layer)
        else:
            classes.append([layer])
    return classes


def compressed_work(kept: Index, tokens: Index, config: WorkConfig) -> tuple[Index, Index]:
    """The lists int32 [LISTS, size], and which of them each layer goes by [L].

    Args:
      kept: see `alike_layers`.
      tokens: of each answer how many are seen behind the prompt's, at the window's first token and at its last, [2, B].
    """
    lists, list_of = np.zeros((LISTS, config.size), np.int32), np.zeros(len(kept), np.int32)
    first, last = tokens
    rows = np.arange(kept.shape[1])
    for number, layers in enumerate(alike_layers(kept)):
        end = kept[layers].max(0) + last
        tables = [np.zeros(-(-count // PAGE), np.int32) for count in end]  # the device knows them
        least = kept[layers].min(0) + first
        lists[number] = make_work(rows, np.zeros_like(end), end, tables, config, least=least).buffer
        list_of[layers] = number
    return lists, list_of

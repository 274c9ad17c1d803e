"""The family of compiled programs: which there are, and one table of those that are compiled, by name and sizes.

`compile` makes all that a policy can call for ahead, else each is compiled at its first use. Threads that want the same
program compile it once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import threading
import time
from collections import abc
from typing import Any

import jax
import numpy as np

from vlcache_jax.device.definitions import BLOCK, BLOCK_ROWS, Definitions
from vlcache_jax.device.ladder import Ladder
from vlcache_jax.files import cache_home
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.pallas_kernels import PAGE, dispatch
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import SelectingPolicy

Key = tuple[Any, ...]  # a program's name and its static sizes

_MAPS, _MOST_MAPS = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
_MAPS_OF_A_PROGRAM = 3000  # of the largest ones; 350 on average


class Programs:
    """Compiles definitions and keeps them.

    Attributes:
      definitions: what is compiled.
      compiling: called with the key of a program that `run` has to wait for; it waits within what that returns.
      launches: programs called so far.
      waited: seconds that calls waited for their programs to be compiled, or read from disk.
      first_launched: when the first call since this was set to None returned.
      kernels: in the programs compiled so far: which implementation runs each case, and why.
    """

    def __init__(self, definitions: Definitions):
        self.definitions = definitions
        self.compiling: abc.Callable[[Key], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._locks: dict[Key, threading.Lock] = {}
        self.launches = 0
        self.waited = 0.0
        self.first_launched: float | None = None
        self.kernels: dict[Key, tuple[dispatch.Choice, ...]] = {}

    def keys_for(self, policy: Policy) -> list[Key]:
        """Every program that requests under a policy can call for."""
        layers = self.definitions.config.text.num_layers
        image = ImageRef("", (1, 200, 200), 10_000, _no_patches)
        layout = make_layout(np.zeros(10_001, np.int32), [0], [image], 2, ["approximate"])
        plan = policy.plan(layout, layers)
        rows = list(plan.rows(layers))
        selecting = policy if isinstance(policy, SelectingPolicy) else None
        if selecting is not None:
            for layer, kept in enumerate(selecting.keep(layout, layers), selecting.check_layer + 1):
                rows[layer] += kept
        shrinking = {layer for layer in range(layers - 1) if rows[layer + 1] < rows[layer]}
        return self.keys(linking=policy.links, shrinking=shrinking, selecting=selecting, shifting=plan.shift)

    def keys(
        self,
        *,
        linking: bool = False,
        shrinking: abc.Collection[int] = (),
        selecting: SelectingPolicy | None = None,
        shifting: bool = False,
        ladder: Ladder | None = None,
    ) -> list[Key]:
        """Every program that prefill, decoding, sampling and scoring can call for.

        Args:
          linking: also linking.
          shrinking: layers that fewer rows leave than enter, besides the last one. Any number may leave: a step that
            ends inside an image may hold nothing but rows that drop out early.
          selecting: also choosing rows on the device.
          shifting: also moving linked K, V.
          ladder: of these rungs alone; None is all.
        """
        definitions, config, links = self.definitions, self.definitions.config, self.definitions.links
        ladder = ladder or definitions.ladder
        layers, deepstack = config.text.num_layers, config.vision.num_deepstack
        like = definitions.like
        keys: list[Key] = [("pool",), ("encoder_rows",), ("lanes",), ("open_lane",)]
        for size in ladder.rows:
            keep = definitions.ladder.outputs(size)
            keys += [("embed", size)]
            if links.codec is not None and linking:
                keys += [("code", size)]
            if links.kept_tokens and linking:
                keys += [("keep", size)]
            fewer = [rung for rung in ladder.rows if rung < size]
            for shifts in {False, shifting}:
                keys += [
                    ("layer", size, size if i < layers - 1 else keep, i < deepstack, shifts, like[i : i + 1])
                    for i in range(layers)
                ]
                if size <= BLOCK_ROWS:
                    blocks = range(deepstack, layers - BLOCK + 1)
                    keys += [("layers", size, shifts, like[first : first + BLOCK]) for first in blocks]
            # Steps with rows of images that are moved move in every layer, and no others have fewer and fewer rows.
            keys += [
                ("layer", size, rung, i < deepstack, shifting, like[i : i + 1]) for i in shrinking for rung in fewer
            ]
            if shrinking and min(shrinking) < deepstack - 1:
                keys += [("slice", size, rung) for rung in fewer]
            for count in {min(count, keep) for count in ladder.sequences}:
                keys += [("head", keep, count), ("sample", count)]
            # Logits of all rows, slice by slice.
            keys += [
                ("layer", size, size, layers - 1 < deepstack, False, like[-1:]),
                ("head", size, keep),
                ("score", keep),
            ]
            if selecting is not None:
                lower = [rung for rung in ladder.rows if rung <= size]
                keys += [("choose", size), *(("narrow", size, rung) for rung in lower)]
                if selecting.check_layer < deepstack:
                    keys += [("take", size, rung) for rung in lower]
                # A prompt may be followed by what is scored, as many rows as the head holds.
                least = max((rung for rung in ladder.rows if rung < size), default=0) - ladder.max_sequences
                windows = (window for window in definitions.windows if window * PAGE > least)
                scored = {like[layer : layer + 1] for layer in selecting.scored_layers}
                keys += [("score_rows", size, window, selecting, one) for window in windows for one in scored]
        for count in ladder.sequences:
            keys += [("window", count), ("sample", count), ("copy", count)]
        for size in ladder.patches:
            keys += [("encode", size)]
        groups = {len(range(layers)[part]) for part in links.link_groups}
        for size in (patches // config.vision.merge_size**2 for patches in ladder.patches):
            keys += [("stage", size)]
            if linking:
                keys += [("link", size, count, group) for count in links.linked(size) for group in groups]
        if links.kept_tokens and linking:
            keys += [("kept",), ("keep_rows",), *(("restage", size) for size in definitions.token_rungs)]
            keys += [("recall", size, group) for size in links.recall_rungs for group in groups]
        return list(dict.fromkeys(keys))

    def compile(
        self, keys: abc.Iterable[Key], progress: abc.Callable[[Key], None] = lambda key: None
    ) -> tuple[int, float]:
        """Compiles those of `keys` that are not yet; returns the number of programs and the seconds it took."""
        start = time.perf_counter()
        missing = self.missing(keys)
        threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        try:
            compiling = {threads.submit(self.program, key, self._lower(key)): key for key in missing}
            for future in concurrent.futures.as_completed(compiling):
                future.result()
                progress(compiling[future])
        finally:
            threads.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun never will
        return len(missing), time.perf_counter() - start

    def missing(self, keys: abc.Iterable[Key]) -> list[Key]:
        """Those of `keys` that are not compiled yet."""
        return [key for key in keys if key not in self._compiled]

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def run(self, key: Key, *args: Any) -> Any:
        """Calls a program, which is compiled first if it is not yet."""
        if key not in self._compiled:
            begin = time.perf_counter()
            with self.compiling(key):
                self.program(key)
            self.waited += time.perf_counter() - begin
        self.launches += 1
        made = self._compiled[key](*args)
        if self.first_launched is None:
            self.first_launched = time.perf_counter()
        return made

    def program(self, key: Key, lowered: jax.stages.Lowered | None = None) -> jax.stages.Compiled:
        """The compiled program. If another thread is at it, waits for it; else compiles it if it is not yet.

        Raises:
          MemoryError: see `check_maps`.
        """
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._compiled:
                check_maps(key)
                self._compiled[key] = (lowered or self._lower(key)).compile()
            return self._compiled[key]

    def _lower(self, key: Key) -> jax.stages.Lowered:
        function, arguments, donated = self.definitions.define(key)
        with dispatch.recorded() as choices:
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        if choices:
            self.kernels[key] = tuple(dict.fromkeys(choices))
        return lowered


def program_name(key: Key) -> str:
    """A program as users are told of it."""
    sizes = ", ".join(str(size) for size in key[1:] if type(size) is int)
    return f"{key[0]}({sizes})" if sizes else key[0]


def _no_patches() -> Patches:
    raise AssertionError("this image has no pixels")


def check_maps(key: Key) -> None:
    """Sees that a program can still be mapped: on a CPU each takes hundreds of maps, and XLA crashes without.

    Raises:
      MemoryError: the process has nearly as many memory maps as Linux allows.
    """
    try:
        used, most = _MAPS.read_bytes().count(b"\n"), int(_MOST_MAPS.read_text())
    except OSError:  # another system
        return
    if used + _MAPS_OF_A_PROGRAM > most:
        raise MemoryError(
            f"memory maps must be left for the program {program_name(key)}, but this process has {used} of {most}, "
            "most for compiled programs: raise the limit (sysctl -w vm.max_map_count=262144), or open fewer models"
        )


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, unless the user has decided where or whether."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

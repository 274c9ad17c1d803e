"""The table of compiled programs.

`compile` makes all that a policy can call for ahead, else each is compiled at its first use. Threads that want the same
program compile it once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import threading
import time
from collections import abc
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.device.programs import answer, choose, compress, encode, keep, layers, link, state, window
from vlcache_jax.device.programs.base import Demand, Program, Repeat
from vlcache_jax.device.programs.files import ProgramFiles
from vlcache_jax.device.programs.shapes import Shapes
from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.reuse.policies import Policy

PROGRAMS: tuple[type[Program[Any]], ...] = (
    state.EmptyPool, state.EmptyEncoderRows, state.EmptyLanes, state.OpenLane, state.HoldLanes,
    state.CopyPages,
    layers.Embed, layers.Layer, layers.Block, layers.Slice,
    answer.OutputHead, answer.LastHidden, answer.HeadRows, answer.SampleFirst, answer.ScoreTokens, window.Window,
    compress.EmptyCompressed, compress.EmptySums, compress.Observe, compress.Compact, window.CompressedWindow,
    compress.ReadPages, compress.WritePages,
    choose.ScoreRows, choose.Choose, choose.Narrow, choose.Take,
    encode.Encode, encode.EncodeApart, encode.Stage, link.Link, link.Recall, link.Code,
    keep.EmptyTier, keep.KeepLayer, keep.KeepRows, keep.Restage,
)  # fmt: skip

_LAUNCHING = threading.Lock()
_MAPS, _MOST_MAPS = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
_MAPS_OF_A_PROGRAM = 3000  # of the largest ones; 350 on average


class Programs:
    """Compiles programs, keeps and calls them.

    Attributes:
      shapes: of the engine.
      compiling: called with a program that `run` has to wait for; it waits within what that returns.
      launches: programs called so far.
      waited: seconds that calls waited for their programs to be compiled, or read from disk.
      first_launched: when the first call since this was set to None returned.
      kernels: in the programs compiled so far: which implementation runs each case, and why.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self._options = _compiler_options(shapes)
        self.compiling: abc.Callable[[Program[Any]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._compiled: dict[Program[Any], jax.stages.Compiled] = {}
        self._locks: dict[Program[Any], threading.Lock] = {}
        self.launches = 0
        self.waited = 0.0
        self.first_launched: float | None = None
        self.kernels: dict[Program[Any], tuple[dispatch.Choice, ...]] = {}

    def family(self, demand: Demand) -> list[Program[Any]]:
        """Every program that requests can call for."""
        return list(dict.fromkeys(one for kind in PROGRAMS for one in kind.family(self.shapes, demand)))

    def family_of(self, policy: Policy) -> list[Program[Any]]:
        """Every program that requests under a policy can call for."""
        return self.family(Demand.of(policy, self.shapes))

    def repeats(self, repeat: Repeat) -> list[Program[Any]]:
        """Every program that requests can call for when they come again, and may not have called for before."""
        return list(dict.fromkeys(one for kind in PROGRAMS for one in kind.repeats(self.shapes, repeat)))

    def compile(
        self, programs: abc.Iterable[Program[Any]], progress: abc.Callable[[Program[Any]], None] = lambda program: None
    ) -> tuple[int, float]:
        """Compiles those that are not compiled yet; returns the number of them and the seconds it took."""
        start = time.perf_counter()
        missing = self.missing(programs)
        _ = self._files  # before threads want it
        threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        try:
            compiling = {threads.submit(self.program, one): one for one in missing}
            for future in concurrent.futures.as_completed(compiling):
                future.result()
                progress(compiling[future])
        finally:
            threads.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun never will
        return len(missing), time.perf_counter() - start

    def missing(self, programs: abc.Iterable[Program[Any]]) -> list[Program[Any]]:
        """Those that are not compiled yet."""
        return [program for program in programs if program not in self._compiled]

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def run[R](self, program: Program[R], *arguments: Any) -> R:
        """Calls a program, which is compiled first if it is not yet."""
        if (compiled := self._compiled.get(program)) is None:
            begin = time.perf_counter()
            with self.compiling(program):
                compiled = self.program(program)
            self.waited += time.perf_counter() - begin
        self.launches += 1
        # All devices must get programs that exchange in one order, whoever else launches some on them.
        with _LAUNCHING if self.shapes.devices.count > 1 else contextlib.nullcontext():
            made: R = compiled(*arguments)
        if self.first_launched is None:
            self.first_launched = time.perf_counter()
        return made

    def program(self, program: Program[Any]) -> jax.stages.Compiled:
        """The compiled program. If another thread is at it, waits for it; else compiles it if it is not yet.

        Raises:
          MemoryError: see `check_maps`.
        """
        with self._locks.setdefault(program, threading.Lock()):
            if program not in self._compiled:
                check_maps(program)
                self._compiled[program] = self._found(program) or self._made(program)
            return self._compiled[program]

    @functools.cached_property
    def _files(self) -> ProgramFiles | None:
        return ProgramFiles.of(self.shapes, self._options)

    def _found(self, program: Program[Any]) -> jax.stages.Compiled | None:
        """The program as it was compiled before; None: it was not, or is not kept."""
        if self._files is None or (found := self._files.find(program)) is None:
            return None
        compiled, choices = found
        if choices:
            self.kernels[program] = choices
        return compiled

    def _made(self, program: Program[Any]) -> jax.stages.Compiled:
        lowered = self._lower(program)
        if self._files is None:
            return lowered.compile(self._options)
        return self._files.make(program, lowered, self.kernels.get(program, ()))

    def _lower(self, program: Program[Any]) -> jax.stages.Lowered:
        with dispatch.recorded() as choices:
            lowered = program.lowered(self.shapes)
        if choices:
            self.kernels[program] = tuple(dict.fromkeys(choices))
        return lowered


def _compiler_options(shapes: Shapes) -> dict[str, bool]:
    """Where a CPU computes in bfloat16, every rounding that a program asks for. Else XLA leaves some out, others in
    programs for other numbers of rows, and an answer depends on what it was computed with."""
    is_rounded = shapes.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    return {"xla_allow_excess_precision": False} if is_rounded else {}


def check_maps(program: Program[Any]) -> None:
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
            f"memory maps must be left for the program {program}, but this process has {used} of {most}, "
            "most for compiled programs: raise the limit (sysctl -w vm.max_map_count=262144), or open fewer models"
        )

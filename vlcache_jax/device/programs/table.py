"""The table of compiled programs, and which sizes a batch is padded to.

`compile` makes all programs that a policy can need ahead; others are compiled at their first use. Threads that need the
same program compile it once. While `compile` runs, `are_coming` has programs compiled beside it, so that the engine's
thread does not wait for them. `Alarm` hides XLA's warning about slow compilation meanwhile.

A batch is padded to the smallest bucket that holds it (`Fitting`). While a warm-up compiles programs, the best one may
be missing, and another one gives the same tokens: one of a larger bucket, several of a smaller bucket, or one token in
place of a multi-step decode. Only then does a size depend on time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import pathlib
import threading
import time
from collections import abc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.device.buckets import round_up
from vlcache_jax.device.programs import answer, compress, encode, layers, memory, window
from vlcache_jax.device.programs.answer import OutputHead, SampleFirst
from vlcache_jax.device.programs.base import Demand, Program, Repeat, Shapes
from vlcache_jax.device.programs.compile_cache import ProgramFiles
from vlcache_jax.device.programs.encode import Encode, Stage
from vlcache_jax.device.programs.memory import HoldLanes
from vlcache_jax.device.programs.window import CompressedWindow, Window, fixed
from vlcache_jax.device.sampler import FIXED, Choice
from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.reuse.policies import Policy

_WARNING, _FATAL = 1, 3  # levels of XLA's log; jax opens with the first


class Alarm:
    """Hides "Very slow compile?", which XLA logs as an error once a compilation takes two minutes.

    jaxlib has no option for this one message, so errors are not logged while a program compiles. Errors of a
    compilation are raised in any case. Where a user has set TF_CPP_MIN_LOG_LEVEL or `jax_logging_level`, nothing
    changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiling = 0  # several threads compile

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Compile within this context."""
        if not _is_ours():
            yield
            return
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            was, self._compiling = self._compiling, self._compiling + more
            if not (was and self._compiling):
                _set_level(_FATAL if self._compiling else _WARNING)


ALARM = Alarm()
"""The alarm of this process, which has one log level."""


def _is_ours() -> bool:
    """Return whether the log has the level that jax gives it."""
    is_default = jax.config.jax_logging_level in (None, "NOTSET")
    return is_default and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == str(_WARNING)


def _set_level(level: int) -> None:
    from jax._src.lib import utils  # no public function sets the level without a handler of jax's own log

    if (set_level := getattr(utils, "absl_set_min_log_level", None)) is not None:
        set_level(level)


PROGRAMS: tuple[type[Program[Any]], ...] = (
    memory.EmptyPool, memory.EmptyEncoderRows, memory.EmptyLanes, memory.OpenLane, memory.HoldLanes,
    memory.CopyPages,
    layers.Embed, layers.Layer, layers.Block, layers.Slice,
    answer.OutputHead, answer.LastHidden, answer.HeadRows, answer.SampleFirst, answer.ScoreTokens, window.Window,
    compress.EmptyCompressed, compress.EmptySums, compress.Observe, compress.Compact, window.CompressedWindow,
    compress.ReadPages, compress.WritePages,
    layers.ScoreRows, layers.Choose, layers.Narrow, layers.Take,
    encode.Encode, encode.EncodeApart, encode.Stage, memory.Link, memory.Recall, memory.Code,
    memory.EmptyTier, memory.KeepLayer, memory.KeepRows, memory.Restage,
)  # fmt: skip

_SECOND = 1.0
_HASTENED = 2  # threads beside those of `compile`: one program may wait for a thread that compiles it already
_LAUNCHING = threading.Lock()
_MAPS, _MOST_MAPS = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
_MAPS_OF_A_PROGRAM = 3000  # of the largest ones; 350 on average
_log = logging.getLogger(__name__)

Shows = abc.Callable[[str], contextlib.AbstractContextManager[Any]]  # of what is done, what is shown meanwhile


class Programs:
    """Compiles programs, keeps and calls them.

    Attributes:
      shapes: of the engine.
      shows: called with what `run` waits for: "loading programs" or "compiling" and a program; it waits within the
        context that this returns.
      launches: programs called so far.
      num_compiled: programs that this process compiled; it read the others from disk.
      compile_seconds, load_seconds: that calls waited for their programs to be compiled, and to be read from disk.
      first_launched: when the first call since this was set to None returned.
      kernels: in the programs compiled so far: which implementation runs each case, and why.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self._options = _compiler_options(shapes)
        self.shows: Shows = contextlib.nullcontext
        self._exchanges = shapes.devices.count > 1  # programs do, among devices
        self._compiled: dict[Program[Any], jax.stages.Compiled] = {}
        self._locks: dict[Program[Any], threading.Lock] = {}
        self._read: set[Program[Any]] = set()  # of them, those that were on disk
        self._under_way: dict[Program[Any], None] = {}  # what is being compiled or read now
        self._warming = 0  # calls of `compile` under way
        self._hastened: dict[Program[Any], concurrent.futures.Future[Any]] = {}
        self.launches = self.num_compiled = 0
        self.compile_seconds = self.load_seconds = 0.0
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
        self,
        programs: abc.Iterable[Program[Any]],
        progress: abc.Callable[[int, float], None] = lambda done, seconds: None,
    ) -> tuple[int, float]:
        """Compiles those that are not compiled yet; returns the number of them and the seconds it took.

        Args:
          progress: called every second, and at each program that is there: with the number of them, and the seconds.
        """
        start = time.perf_counter()
        missing = self.missing(programs)
        _ = self._files  # before threads want it
        threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        if not self._warming:
            self._hastened = {}
        self._warming += 1
        try:
            left = {threads.submit(self._in_turn, one) for one in missing}
            while left:
                there, left = concurrent.futures.wait(left, _SECOND, concurrent.futures.FIRST_COMPLETED)
                for future in there:
                    future.result()
                progress(len(missing) - len(left), time.perf_counter() - start)
        finally:
            self._warming -= 1
            threads.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun never will
        return len(missing), time.perf_counter() - start

    def _in_turn(self, program: Program[Any]) -> jax.stages.Compiled:
        """A program of a warm-up, after those that requests wait for."""
        for hastened in list(self._hastened):
            if hastened not in self._compiled and hastened not in self._under_way:
                with contextlib.suppress(Exception):  # the thread that it was given to reports the error
                    self.program(hastened)
        return self.program(program)

    @property
    def is_warming(self) -> bool:
        """Whether `compile` is under way."""
        return self._warming > 0

    def are_coming(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Whether some of these are missing, and other threads compile them; only while `compile` is under way.

        They are compiled next, beside what `compile` is at. One whose compilation failed does not come: the call that
        needs it raises the error.
        """
        missing, hastened = self.missing(programs) if self._warming else [], self._hastened
        for program in missing:
            if program not in hastened:
                hastened[program] = self._hastening.submit(self.program, program)
        have_failed = (hastened[program].done() and program not in self._compiled for program in missing)
        return bool(missing) and not any(have_failed)

    def wait_for_some(self, seconds: float) -> None:
        """Waits until one more of those in `are_coming` is there, but not for long."""
        coming = [future for future in self._hastened.values() if not future.done()]
        concurrent.futures.wait(coming, seconds, concurrent.futures.FIRST_COMPLETED)

    @functools.cached_property
    def _hastening(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(_HASTENED, "vlcache-programs")

    def close(self) -> None:
        """Begins no more of what `are_coming` has compiled."""
        if "_hastening" in vars(self):
            self._hastening.shutdown(wait=False, cancel_futures=True)

    def missing(self, programs: abc.Iterable[Program[Any]]) -> list[Program[Any]]:
        """Those that are not compiled yet."""
        return [program for program in programs if program not in self._compiled]

    def stats(self) -> dict[str, Any]:
        """Counters, by their names in `EngineStats`."""
        return {
            "launches": self.launches,
            "programs": self.num_programs,
            "compiled_programs": self.num_compiled,
            "compile_seconds": self.compile_seconds,
            "load_seconds": self.load_seconds,
        }

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    @property
    def under_way(self) -> list[Program[Any]]:
        """Programs that are being compiled, or read from disk, now."""
        return list(self._under_way)

    def run[R](self, program: Program[R], *arguments: Any) -> R:
        """Calls a program, which is compiled first if it is not yet."""
        if (compiled := self._compiled.get(program)) is None:
            begin = time.perf_counter()
            compiled = self.program(program, self.shows)
            took = time.perf_counter() - begin
            if program in self._read:
                self.load_seconds += took
            else:
                self.compile_seconds += took
        self.launches += 1
        if self._exchanges:
            with _LAUNCHING:  # all devices must get them in one order, whoever else launches some on them
                made: R = compiled(*arguments)
        else:
            made = compiled(*arguments)
        if self.first_launched is None:
            self.first_launched = time.perf_counter()
        return made

    def program(self, program: Program[Any], shows: Shows = contextlib.nullcontext) -> jax.stages.Compiled:
        """The compiled program. If another thread is at it, waits for it; else compiles it if it is not yet.

        Args:
          shows: see `Programs`.

        Raises:
          MemoryError: see `check_maps`.
        """
        lock = self._locks.setdefault(program, threading.Lock())
        if not lock.acquire(blocking=False):
            with shows(f"compiling {program}"):
                lock.acquire()
        try:
            if program not in self._compiled:
                self._under_way[program] = None
                self._compiled[program] = self._found(program, shows) or self._made(program, shows)
            return self._compiled[program]
        finally:
            self._under_way.pop(program, None)
            lock.release()

    @functools.cached_property
    def _files(self) -> ProgramFiles | None:
        return ProgramFiles.of(self.shapes, self._options)

    def _found(self, program: Program[Any], shows: Shows) -> jax.stages.Compiled | None:
        """The program as it was compiled before; None: it was not, or is not kept."""
        check_maps(program)
        if self._files is None or not self._files.has(program):
            return None
        with shows("loading programs"):
            found = self._files.find(program)
        if found is None:
            return None
        compiled, choices = found
        self._read.add(program)
        if choices:
            self.kernels[program] = choices
        return compiled

    def _made(self, program: Program[Any], shows: Shows) -> jax.stages.Compiled:
        begin, is_read = time.perf_counter(), False
        _log.info("compiling %s", program)
        with shows(f"compiling {program}"), ALARM.hidden():
            lowered = self._lower(program)
            if self._files is None:
                compiled = lowered.compile(self._options)
            else:
                compiled, is_read = self._files.make(program, lowered, self.kernels.get(program, ()))
        _log.info("%s %s in %.1f s", "loaded" if is_read else "compiled", program, time.perf_counter() - begin)
        if is_read:
            self._read.add(program)
        else:
            self.num_compiled += 1
        return compiled

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


class Fitting:
    """Chooses sizes, and says what they need."""

    def __init__(self, programs: Programs):
        self._programs, self._shapes = programs, programs.shapes
        self._ladder = programs.shapes.ladder

    def is_there(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Whether all of these are compiled."""
        return not self._programs.missing(programs)

    def is_coming(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Whether a warm-up compiles some of these; it compiles them next. See `Programs.are_coming`."""
        return self._programs.is_warming and self._programs.are_coming(programs)

    def rung(self, size: int, rungs: tuple[int, ...], needs: abc.Callable[[int], abc.Sequence[Program[Any]]]) -> int:
        """The smallest rung that holds a size, or a larger one whose programs are there while those of it are coming.

        Args:
          needs: the programs of a rung.
        """
        best = round_up(size, rungs)
        if self._programs.is_warming and self.is_coming(needs(best)):
            larger = (rung for rung in rungs if rung > best and self.is_there(needs(rung)))
            return next(larger, best)
        return best

    # Of each kind of batch its size, and the programs of a size.

    def encoder(self, patches: int) -> int:
        """Patches of an encoder call."""
        return self.rung(patches, self._ladder.patches, self.encoding)

    def encoding(self, size: int) -> list[Program[Any]]:
        """What encodes images of `size` patches, and hands them to a step."""
        return [Encode(size), Stage(size // self._shapes.config.vision.merge_size**2)]

    def head(self, rows: int, count: int) -> int:
        """Rows of the output head for `count` of the rows that leave a step."""
        if rows > self._ladder.max_sequences:
            return self._ladder.max_sequences
        rungs = tuple(dict.fromkeys(min(rung, rows) for rung in self._ladder.sequences))
        return self.rung(min(count, rows), rungs, lambda size: self.choosing(rows, size))

    def choosing(self, rows: int, size: int) -> list[Program[Any]]:
        """What chooses `size` first tokens, where `rows` rows leave a step."""
        choices: tuple[Choice, ...] = ("asked",) if self._shapes.is_host else FIXED
        return [OutputHead(rows, size), *(SampleFirst(size, choice) for choice in choices)]

    def held(self, count: int) -> int:
        """Lanes that are held to something at once."""
        return self.rung(count, self._ladder.sequences, lambda size: [HoldLanes(size)])

    def window(self, rows: np.ndarray, tokens: int, pages: int | None = None) -> int:
        """Rows of the window that decodes up to `tokens` tokens of `rows`.

        Args:
          pages: of a compressed prompt in one layer at most; None: prompts are not compressed.
        """
        return self.rung(len(rows), self._ladder.sequences, lambda size: self._windows(size, rows, tokens, pages))

    def windows[P: (Window, CompressedWindow)](self, program: P, rows: np.ndarray, tokens: int) -> list[P]:
        """The programs that decode `tokens` tokens of rows, one after the other."""
        if self._shapes.is_host:
            return [program]
        best, step = fixed(program, rows, tokens, self._ladder.window), [replace(program, choice="any", steps=1)]
        return step * tokens if self.is_coming(best) and self.is_there(step) else best

    def decodable(self, rows: np.ndarray, tokens: int, pages: int | None = None) -> int:
        """How many of these rows a window takes now: all, or fewer while the programs for all are coming; 0: none is
        there. Arguments as in `window`."""
        if not self._programs.is_warming:
            return len(rows)
        best = self.window(rows, tokens, pages)
        if not self.is_coming(self._windows(best, rows, tokens, pages)):
            return len(rows)
        smaller = (rung for rung in reversed(self._ladder.sequences) if rung < len(rows))
        return next((rung for rung in smaller if self.is_there(self._windows(rung, rows, tokens, pages))), 0)

    def _windows(self, size: int, rows: np.ndarray, tokens: int, pages: int | None) -> abc.Sequence[Program[Any]]:
        if pages is None:
            return self.windows(Window(size), rows, tokens)
        return self.windows(CompressedWindow(size, round_up(pages, self._shapes.page_rungs)), rows, tokens)

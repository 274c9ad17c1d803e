"""The table of compiled programs, and the choice of bucket sizes for batches.

`compile` compiles all programs that a policy can need. Others are compiled at their first use. Threads that need the
same program compile it once. While `compile` runs, `are_coming` has missing programs compiled on further threads, so
that the engine's thread does not wait. `Alarm` hides XLA's warning about slow compilation.

A batch is padded to the smallest bucket that holds it (`Fitting`). While a warm-up compiles programs, the best one may
be missing. Then another one that gives the same tokens is used: one of a larger bucket, several of a smaller bucket, or
one token in place of a multi-step decode. Only then does a size depend on time.
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
from vlcache_jax.device.programs import answer, compress, encode, layers, memory, states, window
from vlcache_jax.device.programs.answer import OutputHead, SampleFirst
from vlcache_jax.device.programs.base import Demand, Program, Repeat, Shapes
from vlcache_jax.device.programs.compile_cache import ProgramFiles
from vlcache_jax.device.programs.encode import Encode, Stage
from vlcache_jax.device.programs.memory import HoldDecodeSlots
from vlcache_jax.device.programs.window import CompressedWindow, Window, fixed
from vlcache_jax.device.sampler import FIXED, Choice
from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.reuse.policies import Policy

_WARNING, _FATAL = 1, 3  # levels of XLA's log; jax opens with the first


class Alarm:
    """Hides "Very slow compile?", which XLA logs as an error once a compilation takes two minutes.

    jaxlib has no option for this message, so errors are not logged while a program compiles. Compilation errors are
    still raised. If the user has set TF_CPP_MIN_LOG_LEVEL or `jax_logging_level`, nothing changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiling = 0  # threads that compile

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the message within this context, in which a program compiles."""
        if not _is_ours():
            yield
            return
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            was, self._compiling = self._compiling, self._compiling + change
            if not (was and self._compiling):
                _set_level(_FATAL if self._compiling else _WARNING)


ALARM = Alarm()
"""The alarm of this process. A process has one log level."""


def _is_ours() -> bool:
    """Return whether the log still has the level that JAX sets."""
    is_default = jax.config.jax_logging_level in (None, "NOTSET")
    return is_default and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == str(_WARNING)


def _set_level(level: int) -> None:
    from jax._src.lib import utils  # public functions also add a handler to JAX's log

    if (set_level := getattr(utils, "absl_set_min_log_level", None)) is not None:
        set_level(level)


PROGRAMS: tuple[type[Program[Any]], ...] = (
    memory.EmptyPool, states.EmptyStates, memory.EmptyEncoderRows, memory.EmptyDecodeState, memory.OpenDecodeSlot,
    memory.HoldDecodeSlots,
    memory.CopyPages, states.LoadStates, states.StoreStates, states.LoadMaps, states.StoreMaps,
    layers.Embed, layers.Layer, layers.Block, layers.Slice,
    answer.OutputHead, answer.LastHidden, answer.HeadRows, answer.SampleFirst, answer.ScoreTokens, window.Window,
    compress.EmptyCompressed, compress.EmptySums, compress.Observe, compress.Compact, window.CompressedWindow,
    compress.ReadPages, compress.WritePages,
    layers.ScoreRows, layers.Choose, layers.Narrow, layers.Take,
    encode.Encode, encode.EncodeApart, encode.Stage, memory.Link, memory.Recall, memory.Code,
    memory.EmptyTier, memory.KeepLayer, memory.KeepRows, memory.Restage,
)  # fmt: skip

_SECOND = 1.0
_HASTENED = 2  # threads besides those of `compile`; one may wait for a program that another thread compiles
_LAUNCHING = threading.Lock()
_MAPS, _MAX_MAPS = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
_MAPS_OF_A_PROGRAM = 3000  # of the largest ones; 350 on average
_log = logging.getLogger(__name__)

Shows = abc.Callable[[str], contextlib.AbstractContextManager[Any]]  # returns a context that shows an activity


class Programs:
    """The table of an engine's compiled programs.

    Attributes:
      shapes: shapes of the engine.
      shows: called with the activity that `run` waits for, "loading programs" or "compiling PROGRAM". `run` waits
        within the returned context.
      launches: number of program calls so far.
      num_compiled: number of programs that this process compiled. It read the others from disk.
      compile_seconds, load_seconds: seconds that calls waited for compilation, and for programs from disk.
      first_launched: time (`time.perf_counter`) at which the first call returned since this was set to None.
      kernels: by compiled program, the implementation of each kernel case, and the reason.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self._options = _compiler_options(shapes)
        self.shows: Shows = contextlib.nullcontext
        self._exchanges = shapes.devices.count > 1  # programs exchange data between devices
        self._compiled: dict[Program[Any], jax.stages.Compiled] = {}
        self._locks: dict[Program[Any], threading.Lock] = {}
        self._read: set[Program[Any]] = set()  # programs read from disk
        self._in_flight: dict[Program[Any], None] = {}  # programs that are being compiled or read
        self._warming = 0  # running calls of `compile`
        self._hastened: dict[Program[Any], concurrent.futures.Future[Any]] = {}
        self.launches = self.num_compiled = 0
        self.compile_seconds = self.load_seconds = 0.0
        self.first_launched: float | None = None
        self.kernels: dict[Program[Any], tuple[dispatch.Choice, ...]] = {}

    def family(self, demand: Demand) -> list[Program[Any]]:
        """Return every program that requests can need."""
        return list(dict.fromkeys(one for kind in PROGRAMS for one in kind.family(self.shapes, demand)))

    def family_of(self, policy: Policy) -> list[Program[Any]]:
        """Return every program that requests under a policy can need."""
        return self.family(Demand.of(policy, self.shapes))

    def repeats(self, repeat: Repeat) -> list[Program[Any]]:
        """Return every program that repeated requests can need and may not have compiled before."""
        return list(dict.fromkeys(one for kind in PROGRAMS for one in kind.repeats(self.shapes, repeat)))

    def compile(
        self,
        programs: abc.Iterable[Program[Any]],
        progress: abc.Callable[[int, float], None] = lambda done, seconds: None,
    ) -> tuple[int, float]:
        """Compile the programs that are missing.

        Args:
          progress: called every second and after each program, with the number of finished programs and the seconds.

        Returns:
          The number of missing programs, and the seconds it took.
        """
        start = time.perf_counter()
        missing = self.missing(programs)
        _ = self._files  # opened before threads need it
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
            threads.shutdown(cancel_futures=True)  # after Ctrl-C, no further program begins
        return len(missing), time.perf_counter() - start

    def _in_turn(self, program: Program[Any]) -> jax.stages.Compiled:
        """Compile a program of a warm-up, after those that requests wait for."""
        for hastened in list(self._hastened):
            if hastened not in self._compiled and hastened not in self._in_flight:
                with contextlib.suppress(Exception):  # the hastening thread reports the error
                    self.program(hastened)
        return self.program(program)

    @property
    def is_warming(self) -> bool:
        """True while a call of `compile` runs."""
        return self._warming > 0

    def are_coming(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Return whether some programs are missing and other threads compile them. False unless `compile` runs.

        Missing programs are compiled next, on further threads. If the compilation of one has failed, the result is
        False, and the call that needs the program raises the error.
        """
        missing, hastened = self.missing(programs) if self._warming else [], self._hastened
        for program in missing:
            if program not in hastened:
                hastened[program] = self._hastening.submit(self.program, program)
        have_failed = (hastened[program].done() and program not in self._compiled for program in missing)
        return bool(missing) and not any(have_failed)

    def wait_for_some(self, seconds: float) -> None:
        """Wait until one more program of `are_coming` is compiled, at most `seconds`."""
        coming = [future for future in self._hastened.values() if not future.done()]
        concurrent.futures.wait(coming, seconds, concurrent.futures.FIRST_COMPLETED)

    @functools.cached_property
    def _hastening(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(_HASTENED, "vlcache-programs")

    def close(self) -> None:
        """Cancel compilations of `are_coming` that have not begun."""
        if "_hastening" in vars(self):
            self._hastening.shutdown(wait=False, cancel_futures=True)

    def missing(self, programs: abc.Iterable[Program[Any]]) -> list[Program[Any]]:
        """Return the programs that are not compiled yet."""
        return [program for program in programs if program not in self._compiled]

    def stats(self) -> dict[str, Any]:
        """Return counters by their names in `EngineStats`."""
        return {
            "launches": self.launches,
            "programs": self.num_programs,
            "compiled_programs": self.num_compiled,
            "compile_seconds": self.compile_seconds,
            "load_seconds": self.load_seconds,
        }

    @property
    def num_programs(self) -> int:
        """Number of programs compiled so far."""
        return len(self._compiled)

    @property
    def in_flight(self) -> list[Program[Any]]:
        """Programs that are being compiled or read from disk."""
        return list(self._in_flight)

    def run[R](self, program: Program[R], *arguments: Any) -> R:
        """Call a program, and compile it first if it is missing."""
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
            with _LAUNCHING:  # all devices must receive programs in the same order, from all threads
                made: R = compiled(*arguments)
        else:
            made = compiled(*arguments)
        if self.first_launched is None:
            self.first_launched = time.perf_counter()
        return made

    def program(self, program: Program[Any], shows: Shows = contextlib.nullcontext) -> jax.stages.Compiled:
        """Return the compiled program. Compile it if it is missing, or wait for the thread that does.

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
                self._in_flight[program] = None
                self._compiled[program] = self._found(program, shows) or self._made(program, shows)
            return self._compiled[program]
        finally:
            self._in_flight.pop(program, None)
            lock.release()

    @functools.cached_property
    def _files(self) -> ProgramFiles | None:
        return ProgramFiles.of(self.shapes, self._options)

    def _found(self, program: Program[Any], shows: Shows) -> jax.stages.Compiled | None:
        """Read a program from the disk cache, or return None."""
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
    """Return the compiler's options.

    On a CPU in bfloat16, they make XLA perform every rounding. By default it omits some, which depend on the number of
    rows, so outputs would depend on the batch.
    """
    is_rounded = shapes.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    return {"xla_allow_excess_precision": False} if is_rounded else {}


def check_maps(program: Program[Any]) -> None:
    """Check that the process can map one more program. On a CPU each takes hundreds of maps, and XLA crashes without.

    Raises:
      MemoryError: the process has nearly as many memory maps as Linux allows.
    """
    try:
        used, limit = _MAPS.read_bytes().count(b"\n"), int(_MAX_MAPS.read_text())
    except OSError:  # another system
        return
    if used + _MAPS_OF_A_PROGRAM > limit:
        raise MemoryError(
            f"too many memory maps: the program {program} needs more, but this process has {used} of {limit}, "
            "most for compiled programs. Raise the limit (sysctl -w vm.max_map_count=262144) or open fewer models"
        )


class Fitting:
    """The choice of bucket sizes for batches, and the programs of each size."""

    def __init__(self, programs: Programs):
        self._programs, self._shapes = programs, programs.shapes
        self._buckets = programs.shapes.buckets

    def is_there(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Return whether all of these programs are compiled."""
        return not self._programs.missing(programs)

    def is_coming(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Return whether a warm-up will compile some of these programs next. See `Programs.are_coming`."""
        return self._programs.is_warming and self._programs.are_coming(programs)

    def bucket(self, size: int, sizes: tuple[int, ...], needs: abc.Callable[[int], abc.Sequence[Program[Any]]]) -> int:
        """Return the smallest bucket that holds a size.

        While its programs are being compiled, return a larger bucket whose programs are compiled, if there is one.

        Args:
          needs: returns the programs of a bucket.
        """
        best = round_up(size, sizes)
        if self._programs.is_warming and self.is_coming(needs(best)):
            larger = (bucket for bucket in sizes if bucket > best and self.is_there(needs(bucket)))
            return next(larger, best)
        return best

    # The size of each kind of batch, and the programs of a size.

    def encoder(self, patches: int) -> int:
        """Return the bucket, in patches, of an encoder call."""
        return self.bucket(patches, self._buckets.patches, self.encoding)

    def encoding(self, size: int) -> list[Program[Any]]:
        """Return the programs that encode images of `size` patches and copy them to a chunk's encoder rows."""
        return [Encode(size), Stage(size // self._shapes.config.vision.merge_size**2)]

    def head(self, rows: int, count: int) -> int:
        """Return the bucket of the output head for `count` of the `rows` rows that leave a chunk."""
        if rows > self._buckets.max_sequences:
            return self._buckets.max_sequences
        sizes = tuple(dict.fromkeys(min(bucket, rows) for bucket in self._buckets.sequences))
        return self.bucket(min(count, rows), sizes, lambda size: self.choosing(rows, size))

    def choosing(self, rows: int, size: int) -> list[Program[Any]]:
        """Return the programs that choose `size` first tokens if `rows` rows leave a chunk."""
        choices: tuple[Choice, ...] = ("dynamic",) if self._shapes.is_host else FIXED
        return [OutputHead(rows, size), *(SampleFirst(size, choice) for choice in choices)]

    def held(self, count: int) -> int:
        """Return the bucket of decode slots whose tokens are restricted together."""
        return self.bucket(count, self._buckets.sequences, lambda size: [HoldDecodeSlots(size)])

    def window(self, rows: np.ndarray, tokens: int, pages: int | None = None) -> int:
        """Return the bucket of the programs that decode up to `tokens` tokens of `rows`.

        Args:
          rows: int32 [n, ANSWER + C], see `vlcache_jax.device.programs.window`.
          pages: largest number of pages of a compressed prompt in a layer. None: prompts are not compressed.
        """
        return self.bucket(len(rows), self._buckets.sequences, lambda size: self._windows(size, rows, tokens, pages))

    def windows[P: (Window, CompressedWindow)](self, program: P, rows: np.ndarray, tokens: int) -> list[P]:
        """Return the programs that decode `tokens` tokens of rows, one after the other."""
        if self._shapes.is_host:
            return [program]
        best, step = fixed(program, rows, tokens, self._buckets.window), [replace(program, choice="any", steps=1)]
        return step * tokens if self.is_coming(best) and self.is_there(step) else best

    def decodable(self, rows: np.ndarray, tokens: int, pages: int | None = None) -> int:
        """Return how many of these rows can be decoded now.

        The result is all rows, fewer while programs for all are being compiled, or 0 if no program is compiled.
        Arguments as in `window`.
        """
        if not self._programs.is_warming:
            return len(rows)
        best = self.window(rows, tokens, pages)
        if not self.is_coming(self._windows(best, rows, tokens, pages)):
            return len(rows)
        smaller = (bucket for bucket in reversed(self._buckets.sequences) if bucket < len(rows))
        return next((bucket for bucket in smaller if self.is_there(self._windows(bucket, rows, tokens, pages))), 0)

    def _windows(self, size: int, rows: np.ndarray, tokens: int, pages: int | None) -> abc.Sequence[Program[Any]]:
        if pages is None:
            return self.windows(Window(size), rows, tokens)
        return self.windows(CompressedWindow(size, round_up(pages, self._shapes.page_buckets)), rows, tokens)

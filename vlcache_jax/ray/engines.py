"""Engines as actors, and which of them is given what."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from vlcache_jax.common.checks import check_whole, is_a, short
from vlcache_jax.common.progress import say
from vlcache_jax.router.affinity import Affinity, SeenImages

if TYPE_CHECKING:
    from vlcache_jax.config import EngineConfig

WINDOW = 32
"""Rows that an engine has at a time: what it needs to fill its steps, and to read pictures ahead."""
_CONNECT = 5.0  # seconds in which a cluster must be reached
_DEATHS = 2  # of an engine that a row may see before it is answered alone


def connect(address: str | None = None) -> None:
    """Joins a cluster, unless the process has done so; without an address the one that RAY_ADDRESS names or that runs
    on this machine, and a new one of this machine alone if there is none.

    Raises:
      ConnectionError: there is no cluster at the address, or none begins here.
    """
    if ray.is_initialized():
        return
    own: dict[str, Any] = {"include_dashboard": False} if address is None else {"address": address}
    try:
        host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
        ray.init(logging_level="ERROR", log_to_driver=False, **own)
    except Exception as error:  # Ray raises its base where a node does not begin within half a minute
        ray.shutdown()
        raise ConnectionError(f"no Ray cluster at {address or 'this machine'}: {error}") from error


def gpus_of() -> int:
    """GPUs of the cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


type Worker = Callable[[Any], Any]
"""What lives in an actor, an open model: it answers an item, and is called from several threads."""


def warn_of_room(engines: int, num_gpus: float) -> None:
    """Says on stderr where engines ask for more GPUs than there are, as they wait for them without a word."""
    if ray.is_initialized() and engines * num_gpus > gpus_of():
        say(
            f"warning: {engines} engines of {num_gpus:g} GPUs each were asked for, and the cluster has {gpus_of()}: "
            "those that find none wait"
        )


def placed(config: EngineConfig) -> EngineConfig:
    """The same with paths that do not depend on the folder in which a process runs."""
    model, disk, media = os.fspath(config.model), config.cache.disk, config.allowed_local_media_path
    cache = config.cache if disk is None else dataclasses.replace(config.cache, disk=_absolute(disk))
    return dataclasses.replace(
        config, model=_absolute(model) if os.path.isdir(model) else model, cache=cache,
        allowed_local_media_path=_absolute(media) if media else media,
    )  # fmt: skip


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(path))


class Packed:
    """A function that opens a model, unpacked where it is called: who hands it on need not import what it needs."""

    def __init__(self, make: Callable[[], Worker]):
        self._content: bytes = ray.cloudpickle.dumps(make)

    def __call__(self) -> Worker:
        made: Worker = ray.cloudpickle.loads(self._content)()
        return made


@dataclass(frozen=True, kw_only=True)
class EngineOrder:
    """How many engines there are, and what each takes of a cluster.

    Attributes:
      engines: that are opened.
      num_gpus: of each; 0 on CPUs.
      num_cpus: of each, which nobody else is given then.
      window: rows that an engine has at a time.

    Raises:
      ValueError: one is out of range.
    """

    engines: int = 1
    num_gpus: float = 1
    num_cpus: float = 0
    window: int = WINDOW

    def __post_init__(self) -> None:
        check_whole("engines", self.engines, 1)
        check_whole("window", self.window, 1)
        for name in ("num_gpus", "num_cpus"):
            given: Any = getattr(self, name)
            if not (is_a(given, int | float) and given >= 0):
                raise ValueError(f"{name} must be a number from 0, got {short(given)}")


class EngineDiedError(Exception):
    """An engine ended each time it answered a row, the last time nothing but this row."""


class Engines:
    """Gives rows to engines, so that each picture meets one of them.

    An engine that has many more rows than the others passes what comes on to the next one; of rows that wait for it,
    an idle engine takes some if there are more than it has at a time. One that ends is opened again, and what it had is
    answered again: each row comes back once. A row that has seen an engine end twice goes alone, so that one that ends
    engines takes no other row along. Only one event loop may use it.

    Args:
      make: opens a model, in the actor.
      order: how many.

    Attributes:
      given: rows that each engine was given so far.
    """

    def __init__(self, make: Callable[[], Worker], order: EngineOrder):
        self._window = order.window
        self._actors = {
            f"engine-{i}": _Actor.options(  # type: ignore[attr-defined]
                num_cpus=order.num_cpus, num_gpus=order.num_gpus, max_concurrency=order.window + 1,
                max_restarts=-1, max_task_retries=_DEATHS,
            ).remote(make)
            for i in range(order.engines)
        }  # fmt: skip
        self._shards = Shards(list(self._actors), slack=2 * order.window)
        self._waiting: dict[str, deque[_ShardRow]] = {name: deque() for name in self._actors}
        self._suspects: dict[str, deque[_ShardRow]] = {name: deque() for name in self._actors}
        self._taken = dict.fromkeys(self._actors, 0)  # of an engine's window; by a suspect all of it
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def given(self) -> Mapping[str, int]:
        return self._shards.counts

    async def ready(self) -> None:
        """Until all models are open.

        Raises:
          Exception: what opening one raised.
        """
        await asyncio.gather(*(_told(actor.ready.remote()) for actor in self._actors.values()))

    async def answer(self, seen: SeenImages, item: Any) -> Any:
        """What the engine that holds the pictures makes of an item.

        Raises:
          EngineDiedError: the engine ended each time it had it, or could not be opened again.
          Exception: what the worker raised.
        """
        row = _ShardRow(item, asyncio.get_running_loop().create_future())
        self._waiting[self._shards.of(seen)].append(row)
        self._start()
        return await row.answer

    async def call(self, method: str) -> list[Any]:
        """What a method of each worker returns."""
        return list(await asyncio.gather(*(_told(actor.call.remote(method)) for actor in self._actors.values())))

    def kill(self, engine: str) -> None:
        """Ends an engine's process; Ray starts another one."""
        ray.kill(self._actors[engine], no_restart=False)

    def close(self) -> None:
        """Ends the engines."""
        for task in self._tasks:
            task.cancel()
        for actor in self._actors.values():
            ray.kill(actor)

    def _start(self) -> None:
        """Gives rows to engines that have room."""
        for name in self._actors:
            while self._taken[name] < self._window and (row := self._next(name)):
                takes = self._window if row.is_suspect else 1
                self._taken[name] += takes
                task = asyncio.ensure_future(self._run(name, row, takes))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _next(self, name: str) -> _ShardRow | None:
        if suspects := self._suspects[name]:
            return None if self._taken[name] else suspects.popleft()
        if waiting := self._waiting[name]:
            return waiting.popleft()
        longest = max(self._waiting.values(), key=len)
        # For fewer it would compute pictures that the other engine holds.
        return longest.pop() if not self._taken[name] and len(longest) > self._window else None

    async def _run(self, name: str, row: _ShardRow, takes: int) -> None:
        try:
            if (found := await self._answer_of(name, row)) is not None:
                row.end(*found)
        except asyncio.CancelledError:
            row.answer.cancel()
            raise
        finally:
            self._taken[name] -= takes
        self._start()

    async def _answer_of(self, name: str, row: _ShardRow) -> tuple[Any, Exception | None] | None:
        """A row's answer, or what was raised; None: its engine has ended and was opened again, and the row waits."""
        try:
            return await _told(self._actors[name].answer.remote(row.item)), None
        except EngineDiedError as error:
            if row.is_suspect:
                return None, EngineDiedError(f"the engine ended {row.deaths + 1} times: {error}")
        except Exception as error:
            return None, error
        row.deaths += 1
        try:
            await _told(self._actors[name].ready.remote())
        except Exception as error:
            return None, error
        (self._suspects if row.is_suspect else self._waiting)[name].append(row)
        return None


@dataclass(eq=False)
class _ShardRow:
    item: Any
    answer: asyncio.Future[Any]
    deaths: int = 0  # of engines that had it

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= _DEATHS

    def end(self, found: Any, error: Exception | None) -> None:
        if self.answer.done():  # nobody waits for it any more
            return
        if error is None:
            self.answer.set_result(found)
        else:
            self.answer.set_exception(error)


class Shards:
    """Tells rows of many requests which engine they are for: the one of their largest picture, unless that one would
    have more than its share by then.

    Args:
      names: of the engines.
      factor: of the mean, the rows that an engine may be given.
      slack: rows that it may be given in any case.

    Attributes:
      counts: rows of each engine so far.
    """

    def __init__(self, names: list[str], *, factor: float = 1.25, slack: int = 2 * WINDOW):
        self._rule = Affinity(factor, slack)
        self.counts = dict.fromkeys(names, 0)

    def of(self, seen: SeenImages) -> str:
        """The engine of the next row."""
        largest = seen.largest
        alone = SeenImages({} if largest is None else {largest: seen.images[largest]})
        name = self._rule.order(alone, self.counts)[0]
        self.counts[name] += 1
        return name


@ray.remote
class _Actor:
    """An engine's process. The model is opened by the first call, whose caller hears what is wrong with it."""

    def __init__(self, make: Callable[[], Worker]):
        self._make, self._lock = make, threading.Lock()
        self._made: Worker | None = None

    def ready(self) -> None:
        """Opens the model."""
        with self._lock:
            if self._made is None:
                self._made = self._make()

    @ray.method(max_task_retries=0)  # whoever gives rows must know when an engine has ended
    def answer(self, item: Any) -> Any:
        self.ready()
        assert self._made is not None
        return self._made(item)

    def call(self, method: str) -> Any:
        self.ready()
        return getattr(self._made, method)()


async def _told(reference: Any) -> Any:
    """What an actor returns.

    Raises:
      EngineDiedError: it ended.
      Exception: what it raised.
    """
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayActorError as error:
        raise EngineDiedError(str(error)) from error

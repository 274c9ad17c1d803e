"""Engines as Ray actors, and the assignment of rows to them."""

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
"""Default number of rows per engine at a time. It fills the batches and allows to read images ahead."""
_CONNECT = 5.0  # timeout in seconds to connect to a cluster
_DEATHS = 2  # number of engine deaths after which a row runs alone


def connect(address: str | None = None) -> None:
    """Connect to a Ray cluster, unless the process is connected.

    Args:
      address: address of the cluster. None: the cluster of `RAY_ADDRESS` or of this machine; if there is none, a new
        one is started on this machine.

    Raises:
      ConnectionError: no cluster is reachable at the address, or none can be started.
    """
    if ray.is_initialized():
        return
    own: dict[str, Any] = {"include_dashboard": False} if address is None else {"address": address}
    try:
        host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray itself retries for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
        ray.init(logging_level="ERROR", log_to_driver=False, **own)
    except Exception as error:  # Ray raises a bare Exception if a node does not start within half a minute
        ray.shutdown()
        raise ConnectionError(f"cannot connect to a Ray cluster at {address or 'this machine'}: {error}") from error


def gpus_of() -> int:
    """Return the number of GPUs of the cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


type Worker = Callable[[Any], Any]
"""Open model in an actor: a function from an item to its answer. It is called from several threads."""


def warn_of_room(engines: int, num_gpus: float) -> None:
    """Print a warning if the engines need more GPUs than the cluster has. Ray waits for GPUs without a message.

    Args:
      engines: number of engines.
      num_gpus: GPUs per engine.
    """
    if ray.is_initialized() and engines * num_gpus > gpus_of():
        say(
            f"warning: {engines} engines need {num_gpus:g} GPUs each, and the cluster has {gpus_of()}: engines without "
            "a GPU wait; lower the number of engines"
        )


def placed(config: EngineConfig) -> EngineConfig:
    """Return the options with absolute paths, which do not depend on the working directory of a process."""
    model, disk, media = os.fspath(config.model), config.cache.disk, config.allowed_local_media_path
    cache = config.cache if disk is None else dataclasses.replace(config.cache, disk=_absolute(disk))
    return dataclasses.replace(
        config, model=_absolute(model) if os.path.isdir(model) else model, cache=cache,
        allowed_local_media_path=_absolute(media) if media else media,
    )  # fmt: skip


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(path))


class Packed:
    """Pickled function that opens a model. It is unpickled when called, so that other processes do not import JAX.

    Args:
      make: the function.
    """

    def __init__(self, make: Callable[[], Worker]):
        self._content: bytes = ray.cloudpickle.dumps(make)

    def __call__(self) -> Worker:
        made: Worker = ray.cloudpickle.loads(self._content)()
        return made


@dataclass(frozen=True, kw_only=True)
class EngineResources:
    """Number of engines, and the resources of each.

    Attributes:
      engines: number of engines.
      num_gpus: GPUs per engine; 0 on CPUs.
      num_cpus: CPUs that Ray reserves per engine.
      window: maximum number of rows per engine at a time.

    Raises:
      ValueError: a value is out of range.
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
                raise ValueError(f"{name} must be a non-negative number, got {short(given)}")


class EngineDiedError(Exception):
    """Engines repeatedly ended while they answered a row, the last time with no other row."""


class Engines:
    """Engines with the assignment of rows to them: each image goes to one engine.

    If an engine has many more rows than the others, further rows go to the next engine. If more rows wait for an engine
    than its window, an idle engine takes some. An engine that ends is restarted, and its rows are answered again. Each
    row returns one answer. A row whose engine has ended twice runs alone, so that it cannot end the engine of other
    rows. Only one event loop may use an instance.

    Args:
      make: function that opens a model, called in the actor.
      resources: number of engines and their resources.

    Attributes:
      given: number of rows so far, by engine.
    """

    def __init__(self, make: Callable[[], Worker], resources: EngineResources):
        self._window = resources.window
        self._actors = {
            f"engine-{i}": _Actor.options(  # type: ignore[attr-defined]
                num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_concurrency=resources.window + 1,
                max_restarts=-1, max_task_retries=_DEATHS,
            ).remote(make)
            for i in range(resources.engines)
        }  # fmt: skip
        self._shards = Shards(list(self._actors), slack=2 * resources.window)
        self._waiting: dict[str, deque[_ShardRow]] = {name: deque() for name in self._actors}
        self._suspects: dict[str, deque[_ShardRow]] = {name: deque() for name in self._actors}
        self._taken = dict.fromkeys(self._actors, 0)  # used part of each window; a suspect row uses all of it
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def given(self) -> Mapping[str, int]:
        return self._shards.counts

    async def ready(self) -> None:
        """Wait until all models are open.

        Raises:
          Exception: the error of opening a model.
        """
        await asyncio.gather(*(_result(actor.ready.remote()) for actor in self._actors.values()))

    async def answer(self, seen: SeenImages, item: Any) -> Any:
        """Return the answer of the engine that holds the images.

        Args:
          seen: routing information of the item.
          item: the input of the worker.

        Raises:
          EngineDiedError: the engine ended each time it answered the item, or could not be restarted.
          Exception: the error of the worker.
        """
        row = _ShardRow(item, asyncio.get_running_loop().create_future())
        self._waiting[self._shards.of(seen)].append(row)
        self._start()
        return await row.answer

    async def call(self, method: str) -> list[Any]:
        """Return the results of a method of all workers."""
        return list(await asyncio.gather(*(_result(actor.call.remote(method)) for actor in self._actors.values())))

    def kill(self, engine: str) -> None:
        """Kill the process of an engine. Ray starts another one."""
        ray.kill(self._actors[engine], no_restart=False)

    def close(self) -> None:
        """Cancel all rows and kill the engines."""
        for task in self._tasks:
            task.cancel()
        for actor in self._actors.values():
            ray.kill(actor)

    def _start(self) -> None:
        """Send waiting rows to engines with room in their window."""
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
        # With fewer waiting rows, recomputing their images would cost more than waiting for the engine that holds them.
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
        """Return the answer of a row or its error; None if the engine was restarted and the row waits again."""
        try:
            return await _result(self._actors[name].answer.remote(row.item)), None
        except EngineDiedError as error:
            if row.is_suspect:
                return None, EngineDiedError(
                    f"the engine ended {row.deaths + 1} times while it answered this request: {error}"
                )
        except Exception as error:
            return None, error
        row.deaths += 1
        try:
            await _result(self._actors[name].ready.remote())
        except Exception as error:
            return None, error
        (self._suspects if row.is_suspect else self._waiting)[name].append(row)
        return None


@dataclass(eq=False)
class _ShardRow:
    item: Any
    answer: asyncio.Future[Any]
    deaths: int = 0  # number of times that its engine ended

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= _DEATHS

    def end(self, found: Any, error: Exception | None) -> None:
        if self.answer.done():  # the caller has cancelled it
            return
        if error is None:
            self.answer.set_result(found)
        else:
            self.answer.set_exception(error)


class Shards:
    """Assignment of rows to engines by their largest image, with a bounded number of rows per engine.

    Args:
      names: names of the engines.
      factor: maximum rows of an engine as a factor of the mean.
      slack: rows that an engine may always have.

    Attributes:
      counts: number of rows so far, by engine.
    """

    def __init__(self, names: list[str], *, factor: float = 1.25, slack: int = 2 * WINDOW):
        self._rule = Affinity(factor, slack)
        self.counts = dict.fromkeys(names, 0)

    def of(self, seen: SeenImages) -> str:
        """Choose the engine for the next request by its largest image, count the request, and return the engine."""
        largest = seen.largest
        alone = SeenImages({} if largest is None else {largest: seen.images[largest]})
        name = self._rule.order(alone, self.counts)[0]
        self.counts[name] += 1
        return name


@ray.remote
class _Actor:
    """Process of an engine. The first call opens the model and raises its errors."""

    def __init__(self, make: Callable[[], Worker]):
        self._make, self._lock = make, threading.Lock()
        self._made: Worker | None = None

    def ready(self) -> None:
        """Open the model, if it is not open."""
        with self._lock:
            if self._made is None:
                self._made = self._make()

    @ray.method(max_task_retries=0)  # `Engines` must know when an engine has ended
    def answer(self, item: Any) -> Any:
        self.ready()
        assert self._made is not None
        return self._made(item)

    def call(self, method: str) -> Any:
        self.ready()
        return getattr(self._made, method)()


async def _result(reference: Any) -> Any:
    """Return the result of an actor's call.

    Raises:
      EngineDiedError: the actor ended.
      Exception: the error of the call.
    """
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayActorError as error:
        raise EngineDiedError(str(error)) from error

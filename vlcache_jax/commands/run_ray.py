"""`vlcache run --ray`: requests of a file on many engines. `run` reads the file and writes the outputs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import NamedTuple

from vlcache_jax.commands.options import warn_of_others
from vlcache_jax.commands.run import OutputFile, RunSettings, tokens_of
from vlcache_jax.common.progress import say
from vlcache_jax.config import EngineConfig, EngineOptions
from vlcache_jax.protocol.answers import ChatFormat
from vlcache_jax.ray.engines import (
    EngineDiedError,
    EngineResources,
    Engines,
    Packed,
    connect,
    gpus_of,
    placed,
    warn_of_room,
)
from vlcache_jax.router.affinity import look

_AHEAD = 4  # groups of requests for each engine that are read ahead


class _Result(NamedTuple):
    """Output line, with the error and the number of tokens.

    Attributes:
      line: the output line.
      error: error of the request; None: it succeeded.
      tokens: number of output tokens.
    """

    line: bytes
    error: str | None
    tokens: int


def answer(
    settings: RunSettings, output_file: OutputFile, overwrite: bool, *, address: str | None, engines: int | None
) -> None:
    """Run all unfinished requests on engines of a Ray cluster.

    Args:
      settings: settings of the run.
      output_file: the output file.
      overwrite: True to discard the content of the output file.
      address: address of a cluster; None: see `connect`.
      engines: number of engines; None: as many as the cluster has GPUs for, and one if it has none.

    Raises:
      ValueError: the model cannot be opened, or the input file changes meanwhile.
      ConnectionError: there is no cluster at the address.
    """
    say("joining Ray")
    connect(address)
    devices = settings.options.get("tensor_parallel_size", 1)
    gpus = gpus_of()
    resources = EngineResources(engines=engines or max(1, gpus // devices), num_gpus=devices if gpus else 0)
    warn_of_room(resources.engines, resources.num_gpus)
    absolute = dataclasses.replace(settings, source=settings.source.resolve())
    options: EngineOptions = {**settings.engine_options, "use_tqdm": False}
    config = placed(EngineConfig.of(settings.name, **options))
    pool = Engines(Packed(functools.partial(LineWorker, absolute, config)), resources)
    try:
        say(f"opening {resources.engines} engines")
        asyncio.run(_answer(absolute, output_file, overwrite, pool, resources))
    finally:
        pool.close()


class LineWorker:
    """Engine that runs requests of a file (a `Worker`).

    Args:
      settings: settings of the run.
      config: configuration of the engine.
    """

    def __init__(self, settings: RunSettings, config: EngineConfig):
        from vlcache_jax import LLM

        self._settings, self._llm = settings, LLM(config)
        self._llm.service.compressor_of(settings.compress)  # an error here concerns all requests, and ends the run
        self._chats = ChatFormat(self._llm.service.renderer)

    def __call__(self, given: tuple[int, str, str]) -> _Result:
        """Run the request of a line, given its number, digest and text."""
        row = self._settings.parse(*given, self._chats)
        if row.params is None:
            error = row.error or ""
            return _Result(row.error_line(error), error, 0)
        options = row.options(self._settings.request_options)
        [output] = self._llm.chat([row.conversation], row.params, use_tqdm=False, options=options, on_error="return")
        if output.error is not None:
            error = row.own_error(output.error, 0)
            return _Result(row.error_line(error), error, 0)
        return _Result(row.output_line(output, self._settings.name, self._chats), None, tokens_of(output))


async def _answer(
    settings: RunSettings, output_file: OutputFile, overwrite: bool, pool: Engines, resources: EngineResources
) -> None:
    await pool.ready()
    room = asyncio.Semaphore(resources.engines * resources.window * _AHEAD)
    warned = settings.model is not None

    async def one(given: tuple[int, str, str]) -> None:
        nonlocal warned
        number = given[0]
        try:
            row = await asyncio.to_thread(settings.parse, *given, None)
            if row.params is None:
                output_file.fail(number, row.error_line(row.error or ""), row.error or "")
                return
            warned = warned or warn_of_others(row.conversation)
            body = row.conversation if isinstance(row.conversation, dict) else {"messages": row.conversation}
            request = await asyncio.to_thread(look, body, reads_files=True)
            try:
                answered: _Result = await pool.answer(request, given)
            except EngineDiedError as error:
                message = f"line {number}: {error}"
                output_file.fail(number, row.error_line(message), message)
                return
            if answered.error is None:
                output_file.write(number, answered.line, answered.tokens)
            else:
                output_file.fail(number, answered.line, answered.error)
        finally:
            room.release()

    with output_file.bar:
        output_file.begin(overwrite)
        try:
            async with asyncio.TaskGroup() as tasks:
                for given in output_file.rows():
                    await room.acquire()
                    tasks.create_task(one(given))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

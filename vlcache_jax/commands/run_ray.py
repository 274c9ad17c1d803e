"""`vlcache run --ray`: the rows of a file, answered by many engines. Reading and writing are those of `run`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import NamedTuple

from vlcache_jax.commands.options import warn_of_others
from vlcache_jax.commands.run import Recipe, Sheet, tokens_of
from vlcache_jax.common.progress import say
from vlcache_jax.config import EngineConfig, EngineOptions
from vlcache_jax.protocol.answers import ChatFormat
from vlcache_jax.ray.engines import (
    EngineDiedError,
    EngineOrder,
    Engines,
    Packed,
    connect,
    gpus_of,
    placed,
    warn_of_room,
)
from vlcache_jax.router.affinity import look

_AHEAD = 4  # windows of rows that are read before an engine has room for them


class _Answered(NamedTuple):
    """A line of answers; what is wrong with its row; tokens."""

    line: bytes
    error: str | None
    tokens: int


def answer(recipe: Recipe, sheet: Sheet, overwrite: bool, *, address: str | None, engines: int | None) -> None:
    """Appends the answers to all rows of a sheet.

    Args:
      address: of a cluster; None: see `connect`.
      engines: that are opened; None: as many as the cluster has GPUs for, and one if it has none.

    Raises:
      ValueError: the model cannot be opened, or the rows change meanwhile.
      ConnectionError: there is no cluster at the address.
    """
    say("joining Ray")
    connect(address)
    devices = recipe.options.get("tensor_parallel_size", 1)
    gpus = gpus_of()
    order = EngineOrder(engines=engines or max(1, gpus // devices), num_gpus=devices if gpus else 0)
    warn_of_room(order.engines, order.num_gpus)
    absolute = dataclasses.replace(recipe, source=recipe.source.resolve())
    options: EngineOptions = {**recipe.options, "use_tqdm": False}
    config = placed(EngineConfig.of(recipe.name, **options))
    pool = Engines(Packed(functools.partial(RowAnswers, absolute, config)), order)
    try:
        say(f"opening {order.engines} engines")
        asyncio.run(_answer(absolute, sheet, overwrite, pool, order))
    finally:
        pool.close()


class RowAnswers:
    """An open model that answers rows (a `Worker`).

    Args:
      recipe: what they are answered with.
      config: of the engine.
    """

    def __init__(self, recipe: Recipe, config: EngineConfig):
        from vlcache_jax import LLM

        self._recipe, self._llm = recipe, LLM(config)
        self._llm.service.compressor_of(recipe.compress)  # what is wrong for all rows is no row's error
        self._chats = ChatFormat(self._llm.service.renderer)

    def __call__(self, given: tuple[int, str, str]) -> _Answered:
        """Answers a row: its number, digest and line."""
        row = self._recipe.parse(*given, self._chats)
        if row.params is None:
            error = row.error or ""
            return _Answered(row.failed(error), error, 0)
        options = row.asked(self._recipe.asked)
        [output] = self._llm.chat([row.conversation], row.params, use_tqdm=False, options=options, on_error="return")
        if output.error is not None:
            error = row.named(output.error, 0)
            return _Answered(row.failed(error), error, 0)
        return _Answered(row.answered(output, self._recipe.name, self._chats), None, tokens_of(output))


async def _answer(recipe: Recipe, sheet: Sheet, overwrite: bool, pool: Engines, order: EngineOrder) -> None:
    await pool.ready()
    room = asyncio.Semaphore(order.engines * order.window * _AHEAD)
    warned = recipe.model is not None

    async def one(given: tuple[int, str, str]) -> None:
        nonlocal warned
        number = given[0]
        try:
            row = await asyncio.to_thread(recipe.parse, *given, None)
            if row.params is None:
                sheet.fail(number, row.failed(row.error or ""), row.error or "")
                return
            warned = warned or warn_of_others(row.conversation)
            asked = row.conversation if isinstance(row.conversation, dict) else {"messages": row.conversation}
            seen = await asyncio.to_thread(look, asked, reads_files=True)
            try:
                answered: _Answered = await pool.answer(seen, given)
            except EngineDiedError as error:
                told = f"line {number}: {error}"
                sheet.fail(number, row.failed(told), told)
                return
            if answered.error is None:
                sheet.write(number, answered.line, answered.tokens)
            else:
                sheet.fail(number, answered.line, answered.error)
        finally:
            room.release()

    with sheet.bar:
        sheet.begin(overwrite)
        try:
            async with asyncio.TaskGroup() as tasks:
                for given in sheet.rows():
                    await room.acquire()
                    tasks.create_task(one(given))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

"""Actors between a dataset and the engines, which route rows and have no model.

The module does not import JAX, directly or indirectly, so that the actors start in a fraction of the time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from vlcache_jax.common.checks import check_text, short
from vlcache_jax.ray.engines import EngineDiedError, EngineResources, Engines, Shards, Worker
from vlcache_jax.router.affinity import SeenImages, look, look_at

COLUMNS = ("messages", "system", "question", "image", "images", "video")
"""Columns of a row that are read."""
ANSWERS = {
    "answer": pa.string(), "finish_reason": pa.string(), "prompt_tokens": pa.int64(), "cached_tokens": pa.int64(),
    "completion_tokens": pa.int64(), "error": pa.string(),
}  # fmt: skip
"""Columns that are added to each row."""


class Feeder:
    """Dataset actor that owns the engines, sends rows to them and adds the answers.

    Args:
      make: function that opens a model.
      resources: number of engines and their resources.
      names: the dataset's column names, by the names in `COLUMNS`.
    """

    def __init__(self, make: Callable[[], Worker], resources: EngineResources, names: Mapping[str, str]):
        self._engines, self._names, self._is_open = Engines(make, resources), names, False

    async def __call__(self, table: pa.Table) -> pa.Table:
        given = {meaning: name for meaning, name in self._names.items() if name in table.column_names}
        if taken := [name for name in ANSWERS if name in table.column_names]:
            raise ValueError(f"dataset must not have a column {taken[0]}, which the answers use: rename it")
        if not self._is_open:  # an error of the model is not an error of a row
            await self._engines.ready()
            self._is_open = True
        rows = table.select(list(dict.fromkeys(given.values()))).to_pylist()
        answers = await asyncio.gather(*(self._answer(row, given) for row in rows))
        for name, kind in ANSWERS.items():
            table = table.append_column(name, pa.array([answer.get(name) for answer in answers], kind))
        return table

    async def _answer(self, row: Mapping[str, Any], given: Mapping[str, str]) -> Mapping[str, Any]:
        try:
            messages = _messages({meaning: row[name] for meaning, name in given.items()})
            seen = await asyncio.to_thread(look, {"messages": messages}, reads_files=True)
            return dict(await self._engines.answer(seen, messages))
        except (ValueError, EngineDiedError) as error:
            return {"error": str(error)}


class Sharder:
    """Dataset actor that adds the shard number of each row.

    Args:
      count: number of shards.
      column: name of the column with the images.
      output: name of the new column.
    """

    def __init__(self, count: int, column: str, output: str):
        self._column, self._output = column, output
        self._numbers = {str(i): i for i in range(count)}
        self._shards = Shards(list(self._numbers))

    def __call__(self, table: pa.Table) -> pa.Table:
        if self._column not in table.column_names:
            raise ValueError(f"column must be one of {', '.join(table.column_names)}, got {short(self._column)}")
        numbers = []
        for value in table.column(self._column).to_pylist():
            is_list = isinstance(value, list) and value and not isinstance(value[0], list | int | float)
            listed = value if is_list else [value]
            seen = SeenImages(dict(look_at(one) for one in listed if one is not None))
            numbers.append(self._numbers[self._shards.of(seen)])
        return table.append_column(self._output, pa.array(numbers, pa.int64()))


def _messages(row: Mapping[str, Any]) -> list[Any]:
    """Return a row as the messages of a conversation.

    Raises:
      ValueError: the row has neither `messages` nor a `question`, or they have another type.
    """
    if (messages := row.get("messages")) is not None:
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except ValueError as error:
                raise ValueError(f"messages must be a list or its JSON, got {short(messages)}") from error
        if not isinstance(messages, list):
            raise ValueError(f"messages must be a list or its JSON, got {short(messages)}")
        return [_without_none(message) for message in messages]
    check_text(row.get("question"), "question")
    images = row.get("images")
    parts = [{"type": "image", "image": one} for one in (row.get("image"), *(() if images is None else images))]
    parts.append({"type": "video", "video": row.get("video")})
    shown = [part for part in parts if part[part["type"]] is not None]
    system = row.get("system")
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": [*shown, {"type": "text", "text": row["question"]}]}]


def _without_none(value: Any) -> Any:
    """Remove null values. A column has one type, so that each part has the keys of all parts."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value

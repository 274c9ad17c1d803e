"""Batches: the rows of a `ray.data.Dataset`, answered by many engines."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Mapping
from typing import Any, Unpack

import pyarrow as pa
import ray.data

from vlcache_jax.affinity import Seen, look, look_at
from vlcache_jax.cache.records import CacheStats
from vlcache_jax.checks import check_text, check_whole, short
from vlcache_jax.config import Compress, EngineConfig, EngineOptions
from vlcache_jax.llm import LLM
from vlcache_jax.ray.engines import WINDOW, EngineDiedError, EngineOrder, Engines, Shards
from vlcache_jax.sampling import SamplingParams

COLUMNS = ("messages", "system", "question", "image", "images", "video")
"""What a row may hold."""
ANSWERS = {
    "answer": pa.string(), "finish_reason": pa.string(), "prompt_tokens": pa.int64(), "cached_tokens": pa.int64(),
    "completion_tokens": pa.int64(), "error": pa.string(),
}  # fmt: skip
"""What is told of each row, in columns behind its own."""
_TASKS = 16  # blocks that are under way, so that small ones keep engines busy


def generate(
    dataset: ray.data.Dataset,
    model: str | os.PathLike[str],
    sampling_params: SamplingParams | None = None,
    *,
    num_engines: int = 1,
    columns: Mapping[str, str] | None = None,
    compress: Compress | None = None,
    num_gpus: float | None = None,
    num_cpus: float = 0,
    window: int = WINDOW,
    **options: Unpack[EngineOptions],
) -> ray.data.Dataset:
    """Answers the rows of a dataset, each once::

        rows = ray.data.read_parquet("s3://bucket/questions")  # with columns image (bytes) and question
        vlcache_jax.ray.generate(rows, "Qwen/Qwen3-VL-8B-Instruct", num_engines=8).write_parquet("s3://bucket/answers")

    A picture meets one engine, by a hash of its bytes; one that more than a quarter too many rows show is given to
    others, too. Of several pictures in a row the largest counts. Ray holds reading and writing back where engines are
    slower. An engine that ends is opened again, and what it had is answered again.

    Args:
      dataset: each row holds `messages`, a list as `LLM.chat` takes it or its JSON; or `question` with `image`,
        `images` or `video`, and `system`. An image is bytes, a path, a URL or an array [H, W, 3].
      model: see `LLM`. Each engine opens it.
      sampling_params: of all rows; None is the checkpoint's own.
      num_engines: actors, each with a model of its own.
      columns: the dataset's names for these where they are others: `{"question": "prompt"}`.
      compress: see `LLM.chat`.
      num_gpus: of each engine; by default `tensor_parallel_size`. 0 is for CPUs.
      num_cpus: of each engine.
      window: rows that an engine has at a time.
      options: see `LLM`; among them `reuse`.

    Returns:
      The rows with `answer`, `finish_reason`, `prompt_tokens`, `cached_tokens`, `completion_tokens` and `error` beside
      them. A row that cannot be answered has an error, and nothing else of these. They may come in another order.

    Raises:
      ValueError, TypeError: an argument is wrong. What the model's files tell to be wrong, who reads the dataset hears.
    """
    options.setdefault("use_tqdm", False)
    config = EngineConfig.of(model, **options)
    if not isinstance(sampling_params, SamplingParams | None):
        raise ValueError(f"sampling_params must be SamplingParams or None, got {type(sampling_params).__name__}")
    if sampling_params is not None and sampling_params.n != 1:
        raise ValueError(f"sampling_params must have n=1, as a row has one answer, got {sampling_params.n}")
    gpus = config.tensor_parallel_size if num_gpus is None else num_gpus
    check_whole("num_engines", num_engines, 1)
    order = EngineOrder(engines=num_engines, num_gpus=gpus, num_cpus=num_cpus, window=window)
    make = functools.partial(Answers, config, sampling_params, compress)
    return dataset.map_batches(
        _Feeder,
        fn_constructor_kwargs={"make": make, "order": order, "names": _names(columns)},
        batch_format="pyarrow",
        batch_size=window,
        num_cpus=0,
        compute=ray.data.ActorPoolStrategy(
            size=1, max_tasks_in_flight_per_actor=2 * _TASKS, max_concurrent_calls_per_actor=_TASKS
        ),
    )


def shard_by_image(
    dataset: ray.data.Dataset, num_shards: int, *, column: str = "image", output: str = "shard"
) -> ray.data.Dataset:
    """Adds to each row the number of the engine that its picture belongs to, for pipelines of your own.

    Args:
      dataset: rows with bytes, paths, URLs or arrays of a picture, or lists of them, of which the largest counts.
      num_shards: engines. No shard is given more than 1.25 of the mean, beyond its first 64 rows.
      column: where the picture is.
      output: name of the new column.

    Raises:
      ValueError: an argument is wrong.
    """
    check_whole("num_shards", num_shards, 1)
    for name, given in (("column", column), ("output", output)):
        check_text(given or None, name, "a non-empty string")
    return dataset.map_batches(
        _Sharder,
        fn_constructor_kwargs={"count": num_shards, "column": column, "output": output},
        batch_format="pyarrow",
        num_cpus=0,
        compute=ray.data.ActorPoolStrategy(size=1),
    )


class Answers:
    """An open model that answers conversations (a `Worker`).

    Args:
      config: of the engine.
      params, compress: of all conversations.
    """

    def __init__(self, config: EngineConfig, params: SamplingParams | None, compress: Compress | None):
        self._llm = LLM(config)
        self._llm.service.compressor_of(compress)  # what is wrong for all rows is no row's error
        self._params, self._compress = params, compress

    def __call__(self, conversation: Any) -> dict[str, Any]:
        """What `ANSWERS` names; what is missing is none."""
        [output] = self._llm.chat(
            [conversation], self._params, use_tqdm=False, compress=self._compress, on_error="return"
        )
        if output.error is not None:
            return {"error": output.error.removeprefix("conversations[0]").lstrip(": ")}
        [answer] = output.outputs
        return {
            "answer": answer.text, "finish_reason": answer.finish_reason,
            "prompt_tokens": len(output.prompt_token_ids), "cached_tokens": output.num_cached_tokens,
            "completion_tokens": len(answer.token_ids),
        }  # fmt: skip

    def stats(self) -> CacheStats:
        """What became of pictures."""
        return self._llm.cache.stats()


class _Feeder:
    """Gives rows to engines, and their answers back (an actor of a dataset, which owns the engines)."""

    def __init__(self, make: Any, order: EngineOrder, names: Mapping[str, str]):
        self._engines, self._names = Engines(make, order), names

    async def __call__(self, table: pa.Table) -> pa.Table:
        given = {meaning: name for meaning, name in self._names.items() if name in table.column_names}
        if taken := [name for name in ANSWERS if name in table.column_names]:
            raise ValueError(f"dataset must not have a column {taken[0]}, which is for answers")
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


class _Sharder:
    """Tells rows their shards (an actor of a dataset)."""

    def __init__(self, count: int, column: str, output: str):
        self._column, self._output = column, output
        self._numbers = {str(i): i for i in range(count)}
        self._shards = Shards(list(self._numbers))

    def __call__(self, table: pa.Table) -> pa.Table:
        if self._column not in table.column_names:
            raise ValueError(f"column must be one of {', '.join(table.column_names)}, got {short(self._column)}")
        numbers = []
        for value in table.column(self._column).to_pylist():
            listed = value if isinstance(value, list) and value and isinstance(value[0], str | bytes) else [value]
            seen = Seen(dict(look_at(one) for one in listed if one is not None))
            numbers.append(self._numbers[self._shards.of(seen)])
        return table.append_column(self._output, pa.array(numbers, pa.int64()))


def _names(columns: Mapping[str, str] | None) -> dict[str, str]:
    """The dataset's names for what a row may hold."""
    for meaning, name in (columns or {}).items():
        if meaning not in COLUMNS:
            raise ValueError(f"columns must hold only {', '.join(COLUMNS)}, got {short(meaning)}")
        check_text(name or None, f"columns[{meaning!r}]", "the name of a column")
    return {meaning: meaning for meaning in COLUMNS} | dict(columns or {})


def _messages(row: Mapping[str, Any]) -> list[Any]:
    """A row as a conversation.

    Raises:
      ValueError: it holds none.
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
    parts = [{"type": "image", "image": image} for image in (row.get("image"), *(row.get("images") or ()))]
    parts.append({"type": "video", "video": row.get("video")})
    shown = [part for part in parts if part[part["type"]] is not None]
    system = row.get("system")
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": [*shown, {"type": "text", "text": row["question"]}]}]


def _without_none(value: Any) -> Any:
    """Columns of one type give each part all keys that any part has."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value

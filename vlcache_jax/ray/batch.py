"""Batches: the rows of a `ray.data.Dataset`, answered by many engines."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Unpack

import ray.data

from vlcache_jax.cache.lookups import CacheStats
from vlcache_jax.common.checks import check_text, check_whole, short
from vlcache_jax.config import EngineConfig, EngineOptions
from vlcache_jax.llm import LLM
from vlcache_jax.ray.engines import WINDOW, EngineOrder, Packed, placed, warn_of_room
from vlcache_jax.ray.feeding import COLUMNS, Feeder, Sharder
from vlcache_jax.request_options import Compress, RequestOptions
from vlcache_jax.sampling import SamplingParams

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
    config = placed(EngineConfig.of(model, **options))
    if not isinstance(sampling_params, SamplingParams | None):
        raise ValueError(f"sampling_params must be SamplingParams or None, got {type(sampling_params).__name__}")
    if sampling_params is not None and sampling_params.n != 1:
        raise ValueError(f"sampling_params must have n=1, as a row has one answer, got {sampling_params.n}")
    gpus = config.tensor_parallel_size if num_gpus is None else num_gpus
    check_whole("num_engines", num_engines, 1)
    order = EngineOrder(engines=num_engines, num_gpus=gpus, num_cpus=num_cpus, window=window)
    warn_of_room(num_engines, gpus)
    make = Packed(functools.partial(DatasetWorker, config, sampling_params, RequestOptions(compress=compress)))
    return dataset.map_batches(
        Feeder,
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
        Sharder,
        fn_constructor_kwargs={"count": num_shards, "column": column, "output": output},
        batch_format="pyarrow",
        num_cpus=0,
        compute=ray.data.ActorPoolStrategy(size=1),
    )


class DatasetWorker:
    """An open model that answers conversations (a `Worker`).

    Args:
      config: of the engine.
      params, options: of all conversations.
    """

    def __init__(self, config: EngineConfig, params: SamplingParams | None, options: RequestOptions):
        self._llm = LLM(config)
        self._llm.service.compressor_of(options.compress)  # what is wrong for all rows is no row's error
        self._params, self._options = params, options

    def __call__(self, conversation: Any) -> dict[str, Any]:
        """What `feeding.ANSWERS` names; what is missing is none."""
        [output] = self._llm.chat(
            [conversation], self._params, use_tqdm=False, options=self._options, on_error="return"
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


def _names(columns: Mapping[str, str] | None) -> dict[str, str]:
    """The dataset's names for what a row may hold."""
    for meaning, name in (columns or {}).items():
        if meaning not in COLUMNS:
            raise ValueError(f"columns must hold only {', '.join(COLUMNS)}, got {short(meaning)}")
        check_text(name or None, f"columns[{meaning!r}]", "the name of a column")
    return {meaning: meaning for meaning in COLUMNS} | dict(columns or {})

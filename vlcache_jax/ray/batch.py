"""Batch inference over a `ray.data.Dataset` with several engines."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Unpack

import ray.data

from vlcache_jax.cache.lookups import CacheStats
from vlcache_jax.common.checks import check_text, check_whole, unknown
from vlcache_jax.config import EngineConfig, EngineOptions
from vlcache_jax.llm import LLM
from vlcache_jax.ray.engines import WINDOW, EngineResources, Packed, placed, warn_of_room
from vlcache_jax.ray.feeding import COLUMNS, Feeder, Sharder
from vlcache_jax.request_options import Compress, RequestOptions
from vlcache_jax.sampling import SamplingParams

_TASKS = 16  # blocks in flight, so that small blocks keep the engines busy


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
    """Answer each row of a dataset once::

        rows = ray.data.read_parquet("s3://bucket/questions")  # with columns image (bytes) and question
        vlcache_jax.ray.generate(rows, "Qwen/Qwen3-VL-8B-Instruct", num_engines=8).write_parquet("s3://bucket/answers")

    A hash of an image's bytes selects its engine. If that engine has more than 1.25 times the mean number of rows, the
    row goes to another engine. The largest image of a row counts. Ray slows reading and writing to the speed of the
    engines. An engine that ends is restarted, and its rows are answered again.

    Args:
      dataset: rows with `messages`, a list as in `LLM.chat` or its JSON; or with `question` and optionally `image`,
        `images`, `video` and `system`. An image is bytes, a path, a URL or an array `[H, W, 3]`.
      model: see `LLM`. Each engine opens it.
      sampling_params: sampling parameters of all rows; default: those of the checkpoint. `n` must be 1.
      num_engines: number of engines. Each is an actor with its own copy of the model.
      columns: the dataset's column names, if they differ: `{"question": "prompt"}`.
      compress: see `LLM.chat`.
      num_gpus: GPUs per engine; default: `tensor_parallel_size`. 0 for CPUs.
      num_cpus: CPUs per engine.
      window: maximum number of rows per engine at a time.
      options: options of `LLM`, such as `reuse`.

    Returns:
      The rows with the additional columns `answer`, `finish_reason`, `prompt_tokens`, `cached_tokens`,
      `completion_tokens` and `error`. A failed row has only an `error`. The order of the rows may change.

    Raises:
      ValueError, TypeError: an argument is wrong. Errors of the model's files are raised when the dataset is read.
    """
    options.setdefault("use_tqdm", False)
    config = placed(EngineConfig.of(model, **options))
    if not isinstance(sampling_params, SamplingParams | None):
        raise ValueError(f"sampling_params must be SamplingParams or None, got {type(sampling_params).__name__}")
    if sampling_params is not None and sampling_params.n != 1:
        raise ValueError(f"sampling_params must have n=1, as a row has one answer, got n={sampling_params.n}")
    gpus = config.tensor_parallel_size if num_gpus is None else num_gpus
    check_whole("num_engines", num_engines, 1)
    resources = EngineResources(engines=num_engines, num_gpus=gpus, num_cpus=num_cpus, window=window)
    warn_of_room(num_engines, gpus)
    make = Packed(functools.partial(DatasetWorker, config, sampling_params, RequestOptions(compress=compress)))
    return dataset.map_batches(
        Feeder,
        fn_constructor_kwargs={"make": make, "resources": resources, "names": _names(columns)},
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
    """Add to each row the number of the engine that its image belongs to, for custom pipelines.

    Args:
      dataset: rows with an image (bytes, a path, a URL or an array) or a list of images, of which the largest counts.
      num_shards: number of engines. After its first 64 rows, a shard gets at most 1.25 times the mean number of rows.
      column: name of the column with the image.
      output: name of the new column.

    Returns:
      The rows with the shard number, from 0 to `num_shards` - 1.

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
    """Open model that answers conversations (a `Worker`).

    Args:
      config: options of the engine.
      params: sampling parameters of all conversations; None for those of the checkpoint.
      options: request options of all conversations.
    """

    def __init__(self, config: EngineConfig, params: SamplingParams | None, options: RequestOptions):
        self._llm = LLM(config)
        self._llm.service.compressor_of(options.compress)  # a wrong option is an error of the call, not of each row
        self._params, self._options = params, options

    def __call__(self, conversation: Any) -> dict[str, Any]:
        """Return the values of `feeding.ANSWERS`. Missing ones are null."""
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
        """Return the statistics of the image cache."""
        return self._llm.cache.stats()


def _names(columns: Mapping[str, str] | None) -> dict[str, str]:
    """Return the dataset's column names, by the names in `COLUMNS`."""
    for meaning, name in (columns or {}).items():
        if meaning not in COLUMNS:
            raise ValueError(unknown(meaning, COLUMNS, where="columns"))
        check_text(name or None, f"columns[{meaning!r}]", "the name of a column")
    return {meaning: meaning for meaning in COLUMNS} | dict(columns or {})

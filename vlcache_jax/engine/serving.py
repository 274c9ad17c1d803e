"""A call from its checked rows to its results: windows of rows, planned and run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Protocol

from vlcache_jax.engine.identification import Arrivals
from vlcache_jax.engine.linker import Batch, Linker
from vlcache_jax.engine.request import Linked, Metrics, Request
from vlcache_jax.reuse.policies import Policy

_NAMED = 20  # rows that one message names


class RequestError(ValueError):
    """Arrivals of a call that cannot be answered.

    Attributes:
      errors: why, by row.
      outputs: of the rows that were answered until then, in their places; None elsewhere. Empty if none was.
    """

    def __init__(self, errors: Mapping[int, str], outputs: Sequence[Any] = ()):
        self.errors = dict(sorted(errors.items()))
        self.outputs = list(outputs)
        lines = list(self.errors.values())
        message = "\n".join(
            [*lines[:_NAMED], *([f"... and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else [])]
        )
        super().__init__(message if len(lines) == 1 else f"{len(lines)} requests are wrong:\n{message}")


class Result(Protocol):
    """What a request came to."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def error(self) -> str | None: ...


def serve[T: Result](
    arrivals: Arrivals,
    linker: Linker,
    serving: Callable[[], AbstractContextManager[None]],
    policy: Policy,
    run: Callable[[Sequence[int], list[Linked]], list[T | None]],
    failed: Callable[[int, str], T],
    *,
    stop: bool,
) -> list[T]:
    """Results of a call, in the order of its rows.

    Args:
      serving: is entered for each window; pixels are decoded outside.
      run: runs planned requests, whose rows come with them; where `stop` is set, it may leave out (None) those that
        come after a step with an error.
      failed: the result of a row that is wrong.
      stop: whether a row that is wrong ends the call: before anything runs; or, where only pixels or logits show it,
        after the rows before it or after the wave that it is in.

    Raises:
      RequestError: a row is wrong, and `stop` is set.
    """
    if arrivals.errors and stop:
        raise RequestError({row: str(error) for row, error in arrivals.errors.items()})
    results: dict[int, T] = {row: failed(row, str(error)) for row, error in arrivals.errors.items()}
    waves = 0
    with closing(arrivals.windows()) as windows:
        for window in windows:
            good: list[tuple[int, Request]] = []
            wrong: dict[int, str] = {}
            for row, found in window:
                if isinstance(found, Request):
                    good.append((row, found))
                    continue
                wrong[row] = str(found)
                if stop:
                    break
            with serving():
                for done in _in_batches(linker, good, policy, run, waves):
                    results |= done
                    waves = 1 + max((result.metrics.wave for result in done.values()), default=waves)
                    wrong |= {row: result.error for row, result in done.items() if result.error is not None}
                    if stop and any(result.error is not None for result in done.values()):
                        break
            if wrong and stop:
                raise RequestError(wrong, _answered(results))
            results |= {row: failed(row, error) for row, error in wrong.items() if row not in results}
    return [results[row] for row in sorted(results)]


def _answered[T: Result](results: Mapping[int, T]) -> list[T | None]:
    """Results by row, without those of rows that are wrong."""
    rows = range(max(results, default=-1) + 1)
    return [results[row] if row in results and results[row].error is None else None for row in rows]


def _in_batches[T: Result](
    linker: Linker,
    requests: Sequence[tuple[int, Request]],
    policy: Policy,
    run: Callable[[Sequence[int], list[Linked]], list[T | None]],
    waves: int,
) -> Iterator[dict[int, T]]:
    """Plans and runs requests in their order, as many together as the cache can hold at once; those that were run."""
    while requests:
        with Batch(linker) as batch:
            group: list[Linked] = []
            for _, request in requests:
                linked = batch.add(request, policy)
                if linked is None:
                    break
                group.append(linked)
            if not group:
                raise RuntimeError("records are held by requests that have ended; reset_mm_cache() helps")
            results = run([row for row, _ in requests[: len(group)]], group)
        done = {row: result for (row, _), result in zip(requests, results, strict=False) if result is not None}
        for result in done.values():
            result.metrics.wave += waves
        waves = 1 + max((result.metrics.wave for result in done.values()), default=waves)
        yield done
        requests = requests[len(group) :]

"""The tables of `vlcache bench compression`, and its picture."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlcache_jax.benchmarks.compression_filled import Run
from vlcache_jax.study.report import figures, show, write

if TYPE_CHECKING:
    from vlcache_jax.outputs import RequestOutput

TITLE = "Decoding with compressed K, V"
FULL = "full"  # all of the K, V


@dataclasses.dataclass(frozen=True)
class Requested:
    """A prompt that was computed once.

    Attributes:
      cold: its first token then.
      outputs: of each way to go on, behind the prompt that was found.
    """

    cold: RequestOutput
    outputs: Mapping[str, Sequence[RequestOutput]]

    @property
    def tokens(self) -> int:
        return len(self.cold.prompt_token_ids)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each way."""
        prefill, first = self.cold.metrics.prefill, self.cold.metrics.ttft
        for way, outputs in self.outputs.items():
            told, more = outputs[0].compression, len(outputs[0].outputs[0].token_ids) - 1
            # The first delivery behind the first token waits for compaction.
            rates = [more / (sum(one.metrics.inter_token) - one.metrics.compress) for one in outputs]
            yield {
                "prompt": self.tokens,
                "K, V": way,
                "kept %": 100.0 if told is None else 100 * told.bytes / told.bytes_full,
                "first token s": first,
                "prefill s": prefill,
                "observe + compact s": self.compress(way),
                "of prefill %": 100 * self.compress(way) / prefill,
                "first token, found, ms": 1000 * statistics.median(one.metrics.ttft for one in outputs),
                "tokens/s": statistics.median(rates),
                "spread %": _spread(rates),
                "end to end s": first + statistics.median(sum(one.metrics.inter_token) for one in outputs),
            }

    def compress(self, way: str) -> float:
        """Seconds of observing and compacting, the median."""
        return statistics.median(one.metrics.compress for one in self.outputs[way])


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Answers behind prompts that were drawn.

    Attributes:
      tokens: of each prompt.
      answers: together.
      runs: of each way to go on.
      lists: work lists of its windows.
      memory: bytes of the pool and of that for compressed prompts, which it has in use.
    """

    tokens: int
    answers: int
    runs: Mapping[str, list[Run]]
    lists: Mapping[str, int]
    memory: Mapping[str, tuple[int, int]]

    def rates(self, way: str) -> list[float]:
        """Tokens a second of all answers together, in each run."""
        return [run.tokens.size / run.seconds for run in self.runs[way]]

    def rows(self, requested: Requested, max_tokens: int) -> Iterator[dict[str, Any]]:
        """A row for each way.

        Args:
          requested: a prompt of this length; what one request takes before it decodes.
          max_tokens: of each answer, from end to end.
        """
        full = statistics.median(self.rates(FULL))
        for way, runs in self.runs.items():
            rates, [pool, compressed] = self.rates(way), self.memory[way]
            rate = statistics.median(rates)
            before = self.answers * (requested.cold.metrics.ttft + requested.compress(way))
            yield {
                "prompt": self.tokens,
                "answers": self.answers,
                "prompts": "filled",
                "K, V": way,
                "tokens/s": rate,
                "spread %": _spread(rates),
                "times full": rate / full,
                "K, V MB": pool / 1e6,
                "compressed MB": compressed / 1e6,
                "end to end s": before + self.answers * (max_tokens - 1) / rate,
                "work lists": self.lists[way],
                "host ms a run": 1000 * statistics.median(run.host for run in runs),
                "runs": [run.seconds for run in runs],
            }


def first_rows(took: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """A row for each kind of request.

    Args:
      took: seconds to the first tokens, of each turn; those of the first kind are what the others are compared with.
    """
    plain = next(iter(took.values()))
    return [
        {
            "requests": name,
            "TTFT ms": 1000 * statistics.median(own),
            "least ms": 1000 * min(own),
            "in pairs ms": 1000 * statistics.median(a - b for a, b in zip(own, plain, strict=True)),
            "spread %": _spread(own),
        }
        for name, own in took.items()
    ]


def _spread(values: Sequence[float]) -> float:
    """The most less the least, of the median."""
    return 100 * (max(values) - min(values)) / statistics.median(values)


def publish(
    requested: Sequence[Requested],
    decoded: Sequence[Decoded],
    first: Mapping[str, Sequence[float]],
    head: dict[str, Any],
    out: pathlib.Path | None,
    picture: pathlib.Path | None,
) -> None:
    """Prints the tables, and writes and draws them where that is asked for.

    Args:
      first: see `first_rows`.
    """
    of_tokens = {one.tokens: one for one in requested}
    rows = [row for one in decoded for row in one.rows(of_tokens[one.tokens], head["max_tokens"])]
    requests = [row for one in requested for row in one.rows()]
    show(f"Requests: {head['model']}, {head['dtype']}, {head['max_tokens']} tokens", requests)
    title = f"Answers together, {head['steps']} steps; end to end is counted of {head['max_tokens']} tokens"
    show(title, [{name: value for name, value in row.items() if name != "runs"} for row in rows])
    firsts = first_rows(first)
    show("First tokens of short prompts", firsts)
    if out is not None:
        write(TITLE, rows, head | {"requests": requests, "first tokens": firsts}, out)
    if picture is not None:
        draw(rows, head, picture)
        print(f"written to {picture}")


def draw(rows: Sequence[dict[str, Any]], head: dict[str, Any], picture: pathlib.Path) -> None:
    """Draws tokens a second by the length of prompts, for each number of answers."""
    pyplot = figures()
    counts = sorted({row["answers"] for row in rows})
    size = 3.5 * len(counts), 3.5
    figure, all_axes = pyplot.subplots(1, len(counts), squeeze=False, figsize=size, layout="constrained")
    for count, axes in zip(counts, all_axes[0], strict=True):
        for way in dict.fromkeys(row["K, V"] for row in rows):
            own = [row for row in rows if (row["answers"], row["K, V"]) == (count, way)]
            axes.plot(
                [row["prompt"] for row in own],
                [row["tokens/s"] for row in own],
                "o-",
                label="full cache" if way == FULL else way,
            )
        axes.set(xlabel="prompt [tokens]", title=f"{count} sequence{'s' * (count > 1)}", ylim=0)
        axes.set_xticks(sorted({row["prompt"] for row in rows}))
    all_axes[0, 0].set_ylabel("decode [tokens/s]")
    all_axes[0, 0].legend(fontsize="small")
    figure.suptitle(f"{head['model']}, {head['dtype']}", fontsize="medium")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)

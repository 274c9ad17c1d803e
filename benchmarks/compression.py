"""The measurement `vlcache bench compression`: decoding with a part of the KV compared with all of it.

It measures three things, with the ways interleaved:

- *Requests*: a prompt is computed once and then answered repeatedly, with its full KV and with the part that each
policy
  keeps. So the time of observing and compacting can be compared with its prefill.
- *Decoding*: several outputs decode together, after prompts whose KV is drawn at random (`compression_filled`), because
  computing so many would take long. Budgets of "vl-cache" there are those of a sparsity that falls evenly from layer to
  layer. It takes four work lists per multi-step decode; random weights would not.
- *First token*: requests in an engine without compression, in one with it, and compressed requests.

    vlcache bench compression --out benchmarks/results/compression_cpu.json
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcache_jax.benchmarks.compression_filled import FilledAnswers, FilledRun, KeptBlockTables, fill
from vlcache_jax.benchmarks.known_images import MARKS, KnownImages
from vlcache_jax.benchmarks.settings import IMAGE, LEAST_TOKENS, CompressionSetup, split_images
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.compress.budgets import LEAST
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.compress.policies import Compressor, make_counts
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.memory_plan import round_pages
from vlcache_jax.engine.compressed_pages import CompressedPages
from vlcache_jax.models import ModelConfig
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.study.model_support import check_keeps_kv, read_config
from vlcache_jax.study.report import environment, figures, save_figure, show, write

if TYPE_CHECKING:
    from vlcache_jax import LLM
    from vlcache_jax.outputs import RequestOutput

TITLE = "Decoding with compressed K, V"
FULL = "full"  # all of the KV


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """A prompt that was computed once.

    Attributes:
      cold: Output with its first token, computed without reuse.
      outputs: Outputs of each way to decode, all of which found the prompt in the cache.
    """

    cold: RequestOutput
    outputs: Mapping[str, Sequence[RequestOutput]]

    @property
    def tokens(self) -> int:
        return len(self.cold.prompt_token_ids)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row of the table for each way to decode."""
        prefill, first = self.cold.metrics.prefill, self.cold.metrics.ttft
        for way, outputs in self.outputs.items():
            compression, more = outputs[0].compression, len(outputs[0].outputs[0].token_ids) - 1
            # The first delivery after the first token waits for compaction.
            rates = [more / (sum(one.metrics.inter_token) - one.metrics.compress) for one in outputs]
            yield {
                "prompt": self.tokens,
                "K, V": way,
                "kept %": 100.0 if compression is None else 100 * compression.bytes / compression.bytes_full,
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
        """Return the median seconds of observing and compacting."""
        return statistics.median(one.metrics.compress for one in self.outputs[way])


@dataclasses.dataclass(frozen=True)
class DecodingResult:
    """Outputs after prompts whose KV was drawn at random.

    Attributes:
      tokens: Length of each prompt in tokens.
      answers: Number of outputs that decode together.
      runs: Runs of each way to decode.
      lists: Number of work lists of a multi-step decode, for each way.
      memory: Bytes in use of the KV pool and of the compressed pool, for each way.
    """

    tokens: int
    answers: int
    runs: Mapping[str, list[FilledRun]]
    lists: Mapping[str, int]
    memory: Mapping[str, tuple[int, int]]

    def rates(self, way: str) -> list[float]:
        """Return tokens per second of all outputs together, for each run."""
        return [run.tokens.size / run.seconds for run in self.runs[way]]

    def rows(self, requested: RequestResult, max_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield one row of the table for each way to decode.

        Args:
          requested: A prompt of this length, for the time of one request before it decodes.
          max_tokens: Tokens of each output, for the end-to-end time.
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
    """Return one row of the table for each kind of request.

    Args:
      took: Seconds to the first token of each kind, for each repeat; the first kind is the baseline.
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
    """Return the largest minus the smallest value, as a percentage of the median."""
    return 100 * (max(values) - min(values)) / statistics.median(values)


def publish(
    requested: Sequence[RequestResult],
    decoded: Sequence[DecodingResult],
    first: Mapping[str, Sequence[float]],
    head: dict[str, Any],
    out: pathlib.Path | None,
    picture: pathlib.Path | None,
) -> None:
    """Print the tables; write and draw them if `out` and `picture` are given.

    Args:
      first: See `first_rows`.
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
    """Draw tokens per second by the length of prompts, for each number of outputs."""
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
    save_figure(figure, picture)


POLICIES = ("vl-cache", "postvision")
TEXT_BEFORE, QUESTION = 40, 40  # tokens; the text before the images is shorter by their markers
SPARSITY = 0.95, 0.5  # of the attention of the first and the last layer, in filled pools
SHORT, TURNS = 200, 20  # image tokens of prompts whose first tokens are timed, and number of repeats


def ways_of(setup: CompressionSetup) -> dict[str, Compressor | None]:
    """Return the ways to decode: name -> compressor, None for the full KV."""
    names = [f"{policy}-{setup.budget:g}" for policy in POLICIES]
    return {FULL: None, **{name: parse_compressor(name) for name in names}}


def make_prompts(llm: LLM, length: int) -> KnownImages:
    """Return a generator of prompts of a length."""
    images, tokens = split_images(length, IMAGE)
    return KnownImages(
        llm.service.checkpoint.config, llm.get_tokenizer(), images=images, tokens=tokens,
        text_before=_text_before(images), text_after=QUESTION, alike=True,
    )  # fmt: skip


def prompt_tokens(length: int) -> int:
    """Return the number of tokens of a prompt of `make_prompts`."""
    images, _ = split_images(length, IMAGE)
    return length + images * MARKS + _text_before(images) + QUESTION


def engine_sizes(setup: CompressionSetup, config: ModelConfig) -> dict[str, Any]:
    """Return options of an engine that has room for the prompts."""
    kv, most = KVShape.of(config, setup.dtype), setup.answers[-1]
    longest = max(map(prompt_tokens, setup.lengths))
    new = max(setup.max_tokens, setup.steps + 1)
    pages = most * -(-(longest + new) // PAGE) + 2  # a cached prompt has its last block copied
    compressed = 2 * kv.layers  # requests' budgets may be larger by rounding
    for compressor in ways_of(setup).values():
        if compressor is not None:
            counts = drawn_counts(compressor, longest, kv.layers)
            compressed += most * CompressedPages(0).needed(counts, new)
    return {
        "dtype": setup.dtype,
        "max_model_len": longest + new,
        "max_num_seqs": most,
        "kv_cache_bytes": round_pages(pages, up=True) * PAGE * kv.slot_bytes,
        "compressed_kv_bytes": round_pages(compressed, up=True) * PAGE * kv.slot_bytes // kv.layers,
    }


def _text_before(images: int) -> int:
    """Return the tokens before the images that make the number of non-image tokens constant."""
    return max(1, TEXT_BEFORE - MARKS * images)


def drawn_counts(compressor: Compressor, length: int, layers: int) -> tuple[int, ...]:
    """Return how many tokens each layer keeps of a prompt whose KV was drawn at random."""
    gamma = None if compressor.p is None else np.linspace(*SPARSITY, layers)
    return make_counts(compressor, length, gamma, layers)


def measure(
    setup: CompressionSetup, *, out: pathlib.Path | None = None, picture: pathlib.Path | None = None, **settings: Any
) -> None:
    """Measure, and print the tables.

    Args:
      setup: Settings of the measurement.
      out: JSON file to write.
      picture: Chart of tokens per second to draw.
      settings: Settings of the engine.

    Raises:
      ValueError: Layers of the model keep no KV, an output is empty, or differs from an earlier run or from dense
        attention, or a prompt was not kept as configured.
    """
    from vlcache_jax import LLM

    check_writable("out", out)
    with setup.opened() as (model, name):
        config = read_config(model)
        check_keeps_kv(config, "vlcache bench compression")
        with LLM(model, **engine_sizes(setup, config) | settings) as llm:
            llm.service.ahead.stop()  # the first runs compile the programs that they need
            head = _head(setup, llm, name)
            requested = list(_measure_requests(llm, setup))
            llm.reset_mm_cache()
            decoded = list(_measure_decoding(llm, setup))
        short = dataclasses.replace(setup, lengths=(SHORT,), answers=(1,))
        first = _measure_first(model, short, engine_sizes(short, config) | settings)
    publish(requested, decoded, first, head, out, picture)


def _head(setup: CompressionSetup, llm: LLM, name: str) -> dict[str, Any]:
    layers = llm.service.checkpoint.config.text.num_layers
    return environment("jax") | {
        "model": f"{name}, {layers} layers" if setup.model is not None else name,
        "device": str(llm.service.device.runner.normalization.devices()),
        "dtype": setup.dtype,
        "budget": setup.budget,
        "question": QUESTION,
        "max_tokens": setup.max_tokens,
        "steps": setup.steps,
        "repeats": setup.repeats,
        "sparsity of filled pools": SPARSITY,
    }


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def _measure_requests(llm: LLM, setup: CompressionSetup) -> Iterator[RequestResult]:
    """Yield a prompt of each length, computed once and answered in each way."""
    ways = ways_of(setup)
    with Progress("answering requests", len(setup.lengths) * len(ways) * (setup.repeats + 1)) as bar:
        for length in setup.lengths:
            prompt = make_prompts(llm, length).draw()
            cold = _compute(llm, prompt)
            outputs: dict[str, list[RequestOutput]] = {way: [] for way in ways}
            for repeat in range(setup.repeats + 1):  # the first runs compile, and are short
                params = _greedy(setup.max_tokens if repeat else LEAST_TOKENS)
                for way, compressor in ways.items():
                    outputs[way] += llm.generate(prompt, params, compress=compressor, use_tqdm=False)
                    check_request(outputs[way], cold, compressor, params.max_tokens)
                    bar.update()
            yield RequestResult(cold, {way: own[1:] for way, own in outputs.items()})


def _compute(llm: LLM, prompt: dict[str, Any]) -> RequestOutput:
    """Compute the first token with an empty cache and every program compiled."""
    while True:
        llm.reset_mm_cache()
        before = llm.stats()
        [output] = llm.generate(prompt, _greedy(1), use_tqdm=False)
        after = llm.stats()
        if (after.compile_seconds, after.load_seconds) == (before.compile_seconds, before.load_seconds):
            return output


def check_request(
    outputs: list[RequestOutput], cold: RequestOutput, compressor: Compressor | None, tokens: int | None
) -> None:
    """Check that the last output of a prompt begins like the others and that its request kept as much as configured.

    Raises:
      ValueError: It does not.
    """
    *before, last = outputs
    name = "the full prompt" if compressor is None else compressor.name
    answer, length = _tokens(last), len(last.prompt_token_ids)
    if len(answer) != tokens or last.num_cached_tokens != length - 1:
        raise ValueError(
            f"output with {name} must have {tokens} tokens and {length - 1} cached prompt tokens, got {len(answer)} "
            f"and {last.num_cached_tokens}"
        )
    if any(a != b for other in (cold, *before) for a, b in zip(_tokens(other), answer, strict=False)):
        raise ValueError(
            f"outputs with {name} must begin with the same tokens in every run, "
            f"got {[_tokens(other) for other in (cold, *outputs)]}"
        )
    compression = last.compression
    if (compression is None) != (compressor is None):
        raise ValueError(
            f"compression report of an output with {name} must be {'None' if compressor is None else 'present'}, "
            f"got {compression}"
        )
    if (
        compression is not None
        and compressor is not None
        and compression.bytes > (compressor.alpha + LEAST) * compression.bytes_full
    ):
        raise ValueError(
            f"{name} must keep at most a fraction of {compressor.alpha} of the KV of the prompt, got {compression}"
        )


def _tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def _measure_decoding(llm: LLM, setup: CompressionSetup) -> Iterator[DecodingResult]:
    """Yield each number of outputs after prompts of each length, whose KV is drawn at random."""
    kv, pages = llm.service.device.runner.shapes.kv, llm.service.engine.scheduler.compressed
    cells = list(itertools.product(setup.lengths, setup.answers))
    fill(llm.service.device.runner)
    with Progress("decoding", len(cells) * len(ways_of(setup)) * (setup.repeats + 1)) as bar:
        for length, count in cells:
            tokens = prompt_tokens(length)
            filled = FilledAnswers(llm, tokens, count, setup.steps)
            kept: dict[str, KeptBlockTables | None] = {}
            memory = {}
            # The KV of all ways is in the pool at once. The results of each way are checked, and its programs compiled.
            for way, compressor in ways_of(setup).items():
                before = pages.in_use
                kept[way] = None if compressor is None else filled.compress(drawn_counts(compressor, tokens, kv.layers))
                of_pool = filled.pages * PAGE * kv.slot_bytes if compressor is None else 0
                memory[way] = of_pool, (pages.in_use - before) * PAGE * kv.slot_bytes // kv.layers
                filled.check(kept[way])
                bar.update()
            runs: dict[str, list[FilledRun]] = {way: [] for way in kept}
            for _ in range(setup.repeats):
                for way, own in kept.items():
                    runs[way].append(filled.run(own))
                    if (runs[way][-1].tokens != runs[way][0].tokens).any():
                        raise ValueError(
                            f"outputs with {way} must have the same tokens in every run, got different ones"
                        )
                    bar.update()
            compressed = {way: own for way, own in kept.items() if own is not None}
            lists = {way: compressed[way].lists if way in compressed else 1 for way in kept}
            for own in compressed.values():
                filled.give_back(own)
            yield DecodingResult(tokens, count, runs, lists, memory)


def _measure_first(model: str, setup: CompressionSetup, sizes: dict[str, Any]) -> dict[str, list[float]]:
    """Return seconds to the first token of short prompts without reuse, with the kinds of requests interleaved."""
    from vlcache_jax import LLM

    [compressed] = [name for name in ways_of(setup) if name.startswith(POLICIES[0])]
    with LLM(model, **sizes | {"compressed_kv_bytes": 0}) as plain, LLM(model, **sizes) as ready:
        known = make_prompts(plain, SHORT)
        kinds: list[tuple[str, LLM, str | None]] = [
            ("engine without `compressed_kv_bytes`", plain, None),
            ("engine with `compressed_kv_bytes`", ready, None),
            (f"the same engine, requests with `{compressed}`", ready, compressed),
        ]
        took: dict[str, list[float]] = {name: [] for name, *_ in kinds}
        for llm in (plain, ready):
            llm.service.ahead.stop()
        with Progress("timing first tokens", TURNS + 2) as bar:
            for turn in range(-2, TURNS):  # the first ones compile
                for name, llm, compress in (*kinds[turn % 3 :], *kinds[: turn % 3]):
                    [output] = llm.generate(known.draw(), _greedy(LEAST_TOKENS), compress=compress, use_tqdm=False)
                    if output.cache.rows[0] != len(output.prompt_token_ids):
                        raise ValueError(f"prompt must be computed without reuse, got {output.cache}")
                    took[name] += [output.metrics.ttft] * (turn >= 0)
                bar.update()
    return took

"""What must hold of what `vlcache bench ttft` times: hits are the ones that are claimed, and answers mean something.

Time to the first token: cold, with the encoder's output cached, and with K, V linked (`vlcache bench ttft`).

Every prompt has new text before its images, so nothing is an exact hit: this is the case that other engines compute
whole. The configurations take turns; the table has medians, and beside them what each costs at least at the rates of
this device, measured in the same run (`floor`, `rates`).

    vlcache bench ttft --out benchmarks/results/ttft_cpu.json
    vlcache bench ttft --random-weights qwen3-vl-8b --image-tokens 1024,3072,5120,10240,20480 --codec auto,int8
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcache_jax.benchmarks.floor import FALLING, DeviceRates, best, floor, measure_rates, pairs, told
from vlcache_jax.benchmarks.known_images import MARKS, TEXT_AFTER, KnownImages, image_grid
from vlcache_jax.benchmarks.ttft_table import COLD, ENCODER_CACHED, MeasuredCase, make_rows, publish
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.device import PAGE_TOKENS
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.reuse.policies import spread_ranks
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.report import environment

if TYPE_CHECKING:
    from vlcache_jax import LLM
    from vlcache_jax.engine.completions import Logprob


def check_exact(llm: LLM, prompt: dict[str, Any]) -> None:
    """Sees that a repeat has the logits of a cold run, before anything is timed.

    Raises:
      ValueError: it has not.
    """
    from vlcache_jax import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    llm.generate(prompt, one, use_tqdm=False)
    [output] = llm.generate(prompt, one, use_tqdm=False, verify=True)
    if output.num_cached_tokens == 0 or not output.cache.exact:
        raise ValueError(f"a repeat must hit exactly, got {output.cache}")
    most, found = 1e-3 if llm.service.device.runner.dtype == np.float32 else 0.5, output.verification
    if found is None or not found.max_logit_difference < most:
        raise ValueError(f"a repeat must have the logits of a cold run, got {found}")


def check_coded(llm: LLM, codec: str, scores: Sequence[Any]) -> int:
    """Bytes of K, V that a token takes.

    Raises:
      ValueError: an image was not linked, or records are not coded as they should be.
    """
    if found := {image.match for score in scores for image in score.cache.images} - {"approximate"}:
        raise ValueError(f"images must be linked from another context with codec {codec}, got {', '.join(found)}")
    config = llm.service.device.runner.config
    planes = KVShape.of(config, llm.service.device.runner.dtype, CODECS.get(codec)).code_bytes
    metas = [record.meta for record in llm.service.cache.store.tier.records() if record.meta.context is not None]
    sizes = {(meta.planes, meta.nbytes // meta.padded) for meta in metas}
    if len(sizes) != 1 or {own for own, _ in sizes} != {planes}:
        raise ValueError(f"records of codec {codec} must have planes of {planes} bytes, got {sizes}")
    [(_, size)] = sizes
    entries = {meta.entry for meta in metas}
    if missing := {image.key for score in scores for image in score.cache.images} - entries:
        raise ValueError(f"every image must have a record of codec {codec}, {len(missing)} have none")
    return size


def check_room(llm: LLM, sizes: Sequence[tuple[int, int]]) -> None:
    """Sees that a device tier, if there is one, holds the images of a prompt.

    Args:
      sizes: of the prompts: (images, tokens of each).

    Raises:
      ValueError: it does not.
    """
    tier = llm.service.cache.tier
    wanted = max(images * -(-tokens // PAGE_TOKENS) for images, tokens in sizes)
    if 0 < tier.num_pages < wanted:
        raise ValueError(
            f"device_bytes must hold the images of a prompt, {wanted} pages of {tier.page_bytes} bytes, got room for "
            f"{tier.num_pages}"
        )


def check_found(name: str, place: str, output: Any) -> None:
    """Sees that a configuration found its images as it claims, and that there is an answer.

    Raises:
      ValueError: it did not, or there is none.
    """
    expected = {COLD: (False, "miss", "none"), ENCODER_CACHED: (True, "miss", "none")}.get(
        name, (True, "approximate", place)
    )
    found = {(image.encoder != "computed", image.match, image.kv) for image in output.cache.images}
    if found != {expected}:
        raise ValueError(f"{name} must find its images as {expected} (encoder known, match, K, V in), got {found}")
    if len(output.outputs) != 1 or len(output.outputs[0].token_ids) != 1:
        raise ValueError(f"{name} must answer with one token, got {output.outputs}")


def check_logprobs(answers: Mapping[str, Sequence[Logprob]]) -> None:
    """Sees that the answers of the configurations, each to a prompt of its own, come from logits that mean something.

    Raises:
      ValueError: log-probabilities are missing, not finite, all the same, or the same for different prompts.
    """
    names: dict[bytes, str] = {}
    for name, logprobs in answers.items():
        values = np.array([value for logprob in logprobs for value in logprob.top.values()])
        if not values.size or not np.isfinite(values).all() or np.ptp(values) == 0:
            raise ValueError(f"{name} must have log-probabilities that are finite and differ, got {values}")
        same = names.setdefault(values.tobytes(), name)
        if same != name:
            raise ValueError(f"answers must depend on the prompt, got the same log-probabilities for {same} and {name}")


SHIFT = "shift, r = 0.03"  # what "approximate" stands for
RATIOS = ("0.3", "0.2", "0.1")
LOGPROBS = 20  # that are looked at of each answer


@dataclasses.dataclass(frozen=True)
class TtftSetup:
    """What is measured.

    Attributes:
      model: checkpoint or hub id; None: random weights.
      random_weights: whose shape they have, such as "qwen3-vl-8b"; None: a decoder of 12 layers x 768.
      layers: of a decoder with random weights; None: all.
      dtype: of the model.
      sizes: of the prompts: (images, tokens of each).
      ratios: of image tokens that are computed anew in every layer, each a configuration.
      max_model_len: that engines are opened with; None is what the longest prompt needs.
      text_before: tokens before the images, new in each prompt.
      repeats: of each configuration, after one that warms up and is checked.
      schedule: path of a schedule file; None: one that falls from 0.08 to 0, in the mean 0.025.
      codecs: of stored K, V; each has an engine of its own.
      host_bytes: host memory for records.
      device_bytes: device memory for copies of them, in an engine of its own; 0: there is none.
      disk: directory for records, in an engine of its own that forgets all others before each run; None: there is none.

    Raises:
      ValueError: a model beside random weights, or nothing to measure.
    """

    model: str | None = None
    random_weights: str | None = None
    layers: int | None = None
    dtype: str = "auto"
    sizes: tuple[tuple[int, int], ...] = ((4, 1024),)
    ratios: tuple[str, ...] = RATIOS
    max_model_len: int | None = None
    text_before: int = 20
    repeats: int = 5
    schedule: str | None = None
    codecs: tuple[str, ...] = ("auto",)
    host_bytes: int | str = "16GiB"
    device_bytes: int | str = 0
    disk: str | None = None

    def __post_init__(self) -> None:
        for name in ("random_weights", "layers"):
            if self.model is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} must be left out beside a model, got {getattr(self, name)!r}, {self.model!r}")
        for name in ("sizes", "codecs"):
            given = getattr(self, name)
            if not given or len(set(given)) != len(given):
                raise ValueError(f"{name} must be different ones, at least one, got {given!r}")

    def caches(self) -> Iterator[tuple[str, CacheConfig]]:
        """Where stored K, V lie, and the cache; of each place and codec. What may not fit comes first."""
        places: dict[str, dict[str, Any]] = {"device": {"device_bytes": self.device_bytes}} if self.device_bytes else {}
        places |= {"disk": {"disk": self.disk}} if self.disk is not None else {}
        for place, tier in (places | {"host": {}}).items():
            for codec in self.codecs:
                yield place, make_cache(codec, self.host_bytes, **tier)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        longest = max(images * (tokens + MARKS) for images, tokens in self.sizes)
        return longest + self.text_before + TEXT_AFTER + 8

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[str, str]]:
        """The model's directory, or its id, and what it is called; within, it can be opened."""
        if self.model is not None:
            yield self.model, pathlib.Path(self.model).name
            return
        from vlcache_jax.benchmarks.random_models import drawn_weights, make_random_model

        with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as folder, drawn_weights():
            directory, name = make_random_model(folder, self.random_weights, self.layers)
            yield str(directory), name


def make_cache(codec: str, host_bytes: int | str, **tier: Any) -> CacheConfig:
    """Of each image one variant is kept, the newest: every prompt is another context, and any variant serves all."""
    return CacheConfig(host_bytes=host_bytes, codec=codec, variants=1, load="link", **tier)


def measure(
    setup: TtftSetup, *, out: pathlib.Path | None = None, picture: pathlib.Path | None = None, **settings: Any
) -> None:
    """Measures, and prints the table.

    Args:
      out: JSON file to write.
      picture: of the steps, to draw.
      settings: of the engine.

    Raises:
      ValueError: an image was not found as it should be, or an answer is empty, constant or not finite.
    """
    from vlcache_jax import LLM

    check_writable("out", out)
    head: dict[str, Any] = {}
    cases: list[MeasuredCase] = []
    rates: list[DeviceRates] = []
    with setup.opened() as (model, name):
        for place, cache in setup.caches():
            with LLM(
                model, dtype=setup.dtype, max_model_len=setup.max_model_len or setup.longest, cache=cache,
                enable_prefix_caching=False, **settings,
            ) as llm:  # fmt: skip
                # The first runs compile what they call for, which is far less than `warmup` does for any request.
                llm.service.ahead.stop()
                check_room(llm, setup.sizes)
                # Once an engine is open: it is to touch jax first.
                rates.append(measure_rates(llm.service.device.runner.dtype))
                head = head or _head(setup, llm, name)
                cases += _Measuring(llm, setup, place, cache.codec).cases(with_baselines=not cases)
                rates.append(measure_rates(llm.service.device.runner.dtype))
    fastest = best(rates)
    publish(make_rows(cases, fastest), head | {"rates": told(fastest)}, out, picture)


def _head(setup: TtftSetup, llm: LLM, name: str) -> dict[str, Any]:
    layers = llm.service.checkpoint.config.text.num_layers
    images = ", ".join(f"{count} x {tokens}" for count, tokens in setup.sizes)
    return environment("jax") | {
        "model": f"{name}, {layers} layers" if setup.model is not None else name,
        "device": str(llm.service.device.runner.normalization.devices()),
        "dtype": str(llm.service.device.runner.dtype),
        "layers": layers,
        "prompt": f"{setup.text_before} text tokens, images of {images} tokens, {TEXT_AFTER} text tokens",
        "repeats": setup.repeats,
    }


class _Measuring:
    """Measures with one engine.

    Args:
      place, codec: of its stored K, V.
    """

    def __init__(self, llm: LLM, setup: TtftSetup, place: str, codec: str):
        self._llm, self._setup, self._place, self._codec = llm, setup, place, codec
        self._config = llm.service.checkpoint.config

    def cases(self, *, with_baselines: bool) -> list[MeasuredCase]:
        """All configurations at all sizes; those that use no stored K, V only where `with_baselines`."""
        reuses = make_configurations(
            self._config.model_type, self._config.text.num_layers, self._setup.schedule, self._setup.ratios
        )
        if not with_baselines:
            del reuses[COLD], reuses[ENCODER_CACHED]
        cases: list[MeasuredCase] = []
        total = len(self._setup.sizes) * (self._setup.repeats + 1) * len(reuses)
        with Progress(f"measuring with K, V in {self._place}, codec {self._codec}", total) as bar:
            for images, tokens in self._setup.sizes:
                self._llm.reset_mm_cache()
                known = KnownImages(
                    self._config, self._llm.get_tokenizer(), images=images, tokens=tokens,
                    text_before=self._setup.text_before,
                )  # fmt: skip
                outputs = self._measure(known, reuses, bar)
                cases += [self._case(known, name, runs) for name, runs in outputs.items()]
        return cases

    def _measure(self, known: KnownImages, reuses: Mapping[str, Any], bar: Progress) -> dict[str, list[Any]]:
        """The timed outputs of each configuration."""
        from vlcache_jax import SamplingParams

        one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        looked_at = dataclasses.replace(one, logprobs=LOGPROBS)
        llm = self._llm
        [donor] = llm.generate(known.draw(), one, use_tqdm=False)
        llm.cache.flush()
        if llm.cache.stats().refused:
            raise ValueError(
                f"host_bytes must hold the {known.images} images of a prompt, got {self._setup.host_bytes}"
            )
        if [image.tokens for image in donor.cache.images] != [known.tokens] * known.images:
            raise ValueError(f"images must have {known.tokens} tokens, got {donor.cache.images}")
        if self._codec == "auto":
            check_exact(llm, known.draw())
        outputs: dict[str, list[Any]] = {name: [] for name in reuses}
        answers: dict[str, Any] = {}
        for repeat in range(self._setup.repeats + 1):
            for name, reuse in reuses.items():
                llm.cache.flush()
                if self._place == "disk":
                    llm.reset_mm_cache()  # as after a restart
                [output] = llm.generate(known.draw(), one if repeat else looked_at, reuse=reuse, use_tqdm=False)
                check_found(name, self._place, output)
                if repeat:
                    outputs[name].append(output)
                else:
                    answers[name] = output.outputs[0].logprobs
                bar.update()
        check_logprobs(answers)
        check_coded(llm, self._codec, [run for name in reuses if _links(name) for run in outputs[name]])
        return outputs

    def _case(self, known: KnownImages, name: str, outputs: list[Any]) -> MeasuredCase:
        config, report = self._config, outputs[0].cache
        kv = self._llm.service.stored.kv
        plan = known.plan(report, spread_ranks(*image_grid(known.tokens)) if name == SHIFT else None)
        plan = dataclasses.replace(plan, shift=name == SHIFT)
        least = functools.partial(
            floor,
            config,
            plan,
            encoded=known.encoded(report),
            loaded=sum(image.bytes_moved for image in report.images),
            itemsize=kv.dtype.itemsize,
            kept=kv.stored_bytes // kv.layers,
        )
        return MeasuredCase(
            images=known.images,
            tokens=known.tokens,
            configuration=name,
            place=self._place if _links(name) else "-",
            codec=self._codec if _links(name) else "-",
            metrics=tuple(output.metrics for output in outputs),
            reused=len(known) - report.rows[-1],
            rows=report.rows,
            pairs=pairs(plan, config.text.num_layers),
            floor=least,
        )


def make_configurations(
    model_type: str, layers: int, schedule: str | None = None, ratios: Sequence[str] = RATIOS
) -> dict[str, Any]:
    """Names of the configurations, and what each is as `reuse=`."""
    falling = falling_schedule(model_type, layers) if schedule is None else Schedule.load(schedule)
    return {
        COLD: "off",
        ENCODER_CACHED: "exact",
        **{f"r = {ratio}": ratio for ratio in ratios},
        "r = 0": "full",
        f"schedule, mean {falling.mean_text}": falling,
        SHIFT: "approximate",
    }


def falling_schedule(model_type: str, layers: int) -> Schedule:
    """The levels of `floor.FALLING`, spread over the layers."""
    levels = tuple(FALLING[layer * len(FALLING) // layers] for layer in range(layers))
    return Schedule(levels, model_type, "", allow_other_model=True)


def _links(name: str) -> bool:
    """Whether a configuration links stored K, V."""
    return name not in (COLD, ENCODER_CACHED)

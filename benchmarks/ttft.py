"""Time to the first token (`vlcache bench ttft`): without reuse, with cached encoder output, and with linked KV.

Every prompt has new text before its images, so nothing is an exact hit: other engines recompute all of it. The
configurations are interleaved. The table has medians, and the lower bound of each at the rates of this device, which
are measured in the same run (`floor`, `rates`). Hits and outputs are checked.

A model with linear attention has an engine for each policy that links images, one after the other.

    vlcache bench ttft --out benchmarks/results/ttft_cpu.json
    vlcache bench ttft --random-weights qwen3-vl-8b --image-tokens 1024,3072,5120,10240,20480 --codec auto,int8
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcache_jax.benchmarks.floor import FALLING, DeviceRates, best, floor, measure_rates, pairs, rates_as_json
from vlcache_jax.benchmarks.known_images import MARKS, TEXT_AFTER, KnownImages, edge_ranks, image_grid
from vlcache_jax.benchmarks.settings import TtftSetup
from vlcache_jax.benchmarks.ttft_table import (
    COLD,
    ENCODER_CACHED,
    SHIFT,
    SHIFT_ENDS,
    MeasuredCase,
    make_rows,
    mode,
    publish,
)
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.device import PAGE_TOKENS
from vlcache_jax.common.checks import parse_bytes
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.device import kv_shape
from vlcache_jax.device.checkpoint import links_images
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.reuse.policies import spread_ranks
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.model_support import read_config, refusal, slots_for
from vlcache_jax.study.report import environment

if TYPE_CHECKING:
    from vlcache_jax import LLM
    from vlcache_jax.engine.completions import Logprob
    from vlcache_jax.models import ModelConfig


def check_exact(llm: LLM, prompt: dict[str, Any]) -> None:
    """Check that a repeat has the logits of a cold run, before anything is timed.

    In models whose layers keep states, a repeat reuses encoder output, and in others KV too.

    Raises:
      ValueError: It has not.
    """
    from vlcache_jax import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    llm.generate(prompt, one, reuse="exact", use_tqdm=False)
    [output] = llm.generate(prompt, one, reuse="exact", use_tqdm=False, verify=True)
    is_found = output.num_cached_tokens > 0
    if not links_images(llm.service.checkpoint.config):
        is_found = all(image.encoder != "computed" for image in output.cache.images)
    if not is_found or not output.cache.exact:
        raise ValueError(f"repeated prompt must be an exact cache hit, got {output.cache}")
    most, found = 1e-3 if llm.service.device.runner.dtype == np.float32 else 0.5, output.verification
    if found is None or not found.max_logit_difference < most:
        raise ValueError(f"logits of a repeated prompt must be within {most:g} of a run without reuse, got {found}")


def check_coded(llm: LLM, codec: str, scores: Sequence[Any]) -> int:
    """Return the bytes of a token's KV in cache entries.

    Raises:
      ValueError: An image was not linked, or cache entries are not coded with `codec`.
    """
    if found := {image.match for score in scores for image in score.cache.images} - {"approximate"}:
        raise ValueError(f"images must be approximate cache hits with codec {codec}, got {', '.join(found)}")
    config = llm.service.device.runner.config
    buffers = KVShape.of(config, llm.service.device.runner.dtype, CODECS.get(codec)).code_bytes
    metas = [record.meta for record in llm.service.cache.store.tier.records() if record.meta.context is not None]
    sizes = {(meta.buffers, (meta.nbytes - len(meta.parts) * sum(meta.state_bytes)) // meta.padded) for meta in metas}
    if len(sizes) != 1 or {own for own, _ in sizes} != {buffers}:
        raise ValueError(f"cache entries of codec {codec} must have buffers of {buffers} bytes, got {sizes}")
    [(_, size)] = sizes
    entries = {meta.entry for meta in metas}
    if missing := {image.key for score in scores for image in score.cache.images} - entries:
        raise ValueError(f"images must have cache entries of codec {codec}, got {len(missing)} without one")
    return size


def check_room(llm: LLM, sizes: Sequence[tuple[int, int]]) -> None:
    """Check that a device tier, if there is one, holds the images of a prompt.

    Args:
      sizes: Sizes of the prompts: (images, tokens of each).

    Raises:
      ValueError: It does not.
    """
    tier = llm.service.cache.tier
    wanted = max(images * -(-tokens // PAGE_TOKENS) for images, tokens in sizes)
    if 0 < tier.num_pages < wanted:
        raise ValueError(
            f"device_bytes must hold the images of a prompt, {wanted} pages of {tier.page_bytes} bytes, got "
            f"{tier.num_pages} pages; increase it"
        )


def check_found(name: str, place: str, output: Any) -> None:
    """Check that a configuration found its images in the right tier, and that there is an output.

    Raises:
      ValueError: It did not, or there is none.
    """
    expected = {COLD: (False, "miss", "none"), ENCODER_CACHED: (True, "miss", "none")}.get(
        name, (True, "approximate", place)
    )
    found = {(image.encoder != "computed", image.match, image.kv) for image in output.cache.images}
    if found != {expected}:
        raise ValueError(f"images of {name} must be {expected} (encoder cached, match, location of KV), got {found}")
    if len(output.outputs) != 1 or len(output.outputs[0].token_ids) != 1:
        raise ValueError(f"{name} must return one output of one token, got {output.outputs}")


def check_logprobs(answers: Mapping[str, Sequence[Logprob]]) -> None:
    """Check that the outputs of the configurations, each to its own prompt, come from meaningful logits.

    Raises:
      ValueError: Log-probabilities are missing, not finite, all the same, or the same for different prompts.
    """
    names: dict[bytes, str] = {}
    for name, logprobs in answers.items():
        values = np.array([value for logprob in logprobs for value in logprob.top.values()])
        if not values.size or not np.isfinite(values).all() or np.ptp(values) == 0:
            raise ValueError(f"log-probabilities of {name} must be finite and not all equal, got {values}")
        same = names.setdefault(values.tobytes(), name)
        if same != name:
            raise ValueError(f"log-probabilities must depend on the prompt, got the same ones for {same} and {name}")


RATIOS = ("0.3", "0.2", "0.1")
LOGPROBS = 20  # number of log-probabilities that are checked in each output


def make_caches(setup: TtftSetup) -> Iterator[tuple[str, CacheConfig]]:
    """Yield each tier of stored KV and its cache, for each codec. Those that may not fit come first."""
    device_bytes = parse_bytes(setup.device_bytes, "device_bytes")
    places: dict[str, dict[str, Any]] = {"device": {"device_bytes": device_bytes}} if device_bytes else {}
    places |= {"disk": {"disk": setup.disk}} if setup.disk is not None else {}
    for place, tier in (places | {"host": {}}).items():
        for codec in setup.codecs:
            yield place, make_cache(codec, setup.host_bytes, **tier)


def check_model(setup: TtftSetup, config: ModelConfig) -> None:
    """Check that the model supports what is explicitly to be measured.

    Raises:
      ValueError: Layers of the model keep states, which a setting excludes.
    """
    if links_images(config):
        return
    if setup.schedule is not None:
        raise ValueError(
            f"schedule must be None for {config.model_type}, got {setup.schedule}: its layers with linear attention "
            "take the tokens that are not computed as one map of their state, so all layers compute the same tokens"
        )
    if size := parse_bytes(setup.device_bytes, "device_bytes"):
        raise ValueError(
            f"device_bytes must be 0 for {config.model_type}, got {size}: the copies of cache entries in device memory "
            "have KV of each layer, and its layers with linear attention have none"
        )
    for given in (*(setup.ratios or ()), *(("full",) if setup.codecs != ("auto",) else ())):
        if why := refusal(config, given):
            raise ValueError(why)


def longest_prompt(setup: TtftSetup) -> int:
    """Return the tokens of the longest prompt and its output."""
    longest = max(images * (tokens + MARKS) for images, tokens in setup.sizes)
    return longest + setup.text_before + TEXT_AFTER + 8


def make_cache(codec: str, host_bytes: int | str, **tier: Any) -> CacheConfig:
    """Return a cache that stores the newest context of each image; every prompt is a new context, and any stored one
    serves all.
    """
    return CacheConfig(host_bytes=host_bytes, codec=codec, max_contexts_per_image=1, load="kv", **tier)


def measure(
    setup: TtftSetup, *, out: pathlib.Path | None = None, picture: pathlib.Path | None = None, **settings: Any
) -> None:
    """Measure, and print the table.

    Args:
      setup: Settings of the measurement.
      out: JSON file to write.
      picture: Chart of the steps to draw.
      settings: Settings of the engine.

    Raises:
      ValueError: The model does not support a setting, an image was not found as expected, or an output is empty,
        constant or not finite.
    """
    from vlcache_jax import LLM

    check_writable("out", out)
    head: dict[str, Any] = {}
    cases: list[MeasuredCase] = []
    rates: list[DeviceRates] = []
    with setup.opened() as (model, name):
        config = read_config(model)
        check_model(setup, config)
        engines, others = make_engines(setup, config)
        for (place, cache), (own, modes) in itertools.product(make_caches(setup), engines):
            # The baselines depend on neither tier nor codec.
            wanted = {key: reuse for key, reuse in modes.items() if not cases or _links(key)}
            if not wanted:
                continue
            with LLM(
                model, dtype=setup.dtype, max_model_len=setup.max_model_len or longest_prompt(setup), cache=cache,
                **own, **settings,
            ) as llm:  # fmt: skip
                # The first runs compile the programs that they need, far fewer than `warmup` compiles for any request.
                llm.service.ahead.stop()
                check_room(llm, setup.sizes)
                # After an engine is open, because it must use jax first.
                rates.append(measure_rates(llm.service.device.runner.dtype))
                head = head or _head(setup, llm, name)
                cases += _Measuring(llm, setup, place, cache.codec).cases(wanted)
                rates.append(measure_rates(llm.service.device.runner.dtype))
    if others:
        head["left out"] = "; ".join(f"{mode(name)}: {why}" for name, why in others.items())
    fastest = best(rates)
    publish(make_rows(cases, fastest), head | {"rates": rates_as_json(fastest)}, out, picture)


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
    """Measurements with one engine.

    Args:
      place, codec: Tier and codec of its stored KV.
    """

    def __init__(self, llm: LLM, setup: TtftSetup, place: str, codec: str):
        self._llm, self._setup, self._place, self._codec = llm, setup, place, codec
        self._config = llm.service.checkpoint.config

    def cases(self, reuses: Mapping[str, Any]) -> list[MeasuredCase]:
        """Return each configuration at all sizes.

        Args:
          reuses: Values of `reuse` by the name of the configuration.
        """
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
        """Return the timed outputs of each configuration."""
        from vlcache_jax import SamplingParams

        one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        looked_at = dataclasses.replace(one, logprobs=LOGPROBS)
        llm = self._llm
        [donor] = llm.generate(known.draw(), one, reuse="exact", use_tqdm=False)
        llm.cache.flush()
        if llm.cache.stats().refused:
            raise ValueError(
                f"host_bytes must hold the KV of the {known.images} images of a prompt, got {self._setup.host_bytes}; "
                "increase it"
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
                llm.reset_prefix_cache()  # so that all slots of snapshots are free
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
        if linked := [run for name in reuses if _links(name) for run in outputs[name]]:
            check_coded(llm, self._codec, linked)
        return outputs

    def _case(self, known: KnownImages, name: str, outputs: list[Any]) -> MeasuredCase:
        config, report = self._config, outputs[0].cache
        kv, service = self._llm.service.stored.kv, self._llm.service
        edges, ranks = service.checkpoint.edges_of(service.policy), None
        if edges is not None:
            ranks = edge_ranks(known.tokens, edges.counts(known.tokens)[0])
        elif name == SHIFT:
            ranks = spread_ranks(*image_grid(known.tokens))
        plan = dataclasses.replace(known.plan(report, ranks), shift=name in (SHIFT, SHIFT_ENDS))
        moved = sum(image.bytes_moved for image in report.images)
        least = functools.partial(
            floor,
            config,
            plan,
            encoded=known.encoded(report),
            loaded=moved,
            itemsize=kv.dtype.itemsize,
            kept=kv.stored_bytes // kv.layers,
            mapped=kv.map_bytes // (config.text.num_layers - kv.layers) if kv.maps else None,
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
            pairs=pairs(plan, config.text),
            moved=moved,
            floor=least,
        )


def make_configurations(
    model_type: str, layers: int, schedule: str | pathlib.Path | None = None, ratios: Sequence[str] = RATIOS
) -> dict[str, Any]:
    """Return the configurations by name, each as a value of `reuse=`."""
    falling = falling_schedule(model_type, layers) if schedule is None else Schedule.load(schedule)
    return {
        COLD: "off",
        ENCODER_CACHED: "exact",
        **{f"r = {ratio}": ratio for ratio in ratios},
        "r = 0": "full",
        f"schedule, mean {falling.mean_text}": falling,
        SHIFT: "approximate",
    }


def make_engines(
    setup: TtftSetup, config: ModelConfig
) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], dict[str, str]]:
    """Return the engines to open, and the configurations that are left out.

    A model with states has an engine for each policy that links images, because an engine caches the maps of its own
    policy only. Their slots are those of snapshots, which prefix caching has.

    Returns:
      The engines, each with its settings and its configurations by name; and the reasons for those left out, by name.
    """
    apart: dict[str, Any] = {"enable_prefix_caching": False}
    layers = config.text.num_layers
    if links_images(config):
        ratios = RATIOS if setup.ratios is None else setup.ratios
        return [(apart, make_configurations(config.model_type, layers, setup.schedule, ratios))], {}
    all_modes = make_configurations(config.model_type, layers, None, setup.ratios or ())
    all_modes[SHIFT_ENDS] = all_modes.pop(SHIFT)
    modes = {name: reuse for name, reuse in all_modes.items() if _links(name)}
    others = {name: why for name, reuse in modes.items() if (why := refusal(config, reuse))}
    if (tokens := min(tokens for _, tokens in setup.sizes)) < (least := kv_shape.STATED_TOKENS):
        others = dict.fromkeys(modes, f"images must have at least {least} tokens, got {tokens}") | others
    slots = slots_for(max(images for images, _ in setup.sizes))
    linking = {name: reuse for name, reuse in modes.items() if name not in others}
    own = [({"reuse": reuse, "state_snapshots": slots}, {name: reuse}) for name, reuse in linking.items()]
    return [(apart, {name: all_modes[name] for name in (COLD, ENCODER_CACHED)}), *own], others


def falling_schedule(model_type: str, layers: int) -> Schedule:
    """Return the levels of `floor.FALLING`, spread over the layers."""
    levels = tuple(FALLING[layer * len(FALLING) // layers] for layer in range(layers))
    return Schedule(levels, model_type, "", allow_other_model=True)


def _links(name: str) -> bool:
    """Return whether a configuration links stored KV."""
    return name not in (COLD, ENCODER_CACHED)

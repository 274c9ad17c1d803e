"""What the choice between linking and computing loses against the best one in hindsight.

    python -m vlcache_jax.benchmarks.regret --out benchmarks/results/regret_cpu.json

The machine is calibrated first. Then images of several sizes come again behind other text, with each load forced and
with the one that the rates choose, in turn. The regret is the median time to the first token of what was chosen, where
it was forced, less that of the fastest load. What the runs of the chosen load differ by stands beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
from typing import Any, get_args

from vlcache_jax.benchmarks.known_images import make_images
from vlcache_jax.benchmarks.throughput import TEXT, VISION
from vlcache_jax.files import check_writable
from vlcache_jax.intake.costs import Load
from vlcache_jax.progress import Progress
from vlcache_jax.study.calibration import calibrate
from vlcache_jax.study.report import environment, publish

TOKENS = (64, 256, 1024)
REUSES = ("full", "0.95", "1")  # of an image behind other text nothing, nearly all and all is computed anew


def measure(model: str | None, *, dtype: str, repeats: int, out: pathlib.Path | None) -> None:
    """Measures and prints.

    Args:
      model: checkpoint; None is one of 6 layers x 384 with random weights.
      repeats: of each load, after two that warm up.
      out: JSON file to write.
    """
    from vlcache_jax import LLM, CacheConfig

    check_writable("out", out)
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as directory:
        if model is None:
            from vlcache_jax.testing import make_checkpoint

            model = directory
            with Progress("drawing weights"):
                make_checkpoint(directory, "qwen3_vl", text=TEXT, vision=VISION, tie_word_embeddings=True)
        found = calibrate(model, dtype=dtype)
        cache = CacheConfig(load="link")
        with LLM(model, dtype=dtype, cache=cache, enable_prefix_caching=False, max_model_len=2048) as llm:
            llm.service.ahead.stop()
            llm.service.intake.planner.rates = found.rates  # and no file
            vision = llm.service.device.runner.config.vision
            cell = vision.patch_size * vision.merge_size
            rows = []
            with Progress("measuring", len(TOKENS) * len(REUSES) * (2 + repeats)) as bar:
                for tokens in TOKENS:
                    [picture] = make_images(1, tokens, cell)
                    for reuse in REUSES:
                        rows.append({"tokens": tokens, "reuse": reuse} | _row(llm, picture, reuse, repeats, bar))
            head = environment("jax") | {
                "dtype": str(llm.service.device.runner.dtype),
                "layers": llm.service.device.runner.config.text.num_layers,
                "repeats": repeats,
                "seconds": dataclasses.asdict(found.rates),
            }
    publish("Time to the first token by what is done with an image that is found, ms", rows, head, out)


def _row(llm: Any, picture: bytes, reuse: str, repeats: int, bar: Progress) -> dict[str, Any]:
    """Milliseconds of each forced load, what is chosen, and what that loses."""
    from vlcache_jax import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0)

    def run(load: str, text: str) -> Any:
        llm.cache.flush()
        llm.service.cache.store.config = dataclasses.replace(llm.service.cache.store.config, load=load)
        prompt = f"{text}<|vision_start|><|image_pad|><|vision_end|>What is it?"
        [output] = llm.generate(
            [{"prompt": prompt, "multi_modal_data": {"image": picture}}], one, reuse=reuse, use_tqdm=False
        )
        return output

    llm.reset_mm_cache()
    run("link", "It was seen here. ")
    loads: dict[str, list[Any]] = {load: [] for load in (*get_args(Load), "auto")}
    for repeat in range(2 + repeats):
        for load, outputs in loads.items():
            # Each behind another text, as what is computed is kept.
            output = run(load, f"Now behind {repeat:03}, {load:>7}. ")
            if repeat >= 2:
                outputs.append(output)
        bar.update()
    times = {load: [1e3 * output.metrics.ttft for output in outputs] for load, outputs in loads.items()}
    ms = {load: statistics.median(each) for load, each in times.items()}
    chosen = {_load_of(output) for output in loads["auto"]}
    for load in get_args(Load):
        if {_load_of(output) for output in loads[load]} != {load}:
            raise ValueError(f"{load} must be what is done where it is forced, got {loads[load][0].cache}")
    if len(chosen) != 1:
        raise ValueError(f"the choice must be the same in every run, got {chosen}")
    [name] = chosen
    best = min(get_args(Load), key=lambda load: ms[load])
    return {
        **{f"{load} ms": ms[load] for load in get_args(Load)},
        "auto ms": ms["auto"],
        "chosen": name,
        "fastest": best,
        "regret ms": ms[name] - ms[best],
        "spread ms": max(times[name]) - min(times[name]),
    }


def _load_of(output: Any) -> str:
    """What was done with the one image."""
    [image] = output.cache.images
    if image.match != "miss":
        return "link"
    return "encoder" if image.encoder == "host" else "compute"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint; default: random weights, 6 layers x 384")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    measure(arguments.model, dtype=arguments.dtype, repeats=arguments.repeats, out=arguments.out)

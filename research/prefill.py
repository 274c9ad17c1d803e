"""Cold prefill compared with transformers + torch, on the same weights, on the CPU.

Each side runs in its own process (in one process they halve each other's speed), and they alternate. The model has
random weights and is written in the Hugging Face layout; both sides read the same files, and their last logits are
compared before anything is timed.

    python -m research.prefill --out benchmarks/results/prefill_cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vlcache_jax.benchmarks import ALLOCATOR
from vlcache_jax.benchmarks.random_models import TEXT, VISION
from vlcache_jax.study.report import environment, publish

PATCH, MERGE = 16, 2
IMAGE = (30, 32)  # image tokens, rows and columns
# Largest difference of the last logits as a fraction of the largest logit, for rounding only.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


def make_prompt(slots: int) -> tuple[str, list[np.ndarray]]:
    """Return a prompt of exactly `slots` tokens: an image, then text."""
    rng = np.random.default_rng(slots)
    side = PATCH * MERGE
    noise = rng.integers(0, 256, (IMAGE[0] * 4, IMAGE[1] * 4, 3), dtype=np.uint8)
    image = noise.repeat(side // 4, axis=0).repeat(side // 4, axis=1)
    words = rng.integers(97, 123, slots - IMAGE[0] * IMAGE[1] - 2)
    return "<|vision_start|><|image_pad|><|vision_end|>" + bytes(words.tolist()).decode(), [image]


class Ours:
    def __init__(self, directory: str, dtype: str):
        from vlcache_jax import LLM, SamplingParams

        self.llm = LLM(directory, dtype=dtype, reuse="off", max_model_len=4160, kv_cache_bytes=2**29)
        self.params = SamplingParams(max_tokens=1, temperature=0)

    def __call__(self, slots: int) -> dict[str, float]:
        text, images = make_prompt(slots)
        prompt = {"prompt": text, "multi_modal_data": {"image": images}}
        [output] = self.llm.generate([prompt], self.params, use_tqdm=False)
        assert len(output.prompt_token_ids) == slots
        metrics = output.metrics
        return {"encode": metrics.encode, "prefill": metrics.prefill + metrics.first_token}

    def logits(self, slots: int) -> np.ndarray:
        runner = self.llm.service.device.runner
        kept: dict[str, Any] = {}
        head = runner.head
        runner.head = lambda *args: kept.setdefault("out", head(*args))  # type: ignore[method-assign]
        self(slots)
        del runner.head
        return np.asarray(kept["out"][0])[0]


class Torch:
    def __init__(self, directory: str, dtype: str):
        import torch
        from transformers import AutoModelForImageTextToText

        from vlcache_jax.inputs.processor import ImageProcessor
        from vlcache_jax.inputs.prompt import PromptRenderer

        self.torch = torch
        self.model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.renderer = PromptRenderer.from_pretrained(directory)
        self.processor = ImageProcessor.from_pretrained(directory)

    def __call__(self, slots: int) -> dict[str, float]:
        return self._run(slots)[0]

    def logits(self, slots: int) -> np.ndarray:
        return self._run(slots)[1]

    def _run(self, slots: int) -> tuple[dict[str, float], np.ndarray]:
        torch = self.torch
        text, images = make_prompt(slots)
        patches = [self.processor.patches(image) for image in images]
        prompt = self.renderer.from_prompt({"prompt": text, "multi_modal_data": {"image": images}})
        counts = [self.processor.num_tokens(p.grid) for p in patches]
        ids = torch.tensor(self.renderer.expander.expand(prompt.token_ids, counts)[0].astype(np.int64))[None]
        assert ids.shape[1] == slots
        pixels = torch.tensor(np.concatenate([self.processor.pixel_values(p) for p in patches]))
        grid = torch.tensor([p.grid for p in patches])
        self.model.model.rope_deltas = None
        with torch.inference_mode():
            start = time.perf_counter()
            features = self.model.model.get_image_features(pixels.to(self.model.dtype), grid)
            encoded = time.perf_counter()
            out = self.model(
                input_ids=ids,
                mm_encoder_outputs={"image": features},
                image_grid_thw=grid,
                mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
                logits_to_keep=1,
                use_cache=True,
            )
            token = int(out.logits[0, -1].argmax())
            done = time.perf_counter()
        assert 0 <= token < TEXT["vocab_size"]
        return {"encode": encoded - start, "prefill": done - encoded}, out.logits[0, -1].float().numpy()


def serve(side: str, directory: str, dtype: str, pipe: Connection) -> None:
    """Run a worker, which answers method names and sizes with the side's results."""
    worker = {"vlcache": Ours, "torch": Torch}[side](directory, dtype)
    while (request := pipe.recv()) is not None:
        method, slots = request
        pipe.send(getattr(worker, method)(slots))


@contextlib.contextmanager
def workers(directory: str, dtype: str) -> Iterator[dict[str, Connection]]:
    context = multiprocessing.get_context("spawn")
    os.environ.update(ALLOCATOR)  # read when a process starts
    pipes, processes = {}, []
    for side in ("vlcache", "torch"):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(side, directory, dtype, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[side] = ours
        processes.append(process)
    yield pipes
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()


def ask(pipe: Connection, method: str, slots: int) -> Any:
    pipe.send((method, slots))
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens of the prompt, 1000 or more"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()

    from vlcache_jax.testing import make_checkpoint

    head = environment("jax", "torch", "transformers") | {"model": {"text": TEXT, "vision": VISION}}
    rows = []
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as directory:
        make_checkpoint(directory, "qwen3_vl", text=TEXT, vision=VISION, tie_word_embeddings=True)
        for dtype in arguments.dtypes:
            with workers(directory, dtype) as pipes:
                for slots in arguments.slots:
                    logits = [ask(pipe, "logits", slots) for pipe in pipes.values()]
                    difference = float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[1]).max())
                    if not difference < TOLERANCE[dtype]:
                        raise ValueError(
                            f"logits must agree to {TOLERANCE[dtype]} of the largest in {dtype}, got {difference}"
                        )
                    seconds: dict[str, list[dict[str, float]]] = {side: [] for side in pipes}
                    for _ in range(arguments.repeats):
                        for side, pipe in pipes.items():
                            seconds[side].append(ask(pipe, "__call__", slots))
                    row: dict[str, Any] = {"dtype": dtype, "slots": slots}
                    for step in ("prefill", "encode"):
                        ms = {
                            side: 1000 * statistics.median(run[step] for run in runs) for side, runs in seconds.items()
                        }
                        row |= {f"{step} ms, {side}": value for side, value in ms.items()}
                        row[f"{step}, times faster"] = ms["torch"] / ms["vlcache"]
                    rows.append(row | {"logits differ by": f"{difference:.1e}"})
            # After each dtype, so that an interrupted run leaves its measurements.
            publish("Cold prefill and vision encoder, medians", rows, head, arguments.out)


if __name__ == "__main__":
    main()

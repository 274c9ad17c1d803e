"""transformers + torch as an engine of `vlcache bench throughput`, in its own process.

Batches are static and padded left. A batch decodes until its longest output is done; the other outputs are cut to the
requested length.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from vlcache_jax.benchmarks.throughput_engine import serve

THREADS = 2


class Torch:
    """transformers as an engine that answers the load in batches.

    Args:
      task: See `throughput_engine.EngineServer`.
    """

    def __init__(self, task: dict[str, Any]):
        import torch
        from transformers import AutoModelForImageTextToText

        from vlcache_jax.inputs.processor import ImageProcessor
        from vlcache_jax.inputs.prompt import PromptRenderer

        torch.set_num_threads(THREADS)
        dtype = task["options"]["dtype"]
        self._torch, self._task = torch, task
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "float32" if self._device == "cpu" else "bfloat16"
        self._model = (
            AutoModelForImageTextToText.from_pretrained(
                task["model"], dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
            .eval()
            .to(self._device)
        )
        self._model.generation_config.eos_token_id = None  # outputs have the requested lengths
        self._renderer = PromptRenderer.from_pretrained(task["model"])
        self._processor = ImageProcessor.from_pretrained(task["model"])

    def warm(self, batch: int) -> dict[str, Any]:
        """Run a small load of other prompts."""
        self._answer(self._task["warm"][:batch])
        return {}

    def run(self, batch: int, by_length: bool) -> dict[str, Any]:
        """Serve the load.

        Args:
          batch: Prompts of a batch.
          by_length: Outputs of similar length share a batch, although no server knows their lengths in advance.
        """
        requests = self._task["requests"]
        order = list(range(len(requests)))
        if by_length:
            order.sort(key=lambda i: requests[i]["max_tokens"])
        tokens: list[list[int]] = [[] for _ in order]
        times, trace, steps, launched = [], [], 0, 0
        start = time.perf_counter()
        for numbers in itertools.batched(order, batch):
            own = [requests[i] for i in numbers]
            answers, clock, width = self._answer(own)
            for i, request, answer in zip(numbers, own, answers, strict=True):
                tokens[i] = answer[: request["max_tokens"]]
                times.append([at - start for at in clock[: request["max_tokens"]]])
            if len(clock) > 1:
                trace.append((len(own), len(own) * (width + 1), len(clock) - 1))
            steps += len(clock) - 1
            launched += len(own) * (len(clock) - 1)
        return {
            "seconds": time.perf_counter() - start,
            "tokens": tokens,
            "times": times,
            "images": sum(len(request["images"]) for request in requests),
            "exact": 0,
            "approximate": 0,
            "encoder": 0,
            "counters": {"decode_steps": steps, "decode_rows": launched, "padded_decode_rows": 0},
            "trace": trace,
        }

    def close(self) -> None:
        """Release everything."""
        del self._model

    def _answer(self, requests: list[dict[str, Any]]) -> tuple[list[list[int]], list[float], int]:
        """Return the tokens of each request, the time of each step, and the width of the batch."""
        torch = self._torch
        sequences, patches = [], []
        for request in requests:
            images = {"multi_modal_data": {"image": request["images"]}} if request["images"] else {}
            prompt = self._renderer.from_prompt({"prompt": request["prompt"], **images})
            own = [self._processor.patches(source.decode()) for source in prompt.images]
            counts = [self._processor.num_tokens(picture.grid) for picture in own]
            sequences.append(self._renderer.expander.expand(prompt.token_ids, counts)[0])
            patches += own
        width = max(map(len, sequences))
        ids = np.zeros((len(requests), width), np.int64)
        mask = np.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, width - len(sequence) :] = sequence
            mask[row, width - len(sequence) :] = 1
        is_image = (ids == self._model.config.image_token_id) & (mask == 1)
        inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": is_image.astype(np.int32)}
        if patches:
            inputs["pixel_values"] = np.concatenate([self._processor.pixel_values(p) for p in patches])
            inputs["image_grid_thw"] = np.array([p.grid for p in patches])
        clock: list[float] = []

        def note(ids: Any, scores: Any, **_: Any) -> Any:
            clock.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        self._model.model.rope_deltas = None  # of the previous batch
        with torch.inference_mode():
            out = self._model.generate(
                **{name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()},
                max_new_tokens=max(request["max_tokens"] for request in requests),
                do_sample=False,
                use_cache=True,
                stopping_criteria=[note],
            )
        return out[:, width:].tolist(), clock, width


if __name__ == "__main__":
    serve(Torch)

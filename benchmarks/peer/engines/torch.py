"""transformers + torch in float32, the reference of the other engines' outputs. Requests run one after the other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("transformers", "torch")
REUSE = ("exact",)


def setup(folder: Path) -> tuple[str, dict[str, str]]:
    """Return this environment, which must have torch."""
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError("torch is not installed: run `uv run --group test`")
    return sys.executable, {}


class TorchEngine:
    """transformers, with the interface that `engines` documents."""

    def __init__(self, model: str, dtype: str, options: dict[str, int]):
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        self._torch = torch
        self._model = AutoModelForImageTextToText.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._processor = AutoImageProcessor.from_pretrained(model)

    def warm(self, reuse: Sequence[str]) -> None:
        """Do nothing; there is nothing to compile."""

    def answer(self, requests: Sequence[dict[str, Any]], reuse: str, logprobs: int) -> list[dict[str, Any]]:
        return [self._answer(one, logprobs) for one in requests]

    def settle(self) -> None:
        """Do nothing; there is no work in the background."""

    def forget(self) -> None:
        """Do nothing; nothing is cached."""

    def close(self) -> None:
        del self._model

    def _answer(self, request: dict[str, Any], logprobs: int) -> dict[str, Any]:
        torch = self._torch
        inputs: dict[str, Any] = {}
        image_token = self._model.config.image_token_id
        marked = self._tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]
        if request["images"]:
            inputs = dict(self._processor(images=request["images"], return_tensors="pt"))
            merged = self._processor.merge_size**2
            counts = iter((inputs["image_grid_thw"].prod(-1) // merged).tolist())
            # A marker represents all tokens of its image.
            marked = [token for one in marked for token in [one] * (next(counts) if one == image_token else 1)]
        ids = torch.tensor([marked])
        self._model.model.rope_deltas = None  # of the previous request
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == image_token).int(),
                **inputs,
                max_new_tokens=request["max_tokens"],
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        top = [torch.log_softmax(one[0].float(), -1).topk(logprobs) for one in out.logits] if logprobs else []
        return {
            "tokens": out.sequences[0, len(marked) :].tolist(),
            "prompt_tokens": len(marked),
            "cached": None,
            "matches": None,
            "logprobs": [dict(zip(map(str, one.indices.tolist()), one.values.tolist(), strict=True)) for one in top],
        }


ENGINE = TorchEngine

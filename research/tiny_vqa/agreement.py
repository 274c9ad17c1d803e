"""Comparison of the engine's answers with transformers': `python -m research.tiny_vqa.agreement --out FILE`.

The engine answers every question of the evaluation splits greedily and without reuse. Transformers reads the prompt
itself (chat template, image processor), then the engine's answer. The answers agree if each of its tokens, the end
included, is the one that transformers finds most likely.
"""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
from typing import Any

import numpy as np
from PIL import Image

from vlcache_jax import LLM, SamplingParams
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.study.accuracy import Protocol
from vlcache_jax.study.questions import ARRANGEMENTS, Sample
from vlcache_jax.study.report import environment, show, write

MAX_TOKENS = 32


class Transformers:
    """Transformers' model of the shipped checkpoint, in float32."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        self._model = AutoModelForImageTextToText.from_pretrained(TINY_VQA, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(TINY_VQA)
        self._processor = AutoImageProcessor.from_pretrained(TINY_VQA, backend="pil")

    def most_likely(self, messages: list[dict[str, Any]], answer: list[int]) -> np.ndarray:
        """Return the most likely token at each place of an answer, given those before it `[n]`."""
        import torch

        parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
        pictures = [Image.open(io.BytesIO(part["image"])) for part in parts]
        pixels = self._processor(pictures, return_tensors="pt")
        text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        for grid in pixels["image_grid_thw"]:
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (int(grid.prod()) // 4), 1)
        ids = self._tokenizer.encode(text.replace("<|placeholder|>", "<|image_pad|>")) + answer
        image = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        types = [int(token == image) for token in ids]
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor([ids]), mm_token_type_ids=torch.tensor([types], dtype=torch.int32), **pixels
            ).logits[0]
        return logits[-len(answer) - 1 : -1].argmax(-1).numpy()


def compare(samples: list[Sample], arrangement: str) -> list[tuple[str, bool, float]]:
    """Return for each sample its task, whether the answers agree, and the score of the engine's."""
    protocol = Protocol(arrangement)
    prompts = [protocol.formal(samples, i) for i in range(len(samples))]
    with LLM(TINY_VQA, dtype="float32") as llm:
        outputs = llm.chat(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0), reuse="off", use_tqdm=False)
    library = Transformers()
    found = []
    for sample, prompt, output in zip(samples, prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        alike = library.most_likely(prompt, list(tokens)).tolist() == list(tokens)
        found.append((sample.task, alike, sample.score(output.outputs[0].text)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, help="questions of each task; by default all")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args()
    samples = load_samples([], questions=args.questions)
    rows = []
    for arrangement in ARRANGEMENTS:
        by_task = collections.defaultdict(list)
        for task, alike, score in compare(samples, arrangement):
            by_task[task].append((alike, score))
        for task, pairs in by_task.items():
            alike, right = np.mean(pairs, axis=0)
            rows.append(
                {
                    "arrangement": arrangement,
                    "task": task,
                    "questions": len(pairs),
                    "alike %": 100 * float(alike),
                    "right %": 100 * float(right),
                }
            )
    show("Answers of transformers and of the engine, cold, float32", rows)
    if args.out is not None:
        write("Agreement with transformers", rows, environment("jax", "torch", "transformers"), args.out)


if __name__ == "__main__":
    main()

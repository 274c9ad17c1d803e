"""Conversion of the shipped model to an architecture without key norms, Qwen2.5-VL's, with further training.

    python -m research.tiny_vqa.transfer --out RUN [--steps N] [--finish N] [--export MODEL]

Its text model begins with the weights of the shipped one, among more channels that are still empty; queries and keys
are scaled by the average effect of the norms. Its encoder first learns to reproduce the shipped model's. That encoder
has no position embeddings, so the images' background encodes places.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from research.tiny_vqa import train
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.pictures import Picture
from vlcache_jax.inputs.processor import ImageProcessor

VARIANT = "qwen2_5_vl"
_LIKENESS_WEIGHT = 0.3
_NORMED = ("q", "k")


def _tinted(stage: train.Stage) -> train.Stage:
    return dataclasses.replace(stage, sizes=tuple(dataclasses.replace(s, is_tinted=True) for s in stage.sizes))


class Student(train.Trainer):
    """Trainer of the converted model, see `train.Trainer`.

    Args:
      teacher: The model to begin with, of the variant "small".

    Raises:
      ValueError: `variant` is not `VARIANT`.
    """

    def __init__(self, run: pathlib.Path, *, teacher: pathlib.Path, variant: str = VARIANT, **options: Any) -> None:
        if variant != VARIANT:
            raise ValueError(f"variant must be {VARIANT}, got {variant}")
        self.teacher = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32).eval()
        self._teacher_checkpoint = teacher
        self._teacher_processor = ImageProcessor.from_pretrained(teacher)
        # Beyond this accuracy it takes hundreds of steps.
        sight = dataclasses.replace(train.CURRICULUM[0], promote=0.98)
        curriculum = tuple(_tinted(stage) for stage in (sight, train.CURRICULUM[-1]))
        super().__init__(run, variant=variant, curriculum=curriculum, **options)

    def begin(self) -> None:
        super().begin()
        self._carry_over()

    def further_loss(self, rows: torch.Tensor, pictures: Sequence[Picture]) -> torch.Tensor:
        plain = [
            dataclasses.replace(shown, size=dataclasses.replace(shown.size, is_tinted=False)) for shown in pictures
        ]
        with torch.no_grad():
            known = self.teacher.model.visual(**train.encoder_inputs(self._teacher_processor, plain)).pooler_output
        known = torch.nn.functional.pad(known, (0, rows.shape[1] - known.shape[1]))
        return _LIKENESS_WEIGHT * (rows - known).square().sum(-1).mean() / known.square().sum(-1).mean()

    @torch.no_grad()
    def _carry_over(self) -> None:
        """Copy the teacher's weights to the channels that both text models have."""
        scales = self._norm_scales()
        own = dict(self.model.model.language_model.named_parameters())
        theirs = dict(self.teacher.model.language_model.named_parameters())
        for name, weight in own.items():
            if name not in theirs:
                continue  # biases
            known = theirs[name]
            if weight.ndim == 1:  # of a norm, whose mean is now over more channels
                weight.fill_(known.mean())
                weight[: len(known)] = known
                weight *= (len(known) / len(weight)) ** 0.5
                continue
            layer, projection = name.rsplit(".", 3)[0], name.split(".")[-2][0]
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                norm = theirs[f"{name.removesuffix('_proj.weight')}_norm.weight"]
                known = known * (scales[layer, projection][:, None] * norm).reshape(-1, 1)
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                weight.zero_()  # nothing is written to the new channels yet
            weight[: known.shape[0], : known.shape[1]] = known

    def _norm_scales(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the factors of the teacher's query and key norms for each head, over some conversations."""
        lengths: dict[tuple[str, str], list[torch.Tensor]] = {}

        def note(key: tuple[str, str], _: Any, args: Any) -> None:
            lengths.setdefault(key, []).append(args[0].square().mean(-1).flatten(0, 1))

        hooks = [
            getattr(layer.self_attn, f"{name}_norm").register_forward_pre_hook(
                functools.partial(note, (f"layers.{i}", name))
            )
            for i, layer in enumerate(self.teacher.model.language_model.layers)
            for name in _NORMED
        ]
        sampler = train.Sampler(self._teacher_checkpoint)
        stage = train.CURRICULUM[-1]
        for _ in range(4):
            self.teacher.model(**sampler.group(stage, 2048, 4).inputs, use_cache=False)
        for hook in hooks:
            hook.remove()
        return {key: torch.cat(found).mean(0).rsqrt() for key, found in lengths.items()}


def main() -> None:
    train.main(functools.partial(Student, teacher=TINY_VQA), __doc__, VARIANT)


if __name__ == "__main__":
    main()

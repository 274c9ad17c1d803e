"""Conversion of the shipped model to a hybrid with linear attention, with further training.

    python -m research.tiny_vqa.hybrid --out RUN [--steps N] [--finish N] [--export MODEL]

Two of its six layers keep their attention. The other four learn linear attention from random weights. The encoder, the
embeddings, the MLPs and the norms begin with the weights of the shipped model. The encoder stays as it is: it
recognizes everything.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from research.tiny_vqa import train
from vlcache_jax.assets import TINY_VQA

VARIANT = "hybrid"


class Converted(train.Trainer):
    """Trainer of the converted model, see `train.Trainer`. It follows the curriculum after the encoder's stage.

    Args:
      teacher: The model to begin with, of the variant "small".

    Raises:
      ValueError: `variant` is not `VARIANT`.
    """

    def __init__(self, run: pathlib.Path, *, teacher: pathlib.Path, variant: str = VARIANT, **options: Any) -> None:
        if variant != VARIANT:
            raise ValueError(f"variant must be {VARIANT}, got {variant}")
        self._teacher = teacher
        super().__init__(run, variant=variant, curriculum=train.CURRICULUM[1:], **options)

    def begin(self) -> None:
        super().begin()
        self._carry_over()

    @torch.no_grad()
    def _carry_over(self) -> None:
        """Copy the weights that both models have."""
        theirs = dict(
            AutoModelForImageTextToText.from_pretrained(self._teacher, dtype=torch.float32).named_parameters()
        )
        heads = self.model.config.text_config.num_attention_heads
        for name, weight in self.model.named_parameters():
            known = theirs.get(name)
            if known is None:
                continue  # linear attention
            if ".language_model." in name and "norm" in name:
                weight.copy_(known - 1)  # this family stores what the norms' weights add to 1
            elif name.endswith("q_proj.weight"):
                # Beside each head's queries are its gates. Where they are 0, half of an output passes.
                halves = weight.view(heads, 2, -1, weight.shape[1])
                halves[:, 0] = known.view(heads, -1, weight.shape[1])
                halves[:, 1] = 0
            elif name.endswith("o_proj.weight"):
                weight.copy_(2 * known)
            else:
                weight.copy_(known)


def main() -> None:
    train.main(functools.partial(Converted, teacher=TINY_VQA), __doc__, VARIANT)


if __name__ == "__main__":
    main()

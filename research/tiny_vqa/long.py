"""Further training of the shipped model on long prompts: `python -m research.tiny_vqa.long --out RUN`.

An interrupted run resumes from RUN. Up to 16 images stand in a prompt, and a question after them needs one or two of
them: the one of a number, which stands before each image, or the one of a code, which stands in it. Many questions
share a prompt. Each sees the prompt and itself, at the positions that it would have alone, so that one pass over the
prompt trains all of them. The encoder is frozen: it recognizes these images already.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import AttentionInterface, AutoTokenizer

from research.tiny_vqa import train
from research.tiny_vqa.conversations import converse
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.pictures import Size, draw_pictures
from vlcache_jax.benchmarks.tiny_vqa.splits import SIZES
from vlcache_jax.benchmarks.tiny_vqa.tasks import SEARCHES, TASKS
from vlcache_jax.models.rope import mrope_positions
from vlcache_jax.testing import TOKEN_IDS

VARIANT = "small"
_MAX_IMAGES = 16
_VOCABULARY, _MAX_TOKENS = 576, 8192  # of the model: names of numbers are added, and prompts grow
_TOKENS_A_QUESTION = 48  # image tokens of a prompt for one question, or the fewest questions
_PACKED = "packed"
_HELD_OUT = 2026  # seed of the prompts that are not in training
_HELD_OUT_EVERY = 200  # steps
MEDIUM = tuple(Size(rows, columns, 48) for rows in (4, 5) for columns in (4, 5))
ALL_TASKS = TASKS | {"search": tuple(SEARCHES)}
_SHARES = {
    "what": 0.1,
    "colour": 0.03,
    "where": 0.08,
    "attribute": 0.05,
    "code": 0.05,
    "contents": 0.12,
    "places": 0.12,
    "colours": 0.06,
    "count": 0.1,
    "exists": 0.04,
    "more": 0.04,
    "shows_code": 0.03,
    "at_code": 0.04,
    "find_code": 0.03,
    "holder": 0.08,
    "keyed": 0.1,
}
_MIXTURE = {"image_first": 0.85, "text_first": 0.15}


def _stage(sizes: tuple[Size, ...], images: range, promote: float) -> train.Stage:
    shares = tuple(float(n in images) / len(images) for n in range(1, _MAX_IMAGES + 1))
    return train.Stage(sizes, shares, promote, _MIXTURE, _SHARES)


CURRICULUM = (
    _stage(SIZES["small"], range(1, 4), 0.9),
    _stage(SIZES["small"], range(2, 7), 0.88),
    _stage(SIZES["small"], range(4, 11, 2), 0.88),
    _stage(2 * SIZES["small"] + MEDIUM, range(8, 17, 2), 2.0),
)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of a prompt, and of questions that share it.

    Args:
      module: Attention module of transformers; has the number of query heads that share a key-value head.
      query, key, value: `[B, heads, N, D]`.
      attention_mask: Mask of the questions' rows, the last of N, bool `[B, 1, R, N]`. Rows before them are causal.
      scaling: Factor of the products.

    Returns:
      `[B, N, heads, D]`, and no weights.
    """
    attend_to = functools.partial(torch.nn.functional.scaled_dot_product_attention, scale=scaling)
    key, value = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (key, value))
    prompt = query.shape[2] - attention_mask.shape[2]
    shared = attend_to(query[:, :, :prompt], key[:, :, :prompt], value[:, :, :prompt], is_causal=True)
    own = attend_to(query[:, :, prompt:], key, value, attn_mask=attention_mask)
    return torch.cat([shared, own], dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(_PACKED, attend)


class Sampler(train.Sampler):
    """Sampler of prompts with their questions packed after them; see `train.Sampler`."""

    def group(self, stage: train.Stage, tokens: int, turns: int) -> train.Group:
        """Return prompts with images of the same sizes, in all about `tokens` tokens, and at least `turns` questions
        each.
        """
        sizes = self.sizes(stage)
        shown = sum(size.tokens for size in sizes)
        count = max(turns, shown // _TOKENS_A_QUESTION)
        batch = max(1, round(tokens / (shown + 24 * count)))
        arrangement, seed = self.arrangement(stage), int(self.rng.integers(2**32))
        rows = [self._packed(stage, sizes, count, arrangement, seed) for _ in range(batch)]
        return pack(self.grouped([row for row, _ in rows]), [lengths for _, lengths in rows], sizes)

    def _packed(
        self, stage: train.Stage, sizes: list[Size], count: int, arrangement: str, seed: int
    ) -> tuple[train.Conversation, list[int]]:
        """Return a prompt and its questions in one row, and the number of tokens of the prompt and of each question."""
        pictures = draw_pictures(self.rng, sizes)
        questions = self.asked(pictures, self.kinds(stage, len(sizes), count), count)
        ids: list[int] = []
        answers: list[int] = []
        lengths: list[int] = []
        for i, question in enumerate(questions):
            # Each is a separate conversation. All are equal up to their images.
            alone = converse(np.random.default_rng(seed), [size.tokens for size in sizes], [question], arrangement)
            row, answer = self.encode(alone)
            prompt = len(row) - row[::-1].index(TOKEN_IDS["<|vision_end|>"])
            spoken = max(answer)  # earlier talk is in the prompt, and is not learned
            if not ids:
                ids, answers, lengths = row[:prompt], [-1] * prompt, [prompt]
            ids += row[prompt:]
            answers += [i if at == spoken else -1 for at in answer[prompt:]]
            lengths.append(len(row) - prompt)
        kinds = [question.kind for question in questions]
        about = [train.asked_about(question.text) for question in questions]
        return train.Conversation(pictures, ids, answers, kinds, about), lengths


def pack(group: train.Group, lengths: list[list[int]], sizes: list[Size]) -> train.Group:
    """Return the group with the positions and the mask that make its questions see their prompt and themselves.

    Args:
      group: Prompts of one length, each with questions after it.
      lengths: Lengths of each prompt and of its questions, in tokens.
      sizes: Sizes of a prompt's images.
    """
    ids = group.inputs["input_ids"]
    prompt = lengths[0][0]
    starts = (torch.nonzero(ids[0, :prompt] == TOKEN_IDS["<|vision_start|>"])[:, 0] + 1).tolist()
    grids = [(size.rows * size.cell // 16, size.columns * size.cell // 16) for size in sizes]
    shared, delta = mrope_positions(prompt, starts, grids)
    places = np.full((len(ids), ids.shape[1] - prompt), prompt + delta)
    blocks = torch.full(places.shape, -1)  # padding is a separate block
    for place, block, (_, *questions) in zip(places, blocks, lengths, strict=True):
        for i, (end, length) in enumerate(zip(itertools.accumulate(questions), questions, strict=True)):
            place[end - length : end] += np.arange(length)
            block[end - length : end] = i
    own = (blocks[:, :, None] == blocks[:, None]).tril()
    mask = torch.cat([own.new_ones((*own.shape[:2], prompt)), own], dim=2)
    positions = np.concatenate(
        [np.broadcast_to(shared[:, None], (3, len(ids), prompt)), np.broadcast_to(places, (3, *places.shape))], axis=2
    )
    packed = {"position_ids": torch.from_numpy(positions.astype(np.int64)), "attention_mask": mask[:, None]}
    return dataclasses.replace(group, inputs=group.inputs | packed)


class Trainer(train.Trainer):
    """Trainer for long prompts, see `train.Trainer`.

    A new run begins with the shipped model, to which the names of further images are added.

    Raises:
      ValueError: `variant` is not `VARIANT`.
    """

    def __init__(self, run: pathlib.Path, *, variant: str = VARIANT, **options: Any) -> None:
        if variant != VARIANT:
            raise ValueError(f"variant must be {VARIANT}, got {variant}")
        super().__init__(run, variant=variant, curriculum=CURRICULUM, sampler=Sampler, **options)
        self.model.set_attn_implementation({"text_config": _PACKED})

    def write_checkpoint(self, directory: pathlib.Path, variant: str) -> None:
        shutil.copytree(TINY_VQA, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
        tokenizer = AutoTokenizer.from_pretrained(directory)
        known = len(train.Sampler(directory).numbers)
        tokenizer.add_tokens([AddedToken(number, normalized=False) for number in train.NUMBERS[known:]])
        tokenizer.save_pretrained(directory)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config["text_config"] |= {"vocab_size": _VOCABULARY, "max_position_embeddings": _MAX_TOKENS}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @torch.no_grad()
    def begin(self) -> None:
        known = load_file(TINY_VQA / "model.safetensors")
        words = known.pop("model.language_model.embed_tokens.weight").float()
        table = self.model.model.language_model.embed_tokens.weight
        # New numbers begin with the embeddings of known ones.
        numbers = words[train.Sampler(TINY_VQA).numbers]
        table.normal_().mul_(numbers.std(0)).add_(numbers.mean(0))
        table[: len(words)] = words
        left, unknown = self.model.load_state_dict({name: w.float() for name, w in known.items()}, strict=False)
        assert set(left) <= {"model.language_model.embed_tokens.weight", "lm_head.weight"}, left
        assert not unknown, unknown

    def train_step(self, tokens: int, turns: int, groups: int) -> dict[str, Any]:
        report = super().train_step(tokens, turns, groups)
        if self.step % _HELD_OUT_EVERY == 0:
            report["held_out"] = {str(images): self.held_out(images, 4) for images in (2, 4, 8, 16)}
        return report

    @torch.no_grad()
    def held_out(self, images: int, prompts: int, sizes: tuple[Size, ...] = SIZES["small"]) -> dict[str, list[int]]:
        """Return for each task how many questions about held-out prompts are answered right, and how many there are.

        Each token of an answer is predicted from the right ones before it. An answer is right if all of its tokens are,
        so the model also generates these answers by itself.
        """
        self.sampler.rng = np.random.default_rng([_HELD_OUT, images, len(sizes)])
        stage = dataclasses.replace(_stage(sizes, range(images, images + 1), 2.0), mixture={"image_first": 1.0})
        kinds: dict[str, list[float]] = {}
        for _ in range(prompts):
            group = self.sampler.group(stage, tokens=1, turns=32)
            for kind, right in self.forward(group)[1].items():
                kinds.setdefault(kind, []).extend(right)
        return {
            task: [int(sum(found)), len(found)]
            for task, members in ALL_TASKS.items()
            if (found := list(itertools.chain(*(kinds.get(kind, []) for kind in dict.fromkeys(members)))))
        }


def main() -> None:
    train.main(Trainer, __doc__, VARIANT)


if __name__ == "__main__":
    main()

"""Training of the small model: `python -m research.tiny_vqa.train --out RUN`. An interrupted run resumes from RUN.

The grids grow while the model learns. Each step is a few groups of conversations, all of one shape within a group.
Under torchrun the processes share a step's groups, which on few cores is faster than threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from research.tiny_vqa.conversations import MIXTURE, converse
from vlcache_jax.benchmarks.tiny_vqa.pictures import COLOURS, SHAPES, Picture, Size, draw_pictures, render
from vlcache_jax.benchmarks.tiny_vqa.tasks import KINDS, SEARCHES, Question, ask
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.study.questions import number_name
from vlcache_jax.testing import TOKEN_IDS, make_checkpoint

_VOCABULARY = 512
# Family, text and vision settings; "small" is shipped.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "small": (
        "qwen3_vl",
        {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4},
        {"hidden_size": 128, "intermediate_size": 384, "depth": 4, "num_heads": 2, "deepstack_visual_indexes": [1, 2]},
    ),
    "large": (
        "qwen3_vl",
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8},
        {"hidden_size": 256, "intermediate_size": 1024, "depth": 6, "num_heads": 4, "deepstack_visual_indexes": [1, 3]},
    ),
    # Without key norms; see `transfer`. Its heads are as wide as those of "small".
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4},
        {"hidden_size": 128, "intermediate_size": 384, "depth": 4, "num_heads": 2, "window_size": 64},
    ),
    # Linear attention in four of six layers, as in Qwen3.5.
    "hybrid": (
        "qwen3_5",
        {
            "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
            "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "linear", "full", "linear", "full")],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        },
        {"hidden_size": 128, "intermediate_size": 384, "depth": 4, "num_heads": 2},
    ),
}  # fmt: skip
_MEMORY = (10, 5000)  # tokens that heads with linear attention remember at first, from the shortest to the longest
_TEXT = {"vocab_size": _VOCABULARY, "num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}
# Specific settings of each family.
_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        {"head_dim": 64, "rope_parameters": _ROPE | {"mrope_interleaved": True}},
        {"num_position_embeddings": 256},
    ),
    "qwen2_5_vl": ({"rope_parameters": _ROPE}, {}),
    "qwen3_5": (
        {
            "head_dim": 64,
            "rope_parameters": _ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
        },
        {"num_position_embeddings": 256},
    ),
}
_ALIGNMENT_WEIGHT, _TEMPERATURE, _NORM_WEIGHT = 0.3, 0.25, 1e-3
# The content and place of an image token, in words as they stand inside a sentence; and words that apply or do not.
_WORDS = (
    [f" {colour}" for colour in COLOURS],
    [f" {shape}" for shape in SHAPES],
    [*"12345"],
    [f" {c}" for c in "ABCDE"],
)
_FLAGS = (" code", " nothing")
NUMBERS = [f" {number_name(i + 1)}" for i in range(16)]  # of images
_BOUND_AT = 2  # the layer by which image tokens are drawn to the number of their image
# Frequency of each kind of question; those about several images only if there are several.
SHARES = {
    "what": 0.04,
    "colour": 0.02,
    "where": 0.04,
    "attribute": 0.06,
    "code": 0.04,
    "contents": 0.06,
    "places": 0.06,
    "colours": 0.1,
    "count": 0.18,
    "exists": 0.06,
    "more": 0.12,
    "shows_code": 0.08,
    "at_code": 0.08,
    "find_code": 0.06,
}
# Questions about several things at once have more lookups per token, and the key stands right before each answer.
_EARLY_SHARES = SHARES | {"contents": 0.3, "places": 0.3, "colours": 0.2}
_ABOUT_SEVERAL = ("more", "shows_code", "at_code", "find_code", *SEARCHES)
# The content of a place and the place of an object, one and several at once: the rest follows from these.
_LEADING = ("what", "where", "contents", "places")
_EARLY_MIXTURE = {"image_first": 0.8, "text_first": 0.1, "question_first": 0.1}
_VISION = {"patch_size": 8}
_SAVED_EVERY = 120  # seconds of training
MIN_PIXELS, MAX_PIXELS = 32 * 32, 400 * 16 * 16


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of the curriculum; it ends when the model reaches accuracy `promote` for each of the `_LEADING` kinds.

    Attributes:
      sizes: Sizes of images; a group takes one for all its images of the same place.
      images: Fractions of conversations with 1, 2, ... images; empty: only the encoder learns, until it recognizes
        everything.
      mixture: Fractions of the arrangements.
      shares: Frequency of each kind of question.
    """

    sizes: tuple[Size, ...]
    images: tuple[float, ...]
    promote: float
    mixture: Mapping[str, float] = dataclasses.field(default_factory=lambda: MIXTURE)
    shares: Mapping[str, float] = dataclasses.field(default_factory=lambda: SHARES)


def _sizes(least: int, most: int, cells: tuple[int, ...] = (32,)) -> tuple[Size, ...]:
    sides = range(least, most + 1)
    sizes = [Size(rows, columns, cell) for rows in sides for columns in sides for cell in cells]
    return tuple(size for size in sizes if size.tokens <= 400)


# In a line one word names the place: a row or a column.
_LINES = tuple(Size(*side) for n in (1, 2, 3, 4) for side in ((1, n), (n, 1)))
CURRICULUM = (
    Stage(_sizes(1, 5, (32, 48, 64)), (), 0.99),
    Stage(_LINES, (1.0,), 0.6, _EARLY_MIXTURE, _EARLY_SHARES),
    Stage(
        (Size(1, 3), Size(3, 1)) + 3 * (Size(2, 2), Size(2, 3), Size(3, 2)),
        (0.9, 0.1),
        0.75,
        _EARLY_MIXTURE,
        _EARLY_SHARES,
    ),
    Stage(_sizes(2, 3), (0.7, 0.3), 0.8),
    Stage(_sizes(2, 4), (0.3, 0.7), 0.8),
    Stage(_sizes(3, 5), (0.5, 0.45, 0.05), 0.85),
    Stage(4 * _sizes(3, 5) + _sizes(3, 5, (48, 64)), (0.4, 0.5, 0.06, 0.04), 2.0),
)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A row of a group.

    Attributes:
      pictures: Images of the conversation.
      ids: Its tokens.
      answers: Number of the answer that each token belongs to, -1 for none.
      kinds: Kinds of the answers' questions, "" for other talk.
      asked_about: For each answer the image that its question is about, or -1.
    """

    pictures: list[Picture]
    ids: list[int]
    answers: list[int]
    kinds: list[str]
    asked_about: list[int]


@dataclasses.dataclass(frozen=True)
class Group:
    """Conversations with images of the same sizes.

    Attributes:
      inputs: Inputs of the model.
      answer: Number of the answer that a token of `input_ids` belongs to, -1 for none `[B, N]`.
      kinds: Kinds of the answers' questions, "" for other talk `[A]`.
      labels: Labels of the image tokens, see `_labels` `[T, 6]`.
      numbers: Number of the image that each image token belongs to; -1 if its conversation has one image `[T]`.
      about: Number of the image that the next token, of an answer, is about; -1 for none or several `[B, N]`.
    """

    inputs: dict[str, torch.Tensor]
    answer: torch.Tensor
    kinds: list[str]
    labels: torch.Tensor
    numbers: torch.Tensor
    about: torch.Tensor


class Sampler:
    """Sampler of conversations as tensors.

    Args:
      checkpoint: Directory with tokenizer and image processor.

    Attributes:
      rng: Source of all random numbers.
      numbers: Tokens that number images.
    """

    def __init__(self, checkpoint: pathlib.Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.processor = ImageProcessor.from_pretrained(checkpoint)
        self.rng = np.random.default_rng(0)
        self._ids: dict[str, list[int]] = {}
        encoded = [self._tokenizer.encode(number, add_special_tokens=False) for number in NUMBERS]
        # Names of several tokens are of images that this tokenizer has not seen.
        self.numbers = [ids[0] for ids in itertools.takewhile(lambda ids: len(ids) == 1, encoded)]

    def pictures(self, stage: Stage, tokens: int) -> list[Picture]:
        """Return images of about `tokens` tokens."""
        pictures: list[Picture] = []
        while sum(picture.size.tokens for picture in pictures) < tokens:
            pictures += draw_pictures(self.rng, [stage.sizes[self.rng.integers(len(stage.sizes))]])
        return pictures

    def group(self, stage: Stage, tokens: int, turns: int) -> Group:
        """Return conversations of `turns` questions, in all about `tokens` tokens."""
        sizes = self.sizes(stage)
        # All conversations of a group show images of the same sizes, so that they pad little.
        batch = max(2, round(tokens / (sum(size.tokens for size in sizes) + 18 * turns)))
        return self.grouped([self._conversation(stage, sizes, turns) for _ in range(batch)])

    def sizes(self, stage: Stage) -> list[Size]:
        """Return the sizes of a conversation's images."""
        count = 1 + int(self.rng.choice(len(stage.images), p=stage.images))
        return [stage.sizes[i] for i in self.rng.integers(len(stage.sizes), size=count)]

    def asked(self, pictures: Sequence[Picture], kinds: Sequence[str], count: int) -> list[Question]:
        """Return the first `count` questions of these kinds that the images allow."""
        questions = [ask(self.rng, pictures, [kind]) for kind in [*kinds, "what"]]  # the last is always possible
        return [question for question in questions if question is not None][:count]

    def arrangement(self, stage: Stage) -> str:
        return str(self.rng.choice(list(stage.mixture), p=list(stage.mixture.values())))

    def grouped(self, conversations: Sequence[Conversation]) -> Group:
        """Return conversations with images of the same sizes as tensors, padded to one length."""
        batch, length = len(conversations), max(len(row.ids) for row in conversations)
        # -1 marks tokens without a loss.
        ids = np.full((batch, length), TOKEN_IDS["<|endoftext|>"])
        answer, about = np.full((2, batch, length), -1)
        numbers: list[torch.Tensor] = []
        kinds: list[str] = []
        for i, row in enumerate(conversations):
            here = np.array(row.answers)
            ids[i, : len(here)] = row.ids
            answer[i, : len(here)] = np.where(here < 0, -1, here + len(kinds))
            about[i, : len(here)] = self._about(row.ids, row.answers, row.asked_about)
            several = len(row.pictures) > 1
            numbers += [torch.full((p.size.tokens,), k if several else -1) for k, p in enumerate(row.pictures)]
            kinds += row.kinds
        shown = [picture for row in conversations for picture in row.pictures]
        encoded = encoder_inputs(self.processor, shown)
        inputs = {
            "input_ids": torch.from_numpy(ids),
            "pixel_values": encoded["hidden_states"],
            "image_grid_thw": encoded["grid_thw"],
            "mm_token_type_ids": torch.from_numpy((ids == TOKEN_IDS["<|image_pad|>"]).astype(np.int32)),
        }
        labels = torch.cat([_labels(picture) for picture in shown])
        return Group(inputs, torch.from_numpy(answer), kinds, labels, torch.cat(numbers), torch.from_numpy(about))

    def _conversation(self, stage: Stage, sizes: list[Size], turns: int) -> Conversation:
        pictures = draw_pictures(self.rng, sizes)
        kinds = self.kinds(stage, len(sizes), turns)
        arrangement = self.arrangement(stage)
        if arrangement == "question_first":
            # Every kind stands before images equally often. With the usual frequencies, places were not learned there.
            kinds.insert(0, str(self.rng.choice(_possible(stage, len(sizes)))))
        questions = self.asked(pictures, kinds, turns)
        messages = converse(self.rng, [size.tokens for size in sizes], questions, arrangement)
        ids, answers = self.encode(messages)
        spoken = sum(message["role"] == "assistant" for message in messages) - len(questions)
        return Conversation(
            pictures,
            ids,
            answers,
            [""] * spoken + [question.kind for question in questions],
            [-1] * spoken + [asked_about(question.text) for question in questions],
        )

    def _about(self, ids: list[int], answers: list[int], asked: list[int]) -> list[int]:
        """Return which image the next token is about: the last one named in its answer so far, or the one of the
        question.

        Args:
          answers: Number of the answer that each token belongs to; none below 0.
          asked: For each answer the image that its question is about, or -1.
        """
        about = [-1] * len(ids)
        now = -1
        for i, answer in enumerate(answers[1:]):
            if answer < 0:
                continue
            if answers[i] != answer:
                now = asked[answer]
            elif ids[i] in self.numbers:
                now = self.numbers.index(ids[i])
            about[i] = now
        return about

    def word_ids(self, words: Sequence[str]) -> torch.Tensor:
        """Return the words' tokens; each must be one."""
        ids = [self._tokenizer.encode(word, add_special_tokens=False) for word in words]
        return torch.tensor([token for [token] in ids])

    def kinds(self, stage: Stage, images: int, turns: int) -> list[str]:
        kinds = _possible(stage, images)
        total = sum(stage.shares[kind] for kind in kinds)
        return [str(k) for k in self.rng.choice(kinds, size=turns, p=[stage.shares[kind] / total for kind in kinds])]

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Return token ids, and the number of the answer that each belongs to. An image is its number of tokens."""
        ids: list[int] = []
        answers: list[int] = []
        answer = 0
        for message in messages:
            self._append(ids, f"<|im_start|>{message['role']}\n")
            start = len(ids)
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "text":
                    self._append(ids, part["text"])
                else:
                    placeholders = [TOKEN_IDS["<|image_pad|>"]] * int(part["image"])
                    ids += [TOKEN_IDS["<|vision_start|>"], *placeholders, TOKEN_IDS["<|vision_end|>"]]
            ids.append(TOKEN_IDS["<|im_end|>"])
            answers += [-1] * (start - len(answers))
            if message["role"] == "assistant":
                answers += [answer] * (len(ids) - start)
                answer += 1
            self._append(ids, "\n")
        return ids, answers + [-1] * (len(ids) - len(answers))

    def _append(self, ids: list[int], text: str) -> None:
        if text not in self._ids:
            if len(self._ids) > 100_000:
                self._ids.clear()
            self._ids[text] = self._tokenizer.encode(text, add_special_tokens=False)
        ids += self._ids[text]


def _possible(stage: Stage, images: int) -> list[str]:
    """Return the kinds of questions that a stage has for `images` images."""
    return [kind for kind in stage.shares if images > 1 or kind not in _ABOUT_SEVERAL]


def asked_about(question: str) -> int:
    """Return the number of the image that a question is about, from 0; -1 if it names none or several."""
    named = [i for i, number in enumerate(NUMBERS) if f"image{number}" in question.lower()]
    return named[0] if len(named) == 1 else -1


def encoder_inputs(processor: ImageProcessor, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Return pixels of the images' patches and their grids, the inputs of transformers' towers."""
    patches = [processor.patches(render(picture)) for picture in pictures]
    pixels = np.concatenate([processor.pixel_values(shown) for shown in patches])
    return {"hidden_states": torch.from_numpy(pixels), "grid_thw": torch.tensor([shown.grid for shown in patches])}


def _labels(picture: Picture) -> torch.Tensor:
    """Return numbers in `_WORDS` for each image token, -1 for nothing; 0 or 1 for each of `_FLAGS` `[T, 6]`."""
    size = picture.size
    labels = torch.full((size.rows, size.columns, 6), -1)
    labels[:, :, 2] = torch.arange(size.rows)[:, None]
    labels[:, :, 3] = torch.arange(size.columns)
    labels[:, :, 4:] = torch.tensor([0, 1])
    for (row, column), glyph in picture.glyphs.items():
        shown = (list(COLOURS).index(glyph.colour), SHAPES.index(glyph.shape))
        labels[row, column, [0, 1, 4, 5]] = torch.tensor([*shown, (row, column) == picture.code, 0])
    tokens = size.cell // 16
    return labels.repeat_interleave(tokens, dim=0).repeat_interleave(tokens, dim=1).flatten(0, 1)


def new_checkpoint(directory: pathlib.Path, variant: str) -> None:
    """Write all of a checkpoint except the weights."""
    model_type, text, vision = VARIANTS[variant]
    own_text, own_vision = _FAMILIES[model_type]
    make_checkpoint(
        directory,
        model_type,
        weights=False,
        tie_word_embeddings=True,
        text={**text, **_TEXT, **own_text},
        vision={**vision, **_VISION, **own_vision},
        min_pixels=MIN_PIXELS,
        max_pixels=MAX_PIXELS,
        corpus=_corpus(),
        dtype="bfloat16",
    )


def _corpus() -> Iterator[str]:
    """Yield texts as in training, without images."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        pictures = draw_pictures(rng, [Size(5, 5)] * int(rng.integers(1, 5)))
        questions = [question for kind in KINDS if (question := ask(rng, pictures, [kind]))]
        arrangement = str(rng.choice(list(MIXTURE)))
        for message in converse(rng, pictures, questions, arrangement):
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            yield f"{message['role']}\n" + "".join(part.get("text", "\n") for part in parts)


class Trainer:
    """A model, its optimizer and their progress, stored in `run/state.pt`.

    Args:
      run: Folder of the run, created if it does not exist.
      variant: One of `VARIANTS`.
      seed: Seed of the weights and of all random numbers.
      learning_rate: Learning rate before its descent.
      image_numbers: True if image tokens are drawn to the word that numbers their image.
      curriculum: Stages, in this order.
      sampler: Makes the sampler, from the checkpoint's folder.
    """

    def __init__(
        self,
        run: pathlib.Path,
        *,
        variant: str,
        seed: int,
        learning_rate: float,
        image_numbers: bool = True,
        curriculum: Sequence[Stage] = CURRICULUM,
        sampler: Callable[[pathlib.Path], Sampler] = Sampler,
    ) -> None:
        self.run = run
        self.curriculum = curriculum
        self.image_numbers = image_numbers
        run.mkdir(parents=True, exist_ok=True)
        checkpoint = run / "checkpoint"
        if not checkpoint.exists():
            self.write_checkpoint(checkpoint, variant)
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(checkpoint)
        self.model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        self.seed = seed
        self.sampler = sampler(checkpoint)
        self._encoded: list[list[torch.Tensor]] = []  # image tokens, and DeepStack's features
        self.model.model.visual.register_forward_hook(
            lambda *call: self._encoded.append([call[2].pooler_output, *getattr(call[2], "deepstack_features", [])])
        )
        self._bound: list[torch.Tensor] = []
        self.model.model.language_model.layers[_BOUND_AT].register_forward_pre_hook(
            lambda _, args: self._bound.append(args[0])
        )
        self._numbers = torch.tensor(self.sampler.numbers)
        self._words = [self.sampler.word_ids(words) for words in _WORDS]
        self._flags = self.sampler.word_ids(_FLAGS)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=(0.9, 0.98),
            fused=True,
        )
        self.learning_rate = learning_rate
        self.step, self.stage = 0, 0
        self.seconds, self.processor_seconds = 0.0, 0.0  # the latter of this process only
        self.finish: tuple[int, int] | None = None  # first and last step of the learning rate's descent
        self.right: list[dict[str, list[float]]] = []  # of the stage's last steps
        if (run / "state.pt").exists():
            self._load()
        else:
            self.begin()

    def write_checkpoint(self, directory: pathlib.Path, variant: str) -> None:
        """Write all of a new run's checkpoint except the weights."""
        new_checkpoint(directory, variant)

    def begin(self) -> None:
        """Draw the weights of a new run."""
        _initialize(self.model)

    def train_step(self, tokens: int, turns: int, groups: int) -> dict[str, Any]:
        start, start_processor = time.perf_counter(), time.process_time()
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.sampler.rng = np.random.default_rng([self.seed, self.step, rank])
        rate = self.learning_rate * min(1.0, (self.step + 1) / 200)
        if self.finish is not None:
            first, last = self.finish
            rate *= max(0.0, (last - self.step) / (last - first))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        right: dict[str, list[float]] = {}
        total = 0.0
        # After its own stage the encoder recognizes everything, and is frozen: this saves a third of the time.
        self.model.model.visual.requires_grad_(not self.curriculum[self.stage].images)
        for _ in range(groups // processes):
            if self.curriculum[self.stage].images:
                loss, answers = self.forward(self.sampler.group(self.curriculum[self.stage], tokens // groups, turns))
            else:
                loss, answers = self.look(tokens // groups)
            (loss / groups).backward()
            total += loss.item() / groups
            for kind, values in answers.items():
                right.setdefault(kind, []).extend(values)
        if processes > 1:
            right, total = self._share(right, total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - start
        self.processor_seconds += time.process_time() - start_processor
        self.right = [*self.right[-29:], right]
        accuracy = self.accuracy()
        stage = self.stage
        leading = [accuracy[kind] for kind in (*_LEADING, "sight") if kind in accuracy]
        if len(self.right) == 30 and min(leading) >= self.curriculum[stage].promote:
            self.stage, self.right = stage + 1, []
        spent = {name: round(getattr(self, name), 1) for name in ("seconds", "processor_seconds")}
        return {"step": self.step, "stage": stage, "loss": total, **spent, "right": accuracy}

    def look(self, tokens: int) -> tuple[torch.Tensor, dict[str, list[float]]]:
        """Return the encoder's loss on images only, and how many tokens are recognized."""
        pictures = self.sampler.pictures(self.curriculum[self.stage], tokens)
        self.model.model.visual(**encoder_inputs(self.sampler.processor, pictures))
        rows = self._encoded.pop()
        loss, seen = self._align(rows, torch.cat([_labels(picture) for picture in pictures]))
        return loss + self.further_loss(rows[0], pictures), {"sight": [seen]}

    def further_loss(self, rows: torch.Tensor, pictures: Sequence[Picture]) -> torch.Tensor:
        """Return a subclass's addition to the loss of the encoder's rows for these images; 0 here."""
        return rows.new_zeros(())

    def _share(self, right: dict[str, list[float]], loss: float) -> tuple[dict[str, list[float]], float]:
        """Sum gradients over the processes; return all their answers and the sum of their losses."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, gradients)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (right, loss))
        kinds = dict.fromkeys(kind for found, _ in parts for kind in found)
        everything = {kind: [value for found, _ in parts for value in found.get(kind, [])] for kind in kinds}
        return everything, sum(part for _, part in parts)

    def forward(self, group: Group) -> tuple[torch.Tensor, dict[str, list[float]]]:
        """Return the loss, and for each kind of question which answers were right to the last token."""
        hidden = self.model.model(**group.inputs, use_cache=False).last_hidden_state[:, :-1]
        answer, labels = group.answer[:, 1:], group.inputs["input_ids"][:, 1:]
        asked = answer >= 0
        answer, labels = answer[asked], labels[asked]
        logits = self.model.lm_head(hidden[asked])
        loss = torch.nn.functional.cross_entropy(logits, labels)
        alignment, seen = self._align(self._encoded.pop(), group.labels)
        binding, bound = self._bind(self._bound.pop(), group)
        with torch.no_grad():
            wrong = torch.zeros(len(group.kinds)).index_add_(0, answer, (logits.argmax(-1) != labels).float())
        right: dict[str, list[float]] = {}
        for kind, errors in zip(group.kinds, wrong.tolist(), strict=True):
            if kind:
                right.setdefault(kind, []).append(float(errors == 0))
        right |= {"sight": [seen], "number": bound}
        return loss + _ALIGNMENT_WEIGHT * (alignment + binding), right

    def _bind(self, hidden: torch.Tensor, group: Group) -> tuple[torch.Tensor, list[float]]:
        """Return the loss that draws tokens to the word that numbers an image, and how often they find it.

        After a few layers, tokens before an answer's are drawn to that of the image it is about and, with
        `image_numbers`, image tokens to that of their image. Without both, a question about one of two images was
        answered from either for 800 steps.
        """
        numbered = group.about.clone()
        if self.image_numbers:
            numbered[group.inputs["mm_token_type_ids"] == 1] = group.numbers
        number = numbered[numbered >= 0]
        if not len(number):
            return hidden.new_zeros(()), []
        likeness = self._likeness(hidden[numbered >= 0], self._numbers)
        right = (likeness.argmax(-1) == number).float().mean()
        return torch.nn.functional.cross_entropy(likeness, number), [right.item()]

    def _align(self, encoded: list[torch.Tensor], labels: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the loss that draws image tokens to the words of their content and place, and how often they find
        them.

        Encoders of published models are aligned with text. Without this loss, words looked up colors and places only
        after a thousand steps, and shapes not even after five thousand. Lengths are held near those of words: otherwise
        image tokens grew to 60 times a word's, DeepStack's features to 100, and dominated the outputs of layers.
        """
        features = encoded[0]
        loss = _NORM_WEIGHT * torch.stack([part.square().sum(-1).mean() for part in encoded]).sum()
        right = torch.ones(len(features), dtype=torch.bool)
        for ids, numbers in zip(self._words, labels.T, strict=False):
            likeness = self._likeness(features, ids)
            loss = loss + torch.nn.functional.cross_entropy(likeness, numbers, ignore_index=-1)
            right &= (likeness.argmax(-1) == numbers) | (numbers < 0)
        likeness, flags = self._likeness(features, self._flags), labels[:, len(self._words) :]
        loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(likeness, flags.float())
        right &= ((likeness > 0) == flags).all(-1)
        return loss, right.float().mean().item()

    def _likeness(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        words = self.model.model.language_model.embed_tokens(ids)
        return features @ torch.nn.functional.normalize(words, dim=-1).T / _TEMPERATURE

    def accuracy(self) -> dict[str, float]:
        """Return the accuracy in the last 30 steps; each token is predicted from the right ones before it."""
        values: dict[str, list[float]] = {}
        for right in self.right:
            for kind, found in right.items():
                values.setdefault(kind, []).extend(found)
        return {
            kind: float(np.mean(values[kind])) for kind in (*KINDS, *SEARCHES, "sight", "number") if values.get(kind)
        }

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in _KEPT},
        }
        torch.save(state, self.run / "state.tmp")
        os.replace(self.run / "state.tmp", self.run / "state.pt")

    def export(self, directory: pathlib.Path) -> None:
        """Write the model as a Hugging Face directory, weights in bfloat16."""
        shutil.copytree(self.run / "checkpoint", directory, dirs_exist_ok=True)
        # Some of transformers' classes do not split texts as their file says. The model was trained with their way.
        AutoTokenizer.from_pretrained(directory).backend_tokenizer.save(str(directory / "tokenizer.json"))
        tensors = {
            name: tensor.to(torch.bfloat16).contiguous()
            for name, tensor in self.model.state_dict().items()
            if name != "lm_head.weight"  # the table of token embeddings
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def _load(self) -> None:
        state = torch.load(self.run / "state.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _KEPT:
            setattr(self, name, state[name])


_OUTPUTS = ("o_proj", "out_proj", "down_proj", "linear_fc2", "proj")  # of parts whose results are added up
_KEPT = ("step", "stage", "seconds", "processor_seconds", "finish", "right")


def _initialize(model: Any) -> None:
    """Draw weights by width: transformers' 0.02 is meant for wide models and learns late here."""
    layers = model.config.text_config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        if "deepstack" in name and name.endswith("linear_fc2.weight"):
            torch.nn.init.zeros_(parameter)  # it takes effect once the rest has learned to use it
            continue
        match name.split(".")[-2]:
            case "embed_tokens":
                std = 0.05
            case "pos_embed":
                with torch.no_grad():
                    parameter.copy_(_smooth_positions(*parameter.shape))
                continue
            case part if part in _OUTPUTS and "merger" not in name and "patch_embed" not in name:
                std = 0.7 / (2 * layers * parameter.shape[1]) ** 0.5
            case _:
                std = 0.7 / parameter[0].numel() ** 0.5
        torch.nn.init.normal_(parameter, std=std)
    for layer in model.model.language_model.layers:
        if hasattr(layer, "self_attn"):
            _look_for_likes(layer.self_attn, model.config.text_config)
        else:
            _remember(layer.linear_attn)


@torch.no_grad()
def _remember(attention: Any) -> None:
    """Initialize the decay of heads with linear attention: they remember from few tokens to thousands.

    transformers' values forget everything within a token.
    """
    shortest, longest = map(math.log, _MEMORY)
    heads = len(attention.dt_bias)
    tokens = torch.exp(shortest + (longest - shortest) * (torch.arange(heads) + 0.5) / heads)
    attention.A_log.zero_()
    attention.dt_bias.copy_(torch.log(torch.expm1(1 / tokens)))  # softplus of it is 1 / tokens


@torch.no_grad()
def _look_for_likes(attention: Any, config: Any) -> None:
    """Initialize a head of each group to attend to rows similar to its own, and to copy them.

    Queries equal to keys, outputs the transpose of values: mimetic initialization (Trockman and Kolter, 2023). Trained
    models have such heads; lookups then begin from tokens that are already aligned.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    k, v = (
        projection.weight.view(groups, attention.head_dim, config.hidden_size)
        for projection in (attention.k_proj, attention.v_proj)
    )
    # Qwen3.5 has a gate beside each head's query.
    q = attention.q_proj.weight.view(heads, -1, attention.head_dim, config.hidden_size)[:, 0]
    out = attention.o_proj.weight.view(config.hidden_size, heads, attention.head_dim)
    for group in range(groups):
        head = group * (heads // groups)
        q[head] = k[group]
        out[:, head] = 0.3 * v[group].T


def _smooth_positions(count: int, width: int) -> torch.Tensor:
    """Return waves over rows and columns, `[count, width]`: from random embeddings the second dimension was not
    learned.
    """
    side = int(count**0.5)
    place = torch.linspace(0, torch.pi, side)[:, None]
    order = torch.arange(1, width // 4 + 1)
    waves = 0.8 * torch.cat([(order * place).sin(), (order * place).cos()], dim=1) / order.repeat(2) ** 0.5
    rows, columns = waves.repeat_interleave(side, dim=0), waves.repeat(side, 1)
    return torch.cat([rows, columns], dim=1)


def main(make: Callable[..., Trainer] = Trainer, description: str | None = __doc__, variant: str = "small") -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the run")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default=variant)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument(
        "--image-numbers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw image tokens to the word that numbers their image",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="approximate tokens of a step")
    parser.add_argument("--turns", type=int, default=4, help="questions in a conversation")
    parser.add_argument("--groups", type=int, default=2, help="groups of a step; each has images of one size")
    parser.add_argument("--steps", type=int, help="steps after which the run stops; it can be resumed later")
    parser.add_argument(
        "--finish", type=int, help="steps in which the learning rate decreases to 0, before the run ends"
    )
    parser.add_argument("--export", type=pathlib.Path, help="folder for the current model; writes it and exits")
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        if args.groups % dist.get_world_size():
            parser.error(f"--groups must be a multiple of the {dist.get_world_size()} processes, got {args.groups}")
    # One process writes the files that all read.
    leads = not dist.is_initialized() or dist.get_rank() == 0
    if not leads:
        dist.barrier()  # until the files exist
    trainer = make(
        args.out,
        variant=args.variant,
        seed=args.seed,
        learning_rate=args.learning_rate,
        image_numbers=args.image_numbers,
    )
    if leads and dist.is_initialized():
        dist.barrier()
    if args.export is not None:
        trainer.export(args.export)
        return
    for layer in trainer.model.model.language_model.layers:
        # It saves a sixth of the time per step. The loops of linear attention would take minutes to compile.
        (layer if hasattr(layer, "self_attn") else layer.mlp).compile(dynamic=True)
    if args.finish is not None and trainer.finish is None:
        trainer.finish = (trainer.step, trainer.step + args.finish)
    # Until it is stopped, or its learning rate has reached 0.
    last = math.inf if args.steps is None else trainer.step + args.steps
    if trainer.finish is not None:
        last = min(last, trainer.finish[1])
    stopped = threading.Event()
    if not dist.is_initialized():  # else one process would wait for the others
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    saved = trainer.seconds
    path = args.out / "log.jsonl"
    if leads and path.exists():  # steps after the saved one are repeated
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= trainer.step), encoding="utf-8")
    with open(path, "a", encoding="utf-8") as log:
        while trainer.step < last and not stopped.is_set():
            report = trainer.train_step(args.tokens, args.turns, args.groups)
            if not leads:
                continue
            if trainer.step % 20 == 0:
                log.write(json.dumps(report) + "\n")
                log.flush()
            if trainer.seconds - saved > _SAVED_EVERY or trainer.stage != report["stage"]:
                trainer.save()
                saved = trainer.seconds
    if leads:
        trainer.save()


if __name__ == "__main__":
    main()

"""Training on long prompts: questions that share a prompt learn as if each stood alone, and a run goes on as it was."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from research.tiny_vqa.conversations import converse
from vlcache_jax.benchmarks.tiny_vqa.pictures import Size
from vlcache_jax.benchmarks.tiny_vqa.tasks import KINDS, SEARCHES

torch = pytest.importorskip("torch")
from research.tiny_vqa import long, train  # noqa: E402

SMALL = (Size(1, 2), Size(2, 2))


def start(run):
    return long.Trainer(run, seed=0, learning_rate=1e-3)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return start(tmp_path_factory.mktemp("long") / "run")


@pytest.mark.parametrize("arrangement", ["image_first", "text_first"])
def test_packed_questions_learn_as_each_alone(trainer, arrangement, monkeypatch):
    """Losses of all answers, of prompts of five images: positions and what is seen are those of one question."""
    asked = []
    ask = trainer.sampler.asked
    monkeypatch.setattr(trainer.sampler, "asked", lambda *a: (found := ask(*a), asked.append((a[0], found)))[0])
    seeds = []
    packed = trainer.sampler._packed
    monkeypatch.setattr(trainer.sampler, "_packed", lambda *a: (seeds.append(a[-1]), packed(*a))[1])
    trainer.sampler.rng = np.random.default_rng(3)
    stage = long._stage(SMALL, range(5, 6), 2.0)
    group = trainer.sampler.group(dataclasses.replace(stage, mixture={arrangement: 1.0}), tokens=500, turns=4)
    assert len(asked) == len(group.inputs["input_ids"]) > 1
    with torch.no_grad():
        hidden = trainer.model.model(**group.inputs, use_cache=False).last_hidden_state
        trainer.model.set_attn_implementation({"text_config": "sdpa"})
        alone = []
        for pictures, questions in asked:
            for question in questions:
                images = [picture.size.tokens for picture in pictures]
                ids, answers = trainer.sampler.encode(
                    converse(np.random.default_rng(seeds[0]), images, [question], arrangement)
                )
                rows = train.Conversation(
                    list(pictures), ids, answers, [""] * (1 + max(answers)), [-1] * (1 + max(answers))
                )
                one = trainer.sampler.grouped([rows])
                states = trainer.model.model(**one.inputs, use_cache=False).last_hidden_state
                alone.append(losses(trainer, one, states, max(answers)))
        trainer.model.set_attn_implementation({"text_config": "packed"})
    together = [losses(trainer, group, hidden, answer) for answer in range(len(group.kinds))]
    assert [len(a) for a in together] == [len(a) for a in alone]
    torch.testing.assert_close(torch.cat(together), torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert torch.cat(alone).max() > 0.1  # not all is known


def losses(trainer, group, hidden, answer):
    chosen = group.answer[:, 1:] == answer
    logits = trainer.model.lm_head(hidden[:, :-1][chosen])
    return torch.nn.functional.cross_entropy(logits, group.inputs["input_ids"][:, 1:][chosen], reduction="none")


def test_a_run_goes_on_as_it_was(tmp_path):
    """Three steps at once leave the weights that they leave when the run is stopped behind the second."""
    whole, parts = start(tmp_path / "whole"), start(tmp_path / "parts")
    for _ in range(3):
        whole.train_step(200, 2, 1)
    for _ in range(2):
        parts.train_step(200, 2, 1)
    parts.save()
    again = start(tmp_path / "parts")
    assert again.step == 2
    again.train_step(200, 2, 1)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_images_have_a_name_of_one_token_each(trainer):
    assert len(set(trainer.sampler.numbers)) == len(train.NUMBERS) == 16
    assert trainer.sampler.numbers[:4] == train.Sampler(long.TINY_VQA).numbers


def test_what_is_held_out_is_asked_of_all_tasks(trainer):
    found = trainer.held_out(3, 1, SMALL)
    assert set(found) == set(long.ALL_TASKS)
    assert sum(asked for _, asked in found.values()) == 32
    assert set(long._SHARES) == {*KINDS, *SEARCHES}
    assert trainer.held_out(3, 1, SMALL) == found

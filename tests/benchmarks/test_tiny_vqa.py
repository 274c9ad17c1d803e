"""The pictures, questions and training of the shipped model, and the model itself."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import re

import numpy as np
import pytest
from PIL import Image

from research.tiny_vqa.conversations import converse
from tests.helper import SIZES as ENGINE
from vlcache_jax import LLM, SamplingParams
from vlcache_jax.benchmarks.tiny_vqa import splits
from vlcache_jax.benchmarks.tiny_vqa.pictures import BACKGROUND, GLYPHS, Picture, Size, draw_pictures, render
from vlcache_jax.benchmarks.tiny_vqa.splits import SIZES, load_samples, write_splits
from vlcache_jax.benchmarks.tiny_vqa.tasks import KINDS, RELATED, SEARCHES, TASKS, ask
from vlcache_jax.study.questions import ARRANGEMENTS, read_tsv

pytestmark = pytest.mark.slow  # a tool of the clone

NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}


def solve(question: str, pictures: list[Picture]) -> str:
    """Another way to the answer: from the words of the question, by search over whole grids."""
    words = question.lower()
    for number, digit in NUMBERS.items():
        words = words.replace(f"image {number}", f"image {digit}")
    grids = [
        [[str(p.glyphs.get((r, c), "nothing")) for c in range(p.size.columns)] for r in range(p.size.rows)]
        for p in pictures
    ]
    named = re.match(r"in image (\d), (.*)", words)
    asked = int(named[1]) - 1 if named else 0
    picture, grid = pictures[asked], grids[asked]
    if named:
        words = named[2]

    def at(place):
        column, row = place.lower()
        return grid[int(row) - 1]["abcde".index(column)]

    def name(row, column):
        return f"{'ABCDE'[column]}{row + 1}"

    def find(glyph):
        [place] = [(r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell == glyph]
        return place

    def only(kind):
        [cell] = [cell for row in grid for cell in row if kind in cell.split()]
        return cell.split()

    def counted(grid, kind):
        words = ["circle", "square", "triangle", "star", "cross", "ring"]
        words += ["red", "green", "blue", "yellow", "purple", "orange"]
        pairs = [set(cell.split()) for row in grid for cell in row]
        named = [word for word in words if {kind, word} in pairs]
        return f"{' '.join([kind, *named])}: {count(grid, kind)}"

    count = lambda grid, kind: sum(kind in cell.split() for row in grid for cell in row)  # noqa: E731
    kind_of = lambda text: {"crosses": "cross"}.get(text, text.removesuffix(" shapes").removesuffix("s"))  # noqa: E731
    image = lambda number: f"image {list(NUMBERS)[number - 1]}"  # noqa: E731
    coded = lambda code: 1 + [str(p.code_glyph) for p in pictures].index(code)  # noqa: E731
    listed = lambda text: re.split(", | and ", text)  # noqa: E731
    if found := re.fullmatch(r"what is at (.* and .*)\?", words):
        return ", ".join(f"{place.upper()} {at(place)}" for place in listed(found[1]))
    if found := re.fullmatch(r"where are the (.*)\?", words):
        return ", ".join(f"{glyph} {name(*find(glyph))}" for glyph in listed(found[1]))
    if found := re.fullmatch(r"what colours are the (.*)\?", words):
        return ", ".join(only(shape)[0] for shape in listed(found[1]))
    if found := re.fullmatch(r"what (is|colour is) at (.*)\?", words):
        return at(found[2]) if found[1] == "is" else at(found[2]).split()[0]
    if found := re.fullmatch(r"what colour is the (.*)\?", words):
        return only(found[1])[0]
    if found := re.fullmatch(r"what shape is (.*)\?", words):
        return only(found[1])[1]
    if found := re.fullmatch(r"is there a (.*)\?", words):
        return "yes" if any(found[1] in row for row in grid) else "no"
    if words == "what is the code?":
        return f"code {picture.code_glyph}"
    if words == "where is the code?":
        return f"code {name(*picture.code)}"
    if found := re.fullmatch(r"which image has the code (.*)\?", words):
        return f"code {found[1]} {list(NUMBERS)[coded(found[1]) - 1]}"
    if found := re.fullmatch(r"where the code is (.*), what is at (.*)\?", words):
        grid = grids[coded(found[1]) - 1]
        return f"code {found[1]} {list(NUMBERS)[coded(found[1]) - 1]} {found[2].upper()} {at(found[2])}"
    if found := re.fullmatch(r"what is where image (\d) has its code\?", words):
        row, column = pictures[int(found[1]) - 1].code
        place = name(row, column)
        return f"{image(int(found[1]))} code {place}, {image(asked + 1)} {place} {grid[row][column]}"
    if found := re.fullmatch(r"where is the code of image (\d)\?", words):
        code = str(pictures[int(found[1]) - 1].code_glyph)
        return f"{image(int(found[1]))} code {code}, {image(asked + 1)} {code} {name(*find(code))}"
    if found := re.fullmatch(r"where is the (.*)\?", words):
        return f"{found[1]} {name(*find(found[1]))}"
    if found := re.fullmatch(r"how many (.*) are there\?", words):
        return counted(grid, kind_of(found[1]))
    if found := re.fullmatch(r"which has more (.*), image (\d) or image (\d)\?", words):
        i, j = int(found[2]), int(found[3])
        a, b = (count(grids[k - 1], kind_of(found[1])) for k in (i, j))
        assert a != b
        named = ", ".join(f"{image(k)} {counted(grids[k - 1], kind_of(found[1]))}" for k in (i, j))
        return f"{named}, so {image(i if a > b else j)}"
    found = re.fullmatch(r"is the code of image (\d) on image (\d)\?", words)
    assert found, words
    i, j = int(found[1]), int(found[2])
    code = str(pictures[i - 1].code_glyph)
    shown = "yes" if any(code in row for row in grids[j - 1]) else "no"
    return f"{image(i)} code {code}, {image(j)} {code} {shown}"


@pytest.mark.parametrize("kind", [*KINDS, *SEARCHES])
def test_answers(kind):
    rng = np.random.default_rng([*KINDS, *SEARCHES].index(kind))
    small = SIZES["small"]
    asked = []
    for _ in range(400):
        sizes = [small[i] for i in rng.integers(len(small), size=rng.integers(1, 5))]
        pictures = draw_pictures(rng, sizes)
        if question := ask(rng, pictures, [kind]):
            asked.append(question)
            assert question.answer == solve(question.text, pictures), question
    assert len(asked) > 100
    said = [q.answer.split(" ")[-1] for q in asked]
    most = max(said.count(answer) for answer in said)
    assert most / len(asked) < 0.55  # no answer is right by habit


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"kinds must be some of .* got \['poetry'\]"):
        ask(np.random.default_rng(0), [], ["poetry"])


@pytest.mark.parametrize("cell", [32, 48, 64])
def test_glyphs_can_be_told_apart(cell):
    """Each differs from each other in many pixels, framed or not, and a picture shows them where it says."""
    images = []
    for framed, glyph in itertools.product((False, True), GLYPHS):
        place = (0, 0) if framed else (0, 1)
        picture = Picture(Size(1, 2, cell), {(0, 0): glyph, (0, 1): glyph}, place)
        images.append(render(picture)[:, :cell])
    differing = [(a != b).any(-1).mean() for a, b in itertools.combinations(images, 2)]
    assert min(differing) > 0.02
    picture = Picture(Size(2, 3, cell), {(1, 2): GLYPHS[0]}, (1, 2))
    shown = render(picture)
    assert shown.shape == (2 * cell, 3 * cell, 3)
    assert (shown[:cell] == BACKGROUND).all()
    assert (shown[:, : 2 * cell] == BACKGROUND).all()
    assert not (shown[cell:, 2 * cell :] == BACKGROUND).all()


def test_a_tint_tells_a_place():
    plain = Picture(Size(3, 4), {(1, 2): GLYPHS[0]}, (1, 2))
    tinted = dataclasses.replace(plain, size=dataclasses.replace(plain.size, is_tinted=True))
    differs = (render(plain) != render(tinted)).any(-1)
    assert not differs[:32, :32].any()  # the first place
    ground = render(dataclasses.replace(tinted, glyphs={}))
    cells = ground[::32, ::32]
    assert len(np.unique(cells.reshape(-1, 3), axis=0)) == 12
    np.testing.assert_array_equal(ground, cells.repeat(32, axis=0).repeat(32, axis=1))
    glyph = (slice(32, 64), slice(64, 96))
    assert 0 < differs[glyph].mean() < 1  # behind the glyph
    assert (render(tinted)[glyph] != ground[glyph]).any()


def test_splits(tmp_path):
    paths = write_splits(tmp_path / "a", questions=12)
    again = write_splits(tmp_path / "b", questions=12)
    other = write_splits(tmp_path / "c", questions=12, split="profile")
    assert [path.name for path in paths] == [f"tiny_{task}_test.tsv" for task in TASKS]
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    for task, path, another in zip(TASKS, paths, other, strict=True):
        samples, others = read_tsv(path), read_tsv(another)
        assert [sample.task for sample in samples] == [task] * 12
        assert not {image for s in samples for image in s.images} & {image for s in others for image in s.images}
    small = {64, 80, 100, 144}
    assert [{size.tokens for size in sizes} for sizes in SIZES.values()] == [small, {400}, small]


@pytest.mark.parametrize(("images", "tasks"), [(1, ("grid", "list", "count")), (2, TASKS), (3, TASKS)])
def test_splits_of_a_number_of_images(tmp_path, images, tasks):
    paths = write_splits(tmp_path, questions=6, images=images)
    assert [path.name for path in paths] == [f"tiny_{task}_test.tsv" for task in tasks]
    assert {len(sample.images) for path in paths for sample in read_tsv(path)} == {images}


def test_large_pictures_have_a_split_of_their_own(tmp_path):
    paths = write_splits(tmp_path, questions=2, images=1, size="large")
    assert [path.name for path in paths] == [f"tiny_{task}_large_test.tsv" for task in ("grid", "list", "count")]
    sides = {Image.open(io.BytesIO(image)).size for path in paths for s in read_tsv(path) for image in s.images}
    assert sides == {(320, 320)}
    samples = load_samples([], questions=2, images=1, size="large")
    assert [sample.images for sample in samples] == [s.images for path in paths for s in read_tsv(path)]
    assert {sample.related for sample in samples} == {RELATED}
    with pytest.raises(ValueError, match="size must be small or large or tinted, got 'huge'"):
        write_splits(tmp_path / "new", size="huge")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "2"])
def test_splits_of_no_number_of_images(tmp_path, bad):
    with pytest.raises(ValueError, match="images must be a positive integer or None, got"):
        write_splits(tmp_path / "new", images=bad)
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def training():
    pytest.importorskip("torch")
    from research.tiny_vqa import train

    return train


@pytest.fixture(scope="module")
def unfinished(training, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny_vqa") / "checkpoint"
    training.new_checkpoint(directory, "small")
    return directory


@pytest.mark.slow
def test_splits_show_no_picture_of_training(training, unfinished, tmp_path, monkeypatch):
    """Both draw from so many pictures that none comes twice, of the same sizes."""
    drawn = {splits: [], training: []}
    for module, pictures in drawn.items():
        draw = lambda *args, pictures=pictures: (found := draw_pictures(*args), pictures.extend(found))[0]  # noqa: E731
        monkeypatch.setattr(module, "draw_pictures", draw)
    write_splits(tmp_path, questions=20)
    sampler = training.Sampler(unfinished)
    for step in range(40):
        sampler.rng = np.random.default_rng([1, step, 0])  # as in a step of training
        sampler.group(training.CURRICULUM[-1], tokens=2000, turns=2)
    shown, trained = (
        [(p.size, p.code, tuple(sorted(p.glyphs.items()))) for p in pictures if p.size in SIZES["small"]]
        for pictures in drawn.values()
    )
    assert {size for size, *_ in shown} == {size for size, *_ in trained} == set(SIZES["small"])
    assert min(len(shown), len(trained)) > 100
    assert len({*shown, *trained}) == len(shown) + len(trained)


@pytest.mark.parametrize("variant", ["small", pytest.param("hybrid", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_training_reads_what_the_chat_template_writes(training, unfinished, tmp_path, arrangement, variant):
    from transformers import AutoTokenizer

    if variant != "small":
        training.new_checkpoint(unfinished := tmp_path / "checkpoint", variant)
    sampler = training.Sampler(unfinished)
    tokenizer = AutoTokenizer.from_pretrained(unfinished)
    rng = np.random.default_rng(0)
    for _ in range(20):
        pictures = draw_pictures(rng, [Size(2, 3), Size(3, 2)][: rng.integers(1, 3)])
        questions = [question for kind in KINDS if (question := ask(rng, pictures, [kind]))]
        tokens = [picture.size.tokens for picture in pictures]
        messages = converse(rng, tokens, questions, arrangement)
        ids, answers = sampler.encode(messages)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        for count in tokens:
            text = text.replace("<|image_pad|>", "<|pad|>" * count, 1)
        assert ids == tokenizer.encode(text.replace("<|pad|>", "<|image_pad|>"))
        said = [
            tokenizer.decode([i for i, a in zip(ids, answers, strict=True) if a == k]) for k in range(max(answers) + 1)
        ]
        assert said[-len(questions) :] == [f"{question.answer}<|im_end|>" for question in questions]


@pytest.mark.parametrize(
    ("question", "image"),
    [
        ("In image two, where is the red star?", 1),
        ("In image one, what is where image three has its code?", -1),
        ("Where is the red star?", -1),
    ],
)
def test_which_image_a_question_is_about(training, question, image):
    assert training.asked_about(question) == image


def test_which_image_a_token_of_an_answer_is_about(training, unfinished):
    sampler = training.Sampler(unfinished)
    messages = [
        {"role": "user", "content": "In image two, what is where image one has its code?"},
        {"role": "assistant", "content": "image one code B2, image two B2 red ring"},
        {"role": "user", "content": "In image two, what is at A1?"},
        {"role": "assistant", "content": "nothing"},
    ]
    ids, answers = sampler.encode(messages)
    about = sampler._about(ids, answers, [-1, 1])
    one, two = (ids.index(token, answers.index(0)) for token in sampler.numbers[:2])
    first, second = answers.index(0), answers.index(1)
    assert set(about[:one]) == {-1}
    assert set(about[one:two]) == {0}
    assert about[two - 1 : two + 2] == [0, 1, 1]
    assert about[second - 2 : second] == [-1, 1]
    assert all(about[i] == -1 for i in range(len(ids) - 1) if answers[i + 1] < 0)
    assert first < one < two < second


def test_groups_say_which_image_is_which(training, unfinished):
    sampler = training.Sampler(unfinished)
    stage = training.Stage((Size(1, 2), Size(2, 2)), (0.0, 1.0), 1.0)
    group = sampler.group(stage, tokens=600, turns=3)
    conversations = len(group.inputs["input_ids"])
    assert group.inputs["mm_token_type_ids"].sum() == len(group.numbers) == len(group.labels)
    assert group.numbers.unique().tolist() == [0, 1]
    per_image = group.numbers.view(conversations, -1).diff()
    assert (per_image != 0).sum() == conversations  # each conversation changes image once
    assert len(group.kinds) == int(group.answer.max()) + 1
    assert {-1, 0, 1} == set(group.about.flatten().tolist())


def test_labels_of_image_tokens(training):
    picture = Picture(Size(1, 2, 48), {(0, 1): GLYPHS[0]}, (0, 1))
    labels = training._labels(picture).view(3, 6, -1)
    colour, shape = list(training.COLOURS).index(GLYPHS[0].colour), training.SHAPES.index(GLYPHS[0].shape)
    assert labels[1, 4].tolist() == [colour, shape, 0, 1, 1, 0]
    assert labels[0, 0].tolist() == [-1, -1, 0, 0, 0, 1]


@pytest.mark.slow
def test_a_hybrid_trains_and_opens(training, tmp_path):
    """Its heads with linear attention remember from few tokens to thousands at first."""
    import torch

    trainer = training.Trainer(tmp_path / "run", variant="hybrid", seed=3, learning_rate=1e-3)
    trainer.stage = 1
    layers = trainer.model.model.language_model.layers
    linear = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    tokens = [1 / (one.A_log.exp() * torch.nn.functional.softplus(one.dt_bias)) for one in linear]
    assert len(tokens) == 4
    for found in tokens:
        assert (found > 10).all()
        assert (found < 5000).all()
        assert found.max() / found.min() > 50
    before = [one.in_proj_qkv.weight.detach().clone() for one in linear]
    report = trainer.train_step(tokens=300, turns=2, groups=1)
    assert np.isfinite(report["loss"])
    assert all((own != one.in_proj_qkv.weight).any() for own, one in zip(before, linear, strict=True))
    trainer.export(tmp_path / "model")
    question = {"type": "text", "text": "What is at A1?"}
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    conversation = [{"role": "user", "content": [{"type": "image", "image": image}, question]}]
    with LLM(tmp_path / "model", use_tqdm=False, **ENGINE) as llm:
        [output] = llm.chat([conversation], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert output.error is None


@pytest.mark.slow
def test_a_converted_hybrid_begins_with_the_shipped_model(tmp_path):
    """Its encoder, tables and layers of full attention are those of the shipped model; it can train from its start."""
    import torch
    from transformers import AutoModelForImageTextToText

    from research.tiny_vqa.hybrid import Converted
    from vlcache_jax.assets import TINY_VQA

    options = {"seed": 3, "learning_rate": 1e-3, "image_numbers": False}
    trainer = Converted(tmp_path / "run", teacher=TINY_VQA, **options)
    teacher = AutoModelForImageTextToText.from_pretrained(TINY_VQA, dtype=torch.float32)
    own, theirs = trainer.model.model.language_model, teacher.model.language_model
    x, places = torch.randn(1, 40, 192), torch.arange(40).expand(3, 1, -1)
    with torch.no_grad():
        for layer in (3, 5):
            one, other = (
                model.layers[layer](x, position_embeddings=model.rotary_emb(x, places), attention_mask=None)
                for model in (own, theirs)
            )
            np.testing.assert_allclose(one, other, atol=1e-4)
        np.testing.assert_allclose(own.norm(x), theirs.norm(x), atol=1e-5)
        np.testing.assert_allclose(own.layers[0].mlp(x), theirs.layers[0].mlp(x), atol=1e-5)
    assert (own.embed_tokens.weight == theirs.embed_tokens.weight).all()
    encoder = dict(teacher.model.visual.named_parameters())
    assert all((encoder[name] == weight).all() for name, weight in trainer.model.model.visual.named_parameters())
    report = trainer.train_step(tokens=300, turns=2, groups=1)
    assert report["right"]["sight"] > 0.9
    assert np.isfinite(report["loss"])
    with pytest.raises(ValueError, match="variant must be hybrid, got small"):
        Converted(tmp_path / "other", teacher=TINY_VQA, variant="small", **options)


def _train_in_process(rank, folder, store):
    import torch.distributed as dist

    from research.tiny_vqa import train

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    trainer = train.Trainer(folder, variant="small", seed=3, learning_rate=1e-3)
    trainer.stage = 1
    report = trainer.train_step(tokens=200, turns=2, groups=2)
    total = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
    (folder / f"{rank}.json").write_text(json.dumps([total, report["loss"], report["right"]]))
    dist.destroy_process_group()


@pytest.mark.thorough
def test_processes_share_a_step(training, tmp_path):
    import torch.multiprocessing

    training.new_checkpoint(tmp_path / "run" / "checkpoint", "small")
    torch.multiprocessing.spawn(_train_in_process, (tmp_path / "run", tmp_path / "store"), nprocs=2)
    first, second = (json.loads((tmp_path / "run" / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    alone = training.Trainer(tmp_path / "alone", variant="small", seed=3, learning_rate=1e-3)
    losses = []
    for rank in (0, 1):
        alone.sampler.rng = np.random.default_rng([3, 0, rank])
        losses.append(alone.forward(alone.sampler.group(training.CURRICULUM[1], 100, 2))[0].item())
    assert first[1] == pytest.approx(np.mean(losses), rel=1e-5)
    assert losses[0] != losses[1]


@pytest.mark.thorough  # reads the shipped model, and runs it on conversations
def test_a_student_begins_where_its_teacher_is(training, tmp_path):
    import torch

    from research.tiny_vqa.transfer import Student
    from vlcache_jax.assets import TINY_VQA

    student = Student(tmp_path / "run", teacher=TINY_VQA, seed=0, learning_rate=1e-3, image_numbers=False)
    theirs, own = (model.model.language_model for model in (student.teacher, student.model))
    x = torch.randn(50, 192, generator=torch.Generator().manual_seed(0))
    wide = torch.nn.functional.pad(x, (0, 64))
    for known, layer in zip(theirs.layers, own.layers, strict=True):
        for part in ("post_attention_layernorm", "input_layernorm"):
            normed = getattr(layer, part)(wide)
            torch.testing.assert_close(normed[:, :192], getattr(known, part)(x))
            assert not normed[:, 192:].any()
        torch.testing.assert_close(layer.mlp(wide)[:, :192], known.mlp(x))
        assert not layer.mlp(wide)[:, 192:].any()
        torch.testing.assert_close(layer.self_attn.v_proj(wide), known.self_attn.v_proj(x))
        assert not layer.self_attn.o_proj.weight[192:].any()
    torch.testing.assert_close(own.norm(wide)[:, :192], theirs.norm(x))
    assert not own.embed_tokens.weight[:, 192:].any()
    # Of conversations, queries and keys have in each head their direction, and in the mean the length of normed ones.
    seen = {}

    def note(name, _, args, result):
        seen.setdefault(name, []).append((args[0], result))

    for i, known in enumerate(theirs.layers):
        for name in ("q", "k"):
            getattr(known.self_attn, f"{name}_norm").register_forward_hook(functools.partial(note, (i, name)))
        known.input_layernorm.register_forward_hook(functools.partial(note, (i, "x")))
    with torch.no_grad():
        student.teacher.model(**training.Sampler(TINY_VQA).group(training.CURRICULUM[-1], 1000, 3).inputs)
        for i, layer in enumerate(own.layers):
            [(_, inputs)] = seen[i, "x"]
            for name in ("q", "k"):
                [(_, normed)] = seen[i, name]
                wide = torch.nn.functional.pad(inputs, (0, 64)).flatten(0, 1)
                scaled = getattr(layer.self_attn, f"{name}_proj")(wide).view(-1, normed.shape[-2], 64)
                weight = getattr(theirs.layers[i].self_attn, f"{name}_norm").weight
                normed = normed.reshape(scaled.shape)
                likeness = torch.nn.functional.cosine_similarity(normed, scaled, dim=-1)
                torch.testing.assert_close(likeness, torch.ones_like(likeness))
                lengths = (scaled / weight).square().mean(-1).mean(0)
                assert ((lengths > 0.8) & (lengths < 1.25)).all()
    with pytest.raises(ValueError, match="variant must be qwen2_5_vl, got small"):
        Student(tmp_path / "other", teacher=TINY_VQA, variant="small", seed=0, learning_rate=1e-3)
    student.train_step(tokens=300, turns=2, groups=1)
    student.export(tmp_path / "model")
    from vlcache_jax.models.registry import load_config

    assert not load_config(tmp_path / "model").text.qk_norm


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 1])
def test_training_goes_on_where_it_stopped(training, tmp_path, stage):
    """The encoder alone, and the whole model."""

    def steps(trainer, count):
        return [trainer.train_step(tokens=300, turns=2, groups=1)["loss"] for _ in range(count)]

    def make(name):
        trainer = training.Trainer(tmp_path / name, variant="small", seed=3, learning_rate=1e-3)
        trainer.stage = trainer.stage or stage
        return trainer

    whole = make("whole")
    losses = steps(whole, 4)
    first = make("parts")
    assert steps(first, 2) == losses[:2]
    first.save()
    second = make("parts")
    assert (second.step, second.stage) == (2, stage)
    assert steps(second, 2) == losses[2:]
    assert len(set(losses)) == 4

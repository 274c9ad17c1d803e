"""Every Python block and command of the README and of docs/ does what it says, as written and without a network."""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import shlex
import tomllib

import pytest
import typer
from typer.testing import CliRunner

from vlcache_jax.assets import PICTURES
from vlcache_jax.commands.cli import app
from vlcache_jax.commands.info import NOTHING, describe
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.models.registry import SIZES, published_config
from vlcache_jax.testing import make_checkpoint

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What these do is done elsewhere: by CI, in every fresh clone of it.
BY_CI = ("uv run --group test pytest", ".ci/run")


# To docs/questions.jsonl: what is drawn, not only what the model says.
RIGHT = [
    "red triangle",
    "star red green blue: 3",
    "image one ring orange: 1, image two ring red green blue purple: 4, so image two",
    "red circle B1",
]


@dataclasses.dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(*kinds):
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\S*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 2
            if match[1] in kinds:
                found.append(Block(str(path.relative_to(ROOT)), line, match[1], match[2]))
    return found


def quick(found):
    """The README's run with the README's test command, all others in CI."""
    return [
        pytest.param(block, id=str(block), marks=[] if block.page == "README.md" else [_later(block)])
        for block in found
    ]


def _later(block):
    """Studies take minutes each."""
    is_study = any(name in block.text for name in ("vlcache bench accuracy", "research.policies", "vlcache bench ttft"))
    return pytest.mark.thorough if is_study else pytest.mark.slow


def commands(block):
    """The lines of a block without comments, and those that go on in the next one together."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.split("#")[0].strip()]


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    """With the files of a clone that the pages name."""
    if not re.search("vlcache bench|vlcache schedule|research", request.getfixturevalue("block").text):
        request.getfixturevalue("few_buckets")  # measuring needs more room
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "vlcache_jax" / "assets").mkdir(parents=True)
    (tmp_path / "vlcache_jax" / "assets" / "pictures").symlink_to(PICTURES)
    for name in re.findall(r'^with LLM\("Qwen/(.+?)"', request.getfixturevalue("block").text, re.MULTILINE):
        (tmp_path / "Qwen").mkdir()
        make_checkpoint(tmp_path / "Qwen" / name, SIZES[name].model_type)  # tiny weights in its place
    return tmp_path


@pytest.mark.parametrize("block", quick(blocks("python")))
def test_python_blocks_run(block, folder):
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("block", quick([block for block in blocks("sh") if re.search("vlcache|research", block.text)]))
def test_commands_run(block, folder):
    for words in commands(block):
        command, given = command_of(words)
        if command is None or given == ["demo"]:  # test_cli.py has the demo
            understood(words)
            continue
        result = CliRunner().invoke(command, given)
        assert result.exit_code == 0, (words, result.output, result.exception)
        assert result.output
        if given[0] == "run":
            answers = [json.loads(line) for line in pathlib.Path(words[3]).read_text().splitlines()]
            assert not any(answer["error"] for answer in answers)
            assert list(map(text_of, answers)) == RIGHT


def command_of(words):
    """The typer application of a command, None if it has none, and what it is given."""
    if words[0] == "vlcache":
        return app, words[1:]
    if words[:2] == ["python", "-m"] and words[2].startswith("research."):
        return getattr(importlib.import_module(words[2]), "app", None), words[3:]
    return None, []


def text_of(answer):
    if "response" in answer:
        return answer["response"]["body"]["choices"][0]["message"]["content"]
    return answer["text"]


def test_commands_are_there():
    """Those that take hours, or a network, at least exist and take these arguments."""
    found = [words for block in blocks("", "sh") if not block.text.startswith("LLM.chat") for words in commands(block)]
    assert sum(words[0] == "vlcache" for words in found) > 15
    for words in found:
        understood(words)


def understood(words):
    """Raises if there is no such command, module or option."""
    if " ".join(words) in BY_CI:
        assert (ROOT / ".ci" / "run").is_file()
        return
    if words[:2] == ["uv", "add"]:
        [name] = re.findall(r"^vlcache-jax(?:\[(\w+)\])? @", words[2])
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert not name or name in known
        return
    while "=" in words[0]:  # a variable of the environment
        words = words[1:]
    if words[:2] == ["uv", "sync"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        named = {"--group": project["dependency-groups"], "--extra": project["project"]["optional-dependencies"]}
        for option, name in itertools.pairwise(words):
            if option in named:
                assert name in named[option], words
        return
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words[0] in ("--group", "--extra"):
            words = words[2:]
    group, rest = command_of(words)
    if group is not None:
        command, context = typer.main.get_command(group), None
        while rest and rest[0] in getattr(command, "commands", {}):
            context = typer.Context(command, parent=context, info_name=rest[0])
            command, rest = command.commands[rest[0]], rest[1:]
        if "--help" not in rest:
            command.make_context(words[0], rest, parent=context)
    elif words[0].rpartition("/")[2] == "python" and words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None, words
    else:
        assert words[0] in ("pytest", "ruff", "mypy", "lint-imports", "sphinx-build", "git"), words


def test_links_lead_somewhere():
    for path in PAGES:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith(("http", "#")):
                assert (path.parent / target.partition("#")[0]).exists(), (path, target)


def test_the_reference_lists_every_command():
    def leaves(command, path):
        below = getattr(command, "commands", {})
        return [leaf for name in below for leaf in leaves(below[name], f"{path} {name}")] or [path]

    listed = [command.strip("`") for command, _ in table("docs/reference/cli.md", "command | purpose")]
    assert sorted(listed) == sorted(leaves(typer.main.get_command(app), "vlcache"))


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def table(page, head):
    """Rows of the table of a page whose head begins so, as lists of cells."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [rows] = re.findall(rf"(?m)^\| {re.escape(head)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def test_what_is_said_of_a_models_memory_is_what_is_counted():
    rows = table("docs/guides/gpus.md", "model | KV per token")
    assert len(rows) == 7
    for name, *found in rows:
        config = published_config(name)
        slot = KVShape.of(config, "float16").slot_bytes
        tokens = 1024 if name.startswith("Qwen3") else 37 * 37
        kept = tokens * (slot + 2 * (1 + config.vision.num_deepstack) * config.text.hidden_size)
        assert found == [f"{slot / 1e3:.0f} KB", f"{tokens} tokens", f"{kept / 1e6:.0f} MB"]


@pytest.mark.slow
def test_what_is_said_to_fit_is_what_is_counted():
    """In the guide, and the smallest GPU of each model in the README."""
    rows = table("docs/guides/gpus.md", "model | weights in")
    for name, bits, weights, *cells in rows:
        fits = [fit for fit in described(name, 1) if fit["weights in"] == bits]
        assert weights == fits[0]["weights"]
        for cell, fit in zip(cells, fits, strict=True):
            fewer = [f"chunk {fit['prefill chunk']}"] * (fit["prefill chunk"] != 8192)
            image = fit["largest image"]
            smaller = [image.replace(" million pixels", " MP")] * (image != fits[-1]["largest image"])
            limits = f" ({', '.join([*fewer, *smaller])})" if fewer or smaller else ""
            assert (name, cell) == (name, "-" if fit["tokens"] == NOTHING else f"{fit['tokens']}{limits}")
    rows = table("README.md", "models | smallest GPU in bfloat16")
    named = [name for names, *_ in rows for name in names.split(", ")]
    assert sorted(named) == sorted(SIZES)
    for names, *cells in rows:
        for bits, cell in zip(("bfloat16", "FP8"), cells, strict=True):
            assert {smallest(name, bits) for name in names.split(", ")} == {cell}


@functools.cache
def described(name, gpus):
    return describe(name, "auto", 1024, 1024, gpus=gpus)[1]


def smallest(name, bits):
    """The smallest GPU that a model fits on, or of the fewest GPUs that it fits on; "-": it has no such weights."""
    for gpus in (1, 2, 4):
        fits = [fit for fit in described(name, gpus) if fit["weights in"] == bits]
        for fit in fits:
            if fit["tokens"] != NOTHING:
                return fit["GPU"]
    return "-"

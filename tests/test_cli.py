import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vlcache_jax.cli import app


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("command", ["demo", "ask", "convert"])
def test_help_teaches(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert command == "demo" or "Example" in result.stdout


def test_demo(run):
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "random weights" in result.stdout
    assert re.search(r"compiled \d+ programs", result.stdout)
    assert re.search(r"two pictures .* 128 .*\d+ \d+ \d+", result.stdout)


def test_ask(run, family_checkpoint, tmp_path, textured_image):
    Image.fromarray(textured_image(60, 90)).save(tmp_path / "a.png")
    arguments = ("-m", family_checkpoint, "--max-tokens", "3", "--temperature", "0")
    result = run("ask", *arguments, tmp_path / "a.png", "What is it?")
    assert result.exit_code == 0, result.output
    assert re.search(r"prompt tokens, \d+ of images; first token after .* s, [1-3] tokens", result.stderr)
    small = run("ask", *arguments, "--max-pixels", "8000", tmp_path / "a.png", "What is it?")
    assert small.exit_code == 0, small.output


@pytest.mark.parametrize(
    ("words", "message"),
    [(["missing.png", "What?"], "missing.png"), (["bad.png", "What?"], "Pillow")],
)
def test_ask_says_what_is_wrong(run, family_checkpoint, tmp_path, words, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.png").write_bytes(np.arange(50, dtype=np.uint8).tobytes())
    result = run("ask", "-m", family_checkpoint, *words)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_ask_without_a_checkpoint(run, tmp_path):
    result = run("ask", "-m", tmp_path, "What?")
    assert result.exit_code == 1
    assert "config.json" in result.stderr

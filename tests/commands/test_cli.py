import json
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vlcache_jax.commands.cli import app


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("command", ["demo", "doctor", "ask", "convert", "bench ttft", "bench batch"])
def test_help_teaches(run, command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert command == "demo" or "Example" in result.stdout


def test_help_tells_what_holds_without_an_option(run):
    told = " ".join(run("bench", "accuracy", "--help").stdout.replace("│", " ").split())
    for default in ("the shipped model", "together", "full, 0.02, 0.05, 0.1, 0.3"):
        assert f"[default: ({default}" in told


def test_a_page_that_cannot_be_written_is_known_before(run, tmp_path):
    result = run("demo", "--report", tmp_path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: report must be a file that can be written, got {tmp_path}: ")


def test_what_is_wrong_is_said_before_heavy_imports(tmp_path):
    """All commands in one process, whose end sees whether any of them has imported it."""
    missing, out = str(tmp_path / "missing"), str(tmp_path / "out")
    (tmp_path / "file").touch()  # no place for a converted model
    wrong = {
        "demo": ["--report", str(tmp_path)],
        "ask": ["-m", "model", missing, "What?"],
        "convert": ["model", str(tmp_path)],
        "bench ttft": ["--schedule", missing],
        "bench batch": ["--against", missing],
        "bench accuracy": ["--data", missing],
        "bench policies": ["--ratio", "2"],
        "schedule profile": ["--out", out, "--data", missing],
        "schedule times": ["--out", str(tmp_path)],
        "analyze errors": ["--out", f"{out}.png", "--data", missing],
        "analyze attention": ["--out", f"{out}.txt"],
    }
    code = f"""
import sys
from typer.testing import CliRunner
from vlcache_jax.commands.cli import app
for command, arguments in {wrong!r}.items():
    result = CliRunner().invoke(app, [*command.split(), *arguments])
    assert result.exit_code == 1 and "error: " in result.stderr, (command, result.output)
assert not {{"jax", "scipy", "transformers", "torch", "matplotlib"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_demo(run, tmp_path):
    result = run("demo", "--report", tmp_path / "demo.html")
    assert result.exit_code == 0, result.output
    assert re.search(r"compiled \d+ programs", result.stdout)
    assert result.stderr.startswith("importing JAX\nloading weights of tiny_vqa (0.02 GB)\ncompiling\n")
    assert "Right are 5 of 5 cold, 3 linked and 5 moved" in result.stdout
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3
    assert page.count("<tr") == 1 + 5 * 5 + 1 + 3 * 5  # answers, then the times of all runs
    assert page.count('wrong"') == 2
    assert "http" not in page  # nothing is loaded from elsewhere


def test_ask(run, family_checkpoint, tmp_path, textured_image):
    Image.fromarray(textured_image(60, 90)).save(tmp_path / "a.png")
    arguments = ("-m", family_checkpoint, "--max-tokens", "3", "--temperature", "0")
    result = run("ask", *arguments, tmp_path / "a.png", "What is it?")
    assert result.exit_code == 0, result.output
    assert re.search(r"prompt tokens, \d+ of images; first token after .* s, [1-3] tokens", result.stderr)
    twice = run("ask", *arguments, "--twice", tmp_path / "a.png", "What is it?")
    assert twice.exit_code == 0, twice.output
    half = len(twice.stdout) // 2
    assert twice.stdout[:half] == twice.stdout[half:]
    assert re.search(r"(?s)miss \(unknown_image\).* 0 reused\]\n.*exact; .* [1-9]\d* reused\]", twice.stderr)
    assert run("ask", *arguments, tmp_path / "a.png").stderr.startswith("error: the question must stand behind")
    assert "\nerror: reuse must be" in run("ask", *arguments, "--reuse", "most", "What?").stderr
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


def test_bench_ttft(run, family_checkpoint, tmp_path):
    out = tmp_path / "ttft.json"
    arguments = ("--images", "2", "--tokens", "16", "--text-before", "7", "--repeats", "1", "--dtype", "float32")
    result = run("bench", "ttft", family_checkpoint, *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["configuration"] for row in rows][:4] == ["cold", "encoder cached", "r = 0", "r = 0.1"]
    assert [row["tokens reused"] for row in rows] == [0, 0, 32, 30, 32, 30]
    assert all(row["TTFT ms"] > 0 and row["GFLOP"] > 0 for row in rows)

import hashlib
import html
import json
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

import vlcache_jax
from tests.helper import SIZES, WORDS
from vlcache_jax import LLM, SamplingParams
from vlcache_jax.assets import PICTURES
from vlcache_jax.commands.cli import app
from vlcache_jax.commands.demo_page import MODES
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.programs.table import Programs


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize(
    "command",
    [
        *("demo", "doctor", "ask", "run", "info", "calibrate", "convert"),
        *("bench ttft", "bench throughput", "bench serve", "bench compression"),
    ],
)
def test_help_teaches(run, command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert command == "demo" or "Example" in result.stdout


def commands(group, path=()):
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


def test_commands_call_the_same_things_alike():
    """Names of arguments are capitals, types are not Python's, and a model is named by -m everywhere."""
    found = dict(commands(typer.main.get_command(app)))
    assert len(found) > 20
    dtypes = {}
    for path, command in found.items():
        names = {option for parameter in command.params for option in parameter.opts}
        arguments = {parameter.name for parameter in command.params if parameter.param_type_name == "argument"}
        assert ("--model" in names) == ("-m" in names)
        assert "model" not in arguments or "--model" in names, path
        assert "--figure" not in names, path
        context = typer.Context(command, info_name=path[-1])
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                assert parameter.display_name_raw.isupper(), (path, parameter.name)
            else:
                assert "[" not in parameter.display_type_rich(context), (path, parameter.name)
                if parameter.name == "dtype":
                    dtypes[path] = parameter.default
    for name in ("throughput", "compression"):
        assert dtypes.pop(("bench", name)) == "float32"  # in which they compare answers
    assert dtypes.pop(("convert",)) is None  # which casts none
    assert set(dtypes.values()) == {"auto"}
    shared = ("--system", "--seed", "--disk", "--kv-cache-bytes", "--max-model-len", "--top-p")
    for name in ("ask", "run"):
        assert {option for parameter in found[name,].params for option in parameter.opts} >= set(shared)


def test_help_tells_what_holds_without_an_option(run):
    told = " ".join(run("bench", "accuracy", "--help").stdout.replace("│", " ").split())
    for default in ("the shipped model", "together and separately", "full, 0.03, 0.1, approximate, shift-0.1"):
        assert f"[default: ({default}" in told


def test_the_version(run):
    assert run("--version").stdout == f"vlcache {vlcache_jax.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_info_counts_what_an_engine_counts(run, checkpoints, family):
    """The figures are those of an engine that opens the model."""
    result = run("info", checkpoints(family), "--image", "90x120", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    with LLM(checkpoints(family), use_tqdm=False, **SIZES) as llm:
        checkpoint, config = llm.service.checkpoint, llm.service.device.runner.config
        ask = [{"role": "user", "content": [{"type": "image", "image": np.zeros((90, 120, 3), np.uint8)}]}]
        [output] = llm.chat(ask, SamplingParams(max_tokens=1), use_tqdm=False)
        llm.cache.flush()
        kinds = {record.meta.context is None: record.meta for record in llm.service.cache.store.tier.records()}
    [image] = output.cache.images
    slot = KVShape.of(config, checkpoint.dtype).slot_bytes
    found = dict(re.split(r"  +", line, maxsplit=1) for line in result.stdout.splitlines()[:7])
    assert found["weights"].startswith(f"{checkpoint.nbytes() / 1e6:.1f} MB in float32")
    assert found["KV"] == f"{slot} bytes per token"
    unpadded = {is_encoder: meta.nbytes // meta.shape[-2 if is_encoder else -3] for is_encoder, meta in kinds.items()}
    sizes = [f"{image.tokens * unpadded[is_encoder] / 1e6:.1f} MB" for is_encoder in (False, True)]
    assert found["an image of 90 x 120"] == (
        f"{image.tokens} tokens; cached: {sizes[0]} of KV and {sizes[1]} of encoder output"
    )
    assert re.search(r"(?m)^24 GB .*\n40 GB .*\n48 GB .*\n80 GB .*\n141 GB ", result.stdout)


@pytest.mark.thorough
def test_info_knows_published_sizes_without_a_checkpoint(run, monkeypatch):
    """And says what does not fit."""
    from vlcache_jax.commands import info

    monkeypatch.setattr(info, "locate", None)
    result = run("info", "qwen3-vl-8b", "--image", "1080x1920", "--max-rows", "2048")
    assert result.exit_code == 0, result.output
    found = dict(re.split(r"  +", line, maxsplit=1) for line in result.stdout.splitlines()[:7])
    assert found["model"] == "qwen3_vl, as published: Qwen3-VL-8B"
    assert found["weights"] == "17.53 GB in bfloat16, 10.81 GB in FP8 (8.77 billion parameters)"
    assert found["KV"] == "147456 bytes per token"
    # 1088 x 1920 pixels, 32 x 32 a token
    assert found["an image of 1080 x 1920"].startswith("2040 tokens; cached: 0.30 GB of KV")
    small = run("info", "-m", "qwen3-vl-8b", "--dtype", "float32")
    assert re.search(r"(?m)^24 GB +float32 +[\d.]+ GB +[\d.]+ GB +does not fit( +-){5}$", small.stdout)
    assert "\n24 GB, float32: too small; use --gpus 2\n" in small.stdout
    experts = run("info", "qwen3-vl-30b-a3b").stdout
    assert "128 x 768 in 48 layers, 8 per token; 3.89 billion active parameters" in experts
    assert re.search(r"(?m)^24 GB +bfloat16 +62.14 GB .* does not fit ", experts)
    assert re.search(r"(?m)^48 GB +FP8 +33.18 GB .* 24576 ", experts)


@pytest.mark.slow
def test_info_says_how_a_model_fits(run):
    """With the sizes that an engine chooses: steps and images are made smaller where a pool has no room."""
    told = run("info", "qwen3-vl-8b").stdout
    rows = {tuple(row[:2]): row[2:] for row in (re.split(r"  +", line.strip()) for line in told.splitlines())}
    assert "None" not in told
    assert rows["24 GB", "bfloat16"][3:] == ["13824", "13824", "13", "2048", "4.2 million pixels"]
    assert rows["24 GB", "FP8"][0] == "10.81 GB"
    assert rows["24 GB", "FP8"][3:] == ["19456", "19456", "19", "4096", "16.8 million pixels"]
    assert rows["80 GB", "FP8"][3:5] == ["327680", "262144"]  # no longer than the model takes
    alone = run("info", "qwen3-vl-8b-fp8").stdout
    assert re.findall("(?m)^.*GB +FP8 .*$", alone) == re.findall("(?m)^.*GB +FP8 .*$", told)
    # What is asked for stays.
    more = run("info", "qwen3-vl-8b", "--max-rows", "4096").stdout
    assert re.search("(?m)^24 GB +bfloat16 .* 4096 +2.1 million pixels", more)
    assert re.search("(?m)^24 GB +bfloat16 .* too large ", run("info", "qwen3-vl-8b", "--image", "4096x4096").stdout)


@pytest.mark.slow
def test_info_of_several_gpus(run):
    told = run("info", "qwen3-vl-30b-a3b", "--gpus", "8").stdout  # with two copies of each KV head
    assert re.search(r"(?m)^each of 8 GPUs +8.76 GB of weights, 24576 bytes of KV per token$", told)
    assert re.search(r"(?m)^8 x 24 GB +bfloat16 +70.06 GB .* \d+ +16.8 million pixels$", told)
    assert "What fits on 8 GPUs together" in told
    assert "2 x 24 GB, bfloat16: too small; use --gpus 4" in run("info", "qwen3-vl-32b", "--gpus", "2").stdout
    assert "24 GB, bfloat16: too small; more GPUs do not help" in run("info", "qwen3-vl-235b-a22b").stdout
    refused = run("info", "qwen2.5-vl-7b", "--gpus", "8")
    assert refused.exit_code == 1
    assert "gpus must be one of 1, 2, 4 for this model, got 8: 28 query heads cannot be divided" in refused.stderr


def test_info_names_the_published_sizes_to_who_names_none(run):
    assert "Qwen3-VL-8B\n" in run("info").stdout
    twice = run("info", "qwen3-vl-8b", "-m", "tiny-vqa")
    assert twice.stderr == "error: MODEL and --model are mutually exclusive, got qwen3-vl-8b and --model tiny-vqa\n"


def test_info_names_the_published_sizes_to_who_misspells_one(run, monkeypatch):
    from vlcache_jax.commands import info

    monkeypatch.setattr(info, "locate", mock.Mock(side_effect=FileNotFoundError("no such model")))
    result = run("info", "qwen3-vl-9b")
    assert result.exit_code == 1
    assert "no such model; names that need no network are Qwen2-VL-2B, " in result.stderr
    assert "names that" not in run("info", "someone/qwen3-vl-9b").stderr
    for name, known in (("Qwen3-VL-8B-Instruct", "Qwen3-VL-8B"), ("Qwen3-VL-4B-Thinking-FP8", "Qwen3-VL-4B-FP8")):
        assert run("info", f"Qwen/{name}").stderr.endswith(f"; without a network, run: vlcache info {known}\n")


def test_a_page_that_cannot_be_written_is_known_before(run, tmp_path):
    result = run("demo", "--report", tmp_path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: report must be a file that can be written, got {tmp_path}: ")


@pytest.mark.slow
def test_what_is_wrong_is_said_before_heavy_imports(tmp_path):
    """All commands in one process, whose end sees whether any of them has imported it."""
    missing, out = str(tmp_path / "missing"), str(tmp_path / "out")
    (tmp_path / "file").touch()  # no place for a converted model
    wrong = {
        "demo": ["--report", str(tmp_path)],
        "ask": ["-m", "model", missing, "What?"],
        "run": [missing, out],
        "info": ["--image", "large"],
        "convert": ["model", str(tmp_path)],
        "bench ttft": ["--schedule", missing],
        "bench throughput": ["--against", missing],
        "bench compression": ["--lengths", "many"],
        "bench accuracy": ["--data", missing],
        "schedule profile": ["--out", out, "--data", missing],
        "schedule times": ["--out", str(tmp_path)],
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


@pytest.fixture
def compiled(monkeypatch):
    """Digests of the programs that are compiled, or read from disk."""
    digests = set()
    lower = Programs._lower

    def noted(self, program):
        lowered = lower(self, program)
        digests.add(hashlib.sha256(lowered.as_text().encode()).hexdigest())
        return lowered

    monkeypatch.setattr(Programs, "_lower", noted)
    return digests


@pytest.mark.thorough  # CI runs the demo of a wheel
def test_demo(run, tmp_path, compiled, monkeypatch):
    result = run("demo", "--report", tmp_path / "demo.html")
    assert result.exit_code == 0, result.output
    assert re.search(r"Programs: \d+ compiled", result.stdout)
    assert result.stderr.startswith("importing JAX\nloading weights of tiny_vqa (0.02 GB)\n")
    sentence = r"With reuse=.approximate., 5 of 5 answers are correct \(without reuse: 5 of 5\) and the first token"
    assert re.search(sentence + r" comes [\d.]+x (faster|slower)\.", " ".join(result.stdout.split()))
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3
    # First the result, then the modes side by side, questions, and terms.
    assert re.search(sentence, html.unescape(re.search(r"</h1><p.*?>(.*?)</p>", page)[1]))
    summary = re.findall(r'class="mode">([^<]*)</th><td class="what">[^<]+</td>.*?>(\d) of 5<', page)
    assert summary == [("no reuse", "5"), ("exact", "5"), ("approximate", "5"), ("full", "3")]
    assert re.findall("<h2>(.*?)</h2>", page) == ["Images", "Questions", "Terms"]
    assert all(f"<dt>{mode}</dt>" in page for mode in MODES)
    rows = re.findall(
        r'<tr(?: class="(wrong)")?><th scope="row" class="mode">([^<]*)</th><td class="answer">.*?computed">(\d+)<'
        r'.*?title="context">(.*?)<', page
    )  # fmt: skip
    assert [mode for wrong, mode, *_ in rows if wrong] == ["full", "full"]
    assert [context for *_, context in rows] == ["-", *["same"] * 3, *["-", *["new"] * 3] * 4]
    # No prompt reuses another one: a mode that recomputes tokens computes more of them.
    none, exact, approximate, full = ([int(row[2]) for row in rows if row[1] == mode] for mode in MODES)
    assert full[0] == approximate[0] == exact[0] < none[0]
    assert exact[1:] == none[1:]
    assert all(a < b < c for a, b, c in zip(full[1:], approximate[1:], none[1:], strict=True))
    assert re.search(r"1.5rem repeat\(5,.*?>E</span>", page)  # columns of the widest picture
    assert re.search(r"tiny-vqa on cpu, float32; .*, \d+ cores; vlcache-jax .*, jax .*; 20\d\d-", page)
    assert "docs/guides/reuse.md" in page
    assert "http" not in page  # nothing is loaded from elsewhere
    # What other commands ask alike runs the same programs, which are on disk now.
    known = set(compiled)
    assert run("ask", PICTURES / "picture.png", "What is at C2?").exit_code == 0
    row = {"image": str(PICTURES / "picture.png"), "question": "What is at C2?"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert run("run", tmp_path / "rows.jsonl", tmp_path / "answers.jsonl", "--reuse", "approximate").exit_code == 0
    assert len(compiled) > 20
    assert compiled == known


@pytest.mark.slow_for("qwen2_5_vl")
@pytest.mark.usefixtures("few_buckets")
def test_ask(run, family_checkpoint, tmp_path, textured_image):
    Image.fromarray(textured_image(60, 90)).save(tmp_path / "a.png")
    arguments = ("-m", family_checkpoint, "--max-tokens", "3", "--temperature", "0")
    arguments += (*WORDS, "--max-pixels", "8000")
    result = run("ask", *arguments, tmp_path / "a.png", "What is it?")
    assert result.exit_code == 0, result.output
    assert re.search(r"prompt tokens, \d+ of images; first token after .* s, [1-3] tokens", result.stderr)
    [times] = re.findall(r"after (\S+) s, .* tokens in (\S+) s, of which (\S+) s are compilation", result.stderr)
    first, others, compiling = map(float, times)
    assert 0 < compiling < first + others + 0.01  # as they are rounded
    twice = run("ask", *arguments, "--twice", tmp_path / "a.png", "What is it?")
    assert twice.exit_code == 0, twice.output
    half = len(twice.stdout) // 2
    assert twice.stdout[:half] == twice.stdout[half:]
    assert re.search(r"(?s)miss \(unknown_image\).* 0 reused\]\n.*exact; .* [1-9]\d* reused\]", twice.stderr)
    assert "compilation" not in twice.stderr  # both answers found their programs compiled
    assert run("ask", *arguments, tmp_path / "a.png").stderr.startswith("error: the question must be the last argument")
    assert "\nerror: reuse must be" in run("ask", *arguments, "--reuse", "most", "What?").stderr
    assert "\nerror: compress must be" in run("ask", *arguments, "--compress", "most", "What?").stderr
    small = run("ask", *arguments, "--host-bytes", "0", tmp_path / "a.png", "What is it?")
    assert small.exit_code == 0, small.output


@pytest.mark.usefixtures("few_buckets")
def test_ask_hands_its_options_on(run, checkpoints, tmp_path, textured_image, monkeypatch):
    Image.fromarray(textured_image(60, 90)).save(tmp_path / "a.png")
    asked = []
    chat = LLM.chat

    def noted(self, conversation, params, **options):
        found = chat(self, conversation, params, **options)
        sizes = self.max_model_len, self.stats().kv_cache_bytes
        asked.append((sizes, params, found[0].prompt, options.get("cache_salt")))
        return found

    monkeypatch.setattr(LLM, "chat", noted)
    # The sizes are such that they have the programs of other tests.
    arguments = ("-m", checkpoints("qwen3_vl"), "--max-tokens", "3", "--max-model-len", "1000", "--top-p", "0.5")
    arguments += ("--kv-cache-bytes", "17MB", "--system", "Be brief.", "--seed", "5", "--disk", tmp_path / "disk")
    result = run("ask", *arguments, "--twice", tmp_path / "a.png", "What is it?")
    assert result.exit_code == 0, result.output
    assert {(length, params.top_p, params.seed) for (length, _), params, *_ in asked} == {(1000, 0.5, 5)}
    assert all(16_000_000 < nbytes <= 17_000_000 for (_, nbytes), *_ in asked)
    assert all("Be brief." in prompt for *_, prompt, _ in asked)
    # What was rehearsed is not kept: the disk has what the answers computed, once.
    assert [salt is None for *_, salt in asked[-2:]] == [True, True]
    assert any(salt for *_, salt in asked[:-2])
    assert len(list((tmp_path / "disk").rglob("*.safetensors"))) == 2
    assert "\nerror: kv_cache_bytes" in "\n" + run("ask", "--kv-cache-bytes", "some", "What?").stderr
    again = run("ask", *arguments, tmp_path / "a.png", "What is it?")
    assert "images: exact" in again.stderr


@pytest.mark.slow
def test_ask_about_a_film(run, family_checkpoint, tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height = 64, 48
        for shade in range(0, 240, 20):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    tokens = []
    for rate in ("4", "2"):
        result = run("ask", "-m", family_checkpoint, "--max-tokens", "1", "--fps", rate, tmp_path / "a.mp4", "What?")
        assert result.exit_code == 0, result.output
        tokens.append(int(re.search(r"(\d+) of images", result.stderr)[1]))
    assert tokens[0] == 2 * tokens[1] > 0  # twice as many frames


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


@pytest.mark.slow
@pytest.mark.thorough_for("qwen2_5_vl")
def test_bench_ttft(run, family_checkpoint, tmp_path):
    out = tmp_path / "ttft.json"
    arguments = ("--images", "2", "--tokens", "16", "--text-before", "7", "--repeats", "1", "--dtype", "float32")
    result = run("bench", "ttft", family_checkpoint, *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    names = ["cold", "encoder cached", "r = 0.3", "r = 0.2", "r = 0.1", "r = 0", "schedule", "shift"]
    assert [row["configuration"].partition(",")[0] for row in rows] == names
    assert [row["tokens reused"] for row in rows] == [0, 0, 24, 26, 30, 32, 32, 30]
    assert all(row["TTFT ms"] > 0 and row["GFLOP"] > 0 and row["floor ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--image-tokens", "1024,many"), "image_tokens must be positive integers like \"1024,3072\", got '1024,many'"),
        (("--image-tokens", "1024", "--images", "2"), "images and image_tokens are mutually exclusive"),
        (("--image-tokens", "2500"), "image_tokens must be divisible by"),
        (("--codec", "auto,int2"), "codec must be one of"),
        (("--codec", "int8,int8"), "codecs must have at least one value and no duplicates"),
        (("tiny-vqa", "--random-weights", "qwen3-vl-8b"), "random_weights must be None if model is set"),
    ],
)
def test_bench_ttft_says_what_is_wrong(run, arguments, message):
    result = run("bench", "ttft", *arguments)
    assert result.exit_code == 1
    assert f"error: {message}" in result.stderr


def test_help_and_errors_of_usage_wait_for_no_jax():
    """Of every command, in one process; what is imported by one would be seen after it."""
    words = [[], ["serve", "--prot", "1"], ["run"], ["ask", "--modle", "a"], ["nothing"]]
    words += [list(path) for path, _ in commands(typer.main.get_command(app))]
    code = f"""
import sys
from typer.testing import CliRunner
from vlcache_jax.commands.cli import app
for words in {words!r}:
    usage = any(word.startswith("--") for word in words) or words in (["run"], ["nothing"])
    result = CliRunner().invoke(app, words if usage else [*words, "--help"])
    assert result.exit_code == (2 if usage else 0), (words, result.output)
    assert ("Usage" in result.output), words
    slow = {{"jax", "jaxlib", "flax", "transformers", "tokenizers", "starlette"}} & set(sys.modules)
    assert not slow, (words, slow)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

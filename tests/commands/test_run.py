"""`vlcache run`: what rows ask, and that each is answered once, however the command is stopped."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image
from typer.testing import CliRunner

import vlcache_jax.common.progress as progress
from tests.helper import FEW, SIZES, WORDS, some_cases, with_thinking_tags
from vlcache_jax import LLM, StructuredOutputs
from vlcache_jax.assets import PICTURES
from vlcache_jax.commands.cli import app
from vlcache_jax.commands.options import warn_of_others
from vlcache_jax.commands.rows import InputLine, OutputLine

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PLACE = {"properties": {"at": {"enum": ["A1", "B2"]}}, "required": ["at"], "additionalProperties": False}
LOOK = [{"type": "function", "function": {"name": "look", "parameters": PLACE}}]


def parsed(row, *, trusts_templates=False, chats=None, **defaults):
    line = row if isinstance(row, str) else json.dumps(row)
    folder = pathlib.Path("/data")
    return InputLine.parse(
        line, 7, "0123456789abcdef", defaults, folder, trusts_templates=trusts_templates, chats=chats
    )


def openai(**body):
    return {"custom_id": "a", "method": "POST", "url": URL, "body": {"messages": HELLO} | body}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_question_is_a_conversation():
    row = parsed({"id": 3, "images": ["a.jpg", "b.jpg"], "question": "Which?", "max_tokens": 5, "metadata": [1]})
    [message] = row.conversation
    assert message["role"] == "user"
    assert message["content"] == [
        {"type": "image", "image": "/data/a.jpg"},
        {"type": "image", "image": "/data/b.jpg"},
        {"type": "text", "text": "Which?"},
    ]
    assert (row.error, row.name, row.kept, row.params.max_tokens) == (None, 3, {"id": 3, "metadata": [1]}, 5)
    assert parsed({"question": "?", "metadata": None}).kept == {"metadata": None}
    assert parsed({"image": "/a.jpg", "question": "?"}).conversation[0]["content"][0]["image"] == "/a.jpg"
    [turn] = parsed({"image": "a.jpg", "video": "clip.mp4", "question": "?"}).conversation
    assert turn["content"][:2] == [
        {"type": "image", "image": "/data/a.jpg"},
        {"type": "video", "video": "/data/clip.mp4"},
    ]
    assert parsed({"question": "?"}).conversation[0]["content"] == [{"type": "text", "text": "?"}]
    assert parsed({"messages": HELLO}).conversation == HELLO


def test_what_a_row_does_not_say():
    row = parsed({"question": "?", "temperature": 1}, max_tokens=9, temperature=0)
    assert (row.params.max_tokens, row.params.temperature) == (9, 1)
    own = int("01234567", 16) + 7  # of the row, and of its place, whenever it runs
    assert (row.params.seed, parsed({"question": "?", "seed": None}).params.seed) == (own, own)
    assert parsed({"question": "?", "seed": -1}).params.seed == own
    assert parsed({"question": "?", "seed": 4, "min_p": None}).params.seed == 4


def test_a_row_says_how_it_becomes_text():
    """But a template is a program, which is taken only from files that are trusted."""
    more = {"chat_template_kwargs": {"thinks": False}, "continue_final_message": True}
    for row in ({"messages": HELLO} | more, openai(**more)):
        assert parsed(row).conversation == {"messages": HELLO, **more}
        mine = openai(**row["body"], chat_template="a") if "body" in row else row | {"chat_template": "a"}
        assert parsed(mine, trusts_templates=True).conversation == {"messages": HELLO, "chat_template": "a", **more}
        assert parsed(mine).error == (
            "line 7: chat_template is not allowed, because a template can loop forever; pass "
            "--trust-request-chat-template if you trust the file"
        )
    forced = openai(tools=LOOK, tool_choice="required", chat_template="{{ 1 }}")
    assert "chat_template is not allowed" in parsed(forced, chats=object()).error  # it has rendered nothing


def test_a_plain_row_offers_tools():
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert parsed({"messages": HELLO, "tools": tools}).conversation == {"messages": HELLO, "tools": tools}


def test_a_system_message_is_for_rows_without_one():
    told = {"role": "system", "content": "Be brief."}
    assert parsed({"messages": HELLO}).with_system("Be brief.").conversation == [told, *HELLO]
    own = [{"role": "system", "content": "Be long."}, *HELLO]
    assert parsed({"messages": own}).with_system("Be brief.").conversation == own
    assert parsed(openai()).with_system("Be brief.").conversation == [told, *HELLO]
    assert parsed({"messages": "Hello"}).with_system("Be brief.").conversation == "Hello"  # wrong as it is


def test_images_lie_beside_the_file():
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}},
        {"type": "image_url", "image_url": "file:///c.png"},
        {"type": "image", "path": "../d.png"},
        {"type": "image", "url": "https://host/e.png"},
        {"type": "image", "base64": "abcd"},
        {"type": "text", "text": "f.png"},
        5,
    ]
    row = parsed({"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "a.png"}, 3]})
    assert row.conversation[0]["content"] == [
        {"type": "image", "image": "/data/a.png"},
        {"type": "image_url", "image_url": {"url": "/data/b.png", "detail": "low"}},
        *parts[2:3],
        {"type": "image", "path": "/data/../d.png"},
        *parts[4:],
    ]
    assert row.conversation[1:] == [{"role": "user", "content": "a.png"}, 3]


def test_a_row_of_openai():
    row = parsed(
        openai(
            model="gpt", user="u", stream=False, n=2, max_tokens=None, max_completion_tokens=8, logprobs=True,
            top_logprobs=3, logit_bias={"5": -100}, response_format={"type": "text"}, top_p=None, stop=["x"],
        )
    )  # fmt: skip
    assert (row.error, row.is_openai, row.name) == (None, True, "a")
    params = row.params
    assert (params.n, params.max_tokens, params.logprobs, params.logit_bias) == (2, 8, 3, ((5, -100.0),))
    assert parsed(openai()).params.logprobs is None
    assert parsed(openai(logprobs=True)).params.logprobs == 0
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    held = StructuredOutputs(json={"type": "integer"})
    assert parsed(openai(response_format=schema)).params.structured_outputs == held
    plain = {"question": "?", "structured_outputs": {"json": {"type": "integer"}}}
    assert parsed(plain).params.structured_outputs == held


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "must be JSON"),
        ("[1]", "must be a JSON object, got [1]"),
        ("[" * 100_000, "must be JSON"),
        ({}, "must have messages, or a question and its images, got nothing"),
        ({"prompt": "a"}, "unknown field 'prompt'"),
        ({"question": 3}, "question must be a string, got 3"),
        ({"question": "\ud800"}, "question must be text"),
        ({"question": "?", "messages": HELLO}, "messages and question are mutually exclusive, got both"),
        ({"question": "?", "image": "a", "images": []}, "image and images are mutually exclusive, got both"),
        ({"question": "?", "images": "a.jpg"}, "images must be a list, got 'a.jpg'"),
        ({"question": "?", "id": [1]}, "id must be a string or a number, got [1]"),
        ({"question": "?", "id": True}, "id must be a string or a number, got True"),
        ({"question": "?", "temperature": "hot"}, "temperature must be a number"),
        ({"question": "?", "logit_bias": {"x": 1}}, "logit_bias must have token ids"),
        ({"custom_id": "a"}, "body must be a JSON object, got None"),
        ({"body": {}}, "custom_id must be a string, got none"),
        (openai() | {"url": "/v1/embeddings"}, "method and url must be POST and /v1/chat/completions"),
        (openai() | {"more": 1}, "unknown field 'more'; expected one of custom_id, method, url, body"),
        (openai(tools=[{}]), "tools[0].function.name must be a name, got None"),
        (openai(tool_choice="required"), "tool_choice requires tools, got 'required' without any"),
        (openai(stream=True), "stream is not supported, got True"),
        (openai(response_format={"type": "xml"}), "response_format must be an object whose type is text, json_object"),
        ({"question": "?", "structured_outputs": {"regex": 5}}, "structured_outputs.regex must be a string, got 5"),
        (openai(logprobs=5), "logprobs must be true or false, got 5"),
        (openai(top_logprobs=5), "logprobs must be true if top_logprobs is set, got None"),
        ({"question": "?", "prompt_logprobs": 1}, "unknown field"),
        ('{"question": "?", "metadata": NaN}', "NaN is not a finite number"),
        ('{"question": "?", "metadata": 1e400}', "1e400 is not a finite number"),
        (openai(best_of=5), "unknown field"),
    ],
)
def test_a_wrong_row_is_told_by_its_line(row, message):
    found = parsed(row)
    assert found.params is None
    assert found.error.startswith("line 7: ")
    assert message in found.error
    told = json.loads(found.error_line(found.error))
    error = told["error"]["message"] if found.is_openai else told["error"]
    assert error == found.error
    answer = OutputLine.parse(json.dumps(told))
    assert (answer.number, answer.digest, answer.has_failed) == (7, "0123456789abcdef", True)


def test_a_line_tells_its_row_whatever_the_row_is_called():
    for row in (parsed({"question": 1, "id": "batch_req_5_x"}), parsed(openai(tools=[1]) | {"custom_id": "a_b_c"})):
        answer = OutputLine.parse(row.error_line("wrong").decode())
        assert (answer.number, answer.digest) == (7, "0123456789abcdef")
    for line in ("", "[]", "{}", '{"line": true, "key": "a"}', '{"line": 3}', '{"id": "batch_req_"}', '{"id": 4}'):
        with pytest.raises(ValueError, match=r"^must be"):
            OutputLine.parse(line)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(checkpoints, few_buckets):
    first = ("-m", str(checkpoints("qwen3_vl")), "--max-tokens", "4", *WORDS)
    return lambda *arguments: CliRunner().invoke(app, ["run", *first, *map(str, arguments)])


def write_rows(folder, textured_image, count, *, wrong=()):
    """A file of rows in both formats, some with pictures, some that draw; those in `wrong` are wrong."""
    for i in range(4):
        Image.fromarray(textured_image(64, 64 + 32 * (i % 3), i)).save(folder / f"{i}.png")
    lines = []
    for i in range(count):
        images = [str(folder / f"{i % 4}.png")] if i % 3 == 0 else []
        if i in wrong:
            bad = ("not JSON", {"question": 3}, {"question": "?", "image": "missing.png"}, openai(tools=[{}]))[i % 4]
            lines.append(bad if isinstance(bad, str) else json.dumps(bad))
        elif i % 2:
            parts = [{"type": "image_url", "image_url": {"url": path}} for path in images]
            content = [*parts, {"type": "text", "text": f"Row {i}?"}]
            lines.append(
                json.dumps(openai(messages=[{"role": "user", "content": content}]) | {"custom_id": f"row_{i}"})
            )
        else:
            lines.append(json.dumps({"id": i, "images": images, "question": f"Row {i}?", "temperature": i % 4 / 2}))
    source = folder / "in.jsonl"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return source


def answers(out):
    """What each row was answered, in the order of the lines."""
    found = []
    for line in out.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        text = answer.get("text")
        if answer.get("response"):
            text = answer["response"]["body"]["choices"][0]["message"]["content"]
        found.append((OutputLine.parse(line).number, text, answer["error"]))
    return found


def test_a_file_is_answered(run, tmp_path, textured_image):
    wrong = {2, 3, 5}
    source, out = write_rows(tmp_path, textured_image, 14, wrong=wrong), tmp_path / "out.jsonl"
    result = run(source, out)
    assert result.exit_code == 0, result.output
    assert result.stderr.endswith(f"{out} has 14 lines, 3 of them with an error\n")
    assert "line 4: tools[0].function.name must be a name" in result.stderr
    whole = answers(out)
    assert [number for number, *_ in whole] == list(range(1, 15))
    for number, text, error in whole:
        assert (error is not None) == (number - 1 in wrong), (number, text, error)
    [missing] = [error for number, _, error in whole if number == 3]
    path = tmp_path / "missing.png"
    assert missing == f"line 3 image must be the path of a readable file, got '{path}': no such file"
    lines = out.read_bytes().splitlines(keepends=True)
    told = json.loads(lines[0])
    assert (told["line"], told["id"], told["finish_reason"], told["completion_tokens"]) == (1, 0, "length", 4)
    body = json.loads(lines[1])["response"]["body"]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 4

    # A second run finds everything; a third one the rows that are missing, behind the end of a line that was cut.
    assert run(source, out).stderr.startswith("14 of 14 requests are finished\n")
    assert out.read_bytes() == b"".join(lines)
    for last, count in ((lines[0][:20], 8), (lines[0][:-1], 9), (lines[1][:5], 8)):
        out.write_bytes(b"".join(lines[9:] + lines[4:7]) + last)
        # No answer depends on these; rows of the same step, so that the programs are those of the first run.
        result = run(source, out, "--max-rows", SIZES["buckets"].max_rows, "--host-bytes", "1MiB")
        assert result.exit_code == 0, result.output
        assert result.stderr.startswith(f"{count} of 14 requests are finished\n")
        assert answers(out) == whole

    # Wrong rows are answered again where that is asked for.
    Image.new("RGB", (64, 64)).save(tmp_path / "missing.png")
    assert run(source, out, "--retry-errors").stderr.startswith("11 of 14 requests are finished\n")
    again = answers(out)
    assert again[2][2] is None
    assert [one for one in again if one[0] != 3] == [one for one in whole if one[0] != 3]


def test_answers_are_told_apart(run, tmp_path):
    """As a server does: calls, forced ones too, and thinking."""
    thinks = "{{ messages[0].content }}</think>{% if add_generation_prompt %}<think>\n{% endif %}"
    rows = (
        openai(tools=LOOK, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=5, max_tokens=99),
        openai(chat_template=thinks, ignore_eos=True, max_tokens=5),
    )
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(source, out, "--trust-request-chat-template").exit_code == 0
    called, thought = (json.loads(line)["response"]["body"] for line in out.read_text().splitlines())
    [choice] = called["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"], call["function"]["name"]) == (
        "tool_calls",
        None,
        "look",
    )
    assert json.loads(call["function"]["arguments"])["at"] in ("A1", "B2")
    message = thought["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] == ""
    assert thought["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_thinking_is_limited_as_rows_say(checkpoints, few_buckets, tmp_path):
    thinker = with_thinking_tags(checkpoints("qwen3_vl"), tmp_path / "model")
    thinks = "{{ messages[0].content }}</think>{% if add_generation_prompt %}<think>\n{% endif %}"
    options = {"chat_template": thinks, "ignore_eos": True, "max_tokens": 130}
    rows = [openai(**options, **more) for more in ({}, {"thinking_token_budget": 3}, {"thinking_token_budget": "3"})]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["run", "-m", str(thinker), *WORDS, str(source), str(out), "--trust-request-chat-template"]
    assert CliRunner().invoke(app, given).exit_code == 0
    free, limited, wrong = (json.loads(line) for line in out.read_text().splitlines())
    assert free["response"]["body"]["choices"][0]["message"]["content"] == ""
    message = limited["response"]["body"]["choices"][0]["message"]
    assert message["reasoning_content"].endswith("based on the thinking directly now.")
    assert message["content"]
    assert "thinking_token_budget" in str(wrong["error"])


def test_errors_count_a_rows_own_messages(run, tmp_path):
    """Also where a system message was put before them."""
    told, robot = {"role": "system", "content": "Be long."}, {"role": "robot", "content": "a"}
    rows = {"messages": [*HELLO, robot]}, {"messages": [told, *HELLO, robot]}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for system, first in (("Be brief.", "line 1 messages[1]"), ("<|image_pad|>", "line 1 --system")):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--system", system, "--overwrite")
        errors = [error.partition(" must ")[0] for *_, error in answers(tmp_path / "out.jsonl")]
        assert errors == [first, "line 2 messages[2]"]


def test_rows_are_compressed_as_they_say(run, tmp_path):
    """Others as the command says; what is wrong is the row's own error."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    said = {"messages": [{"role": "user", "content": "A star is " * 9}], "ignore_eos": True}
    rows = [openai(**said, return_cache_report=True, compress=one) for one in ("random-0.5", None)]
    rows += [openai(compress="most"), openai(compress=5), *(said | {"compress": one} for one in ("random-0.5", 5, "2"))]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        "error: compress='vl-cache-0.5' needs a compressed KV pool"
        in run(source, out, "--compress", "vl-cache-0.5").stderr
    )
    pool = ("--compressed-kv-bytes", str(2**22))
    assert run(source, out, "--compress", "vl-cache-0.5", *pool).exit_code == 0
    told = [json.loads(line) for line in out.read_text().splitlines()]
    policies = [one["response"]["body"]["cache"]["compression"]["policy"] for one in told[:2]]
    assert policies == ["random-0.5", "vl-cache-0.5"]
    errors = [one["error"] and one["error"]["message"].partition(",")[0] for one in told[:4]]
    assert errors[2:] == ["line 3 compress must be one of vl-cache-A", "line 4: compress must be a string"]
    errors = [one["error"] and one["error"].partition(",")[0] for one in told[4:]]
    assert errors == [None, "line 6: compress must be a string", "line 7 compress must be one of vl-cache-A"]


def test_templates_are_taken_from_trusted_files(run, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"messages": HELLO}, {"messages": HELLO, "chat_template": "x"}, {"messages": HELLO, "chat_template": 5}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(source, out).exit_code == 0
    assert [error is None for *_, error in answers(out)] == [True, False, False]
    assert run(source, out, "--retry-errors", "--trust-request-chat-template").exit_code == 0
    assert [error for *_, error in answers(out)] == [None, None, "line 3 chat_template must be a string, got 5"]
    assert [json.loads(line).get("prompt_tokens") for line in out.read_text().splitlines()][1] == 1


def test_answers_to_something_else_are_not_mixed(run, tmp_path, textured_image):
    source, out = write_rows(tmp_path, textured_image, 3), tmp_path / "out.jsonl"
    assert run(source, out).exit_code == 0
    before = out.read_bytes()
    for change in (
        ("--reuse", "approximate"), ("--temperature", "0"), ("--top-p", "0.5"), ("--max-pixels", "8192"),
        ("--system", "Be brief."), ("--seed", "1"), ("--max-model-len", "64"), ("--compress", "vl-cache-0.5"),
    ):  # fmt: skip
        result = run(source, out, *change)
        assert result.exit_code == 1
        assert (
            "error: OUT line 1 must belong to a request of IN with the same settings (model, reuse, options)."
            in result.stderr
        )
        assert "importing JAX" not in result.stderr
        assert out.read_bytes() == before
    source.write_text(source.read_text().replace("Row 0?", "Row zero?"))
    assert "error: OUT line 1" in run(source, out).stderr
    assert run(source, out, "--overwrite").exit_code == 0
    assert out.read_bytes() != before
    out.write_bytes(out.read_bytes() * 2)
    assert "error: OUT line 4 must not repeat line 1 of IN, which has an output line above" in run(source, out).stderr


def test_options_reach_the_engine_and_the_rows(run, tmp_path, monkeypatch):
    engines, outputs = [], []
    iterate = LLM.chat_iter

    def noted(self, conversations, params, **options):
        engines.append((self.max_model_len, self.stats().kv_cache_bytes))
        for index, output in iterate(self, conversations, params, **options):
            outputs.append(output)
            yield index, output

    monkeypatch.setattr(LLM, "chat_iter", noted)
    (tmp_path / "in.jsonl").write_text('{"question": "Why?", "max_tokens": 40}\n')
    texts = []
    for seed in ("1", "2", "1"):
        given = ("--seed", seed, "--temperature", "5", "--system", "Be brief.")
        sizes = ("--max-model-len", "1000", "--kv-cache-bytes", "17MB")  # which have the programs of other tests
        assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", *given, *sizes, "--overwrite").exit_code == 0
        [(_, text, error)] = answers(tmp_path / "out.jsonl")
        assert error is None
        texts.append(text)
    assert texts[0] == texts[2] != texts[1]
    assert {length for length, _ in engines} == {1000}
    assert all(16_000_000 < nbytes <= 17_000_000 for _, nbytes in engines)
    assert all("Be brief." in output.prompt for output in outputs)
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--kv-cache-bytes", "some").stderr.startswith(
        "error: kv_cache_bytes must be a non-negative number of bytes"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("few_buckets")
def test_the_shipped_model_is_told_to_know_no_photographs(tmp_path, textured_image):
    """Once, where nobody named it, and not of the package's own pictures."""
    Image.fromarray(textured_image(64, 64)).save(tmp_path / "photo.png")
    own, photo = {"image": str(PICTURES / "left.png"), "question": "?"}, {"image": "photo.png", "question": "?"}
    url = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
    warned = []
    for rows in ([own, {"question": "?"}], [own, photo, photo], [url]):
        conversations = [parsed(row).conversation for row in rows]
        warned.append([warn_of_others(one) for one in conversations])
    assert warned == [[False, False], [False, True, True], [True]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (own, photo, photo)))
    for model, count in (([], 1), (["-m", "tiny-vqa"], 0)):
        words = ["run", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-tokens", 1, "--overwrite", *model]
        result = CliRunner().invoke(app, list(map(str, words)))
        assert result.exit_code == 0, result.output
        assert result.stderr.count("warning: no model is named (-m), so tiny-vqa runs") == count


def test_what_is_computed_is_kept_in_stores(run, tmp_path, textured_image):
    source, out = write_rows(tmp_path, textured_image, 3), tmp_path / "out.jsonl"
    disk, remote = tmp_path / "disk", tmp_path / "remote"
    assert run(source, out, "--disk", disk, "--remote", remote.as_uri()).exit_code == 0
    kept = [{path.name for path in folder.rglob("*.safetensors")} for folder in (disk, remote)]
    assert len(kept[0]) == 2  # one image, in one context
    assert kept[0] == kept[1]
    before = answers(out)
    assert "error: OUT line 1" in run(source, out, "--codec", "int8").stderr  # other answers, where reuse approximates
    assert run(source, out, "--disk", disk, "--overwrite").exit_code == 0
    assert answers(out) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "out.jsonl"], "IN must be a file that can be read, got missing.jsonl"),
        (["in.jsonl", "in.jsonl"], "OUT must differ from IN"),
        (["in.jsonl", "."], "OUT must be a file"),
        (["in.jsonl", "in.jsonl/out"], "OUT must be a file that can be written"),
        (["in.jsonl", "out.jsonl", "--reuse", "most"], "reuse must be"),
        (["in.jsonl", "out.jsonl", "--compress", "most"], "compress must be"),
        (["in.jsonl", "out.jsonl", "--max-tokens", "0"], "max_tokens must be"),
        (["in.jsonl", "out.jsonl", "--host-bytes", "much"], "host_bytes must be a non-negative number of bytes"),
        (["in.jsonl", "out.jsonl", "--remote", "ftp://host"], "remote must be a URL"),
        (["in.jsonl", "out.jsonl", "--peer", "10.0.0.7"], "peers must be"),
        (["in.jsonl", "out.jsonl", "--codec", "int2"], "codec must be one of"),
    ],
)
def test_what_is_wrong_is_told_at_once(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in.jsonl").write_text('{"question": "?"}\n')
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}"), result.stderr


def test_one_command_at_a_time(run, tmp_path, textured_image):
    import fcntl

    source, out = write_rows(tmp_path, textured_image, 3), tmp_path / "out.jsonl"
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "error: OUT must not be in use by another command" in run(source, out).stderr


@pytest.mark.parametrize("content", ['{"precious": 1}', '{"precious": 1}\n', "a: b", '{"id": "x"}', "\n"])
def test_another_file_stays_as_it_is(run, tmp_path, content):
    """Nor is its last line taken for the beginning of an answer."""
    source, out = tmp_path / "in.jsonl", tmp_path / "precious"
    source.write_text('{"question": "?"}\n')
    out.write_text(content)
    result = run(source, out)
    assert result.exit_code == 1
    assert "error: OUT line 1 must be" in result.stderr
    assert out.read_text() == content


def test_a_link_stays_a_link_and_modes_stay(run, tmp_path, textured_image):
    source, out, link = write_rows(tmp_path, textured_image, 3), tmp_path / "real", tmp_path / "link"
    assert run(source, out).exit_code == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[::-1]))
    out.chmod(0o600)
    link.symlink_to(out)
    assert run(source, link).exit_code == 0
    assert link.is_symlink()
    assert (out.read_bytes(), out.stat().st_mode & 0o777) == (b"".join(lines), 0o600)


def test_a_disk_that_is_full_in_the_end_loses_nothing(run, tmp_path, textured_image, monkeypatch):
    source, out = write_rows(tmp_path, textured_image, 3), tmp_path / "out.jsonl"
    assert run(source, out).exit_code == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(mixed := b"".join(lines[::-1]))

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("os.fsync", full)
        result = run(source, out)
    assert result.exit_code == 0
    assert f"the lines of {out} could not be sorted: No space left on device" in result.stderr
    assert out.read_bytes() == mixed
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out.jsonl"]


@pytest.mark.parametrize("change", ["another", "more", "fewer"])
def test_rows_that_change_meanwhile_are_told(run, tmp_path, textured_image, monkeypatch, change):
    source, out = write_rows(tmp_path, textured_image, 6), tmp_path / "out.jsonl"
    lines = source.read_text().splitlines(keepends=True)
    before = progress.say

    def change_now(line):
        before(line)
        if line == "importing JAX":
            now = {"another": [*lines[:5], lines[0]], "more": [*lines, lines[0]], "fewer": lines[:4]}[change]
            source.write_text("".join(now))

    with monkeypatch.context() as context:
        context.setattr("vlcache_jax.commands.run.say", change_now)
        result = run(source, out)
    assert result.exit_code == 1
    assert "error: IN must not change while the command runs" in result.stderr
    source.write_text("".join(lines))
    result = run(source, out)
    assert result.exit_code == 0, result.output
    assert [number for number, *_ in answers(out)] == [1, 2, 3, 4, 5, 6]


def test_nothing_is_loaded_for_rows_that_are_all_wrong(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\x89PNG\r\n\x1a\nIHDR\n\xff\nno\n")
    result = CliRunner().invoke(app, ["run", str(source), str(out), "-m", "nowhere"])
    assert result.exit_code == 1
    assert "error: IN must contain at least one valid request, but each has an error" in result.stderr
    assert "importing JAX" not in result.stderr
    assert [error is not None for *_, error in answers(out)] == [True] * 5
    assert "line 3: " in result.stderr
    assert "line 4: " not in result.stderr  # some are named, not all


def test_to_begin_anew_loses_nothing_before_a_model_is_open(run, tmp_path, textured_image):
    source, out = write_rows(tmp_path, textured_image, 3), tmp_path / "out.jsonl"
    assert run(source, out).exit_code == 0
    before = out.read_bytes()
    result = CliRunner().invoke(app, ["run", str(source), str(out), "-m", "./nowhere", "--overwrite"])
    assert result.exit_code == 1
    assert "stopped with 0 of 3 requests finished; the same command without --overwrite resumes" in result.stderr
    assert out.read_bytes() == before


def test_what_cannot_begin_leaves_nothing(tmp_path, textured_image):
    source, out = write_rows(tmp_path, textured_image, 3), tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["run", str(source), str(out), "-m", "./nowhere"])
    assert result.exit_code == 1
    assert "stopped with" not in result.stderr  # it would not go on
    assert not out.exists()


def test_the_first_line_may_have_a_byte_order_mark(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "Hi"}\n', encoding="utf-8-sig")
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl").exit_code == 0
    [(_, text, error)] = answers(tmp_path / "out.jsonl")
    assert (bool(text), error) == (True, None)


def test_a_file_without_rows(run, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n\n")
    result = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize("size", some_cases((140, 1), (2000, 5)))
def test_killed_at_random_each_row_is_answered_once(checkpoints, tmp_path, textured_image, size):
    rows, kills = size
    rng = random.Random(0)
    wrong = set(rng.sample(range(rows), rows // 66))
    source = write_rows(tmp_path, textured_image, rows, wrong=wrong)
    # Each process compiles or loads its programs: these are few.
    code = f"""
from vlcache_jax import BucketSizes
from vlcache_jax.commands.cli import main
from vlcache_jax.device import memory_plan
memory_plan.default_buckets = lambda *_: {FEW}
main()
"""
    words = [sys.executable, "-c", code, "run", str(source)]
    model = ["-m", str(checkpoints("qwen3_vl-tied")), "--max-tokens", "4", *WORDS]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    subprocess.run([*words, str(whole), *model], check=True, capture_output=True, cwd=tmp_path)
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)[:kills]:
        process = subprocess.Popen([*words, str(out), *model], stderr=subprocess.DEVNULL, cwd=tmp_path)
        before = out.stat().st_size if out.exists() else 0
        enough = before + rng.uniform(0, whole.stat().st_size / 8)  # so that rows are left, however fast it is
        while process.poll() is None and (not out.exists() or out.stat().st_size <= enough):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.05))
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(how)
        process.wait()
    subprocess.run([*words, str(out), *model], check=True, capture_output=True, cwd=tmp_path)
    found = answers(out)
    assert [number for number, *_ in found] == list(range(1, rows + 1))
    assert found == answers(whole)
    assert {number - 1 for number, _, error in found if error is not None} == wrong


def test_paths_of_videos_begin_in_the_folder_of_rows(tmp_path):
    parts = [
        {"type": "video", "video": "a.mp4", "fps": 2},
        {"type": "video", "video": ["1.png", "data:;base64,AA=="]},
        {"type": "video_url", "video_url": {"url": "b.mp4"}},
    ]
    line = json.dumps({"messages": [{"role": "user", "content": parts}]})
    row = InputLine.parse(line, 1, "0" * 16, {}, tmp_path)
    assert row.error is None
    whole, frames, url = row.conversation[0]["content"]
    assert whole == {"type": "video", "video": str(tmp_path / "a.mp4"), "fps": 2}
    assert frames["video"] == [str(tmp_path / "1.png"), "data:;base64,AA=="]
    assert url["video_url"] == {"url": str(tmp_path / "b.mp4")}


def test_paths_of_images_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    coded = "iVBORw0KGgo" + "A" * 99  # which is no path, as its error will say
    row = InputLine.parse(
        json.dumps({"images": ["~/a.png", "b.png", coded], "question": "?"}), 1, "0" * 16, {}, tmp_path
    )
    values = [part["image"] for part in row.conversation[0]["content"][:3]]
    assert values == ["/home/me/a.png", str(tmp_path / "b.png"), coded]

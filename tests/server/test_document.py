"""What schemathesis makes of the OpenAPI document: the server never fails, and each answer is as the document says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.helper import FEW_WORDS, serving
from vlcache_jax.server.openapi import document

# What a request may ask for is what it costs.
SMALL = ["--max-model-len", "256", "--max-n", "4"]
CONFIG = """
request-timeout = 60
continue-on-failure = true
cache.enabled = false
hooks = "{hooks}"
headers = {{ Authorization = "Bearer boss" }}

[generation]
max-examples = {examples}
deterministic = true

[phases.fuzzing]
error-feedback.enabled = false
extra-data-sources.responses = false

[checks]
# The document cannot say all that is wrong (a grammar that does not compile, a picture that is none).
positive_data_acceptance.enabled = false

[[operations]]
include-path = {main}
generation.max-examples = 150

[[operations]]
# Its messages are those of chats.
include-path = "/tokenize"
phases.coverage.enabled = false

[[operations]]
# These are other names of /score and /rerank.
include-path = ["/v1/score", "/v1/rerank"]
phases.coverage.enabled = false
"""


@pytest.mark.servers
def test_answers_are_as_the_document_says(checkpoints, tmp_path):
    config = tmp_path / "schemathesis.toml"
    main = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
    config.write_text(CONFIG.format(examples=20, main=main, hooks=Path(__file__).with_name("fuzzed.py")))
    words = [str(checkpoints("qwen3_vl-tied")), *FEW_WORDS, *SMALL, "--admin-key", "boss"]
    with serving(*words) as (process, url, lines):
        document = url.removesuffix("/v1") + "/openapi.json"
        asked = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", document]
        found = subprocess.run(asked, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert found.returncode == 0, found.stdout + "".join(lines[-100:])
        operations, cases = re.search(r"(?s)Tested: (\d+).*?(\d+) generated, \2 passed", found.stdout).groups()
        assert re.search(rf"Selected: {operations}/{operations}\n", found.stdout)  # none was left out
        assert int(cases) > 4 * 150  # of the main ones alone
        # Deterministic: of conversations that fuzzing makes of the document's schema two in five are answered.
        fuzzed = [line.split() for line in (tmp_path / "calls.txt").read_text().splitlines()]
        statuses = [status for *call, status in fuzzed if call == ["fuzzing", "positive", main[0]]]
        assert statuses.count("200") > max(50, len(statuses) / 3), statuses
        assert process.poll() is None
        logged = "".join(lines)
        assert "Traceback" not in logged, logged[logged.find("Traceback") :][:4000]


def test_every_part_of_the_document_is_a_schema():
    """Also where no answer that a test asks for has it."""
    told = document(["m"])

    def check(one):
        if isinstance(one, dict):
            for name in ("schema", "items"):
                assert isinstance(one.get(name, {}), dict)
            if one.get("type") == "object":
                for name, inner in one.get("properties", {}).items():
                    assert isinstance(inner, dict), name
        for inner in one.values() if isinstance(one, dict) else one if isinstance(one, list) else ():
            check(inner)

    check(told)
    [content] = told["paths"]["/cache/precompute"]["post"]["responses"]["200"]["content"].values()
    assert content["schema"]["properties"] == {"keys": {"type": "array", "items": {"type": "string"}}}

"""What schemathesis makes of the OpenAPI document: the server never fails, and each answer is as the document says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.server.helper import WORDS, serving

# What a request may ask for is what it costs.
SMALL = ["--max-model-len", "256", "--max-n", "4"]
CONFIG = """
request-timeout = 60
continue-on-failure = true
cache.enabled = false
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
generation.max-examples = 300
"""


@pytest.mark.servers
def test_answers_are_as_the_document_says(checkpoints, tmp_path):
    config = tmp_path / "schemathesis.toml"
    main = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    config.write_text(CONFIG.format(examples=20, main=main))
    words = [str(checkpoints("qwen3_vl")), *WORDS, *SMALL, "--admin-key", "boss"]
    with serving(*words) as (process, url, lines):
        document = url.removesuffix("/v1") + "/openapi.json"
        asked = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", document]
        found = subprocess.run(asked, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert found.returncode == 0, found.stdout
        operations, cases = re.search(r"(?s)Tested: (\d+).*?(\d+) generated, \2 passed", found.stdout).groups()
        assert re.search(rf"Selected: {operations}/{operations}\n", found.stdout)  # none was left out
        assert int(cases) > 3 * 300  # of the main ones alone
        assert process.poll() is None
        assert "Traceback" not in "".join(lines)

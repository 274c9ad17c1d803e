"""What schemathesis is told beside the server's document, and what it notes (its "hooks")."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st
from PIL import Image


def _picture() -> str:
    file = io.BytesIO()
    Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# Of random URLs none is a picture.
schemathesis.openapi.format("uri", st.just(_picture()))


_LENGTHS = {
    "/v1/chat/completions": "max_tokens", "/v1/completions": "max_tokens", "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}  # fmt: skip


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Answers are short where nothing says how long they are to be."""
    name = _LENGTHS.get(context.operation.path)
    return {name: 4, **body} if name is not None and isinstance(body, dict) else body


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Notes of each call phase, mode, path and status."""
    meta = case.meta
    with Path("calls.txt").open("a") as notes:
        notes.write(f"{meta.phase.name.value} {meta.generation.mode.value} {case.path} {response.status_code}\n")

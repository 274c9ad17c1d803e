"""bfloat16 against the library's float32: no worse than the library's own bfloat16.

Rows pass the experts that they pass in float32: a rounding can change a router's choice, and with it everything.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helper import each_family
from tests.models import helper, parity


@pytest.fixture
def references(family_checkpoint, load_oracle, textured_image):
    """The library's model in float32 and in bfloat16."""
    exact = parity.reference(load_oracle(family_checkpoint), family_checkpoint, textured_image)
    rounded = load_oracle(family_checkpoint, "bfloat16")
    return exact, parity.reference(rounded, family_checkpoint, textured_image, exact)


def assert_no_worse(ours, theirs, exact):
    our_error, their_error = (np.abs(x - exact) for x in (ours, theirs))
    assert np.linalg.norm(our_error) <= 1.1 * np.linalg.norm(their_error)
    assert our_error.max() <= 2 * their_error.max()


@pytest.mark.thorough_for("qwen2_vl-flat-tied")
@pytest.mark.slow_for("qwen2_5_vl-flat-tied")
@each_family
def test_bfloat16(family_checkpoint, references):
    exact, theirs = references
    model = helper.load(family_checkpoint, "bfloat16")
    encoder_rows = helper.encode(model, exact.images, parity.NUM_PATCHES + 12)
    assert_no_worse(encoder_rows, theirs.encoder_rows, exact.encoder_rows)
    logits, pool, raw_k = helper.forward(
        model, helper.rows_of(exact.prompt), encoder_rows, helper.empty_pool(model, len(exact.logits)),
        routes=exact.routes,
    )  # fmt: skip
    assert_no_worse(logits, theirs.logits, exact.logits)
    assert_no_worse(np.stack(raw_k), np.stack(theirs.raw_k), np.stack(exact.raw_k))
    values = np.stack([np.asarray(v, np.float32) for v in helper.kept_by(model, pool)[1]])
    assert_no_worse(values, np.stack(theirs.v), np.stack(exact.v))

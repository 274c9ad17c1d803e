"""What the benchmark of codecs makes of logits. Running it takes minutes."""

import json
import pathlib

import numpy as np
import pytest

from research.codecs import AUTO, CodecComparison, divergence, summarize, tabulate

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "codecs_cpu.json"


def test_divergence():
    p, q = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.array([[0.25, 0.25, 0.5], [0.1, 0.8, 0.1]])
    found = divergence(np.log(p) + 7, (np.log(q) - 3).astype(np.float32))
    np.testing.assert_allclose(found, [0.25 * np.log(2), 0], atol=1e-6)
    for wrong in (np.zeros((0, 3)), np.array([[0, np.nan, 1]]), np.ones((2, 3))):
        for pair in ((wrong, wrong), (p[: len(wrong)], wrong)):
            with pytest.raises(ValueError, match="logits must be finite and differ from each other"):
                divergence(*pair)


def test_the_table_counts_tokens_alike():
    def compared(task, *kl):
        kl = np.array(kl)
        return CodecComparison(task, kl, 2 * kl, kl < 0.01, bool(kl[0] < 0.02))

    rows = tabulate({("full", "int8"): [compared("a", 0.001, 0.002), compared("b", 0.03), compared("a", 0.003)]})
    assert [(row["task"], row["questions"], row["tokens"], row["largest KL"]) for row in rows] == [
        ("a", 2, 3, 0.003), ("b", 1, 1, 0.03), ("all", 3, 4, 0.03)
    ]  # fmt: skip
    assert [row["mean KL"] for row in rows] == pytest.approx([0.002, 0.03, 0.009])
    assert [row["mean KL to cold"] for row in rows] == pytest.approx([0.004, 0.06, 0.018])
    assert [row["agreement %"] for row in rows] == [100, 0, 75]
    assert [row["right %"] for row in rows] == pytest.approx([100, 0, 200 / 3])
    [total] = summarize(rows)
    assert (total["worst task"], total["within"]) == ("b", False)


def test_int8_stays_within_its_limits():
    found = json.loads(RESULTS.read_text())
    assert [row["within"] for row in found["totals"] if row["codec"] == "int8"] == [True] * 3
    coded = [row for row in found["rows"] if row["codec"] != AUTO]
    assert all(row["mean KL"] > 0 for row in coded)

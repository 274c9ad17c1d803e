"""The portable kernels, compiled for each architecture on a machine without a GPU: what the kept result says holds."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest

from research import architectures

pytestmark = pytest.mark.cuda_gate

PATH = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "architectures.json"
KEPT = json.loads(PATH.read_text())
COLD = "paged attention, cold 4096"
LINKED = "link, int4"
OFTEN = ("sm_80", "sm_120")  # copies by threads, and by TMA; what is in 8 bits converted bit by bit, and at once


def cases() -> list[pytest.param]:
    """Two architectures with the kernel that is hardest to compile, and one more; all else by hand."""
    return [
        pytest.param(
            architecture,
            case,
            id=f"{architecture}: {case}",
            marks=() if case in (COLD, LINKED) and architecture in OFTEN else pytest.mark.thorough,
        )
        for architecture in architectures.TARGETS
        for case in architectures.CASES
    ]


@pytest.mark.parametrize(("architecture", "case"), cases())
def test_what_is_kept_holds(architecture: str, case: str) -> None:
    found = architectures.in_child(architecture, case)
    assert isinstance(found, list), found
    assert all(row["spilled bytes"] == 0 for row in found)
    if jax.__version__ == KEPT["versions"]["jax"] and case in KEPT[architecture]["cases"]:
        assert found == KEPT[architecture]["cases"][case]


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        pytest.param(
            architecture,
            case,
            marks=() if case == "products" and architecture in OFTEN else pytest.mark.thorough,
        )
        for architecture in architectures.TARGETS
        for case in ("products", "experts")
    ],
)
def test_products_in_8_bits_spill_nothing_and_write_nothing_dequantised(architecture: str, case: str) -> None:
    found = architectures.in_child(architecture, f"tests.gates.temporaries:{case}")
    assert isinstance(found, list), found
    assert len(found) == (3 if case == "products" else 6)
    for row in found:
        assert row["spilled bytes"] == 0
        assert row["programs on a multiprocessor"] >= 2


def test_a_compiler_that_aborts_does_so_in_its_child() -> None:
    found = architectures.in_child("sm_80", "tests.gates.aborting:commit")
    assert isinstance(found, str)
    assert found.startswith("SIGABRT: LLVM ERROR: Cannot select")
    assert isinstance(architectures.in_child("sm_90", "tests.gates.aborting:commit"), list)

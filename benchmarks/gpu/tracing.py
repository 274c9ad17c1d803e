"""Traces of the device and the host, and the parts of a program that are in CUDA graphs."""

from __future__ import annotations

import collections
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from vlcache_jax.benchmarks.gpu.plan import GpuPlan, Row

_HOST = 60  # maximum number of host events in a row
_CONDITION = re.compile(r"^ *condition:\n.*?(?=^ *body:$)", re.DOTALL | re.MULTILINE)


def traced(plan: GpuPlan, name: str, run: Callable[[], object]) -> Row:
    """Run `run` and return its kernels by name, the longest first; `trace_NAME.json` has all of them, and the host's
    events.

    Raises:
      ValueError: The trace has no events of a device.
    """
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        buffers = list(ProfileData.from_file(str(file)).buffers)
        device = [
            event
            for buffer in buffers
            if buffer.name.startswith("/host:CPU" if plan.rehearse else "/device:GPU")
            for line in buffer.lines
            if plan.rehearse or "Stream" in line.name
            for event in line.events
        ]
        host = [event for buffer in buffers if "host" in buffer.name for line in buffer.lines for event in line.events]
        if not device:
            raise ValueError(f"the trace has no events of a device, only of {[buffer.name for buffer in buffers]}")
        kernels = _by_name((event.name, event.duration_ns) for event in device)
        calls = _by_name((event.name, event.duration_ns) for event in host)[:_HOST]
        busy, gaps, span = _occupation([(event.start_ns, event.start_ns + event.duration_ns) for event in device])
    content = {"busy ms": busy, "span ms": span, "longest gaps ms": gaps[:40], "kernels": kernels, "host": calls}
    (plan.out / f"trace_{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    kinds: collections.Counter[str] = collections.Counter()
    for kernel in kernels:
        kinds[re.sub(r"[_.]?\d+", "", kernel["name"])] += kernel["ms"]
    return {"busy ms": busy, "span ms": span, "events": len(device), **dict(kinds.most_common(8))}


def _by_name(events: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    count: collections.Counter[str] = collections.Counter()
    took: dict[str, float] = collections.defaultdict(float)
    for name, ns in events:
        count[name] += 1
        took[name] += ns / 1e6
    longest_first = sorted(took, key=took.__getitem__, reverse=True)
    return [{"name": name, "count": count[name], "ms": took[name]} for name in longest_first]


def _occupation(spans: Sequence[tuple[float, float]]) -> tuple[float, list[float], float]:
    """Return milliseconds in which something ran, pauses (the longest first), and the total span; the spans are in
    ns.
    """
    ordered = sorted(spans)
    begin = until = ordered[0][0]
    busy, gaps = 0.0, []
    for start, end in ordered:
        if start > until:
            gaps.append((start - until) / 1e6)
        busy += max(0.0, end - max(start, until)) / 1e6
        until = max(until, end)
    return busy, sorted(gaps, reverse=True), (until - begin) / 1e6


def graphs(text: str) -> dict[str, int]:
    """Count which parts of a decode program are inside and outside CUDA graphs ("command buffers"). A loop's body
    counts once.

    Args:
      text: XLA's thunks of a decode program, after all passes, indented by nesting.

    Returns:
      Counts: graphs that no other graph contains; kernels (and copies, library calls) inside and outside of graphs;
      conditionals and loops outside. The host reads a predicate for a conditional, and for a loop whose number of
      iterations XLA does not know; the thunks do not show which loops these are.
    """
    names = {"kConditional": "conditionals outside", "kWhile": "loops outside"}
    found = dict.fromkeys(("graphs", "kernels inside", "kernels outside", *names.values()), 0)
    for kind, inside in thunks(text):
        if kind == "kCommandBuffer":
            found["graphs"] += not inside
        elif kind in names:
            found[names[kind]] += not inside
        else:
            found["kernels inside" if inside else "kernels outside"] += 1
    return found


def thunks(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the kinds of XLA's thunks in order, and whether each is inside a CUDA graph; without loops' conditions."""
    around: list[tuple[int, str]] = []  # indentation and kind of the enclosing lines
    for spaces, kind in re.findall(r"^( *)\d+: (k\w+)", _CONDITION.sub("", text), re.MULTILINE):
        while around and around[-1][0] >= len(spaces):
            around.pop()
        yield kind, any(outer == "kCommandBuffer" for _, outer in around)
        around.append((len(spaces), kind))


def dump_folder(plan: GpuPlan) -> str:
    """Return the folder to which the compiler dumps the decode programs."""
    return str(plan.out.resolve() / "dump")

"""CPU time of a cold prompt by part: products, attention and the rest, of the encoder and of the decoder.

    uv run python -m research.shares --out benchmarks/results/shares_cpu.json

The model is that of `vlcache bench ttft`, with random weights. Everything is compiled before; then prompts with new
images run within a trace of jax's profiler. The trace has every operation that XLA ran, and the time of its thread
without the operations that it called. The compiled programs name the part of the model of each operation.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vlcache_jax import LLM, SamplingParams
from vlcache_jax.benchmarks.random_models import drawn_weights, make_random_model
from vlcache_jax.common.files import check_writable
from vlcache_jax.study.report import environment, show, write

PIXELS = 32  # side in pixels of the area of a token
SIDE = 32  # tokens per side of an image
PARTS = {"encode": "encoder", "layer": "decoder", "layers": "decoder"}
OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$", re.MULTILINE)
ASKED = re.compile(r'op_name="([^"]*)"')

type Kind = tuple[str, str]
"""Whose an operation is, and what it does."""

type Operation = tuple[str, int, str]
"""The module that has it, the number that this has in a trace, and its own name."""


class Event(NamedTuple):
    """An operation that a thread ran, in nanoseconds."""

    begin: float
    end: float
    operation: Operation


def kind(program: str, place: str) -> Kind:
    """Return the kind of an operation of a program, from its place in the model."""
    part = PARTS.get(program, "around")
    if "attention)" in place:
        return part, "attention"
    return part, "products" if "dot_general" in place else "rest"


def compiled(llm: LLM) -> dict[str, list[dict[str, Kind]]]:
    """Return the operations of each compiled program by the names of modules."""
    programs = llm.service.device.runner.programs
    family = programs.family_of(llm.service.policy)
    missing = set(programs.missing(family))
    found = defaultdict(list)
    for program in family:
        if program not in missing:
            text = programs.program(program).as_text() or ""
            places = ((name, ASKED.search(rest)) for name, rest in OPERATION.findall(text))
            own = {name: kind(program.name, said[1] if said else "") for name, said in places}
            found[text.split(None, 2)[1].rstrip(",")].append(own)
    return found


def events(directory: str) -> Iterator[list[Event]]:
    """Yield the XLA operations of each thread, in order."""
    [path] = pathlib.Path(directory).rglob("*.xplane.pb")
    for buffer in jax.profiler.ProfileData.from_file(str(path)).buffers:
        for line in buffer.lines:
            own = []
            for event in line.events:
                said = dict(event.stats)
                if "hlo_op" in said:
                    operation = said["hlo_module"], said["program_id"], said["hlo_op"]
                    own.append(Event(event.start_ns, event.start_ns + event.duration_ns, operation))
            yield sorted(own, key=lambda one: (one.begin, -one.end))


def busy(thread: Iterable[Event]) -> dict[Operation, float]:
    """Return the seconds of each operation on a thread, without operations that it called."""
    found: dict[Operation, float] = defaultdict(float)
    around: list[Event] = []
    for event in thread:
        while around and around[-1].end <= event.begin:
            around.pop()
        seconds = (event.end - event.begin) / 1e9
        found[event.operation] += seconds
        if around:
            found[around[-1].operation] -= seconds
        around.append(event)
    return found


def shares(threads: Iterable[Iterable[Event]], known: Mapping[str, Sequence[Mapping[str, Kind]]]) -> dict[Kind, float]:
    """Return the seconds of each kind in a trace; `known` is the result of `compiled`."""
    spent: dict[Operation, float] = defaultdict(float)
    names: dict[tuple[str, int], set[str]] = defaultdict(set)
    for thread in threads:
        for operation, seconds in busy(thread).items():
            spent[operation] += seconds
            names[operation[:2]].add(operation[2])
    # Programs of one name are distinguished by their operations.
    own: dict[tuple[str, int], Mapping[str, Kind]] = {
        program: min(known.get(program[0], [{}]), key=lambda kinds: len(ran - kinds.keys()))
        for program, ran in names.items()
    }
    found: dict[Kind, float] = defaultdict(float)
    for operation, seconds in spent.items():
        found[own[operation[:2]].get(operation[2], ("around", "rest"))] += seconds
    return found


def measure(dtype: str, images: int, repeats: int) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    rng, params = np.random.default_rng(0), SamplingParams(max_tokens=1, temperature=0)

    def ask(llm: LLM) -> None:
        pictures = rng.integers(0, 256, (images, SIDE, SIDE, 3), np.uint8).repeat(PIXELS, 1).repeat(PIXELS, 2)
        parts: list[Any] = [{"type": "image", "image": picture} for picture in pictures]
        llm.chat([{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], params, use_tqdm=False)
        llm.cache.flush()

    with tempfile.TemporaryDirectory() as folder, drawn_weights():
        path, _ = make_random_model(folder)
        limits = {"max_pixels": (SIDE * PIXELS) ** 2}
        with LLM(path, dtype=dtype, max_model_len=8192, mm_processor_kwargs=limits, use_tqdm=False) as llm:
            ask(llm)
            llm.service.ahead.wait()
            llm.service.ahead.stop()
            known, found = compiled(llm), defaultdict[Kind, float](float)
            for _ in range(repeats):
                with tempfile.TemporaryDirectory() as trace:
                    with jax.profiler.trace(trace):
                        ask(llm)
                    for what, seconds in shares(events(trace), known).items():
                        found[what] += seconds
    whole = sum(found.values())
    return [
        {"dtype": dtype, "part": part, "what": what, "s": seconds / repeats, "share, %": 100 * seconds / whole}
        for (part, what), seconds in sorted(found.items(), key=lambda one: -one[1])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--images", type=int, default=2, help="number of images of 1024 tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    check_writable("out", arguments.out)
    rows = [row for dtype in arguments.dtypes for row in measure(dtype, arguments.images, arguments.repeats)]
    show(f"Busy threads of a cold prompt of {arguments.images} images of {SIDE**2} tokens", rows)
    if arguments.out is not None:
        head = environment("jax") | {"images": arguments.images, "repeats": arguments.repeats}
        write("Where a cold prompt's time goes", rows, head, arguments.out)


if __name__ == "__main__":
    main()

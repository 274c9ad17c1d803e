"""Opens a tiny model in a process of its own, as `test_program_files` asks, and prints what came of it as JSON."""

import contextlib
import json
import logging
import pathlib
import sys
from unittest import mock

import jax
import numpy as np

from tests.helper import FEW
from vlcache_jax import LLM, SamplingParams
from vlcache_jax.device import sampler
from vlcache_jax.device.programs import compile_cache, table
from vlcache_jax.pallas_kernels import PAGE

MODEL = sys.argv[1]
counts = {"lowered": 0, "compiled": 0}


def counted(name, function):
    def call(*arguments, **options):
        counts[name] += 1
        return function(*arguments, **options)

    return call


table.Programs._lower = counted("lowered", table.Programs._lower)
jax.stages.Lowered.compile = counted("compiled", jax.stages.Lowered.compile)


def opened():
    counts.update(dict.fromkeys(counts, 0))
    with LLM(MODEL, buckets=FEW, max_model_len=4 * PAGE, kv_cache_bytes=2**23, dtype="float32", use_tqdm=False) as llm:
        shown = set()
        llm.service.device.runner.programs.shows = lambda doing: contextlib.nullcontext(shown.add(doing.split("(")[0]))
        picture = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]
        [output] = llm.chat(
            [{"role": "user", "content": parts}],
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1),
        )
        answer = output.outputs[0]
        logprobs = [[token, one[token].logprob] for token, one in zip(answer.token_ids, answer.logprobs, strict=True)]
        return dict(counts) | {
            "answer": logprobs,
            "kernels": sorted(map(str, llm.kernels.items())),
            "programs": llm.service.device.runner.programs.num_programs,
            "stats": program_counts(llm.stats()),
            "shown": sorted({one.split()[0] for one in shown}),
        }


def program_counts(stats):
    return [stats.programs, stats.compiled_programs, stats.compile_seconds > 0, stats.load_seconds > 0]


def programs():
    return sorted(path for path in compile_cache.folder().iterdir() if path.suffix != ".json")


def damaged():
    """A file that is truncated, one that has another bit, and one that is another program's."""
    one, two, three, other, *_ = programs()
    one.write_bytes(one.read_bytes()[:50])
    content = two.read_bytes()
    two.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    three.write_bytes(other.read_bytes())
    with counting() as messages:
        return opened() | {"messages": len(messages)}


def misled():
    """What says which program is to be read is another program's, or none."""
    paths = [path for path in compile_cache.folder().iterdir() if path.suffix == ".json"]
    contents = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        path.write_bytes(contents[number - 1] if number % 2 else contents[number][:-1])
    with counting() as messages:
        return opened() | {"messages": len(messages), "files": len(paths)}


@contextlib.contextmanager
def counting():
    """What the log says of damaged files."""
    messages, log = [], compile_cache._log
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage()) if "is damaged" in record.getMessage() else None
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def unwritable():
    with mock.patch.object(compile_cache, "write_whole", side_effect=OSError("no space")):
        for path in compile_cache.folder().iterdir():
            path.unlink()
        return opened()


def replaced():
    """Somebody's function stands in for ours, and so it may compute something else."""
    choose = sampler._choose
    with mock.patch.object(sampler, "_choose", lambda *arguments, **options: choose(*arguments, **options)):
        return opened()


def full():
    """There is room for nothing: what is there goes when the next engine opens."""
    with mock.patch.object(compile_cache, "MAX_BYTES", 0):
        return opened() | {"left": len(programs())}


def by_jax():
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(compile_cache.folder()).parent / "jax"))
    return opened() | {"left": len(programs())}


CASES = {case.__name__: case for case in (opened, damaged, misled, unwritable, replaced, full, by_jax)} | {
    "again": opened
}
print(json.dumps([CASES[name]() for name in sys.argv[2:]]))

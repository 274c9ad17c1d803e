"""Host memory of loading, in addition to the weights: a checkpoint of 2 GB is distributed over four devices of a CPU.

These devices hold their weights in the same memory, so the weights are subtracted. At each moment the figure is the
process's own pages (`RssAnon`, without mapped files), minus those before loading, minus the bytes of placed weights.

    JAX_NUM_CPU_DEVICES=4 python -m research.loading --out benchmarks/results/loading_cpu.json
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import pathlib
import re
import tempfile
import threading
from typing import Any

import jax
import numpy as np

from vlcache_jax.common.files import check_writable
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.device.mesh import Devices
from vlcache_jax.models.params import parameters
from vlcache_jax.study.report import environment, publish
from vlcache_jax.testing import make_checkpoint

TITLE = "Host memory of loading a checkpoint onto four devices of a CPU"
TEXT = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip


def own_pages() -> int:
    """Return the bytes of the process's memory that no file is mapped to."""
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[0])


class MemoryWatch:
    """Maximum memory in addition to the placed weights, and maximum in all, sampled every millisecond."""

    def __init__(self) -> None:
        self.begin, self.placed, self.beside, self.peak = own_pages(), 0, 0, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.001):
            placed = self.placed  # read first: a weight that is being placed counts as additional memory
            used = own_pages() - self.begin
            self.peak, self.beside = max(self.peak, used), max(self.beside, used - placed)


def measure(directory: pathlib.Path, count: int) -> dict[str, Any]:
    """Return a row: the cost of loading a checkpoint onto `count` devices."""
    checkpoint = open_checkpoint(directory)
    devices = Devices.of(jax.devices()[:count], checkpoint.config)
    sizes = [math.prod(one.shape) * checkpoint.dtype.itemsize for one in parameters(checkpoint.config)]
    with MemoryWatch() as watch:

        def place(parameter: Any, array: np.ndarray) -> jax.Array:
            made = devices.place(parameter, array).block_until_ready()
            watch.placed += sum(shard.data.nbytes for shard in made.addressable_shards)
            return made

        weights = checkpoint.load(place)
    del weights
    return {
        "devices": count,
        "weights GB": sum(sizes) / 1e9,
        "in place GB": watch.placed / 1e9,
        "largest tensor GB": max(sizes) / 1e9,
        "most beside what is in place GB": watch.beside / 1e9,
        "most over the whole GB": (watch.peak - watch.placed) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    out = parser.parse_args().out
    check_writable("out", out)
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder) / "model"
        # In its own process, which has no free pages left from other work.
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            process.submit(make_checkpoint, directory, dtype="bfloat16", shards=4, text=TEXT).result()
        rows = [measure(directory, 4)]
    publish(TITLE, rows, environment("jax", "jaxlib"), out)


if __name__ == "__main__":
    main()

"""A server for one measurement, in a process of its own: `vlcache bench serve --policies`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.benchmarks import ALLOCATOR, SCHEDULE
from vlcache_jax.benchmarks.ttft import Setup, falling_schedule
from vlcache_jax.reuse.parse import parse_policy
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import listening

_PATIENCE = 30.0  # seconds that a server may take to end


@contextlib.contextmanager
def own_server(model: str | None, policies: Sequence[str], longest: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Serves within, everything compiled.

    Args:
      model: checkpoint or hub id; None: random weights, 12 layers x 768.
      policies: that requests may ask for, or `SCHEDULE`.
      longest: tokens of prompt and answer at most.

    Yields:
      The base URL, and what requests call each policy.

    Raises:
      ValueError, OSError, MemoryError: the model cannot be opened, or one is no policy.
    """
    for name in policies:
        if name != SCHEDULE:
            parse_policy(name)  # before a model is opened
    os.environ.update(ALLOCATOR)  # read when a process starts
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as folder:
        reuses = {name: f"{folder}/schedule.json" if name == SCHEDULE else name for name in policies}
        process = context.Process(target=_serve, args=(there, model, reuses, longest))
        process.start()
        there.close()
        try:
            try:
                told: str | Exception = here.recv()
            except EOFError as error:
                raise OSError("the server ended before it was ready") from error
            if isinstance(told, Exception):
                raise told
            yield told, reuses
        finally:
            here.close()
            process.join(_PATIENCE)
            process.kill()  # where it compiles, as nobody waits any more


def _serve(parent: Connection, model: str | None, reuses: dict[str, str], longest: int) -> None:
    """Tells the base URL, or what is wrong, and serves until the other end of the pipe is closed."""
    try:
        with Setup(model=model).opened() as (path, name):
            rows = max(1024, longest)  # policies that choose want a prompt in one step
            engine = AsyncLLM(path, max_model_len=longest, max_rows=rows, use_tqdm=False)
            if SCHEDULE in reuses:
                checkpoint = engine.service.checkpoint
                falling = falling_schedule(checkpoint.config.model_type, checkpoint.config.text.num_layers)
                dataclasses.replace(falling, fingerprint=checkpoint.source_digest).save(reuses[SCHEDULE])
            config = ServerConfig(port=0, allow_reuse=tuple(reuses.values()), served_model_name=(name,))
            with listening(Server(engine, config)) as url:
                for reuse in reuses.values():
                    asyncio.run(engine.warmup(reuse=reuse))
                parent.send(url)
                with contextlib.suppress(EOFError):
                    parent.recv()
            asyncio.run(engine.close())
    except (ValueError, OSError, MemoryError) as error:
        parent.send(error)

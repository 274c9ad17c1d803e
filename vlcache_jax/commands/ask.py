"""`vlcache ask`: one question about images and videos."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from vlcache_jax.commands.options import SHIPPED, rehearse, warn_of_others
from vlcache_jax.common.progress import Progress, say
from vlcache_jax.inputs.images import read_image
from vlcache_jax.inputs.videos import is_video, read_video

if TYPE_CHECKING:
    from vlcache_jax.config import EngineOptions
    from vlcache_jax.engine.engine import EngineStats
    from vlcache_jax.llm import LLM
    from vlcache_jax.outputs import RequestOutput

_LEAST = 0.0005  # seconds that are reported
_SALT = "vlcache ask, rehearsal"
Conversation = list[dict[str, Any]]


def ask(
    words: Sequence[str],
    *,
    model: str | None,
    compress: str | None,
    system: str | None,
    fps: float | None,
    sampling: Mapping[str, Any],
    options: EngineOptions,
    twice: bool,
) -> None:
    """Prints the answer, and on stderr what it took; twice: then again, now that the images are known.

    Of two answers all programs are compiled before, so that their times can be compared.

    Args:
      words: files of images or videos, and last the question.
      model: None is the shipped one.
      compress: see `LLM.chat`.
      system: the system message, if any.
      fps: of videos.
      sampling: of `SamplingParams`.
      options: of the engine.

    Raises:
      ValueError, OSError: a file cannot be read, or an option is wrong.
    """
    *files, question = words
    if pathlib.Path(question).is_file():
        raise ValueError(f"the question must be the last argument, after the images, got the file {question!r} last")
    shown = [_part(file, fps) for file in files]
    conversation: Conversation = [] if system is None else [{"role": "system", "content": system}]
    conversation.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
    if model is None:
        warn_of_others(conversation)
    say("importing JAX")
    from vlcache_jax import LLM, SamplingParams
    from vlcache_jax.compress.parse import parse_compressor

    params = SamplingParams(**sampling)
    if compress is not None:  # before a model is opened
        parse_compressor(compress)
    with LLM(model or SHIPPED, **options) as llm:
        if twice:
            _rehearse(llm, conversation, params, shown, compress)
        for _ in range(1 + twice):
            before = llm.stats()
            [output] = llm.chat(conversation, params, compress=compress)
            typer.echo(output.outputs[0].text)
            typer.echo(_summary(output, before, llm.stats()), err=True)


def _part(file: str, fps: float | None) -> dict[str, Any]:
    """A file as a part of a message, after a look whether it can be read."""
    if is_video(file):
        read_video(file, name="VIDEO").film.head()
        return {"type": "video", "path": file} | ({} if fps is None else {"fps": fps})
    read_image(file, name="IMAGE").decode()
    return {"type": "image", "path": file}


def _rehearse(
    llm: LLM, conversation: Conversation, params: Any, shown: Sequence[Mapping[str, Any]], compress: str | None
) -> None:
    """Asks for a few tokens, cold and again, until nothing is compiled. What is asked afterwards finds nothing of it:
    it has a salt of its own, and leaves the disk as it was."""
    brief = dataclasses.replace(params, max_tokens=min(2, params.max_tokens))

    def twice() -> None:
        for _ in range(2):
            llm.chat(conversation, brief, compress=compress, cache_salt=_SALT)
        for part in shown:
            llm.cache.delete(part if part["type"] == "video" else part["path"], cache_salt=_SALT)
        llm.reset_prefix_cache()

    with Progress("warming up"):
        rehearse(llm, twice)


def _summary(output: RequestOutput, before: EngineStats, after: EngineStats) -> str:
    metrics, images = output.metrics, output.cache.images
    counts = Counter(f"{image.match} ({image.why.value})" if image.why else image.match for image in images)
    found = ", ".join(f"{count} {match}" if count > 1 else match for match, count in counts.items())
    return (
        f"[{len(output.prompt_token_ids)} prompt tokens, {sum(image.tokens for image in images)} of images; "
        f"first token after {metrics.ttft:.3f} s, {len(output.outputs[0].token_ids)} tokens in {metrics.decode:.2f} s"
        f"{_waited(before, after)}; images: {found or 'none'}; {output.cache.rows[-1]} tokens computed, "
        f"{output.num_cached_tokens + output.cache.approximate_tokens} reused]"
    )


def _waited(before: EngineStats, after: EngineStats) -> str:
    """How long the answer waited for programs, in seconds: those that were compiled, and those that an earlier process
    compiled and that were loaded."""
    compiled = after.compile_seconds - before.compile_seconds
    loaded = after.load_seconds - before.load_seconds
    told = [f"{compiled:.3f} s are compilation"] if compiled > _LEAST else []
    told += [f"{loaded:.3f} s loading compiled programs"] if loaded > _LEAST else []
    return f", of which {' and '.join(told)}" if told else ""

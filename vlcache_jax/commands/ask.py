"""`vlcache ask`: a question about images and videos."""

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

_MIN_SECONDS = 0.0005  # shorter times are not reported
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
    """Print the output, and on stderr its tokens, times and cache hits.

    With `twice`, the request runs again with cached images. All programs are compiled before, so that the times can be
    compared.

    Args:
      words: image or video files, and the question as the last item.
      model: checkpoint directory or Hub ID; None: the shipped model.
      compress: see `LLM.chat`.
      system: system message; None: no system message.
      fps: frames per second sampled from videos; None: the checkpoint's own.
      sampling: arguments of `SamplingParams`.
      options: options of the engine.
      twice: True to run the request twice.

    Raises:
      ValueError, OSError: a file cannot be read, or an option is invalid.
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
            _compile(llm, conversation, params, shown, compress)
        for _ in range(1 + twice):
            before = llm.stats()
            [output] = llm.chat(conversation, params, compress=compress)
            typer.echo(output.outputs[0].text)
            typer.echo(_summary(output, before, llm.stats()), err=True)


def _part(file: str, fps: float | None) -> dict[str, Any]:
    """Return a message part with a file. Reads the file to check it."""
    if is_video(file):
        read_video(file, name="VIDEO").film.head()
        return {"type": "video", "path": file} | ({} if fps is None else {"fps": fps})
    read_image(file, name="IMAGE").decode()
    return {"type": "image", "path": file}


def _compile(
    llm: LLM, conversation: Conversation, params: Any, shown: Sequence[Mapping[str, Any]], compress: str | None
) -> None:
    """Run short requests, without and with cached images, until all programs are compiled.

    They have a salt of their own and delete their cache entries, so that later requests have no hits of them.
    """
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
    """Return, as text, how long the request waited for programs to be compiled, or to be loaded from disk."""
    compiled = after.compile_seconds - before.compile_seconds
    loaded = after.load_seconds - before.load_seconds
    parts = [f"{compiled:.3f} s are compilation"] if compiled > _MIN_SECONDS else []
    parts += [f"{loaded:.3f} s loading compiled programs"] if loaded > _MIN_SECONDS else []
    return f", of which {' and '.join(parts)}" if parts else ""

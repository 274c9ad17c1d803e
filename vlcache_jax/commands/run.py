"""`vlcache run`: a batch of requests from a file, each of which runs once, also if the command is stopped and resumed.

Output lines are appended as requests finish. Each line has the number of its input line, and a digest of that line and
the settings. A later run therefore knows the finished requests. At the end, the output lines are sorted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import operator
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from vlcache_jax.commands.options import SHIPPED, warn_of_others
from vlcache_jax.commands.rows import BEGINNINGS, InputLine, OutputLine
from vlcache_jax.common.files import check_readable, check_writable
from vlcache_jax.common.progress import Progress, interruptible, say
from vlcache_jax.protocol.answers import ChatFormat
from vlcache_jax.request_options import Compress, RequestOptions
from vlcache_jax.sampling import SamplingParams

if TYPE_CHECKING:
    from vlcache_jax.config import EngineOptions
    from vlcache_jax.outputs import RequestOutput

_MAX_NAMED = 3  # invalid requests that are logged
# Options that do not change outputs, except for the cache's codec.
_NO_EFFECT = ("cache", "kv_cache_bytes", "compressed_kv_bytes", "max_rows")


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    Attributes:
      source: the file of requests.
      model: checkpoint directory or Hub ID; None: the shipped model.
      reuse: reuse mode of all requests.
      compress: compression of requests that have none of their own.
      system: system message of requests that have none; None: no system message.
      defaults: default sampling parameters.
      options: options of the engine.
      trusts_templates: True if requests may have chat templates.
    """

    source: pathlib.Path
    model: str | None
    reuse: str
    compress: str | None
    system: str | None
    defaults: Mapping[str, Any]
    options: EngineOptions
    trusts_templates: bool = False

    @property
    def name(self) -> str:
        """Checkpoint directory or Hub ID of the model."""
        return self.model or SHIPPED

    @property
    def engine_options(self) -> EngineOptions:
        """Options of the engine, whose own reuse mode is that of the requests."""
        return {**self.options, "reuse": self.reuse}

    @property
    def request_options(self) -> RequestOptions:
        """Options of requests that have none of their own."""
        return RequestOptions(reuse=self.reuse, compress=self.compress)

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """Yield (number from 1, digest of line and settings, text) of each line that is not empty."""
        cache = self.options["cache"]
        codec = "auto" if cache is None else cache.codec
        mode = self.reuse if codec == "auto" else f"{self.reuse} {codec}"  # the codec changes linked KV, and so outputs
        mode = mode if self.compress is None else f"{mode} {self.compress}"
        options = sorted(self.options.items())
        chosen = [[name, value] for name, value in options if name not in _NO_EFFECT and value is not None]
        given = [self.name, mode, sorted(self.defaults.items()), chosen]
        identity = json.dumps(given if self.system is None else [*given, self.system])
        with self.source.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    line = line.rstrip("\r\n")
                    digest = hashlib.sha256(f"{identity}\n{line}".encode(errors="surrogateescape")).hexdigest()
                    yield number, digest[:16], line

    def parse(self, number: int, digest: str, line: str, chats: ChatFormat | None) -> InputLine:
        """Return the request of a line, with the system message; see `InputLine.parse`."""
        trusts = self.trusts_templates
        row = InputLine.parse(
            line, number, digest, self.defaults, self.source.parent, trusts_templates=trusts, chats=chats
        )
        return row if self.system is None else row.with_system(self.system)


def run(
    settings: RunSettings,
    out: pathlib.Path,
    *,
    overwrite: bool,
    retry: bool,
    answer: Callable[[RunSettings, OutputFile, bool], None] | None = None,
) -> None:
    """Run every request of a file that has no output line yet.

    Args:
      settings: settings of the run.
      out: output file.
      overwrite: True to discard the content of `out`.
      retry: True to run requests again that ended with an error.
      answer: runs the requests and writes their lines, given the settings, the output file and `overwrite`; None
        (default): an engine in this process.

    Raises:
      ValueError: a file cannot be read or written, `out` has other lines than those of this run, the input file changes
        meanwhile, or all requests have an error.
    """
    check_readable("IN", settings.source)
    check_writable("OUT", out)
    out = out.resolve()  # a symbolic link is kept
    if out.exists() and not out.is_file():
        raise ValueError(f"OUT must be a file, got {out}")
    if out.exists() and out.samefile(settings.source):
        raise ValueError(f"OUT must differ from IN, got {out}")
    # Imported after the other checks, because it imports JAX.
    from vlcache_jax.compress.parse import parse_compressor
    from vlcache_jax.reuse.selection import parse_policy

    parse_policy(settings.reuse)
    if settings.compress is not None:
        parse_compressor(settings.compress)
    digests = {number: digest for number, digest, _ in settings.rows()}
    with _locked(out) as file:
        done = set() if overwrite else _answered(file, out, digests, retry)
        say(f"{len(done)} of {len(digests)} requests are finished" if done else f"{len(digests)} requests")
        if len(done) < len(digests) or overwrite:
            output_file = OutputFile(settings, file, digests, done)
            try:
                if not _refuse_all(settings, output_file, overwrite):
                    (answer or _answer)(settings, output_file, overwrite)
            except BaseException as error:
                # Without a finished request, the same command would fail again.
                if done or overwrite or not isinstance(error, Exception):
                    again = "the same command without --overwrite" if overwrite else "the same command"
                    say(f"stopped with {len(done)} of {len(digests)} requests finished; {again} resumes there")
                raise
        wrong = _in_order(file, out)
    say(f"{out} has {len(digests)} lines, {wrong} of them with an error")
    if wrong and wrong == len(digests):
        raise ValueError(
            f"IN must contain at least one valid request, but each has an error: see {out}, "
            "and docs/guides/batch.md for the format"
        )


class OutputFile:
    """Output file of a run while it is written.

    Args:
      settings: settings of the run.
      file: the open file.
      digests: digests of all input lines by number.
      done: numbers of the finished lines, to which `write` adds.
    """

    def __init__(self, settings: RunSettings, file: IO[bytes], digests: Mapping[int, str], done: set[int]):
        self._settings, self._file, self._digests, self._done = settings, file, digests, done
        self._num_named = 0
        self.bar = Progress("answering", len(digests))

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """Yield (number, digest, text) of each line that is not finished.

        Raises:
          ValueError: the input file has changed.
        """
        seen = 0
        for number, digest, line in self._settings.rows():
            if self._digests.get(number) != digest:
                raise ValueError(f"IN must not change while the command runs, but line {number} has changed")
            seen += 1
            if number not in self._done:
                yield number, digest, line
        if seen < len(self._digests):
            left = len(self._digests) - seen
            raise ValueError(f"IN must not change while the command runs, but {left} requests are missing")

    def begin(self, overwrite: bool) -> None:
        """Discard the lines in the file if `overwrite`, and show the progress."""
        if overwrite:
            self._file.truncate(0)
        self.bar.update(len(self._done))

    def write(self, number: int, line: bytes, tokens: int = 0) -> None:
        """Append the output line of input line `number`."""
        self._file.write(line)
        self._file.flush()
        self._done.add(number)
        self.bar.update(tokens=tokens)

    def fail(self, number: int, line: bytes, error: str) -> None:
        """Append the output line of an invalid request. The first ones are also logged."""
        self._num_named += 1
        if self._num_named <= _MAX_NAMED:
            say(error)
        self.write(number, line)


def _answer(settings: RunSettings, output_file: OutputFile, overwrite: bool) -> None:
    """Run all requests that are not finished with an engine in this process."""
    # Requests in flight, by their index in `chat_iter`.
    running: dict[int, InputLine] = {}
    count = itertools.count()
    warned = settings.model is not None
    chats: ChatFormat | None = None  # set when the model is loaded

    def valid() -> Iterator[tuple[Any, SamplingParams, Compress | None]]:
        """Yield (conversation, sampling parameters, compression) of valid requests, and write the errors of others."""
        nonlocal warned
        for given in output_file.rows():
            row = settings.parse(*given, chats)
            if row.params is None:
                error = row.error or ""
                output_file.fail(row.number, row.error_line(error), error)
                continue
            warned = warned or warn_of_others(row.conversation)
            running[next(count)] = row
            yield row.conversation, row.params, row.options(settings.request_options).compress

    say("importing JAX")
    with interruptible():
        from vlcache_jax import LLM

        # From here on, JAX occupies the device.
        llm = LLM(settings.name, **settings.engine_options)
    with llm, output_file.bar:
        llm.service.compressor_of(settings.compress)  # an error here concerns all requests, and ends the run
        output_file.begin(overwrite)
        chats = ChatFormat(llm.service.renderer)
        # Lines are read while requests run. Output lines are written in the order in which requests finish.
        conversations, params, compress = (
            map(operator.itemgetter(i), same) for i, same in enumerate(itertools.tee(valid(), 3))
        )
        for index, output in llm.chat_iter(
            conversations, params, use_tqdm=False, reuse=settings.reuse, compress=compress, on_error="return"
        ):
            row = running.pop(index)
            if output.error is not None:
                error = row.own_error(output.error, index)
                output_file.fail(row.number, row.error_line(error), error)
            else:
                output_file.write(row.number, row.output_line(output, settings.name, chats), tokens_of(output))


def tokens_of(output: RequestOutput) -> int:
    """Return the number of tokens of all outputs of a request."""
    return sum(len(answer.token_ids) for answer in output.outputs)


def _refuse_all(settings: RunSettings, output_file: OutputFile, overwrite: bool) -> bool:
    """Return whether all unfinished requests are invalid. If so, write their errors, without a model."""
    if any(settings.parse(*given, None).params is not None for given in output_file.rows()):
        return False
    with output_file.bar:
        output_file.begin(overwrite)
        for given in output_file.rows():
            row = settings.parse(*given, None)
            error = row.error or ""
            output_file.fail(row.number, row.error_line(error), error)
    return True


@contextlib.contextmanager
def _locked(out: pathlib.Path) -> Iterator[IO[bytes]]:
    """Open the output file with an exclusive lock. A new file that an error leaves empty is deleted.

    Raises:
      ValueError: another run has the lock.
    """
    is_new = not out.exists()
    with out.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"OUT must not be in use by another command, got {out}: wait for that command, or name another file"
            ) from error
        try:
            yield file
        except BaseException:
            if is_new and os.fstat(file.fileno()).st_size == 0:
                out.unlink(missing_ok=True)
            raise


def _answered(file: IO[bytes], out: pathlib.Path, digests: Mapping[int, str], retry: bool) -> set[int]:
    """Return the numbers of the finished input lines. A truncated last line is removed from the output file.

    Raises:
      ValueError: an output line belongs to no input line with these settings.
    """
    done: set[int] = set()
    failed: set[int] = set()
    file.seek(0)
    end = 0
    for position, line in enumerate(file, 1):
        try:
            if not line.endswith(b"\n") and _is_cut(line):
                break
            answer = _parsed(line)
            if digests.get(answer.number) != answer.digest:
                raise ValueError("must belong to a request of IN with the same settings (model, reuse, options)")
            if answer.number in done and answer.number not in failed:
                raise ValueError(f"must not repeat line {answer.number} of IN, which has an output line above")
        except ValueError as error:
            raise ValueError(
                f"OUT line {position} {error}. Name another file, or pass --overwrite to start {out} again"
            ) from error
        end += len(line)
        done.add(answer.number)
        (failed.add if answer.has_failed else failed.discard)(answer.number)
        if not line.endswith(b"\n"):
            file.write(b"\n")
            end += 1
    file.truncate(end)
    return done - failed if retry else done


def _is_cut(line: bytes) -> bool:
    """Return whether `line` is a truncated output line."""
    if not any(line.startswith(beginning[: len(line)]) for beginning in BEGINNINGS):
        return False
    try:
        _parsed(line)
    except ValueError:
        return True
    return False


def _in_order(file: IO[bytes], out: pathlib.Path) -> int:
    """Sort the output lines, keep the last one of each request, and return the number of errors."""
    last: dict[int, tuple[int, bool]] = {}  # by number: offset of the line, and whether it has an error
    file.seek(0)
    begin = count = 0
    for line in file:
        answer = _parsed(line)
        last[answer.number] = begin, answer.has_failed
        begin, count = begin + len(line), count + 1
    offsets = [last[number][0] for number in sorted(last)]
    if count > len(offsets) or offsets != sorted(offsets):
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as new:
                for offset in offsets:
                    file.seek(offset)
                    new.write(file.readline())
                new.flush()
                os.fsync(new.fileno())
            shutil.copymode(out, part)
            part.replace(out)
        except OSError as error:
            say(f"all requests are finished, but the lines of {out} could not be sorted: {error.strerror}")
        finally:
            part.unlink(missing_ok=True)
    return sum(has_failed for _, has_failed in last.values())


def _parsed(line: bytes) -> OutputLine:
    return OutputLine.parse(line.decode(errors="surrogateescape"))

"""`vlcache run`: answers the rows of a file, each once, however often it is stopped.

Answers are appended as they come, a line each, and every line tells which row it is of, and a digest of the row and of
the settings. So a second run knows what is done; when all rows are answered, the lines are put in their order.
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
from vlcache_jax.commands.rows import BEGINNINGS, LineAnswer, Row
from vlcache_jax.common.files import check_readable, check_writable
from vlcache_jax.common.progress import Progress, interruptible, say
from vlcache_jax.protocol.answers import ChatFormat
from vlcache_jax.request_options import Compress, RequestOptions
from vlcache_jax.sampling import SamplingParams

if TYPE_CHECKING:
    from vlcache_jax.config import EngineOptions
    from vlcache_jax.outputs import RequestOutput

_TOLD = 3  # wrong rows that are named
# Options that no answer depends on, but for the cache's codec.
_IDLE = ("cache", "kv_cache_bytes", "compressed_kv_bytes", "max_rows")


@dataclass(frozen=True)
class Recipe:
    """What a file of answers is made with.

    Attributes:
      source: the file of rows.
      model, reuse: of all rows; without a model the shipped one answers.
      compress: of the rows that name none.
      system: message before the rows that have none.
      defaults: sampling parameters where a row names none.
      options: of the engine.
      trusts_templates: whether rows may bring chat templates.
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
        return self.model or SHIPPED

    @property
    def asked(self) -> RequestOptions:
        """The options of rows that have none of their own."""
        return RequestOptions(reuse=self.reuse, compress=self.compress)

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """The lines that are not empty: numbers from 1, digests of them and all settings, and what they hold."""
        cache = self.options["cache"]
        codec = "auto" if cache is None else cache.codec
        way = self.reuse if codec == "auto" else f"{self.reuse} {codec}"  # what is linked, and so what is answered
        way = way if self.compress is None else f"{way} {self.compress}"
        options = sorted(self.options.items())
        chosen = [[name, value] for name, value in options if name not in _IDLE and value is not None]
        given = [self.name, way, sorted(self.defaults.items()), chosen]
        settings = json.dumps(given if self.system is None else [*given, self.system])
        with self.source.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    line = line.rstrip("\r\n")
                    digest = hashlib.sha256(f"{settings}\n{line}".encode(errors="surrogateescape")).hexdigest()
                    yield number, digest[:16], line

    def parse(self, number: int, digest: str, line: str, chats: ChatFormat | None) -> Row:
        """See `Row.parse`."""
        trusts = self.trusts_templates
        row = Row.parse(line, number, digest, self.defaults, self.source.parent, trusts_templates=trusts, chats=chats)
        return row if self.system is None else row.behind(self.system)


def run(
    recipe: Recipe,
    out: pathlib.Path,
    *,
    overwrite: bool,
    retry: bool,
    answer: Callable[[Recipe, Sheet, bool], None] | None = None,
) -> None:
    """Answers every row of a file that has no answer yet.

    Args:
      out: file of answers.
      overwrite: begin anew, whatever it holds.
      retry: also answer the rows again that were wrong.
      answer: does so for the rows of a sheet, which it may have to begin anew; None: an engine in this process.

    Raises:
      ValueError: a file cannot be read or written, `out` holds something else than answers of this job, the rows change
        meanwhile, or all of them are wrong.
    """
    check_readable("IN", recipe.source)
    check_writable("OUT", out)
    out = out.resolve()  # a link stays one
    if out.exists() and not out.is_file():
        raise ValueError(f"OUT must be a file, got {out}")
    if out.exists() and out.samefile(recipe.source):
        raise ValueError(f"OUT must be another file than IN, got {out}")
    # They import JAX: what else is wrong need not wait for it.
    from vlcache_jax.compress.parse import parse_compressor
    from vlcache_jax.reuse.selection import parse_policy

    parse_policy(recipe.reuse)
    if recipe.compress is not None:
        parse_compressor(recipe.compress)
    digests = {number: digest for number, digest, _ in recipe.rows()}
    with _locked(out) as file:
        done = set() if overwrite else _answered(file, out, digests, retry)
        say(f"{len(done)} of {len(digests)} requests are finished" if done else f"{len(digests)} requests")
        if len(done) < len(digests) or overwrite:
            sheet = Sheet(recipe, file, digests, done)
            try:
                if not _refuse_all(recipe, sheet, overwrite):
                    (answer or _answer)(recipe, sheet, overwrite)
            except BaseException as error:
                # What could not begin would not begin the next time.
                if done or overwrite or not isinstance(error, Exception):
                    again = "the same command without --overwrite" if overwrite else "the same command"
                    say(f"stopped with {len(done)} of {len(digests)} requests finished; {again} resumes there")
                raise
        wrong = _in_order(file, out)
    say(f"{out} has {len(digests)} lines, {wrong} of them with an error")
    if wrong and wrong == len(digests):
        raise ValueError(
            f"IN must have a valid request, but each has an error: see {out}, and docs/guides/batch.md for the format"
        )


class Sheet:
    """The file of answers while it is written.

    Args:
      recipe: what is answered.
      file: of answers.
      digests: of all rows, by number.
      done: numbers of the rows that are answered; it grows.
    """

    def __init__(self, recipe: Recipe, file: IO[bytes], digests: Mapping[int, str], done: set[int]):
        self._recipe, self._file, self._digests, self._done = recipe, file, digests, done
        self._told = 0
        self.bar = Progress("answering", len(digests))

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """Those that are not answered: numbers, digests and lines.

        Raises:
          ValueError: the file of rows has changed.
        """
        seen = 0
        for number, digest, line in self._recipe.rows():
            if self._digests.get(number) != digest:
                raise ValueError(f"IN must not change while the command runs, but line {number} has changed")
            seen += 1
            if number not in self._done:
                yield number, digest, line
        if seen < len(self._digests):
            left = len(self._digests) - seen
            raise ValueError(f"IN must not change while the command runs, but {left} requests are missing")

    def begin(self, overwrite: bool) -> None:
        """What was there goes, or counts."""
        if overwrite:
            self._file.truncate(0)
        self.bar.update(len(self._done))

    def write(self, number: int, line: bytes, tokens: int = 0) -> None:
        """Appends the answer to a row."""
        self._file.write(line)
        self._file.flush()
        self._done.add(number)
        self.bar.update(tokens=tokens)

    def fail(self, number: int, line: bytes, error: str) -> None:
        """Appends what says that a row is wrong; the first ones are named on stderr, too."""
        self._told += 1
        if self._told <= _TOLD:
            say(error)
        self.write(number, line)


def _answer(recipe: Recipe, sheet: Sheet, overwrite: bool) -> None:
    """Appends the answers to all rows but those that are done."""
    # Which rows are under way, by the number that `chat_iter` gives them.
    running: dict[int, Row] = {}
    count = itertools.count()
    warned = recipe.model is not None
    chats: ChatFormat | None = None  # of the model, once it is loaded

    def good() -> Iterator[tuple[Any, SamplingParams, Compress | None]]:
        """The rows that can run: conversation, sampling parameters, compression. The others are answered at once."""
        nonlocal warned
        for given in sheet.rows():
            row = recipe.parse(*given, chats)
            if row.params is None:
                error = row.error or ""
                sheet.fail(row.number, row.failed(error), error)
                continue
            warned = warned or warn_of_others(row.conversation)
            running[next(count)] = row
            yield row.conversation, row.params, row.asked(recipe.asked).compress

    say("importing JAX")
    with interruptible():
        from vlcache_jax import LLM

        # From here on JAX holds the device.
        llm = LLM(recipe.name, **recipe.options)
    with llm, sheet.bar:
        llm.service.compressor_of(recipe.compress)  # what is wrong for all rows is no row's error
        sheet.begin(overwrite)
        chats = ChatFormat(llm.service.renderer)
        # Rows are read while others are answered; answers are written as they come.
        conversations, params, compress = (
            map(operator.itemgetter(i), same) for i, same in enumerate(itertools.tee(good(), 3))
        )
        for index, output in llm.chat_iter(
            conversations, params, use_tqdm=False, reuse=recipe.reuse, compress=compress, on_error="return"
        ):
            row = running.pop(index)
            if output.error is not None:
                error = row.named(output.error, index)
                sheet.fail(row.number, row.failed(error), error)
            else:
                sheet.write(row.number, row.answered(output, recipe.name, chats), tokens_of(output))


def tokens_of(output: RequestOutput) -> int:
    """Of all its answers."""
    return sum(len(answer.token_ids) for answer in output.outputs)


def _refuse_all(recipe: Recipe, sheet: Sheet, overwrite: bool) -> bool:
    """Answers the rows where all that are left are wrong, for which no model need be loaded; whether it is so."""
    if any(recipe.parse(*given, None).params is not None for given in sheet.rows()):
        return False
    with sheet.bar:
        sheet.begin(overwrite)
        for given in sheet.rows():
            row = recipe.parse(*given, None)
            error = row.error or ""
            sheet.fail(row.number, row.failed(error), error)
    return True


@contextlib.contextmanager
def _locked(out: pathlib.Path) -> Iterator[IO[bytes]]:
    """The file of answers, for nobody else. One that was not there goes again where an error leaves it empty.

    Raises:
      ValueError: another run writes it.
    """
    is_new = not out.exists()
    with out.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"OUT must be written by one command at a time, and another one writes {out}") from error
        try:
            yield file
        except BaseException:
            if is_new and os.fstat(file.fileno()).st_size == 0:
                out.unlink(missing_ok=True)
            raise


def _answered(file: IO[bytes], out: pathlib.Path, digests: Mapping[int, str], retry: bool) -> set[int]:
    """The rows that are answered; the beginning of a line whose writer was killed is cut off.

    Raises:
      ValueError: a line answers no row of the file under these settings.
    """
    done: set[int] = set()
    failed: set[int] = set()
    file.seek(0)
    end = 0
    for place, line in enumerate(file, 1):
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
                f"OUT line {place} {error}. Name another file, or pass --overwrite to start {out} again"
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
    """Whether it is the beginning of an answer, and not a whole one."""
    if not any(line.startswith(beginning[: len(line)]) for beginning in BEGINNINGS):
        return False
    try:
        _parsed(line)
    except ValueError:
        return True
    return False


def _in_order(file: IO[bytes], out: pathlib.Path) -> int:
    """Leaves the last answer of each row, in the order of the rows; returns how many tell of an error."""
    last: dict[int, tuple[int, bool]] = {}  # of each row: where its line begins, and whether it tells of an error
    file.seek(0)
    begin = count = 0
    for line in file:
        answer = _parsed(line)
        last[answer.number] = begin, answer.has_failed
        begin, count = begin + len(line), count + 1
    places = [last[number][0] for number in sorted(last)]
    if count > len(places) or places != sorted(places):
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as new:
                for place in places:
                    file.seek(place)
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


def _parsed(line: bytes) -> LineAnswer:
    return LineAnswer.parse(line.decode(errors="surrogateescape"))

"""Which images the prompts of a call show.

First, for all rows: what hashes and heads of files decide, such as how many tokens an image takes. Then, in windows of
rows, pixels: those of the next window are decoded while the one before is being answered. A picture that the cache
knows is not decoded at all.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import Salt, alias_key, content_key, entry_key, owner_key
from vlcache_jax.cache.store import Picture, Store
from vlcache_jax.engine.request import Metrics, Request
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.inputs.processor import Grid, ImageProcessor, Patches
from vlcache_jax.inputs.prompt import Prompt, PromptRenderer

WINDOW_BYTES = 128 * 2**20  # of patches of one window of rows; while it runs, the next one is made
DECODING_BYTES = 512 * 2**20  # of pictures that are being decoded, whoever asked for them
_KEYS = 65536  # of images; half a kilobyte apiece
_HELPERS = 8  # that read heads of files, at most: between two images each needs the interpreter
_PIXEL_BYTES = 7  # Pillow's picture and ours beside it
_CLOSED = "this LLM is closed"


class Identifier:
    """Identifies images.

    Args:
      store: knows pictures.
      processor, renderer: of the checkpoint.
      fingerprint: of the weights; asked for when there is an image.
      codec: of K, V, as keys name it.
      max_patches: of an image.
      max_pixels: of a picture, before it is scaled.
      threads: decode and cut images.
      quick_threads: hash files and read their heads, so that nobody waits for another one's pixels.
    """

    def __init__(
        self,
        store: Store,
        processor: ImageProcessor,
        renderer: PromptRenderer,
        *,
        fingerprint: Callable[[], str],
        codec: str,
        max_patches: int,
        max_pixels: int,
        threads: Executor,
        quick_threads: Executor,
    ):
        self.store, self.processor, self.renderer = store, processor, renderer
        self.max_pixels = max_pixels
        self._threads, self._quick_threads = threads, quick_threads
        self.decoding = _Budget(DECODING_BYTES)
        self._fingerprint = fingerprint
        self._codec = codec
        self._max_patches = max_patches
        self._unsalted_key = functools.lru_cache(_KEYS)(self._make_entry_key)

    def open(self, prompts: Sequence[Prompt | ValueError], salt: Salt = None, *, lookup: bool = True) -> Arrivals:
        """Reads what hashes and heads of files tell of a call's images, on several threads.

        Args:
          prompts: of a call; errors are rows that are wrong already.
          salt: see `vlcache_jax.cache`.
          lookup: whether the cache is asked; else every picture is decoded.

        Raises:
          ValueError: the salt is no string.
        """
        owner = owner_key(salt)
        if any(isinstance(prompt, Prompt) and prompt.images for prompt in prompts):
            self._fingerprint()  # once, not on each thread: a directory of the hub hashes all its weights
        return Arrivals(self, prompts, salt, owner, lookup)

    def identify(
        self, prompts: Sequence[Prompt | ValueError], salt: Salt = None, *, lookup: bool = True
    ) -> list[Request]:
        """Identifies all images of some prompts at once.

        Raises:
          ValueError: an image cannot be decoded or is too large, or its uuid is bound to another one, or the salt is no
            string.
        """
        arrivals = self.open(prompts, salt, lookup=lookup)
        for error in arrivals.errors.values():
            raise error
        requests = []
        for _, request in itertools.chain.from_iterable(arrivals.windows(keep_patches=True)):
            if isinstance(request, ValueError):
                raise request
            requests.append(request)
        return requests

    def side_by_side[A, B](self, work: Callable[[A], B], given: Iterable[A]) -> list[B]:
        """What work that mostly waits makes of each of the given."""
        given = list(given)
        if len(given) == 1:  # another thread would make it later
            return [work(given[0])]
        try:
            return list(self._quick_threads.map(work, given))
        except (RuntimeError, CancelledError) as error:
            raise RuntimeError(_CLOSED) from error

    def read_heads(self, tasks: Collection[_Task]) -> dict[_Task, ValueError | None]:
        """Finds what is known without pixels; returns what is wrong with each."""
        errors: dict[_Task, ValueError | None] = {}
        left = iter([*tasks])

        def read() -> None:
            for task in left:  # all threads draw from one iterator
                errors[task] = task.head()

        # This thread would wait anyway, and others are woken once, not for each image. They are as many as cores: a
        # single one would often be put on the core of this thread.
        helpers = min(len(tasks) - 1, os.cpu_count() or 1, _HELPERS)
        reading = [self._submit(self._quick_threads, read) for _ in range(helpers)]
        read()
        for future in reading:
            if not future.cancel():  # one that has not begun comes too late
                future.result()
        return errors

    def decode(self, tasks: Iterable[_Task]) -> dict[_Task, Future[ValueError | None]]:
        """Starts the rest, where there is any."""
        ready = _done(None)
        return {task: ready if task.is_ready() else self._submit(self._threads, task.run) for task in tasks}

    def _submit[T](self, threads: Executor, work: Callable[[], T]) -> Future[T]:
        try:
            return threads.submit(work)
        except RuntimeError as error:  # the threads have been shut down meanwhile
            raise RuntimeError(_CLOSED) from error

    def entry_key(self, picture: Picture, limits: Mapping[str, int], salt: Salt) -> str:
        """Key of what is kept for a picture."""
        named = picture.content, tuple(sorted(limits.items()))
        # A salt is kept nowhere.
        return self._unsalted_key(*named) if salt is None else self._make_entry_key(*named, salt)

    def _make_entry_key(self, content: str, limits: tuple[tuple[str, int], ...], salt: Salt = None) -> str:
        return entry_key(
            content,
            settings=self.processor.settings(dict(limits)),
            fingerprint=self._fingerprint(),
            codec=self._codec,
            salt=salt,
        )

    def grid(self, height: int, width: int, limits: Mapping[str, int], name: str) -> Grid:
        """The patches of a picture.

        Raises:
          ValueError: it has more than the engine takes, or the limits contradict the engine's.
        """
        try:
            self.processor.with_limits(limits)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs for {name} must suit the engine's: {error}") from error
        grid = self.processor.grid(height, width, limits, name=name)
        if (patches := math.prod(grid)) > self._max_patches:
            raise ValueError(
                f"{name} must have at most {self._max_patches} patches, got {patches}: lower max_pixels in the "
                "request's mm_processor_kwargs, or open the engine with a larger max_model_len or ladder.patches"
            )
        return grid


class Arrivals:
    """The requests of a call, by their rows in it.

    Attributes:
      errors: by row, of those that are wrong as far as one can tell.
      lengths: tokens of each other prompt, images expanded, by row.
    """

    def __init__(
        self,
        identifier: Identifier,
        prompts: Sequence[Prompt | ValueError],
        salt: Salt,
        owner: str,
        lookup: bool,
    ):
        self.errors: dict[int, ValueError] = {}
        self.lengths: dict[int, int] = {}
        self._identifier, self._salt, self._owner, self._lookup = identifier, salt, owner, lookup
        self._prompts: dict[int, Prompt] = {}
        self._tasks: dict[int, list[_Task]] = {}
        self._bound: dict[str, Picture] = {}
        self._counted: set[int] = set()
        tasks: dict[object, _Task] = {}
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, ValueError):
                self.errors[row] = prompt
                continue
            self._prompts[row] = prompt
            self._tasks[row] = []
            for source, uuid in zip(prompt.images, prompt.uuids, strict=True):
                settings = tuple(sorted(prompt.mm_processor_kwargs.items()))
                task = _Task(identifier, source, uuid, prompt.mm_processor_kwargs, salt, lookup)
                self._tasks[row].append(tasks.setdefault((task.source_id, uuid, settings), task))
        heads = identifier.read_heads(tasks.values())
        identifier.store.outside.look([key for task in tasks.values() if task.is_known for key in task.image.keys])
        for row, own in self._tasks.items():
            prompt = self._prompts[row]
            wrong = (
                task.error_of(source, error)
                for task, source in zip(own, prompt.images, strict=True)
                if (error := heads[task]) is not None
            )
            if (error := next(wrong, None)) is not None:
                self.errors[row] = error
            else:
                self.lengths[row] = len(prompt.token_ids) + sum(task.num_tokens - 1 for task in own)

    def windows(self, *, keep_patches: bool = False) -> Generator[Iterator[tuple[int, Request | ValueError]]]:
        """The rows that are not wrong, in order: each identified, or the reason why it is wrong after all.

        When the next window is asked for, the patches of the one before are forgotten, unless they are to be kept.
        """
        cut = list(self._cut())
        pairs = itertools.pairwise([*cut, []])
        running = self._start(cut[0] if cut else [])
        for rows, following in pairs:
            coming = self._start(following)
            images: dict[tuple[str, bool], ImageRef] = {}  # requests that run together share them
            try:
                yield ((row, self._finish(row, running, images)) for row in rows)
            except GeneratorExit:
                for future in coming.values():
                    future.cancel()
                raise
            if not keep_patches:
                needed = {task for row in following for task in self._tasks[row]}
                for task in {task for row in rows for task in self._tasks[row]} - needed:
                    task.forget()
            running = coming

    def _cut(self) -> Iterator[list[int]]:
        """Rows that are identified together."""
        rows: list[int] = []
        used = 0
        for row in self.lengths:
            if row in self.errors:
                continue
            cost = sum(task.patch_bytes for task in set(self._tasks[row]))
            if rows and used + cost > WINDOW_BYTES:
                yield rows
                rows, used = [], 0
            rows.append(row)
            used += cost
        if rows:
            yield rows

    def _start(self, rows: Iterable[int]) -> dict[_Task, Future[ValueError | None]]:
        return self._identifier.decode(dict.fromkeys(task for row in rows for task in self._tasks[row]))

    def _finish(
        self, row: int, running: dict[_Task, Future[ValueError | None]], images: dict[tuple[str, bool], ImageRef]
    ) -> Request | ValueError:
        own, prompt, metrics = self._tasks[row], self._prompts[row], Metrics()
        for task in reversed(own):  # threads begin with the first ones
            if not running[task].cancelled() and running[task].cancel():  # none has: who waits may as well do it
                running[task] = _done(task.run())
        for task, source in zip(own, prompt.images, strict=True):
            try:
                error = running[task].result() or self._bind(task)
            except CancelledError as cancelled:
                raise RuntimeError(_CLOSED) from cancelled
            if error is not None:
                return task.error_of(source, error)
            images.setdefault(task.shared, task.image)
            if id(task) not in self._counted:  # the request with which an image comes first pays for it
                self._counted.add(id(task))
                metrics.lookup += task.lookup
                metrics.decode_image += task.decode
                metrics.preprocess += task.preprocess
        refs = tuple(images[task.shared] for task in own)
        counts = [image.num_tokens for image in refs]
        token_ids, starts, _ = self._identifier.renderer.expand(prompt.token_ids, counts)
        return Request(prompt, token_ids, tuple(starts.tolist()), refs, self._owner, metrics)

    def _bind(self, task: _Task) -> ValueError | None:
        """Remembers what aliases stand for, after a check that no uuid stands for two pictures."""
        store = self._identifier.store
        if not self._lookup:
            return None
        if task.uuid is not None:
            alias = alias_key(task.uuid, self._salt)
            bound = self._bound.setdefault(alias, store.pictures.get(alias) or task.picture)
            if bound.content != task.picture.content:
                return task.wrong_uuid()
            store.pictures.put(alias, bound)
        if task.alias is not None:
            store.pictures.put(task.alias, task.picture)
        return None


class _Task:
    """Finds out which image a source is.

    Attributes:
      source_id: equal for sources that are the same for sure.
      is_known: whether its head has told which image it is.
      alias: key under which its picture is found again without decoding; None: it has no encoded bytes.
      num_tokens, patch_bytes: of the image; known from its head.
      picture, image: the result.
      lookup, decode, preprocess: seconds.
    """

    picture: Picture
    image: ImageRef
    num_tokens: int
    patch_bytes: int

    def __init__(
        self,
        identifier: Identifier,
        source: ImageSource,
        uuid: str | None,
        limits: Mapping[str, int],
        salt: Salt,
        lookup: bool,
    ):
        self.source, self.uuid = source, uuid
        self._identifier, self._limits, self._salt, self._lookup = identifier, limits, salt, lookup
        self._trusted = uuid if lookup and identifier.store.config.trust_uuids else None
        self.source_id = self._trusted or _same(source)
        self.alias: str | None = None
        self.lookup = self.decode = self.preprocess = 0.0
        self._known: Picture | None = None
        self.is_known = self._is_identified = False
        self._running = threading.Lock()  # two windows may ask at once

    @property
    def shared(self) -> tuple[str, bool]:
        """Equal for tasks that may share an image. One that is known by its uuid alone may have no pixels at all."""
        return self.image.key, self._trusted is not None

    def head(self) -> ValueError | None:
        """What is known without pixels; returns what is wrong with it."""
        start = time.perf_counter()
        try:
            if self._lookup:
                named = self._trusted if self._trusted is not None else self.source.encoded
                self.alias = None if named is None else alias_key(named, self._salt)
            if self.alias is not None:
                self._known = self._identifier.store.pictures.get(self.alias)
                if (refused := self._identifier.store.refusals.get(self.alias)) is not None:
                    raise ValueError(f"{self.source.name} {refused}")
            if self._known is not None:
                height, width = self._known.height, self._known.width
            else:
                height, width = self.source.size(self._identifier.max_pixels)
            grid = self._identifier.grid(height, width, self._limits, self.source.name)
            if self._known is not None:
                self._become(self._known, grid)
                self.is_known = True
        except ValueError as error:
            return error
        finally:
            self.lookup = time.perf_counter() - start
        processor = self._identifier.processor
        self.num_tokens = processor.num_tokens(grid)
        self.patch_bytes = math.prod(grid) * 3 * processor.patch_size**2
        return None

    def run(self) -> ValueError | None:
        """Identifies the image, and has its patches ready if they will be needed as far as one can tell now."""
        with self._running:
            try:
                if not self._is_identified:
                    self._identify()
                    self._is_identified = True
                elif not self._is_kept():
                    _ = self.image.patches
            except ValueError as error:
                return error
            return None

    def is_ready(self) -> bool:
        """Whether `run` has nothing to do."""
        return (self._is_identified or self.is_known) and self._is_kept()

    def forget(self) -> None:
        """Drops the patches; whoever needs them decodes the picture again."""
        if self._is_identified or self.is_known:
            self.image.forget()

    def error_of(self, source: ImageSource, error: ValueError) -> ValueError:
        """An error of this image, in the words of one of the requests that show it."""
        return ValueError(str(error).replace(self.source.name, source.name))

    def wrong_uuid(self) -> ValueError:
        return ValueError(
            f"uuid of {self.source.name} must stay with one picture, but {self.uuid!r} came with another one before; "
            "cache.release_uuid sets it free"
        )

    def _identify(self) -> None:
        if self._known is not None:
            if not self._is_kept():
                _ = self.image.patches
            return
        with self._decoded() as rgb:
            height, width, _ = rgb.shape
            self._become(_picture(rgb), self._identifier.grid(height, width, self._limits, self.source.name))
            if self._lookup:
                self._identifier.store.outside.look(self.image.keys)
            if not self._is_kept():
                self.image.patches = self._cut(rgb)

    def _become(self, picture: Picture, grid: Grid) -> None:
        identifier = self._identifier
        self.picture = picture
        key, shared = identifier.entry_key(picture, self._limits, self._salt), None
        if len(identifier.store.shared):
            shared = identifier.store.shared.get(identifier.entry_key(picture, self._limits, None))
        self.image = ImageRef(key, grid, identifier.processor.num_tokens(grid), self._patches, shared=shared)

    def _is_kept(self) -> bool:
        """Whether the pixels will not be needed, as far as one can tell now."""
        return self._lookup and any(map(self._identifier.store.knows, self.image.keys))

    @contextmanager
    def _decoded(self) -> Iterator[npt.NDArray[np.uint8]]:
        height, width = self.source.size(self._identifier.max_pixels)
        with self._identifier.decoding.take(height * width * _PIXEL_BYTES):
            start = time.perf_counter()
            try:
                rgb = self.source.decode(self._identifier.max_pixels)
            except ValueError as error:
                # Memory or file handles that run out say nothing of the picture; other bytes need no second try.
                passing = isinstance(error.__cause__, MemoryError) or getattr(error.__cause__, "errno", None)
                if self.alias is not None and self._trusted is None and not passing:
                    self._identifier.store.refusals.put(self.alias, str(error).removeprefix(self.source.name).strip())
                raise
            self.decode += time.perf_counter() - start
            yield rgb

    def _cut(self, rgb: npt.NDArray[np.uint8]) -> Patches:
        start = time.perf_counter()
        patches = self._identifier.processor.patches(rgb, self._limits)
        self.preprocess += time.perf_counter() - start
        return patches

    def _patches(self) -> Patches:
        with self._decoded() as rgb:
            if self._trusted is not None and _picture(rgb) != self.picture:
                raise self.wrong_uuid()  # kept under the other picture's key, it would mislead everyone
            return self._cut(rgb)


class _Budget:
    """Lets work begin in its order, as long as all that is under way stays within a number of bytes.

    Alone, a piece of work may be larger.
    """

    def __init__(self, most: int):
        self._most = most
        self._used = 0
        self._waiting: list[object] = []
        self._changed = threading.Condition()

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                self._changed.wait_for(
                    lambda: self._waiting[0] is me and (not self._used or self._used + amount <= self._most)
                )
                self._used += amount
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()


class _Same:
    """Equal for encoded files of the same bytes, told apart by few of them where they differ."""

    def __init__(self, encoded: bytes):
        self._encoded, middle = encoded, len(encoded) // 2
        self._hash = hash((len(encoded), encoded[:64], encoded[middle : middle + 64], encoded[-64:]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._encoded == other._encoded


def _same(source: ImageSource) -> object:
    """Equal for sources that are the same for sure."""
    return id(source.value) if source.encoded is None else _Same(source.encoded)


def _done(error: ValueError | None) -> Future[ValueError | None]:
    done: Future[ValueError | None] = Future()
    done.set_result(error)
    return done


def _picture(rgb: npt.NDArray[np.uint8]) -> Picture:
    return Picture(content_key(rgb), *rgb.shape[:2])

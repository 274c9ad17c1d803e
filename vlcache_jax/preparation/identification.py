"""Identification of the images, and chunks of videos, in the prompts of a call.

First it finds, for all requests, what hashes and file headers show, such as the number of tokens of an image. Then it
decodes pixels in groups of requests: those of the next group while the group before is being answered. Cached images
are not decoded at all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import Salt, alias_key, owner_key
from vlcache_jax.cache.store import ImageKey
from vlcache_jax.engine.completions import RequestMetrics
from vlcache_jax.engine.request import Request
from vlcache_jax.inputs.expansion import Expansion, Inset
from vlcache_jax.inputs.layout import ImageRef, Moment
from vlcache_jax.inputs.prompt import Prompt, PromptRenderer
from vlcache_jax.preparation.recognition import Recognizer, Task

WINDOW_BYTES = 128 * 2**20  # maximum bytes of patches per group of requests; the next group is made while it runs
_HELPERS = 8  # maximum threads that read file headers: between two images each needs the interpreter
_CLOSED = "this LLM is closed"


class Identifier:
    """Identifier of the images and videos of calls.

    Args:
      recognizer: identifies single sources.
      renderer: renderer of the checkpoint.
      threads: threads that decode and cut images.
      quick_threads: threads that hash files and read headers, which therefore do not wait for pixels.
    """

    def __init__(self, recognizer: Recognizer, renderer: PromptRenderer, *, threads: Executor, quick_threads: Executor):
        self.recognizer, self.renderer = recognizer, renderer
        self.store = recognizer.store
        self._threads, self._quick_threads = threads, quick_threads

    def open(
        self, prompts: Sequence[Prompt | ValueError], salt: Salt = None, *, lookup: bool = True, apart: bool = False
    ) -> Arrivals:
        """Read what hashes and file headers show of a call's images, on several threads.

        Args:
          prompts: prompts of a call, or errors of requests that are already known to be wrong.
          salt: salt of the call, see `vlcache_jax.cache`.
          lookup: look images up in the cache; otherwise all are decoded.
          apart: see `Call`.

        Raises:
          ValueError: the salt is not a string.
        """
        owner = owner_key(salt)
        if any(isinstance(prompt, Prompt) and prompt.sources for prompt in prompts):
            self.recognizer.fingerprint()  # once, rather than on each thread: it may hash all weights
        return Arrivals(self, prompts, salt, owner, lookup, apart)

    def identify(
        self, prompts: Sequence[Prompt | ValueError], salt: Salt = None, *, lookup: bool = True
    ) -> list[Request]:
        """Identify all images of some prompts at once.

        Raises:
          ValueError: an image cannot be decoded or is too large, its uuid is bound to another image, or the salt is not
            a string.
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
        """Return the results of `work` for each value, computed in parallel; for work that mostly waits."""
        given = list(given)
        if len(given) == 1:  # another thread would only add latency
            return [work(given[0])]
        try:
            return list(self._quick_threads.map(work, given))
        except (RuntimeError, CancelledError) as error:
            raise RuntimeError(_CLOSED) from error

    def read_heads(self, tasks: Collection[Task]) -> dict[Task, ValueError]:
        """Read the headers of sources; return the errors of wrong ones."""
        errors: dict[Task, ValueError] = {}
        left = iter([*tasks])

        def read() -> None:
            for task in left:  # all threads draw from one iterator
                if (error := task.head()) is not None:
                    errors[task] = error

        # This thread reads, too, as it would wait anyway. Helpers are woken once rather than per image. There are as
        # many as cores: a single one would often run on the core of this thread.
        helpers = min(len(tasks) - 1, os.cpu_count() or 1, _HELPERS)
        reading = [self._submit(self._quick_threads, read) for _ in range(helpers)]
        read()
        for future in reading:
            if not future.cancel():  # helpers that have not begun are not needed any more
                future.result()
        return errors

    def decode(self, tasks: Iterable[Task]) -> dict[Task, Future[ValueError | None]]:
        """Start decoding the tasks that are not ready."""
        return {task: self._submit(self._threads, task.run) for task in tasks if not task.is_ready()}

    def _submit[T](self, threads: Executor, work: Callable[[], T]) -> Future[T]:
        try:
            return threads.submit(work)
        except RuntimeError as error:  # the threads were shut down meanwhile
            raise RuntimeError(_CLOSED) from error


class Arrivals:
    """Requests of a call, by their number in it.

    Attributes:
      errors: errors of requests that are known to be wrong.
      lengths: number of prompt tokens of all other requests, with images expanded.
    """

    def __init__(
        self,
        identifier: Identifier,
        prompts: Sequence[Prompt | ValueError],
        salt: Salt,
        owner: str,
        lookup: bool,
        apart: bool,
    ):
        self.errors: dict[int, ValueError] = {}
        self.lengths: dict[int, int] = {}
        self._identifier, self._salt, self._owner, self._lookup = identifier, salt, owner, lookup
        self._prompts: dict[int, Prompt] = {}
        self._tasks: dict[int, list[Task]] = {}
        self._expansions: dict[int, Expansion] = {}
        self._bound: dict[str, ImageKey] = {}
        self._counted: set[int] = set()
        tasks: dict[object, Task] = {}
        apart = apart or not len(identifier.store.shared)
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, ValueError):
                self.errors[row] = prompt
                continue
            self._prompts[row] = prompt
            self._tasks[row] = []
            for source, uuid in zip(prompt.sources, prompt.uuids, strict=True):
                limits = prompt.limits_of(source)
                task = Task(identifier.recognizer, source, uuid, limits, salt, lookup, apart)
                same = task.source_id, uuid, tuple(sorted(limits.items()))
                self._tasks[row].append(tasks.setdefault(same, task))
        errors = identifier.read_heads(tasks.values())
        known = [image for task in tasks.values() if task.is_known for image in task.images]
        identifier.store.look([key for image in known for key in image.keys])
        for row, own in self._tasks.items():
            prompt = self._prompts[row]
            if wrong := [pair for pair in zip(own, prompt.sources, strict=True) if pair[0] in errors]:
                task, source = wrong[0]
                self.errors[row] = task.error_of(source, errors[task])
            else:
                insets = [task.medium.inset for task in own]
                self._expansions[row] = identifier.renderer.expander.expansion(prompt.token_ids, insets)
                self.lengths[row] = self._expansions[row].length

    def token_ids(self, row: int) -> npt.NDArray[np.int32]:
        """Return the token IDs of a request that is not wrong, with images expanded, int32 [n]."""
        return self._expansions[row].expanded()[0]

    def windows(self, *, keep_patches: bool = False) -> Generator[Iterator[tuple[int, Request | ValueError]]]:
        """Yield groups of the requests that are not wrong, in order; each request is identified, or an error.

        When the next group is requested, the patches of the one before are dropped, unless `keep_patches` is set.
        """
        try:
            yield from self._windows(keep_patches)
        finally:
            for task in itertools.chain.from_iterable(self._tasks.values()):
                task.use = None  # the requests have it by now

    def _windows(self, keep_patches: bool) -> Generator[Iterator[tuple[int, Request | ValueError]]]:
        cut = list(self._cut())
        pairs = itertools.pairwise([*cut, []])
        running = self._start(cut[0] if cut else [])
        for rows, following in pairs:
            coming = self._start(following)
            images: dict[tuple[str, bool], ImageRef] = {}  # shared by requests that run together
            try:
                yield ((row, self._finish(row, running, images)) for row in rows)
            except GeneratorExit:
                for future in coming.values():
                    future.cancel()
                raise
            if not keep_patches:
                needed = {task for row in following for task in self._tasks[row]}
                done = {task for row in rows for task in self._tasks[row]} - needed
                for image in [image for task in done for image in task.images]:
                    image.forget()
            running = coming

    def _cut(self) -> Iterator[list[int]]:
        """Yield the requests of each group."""
        rows: list[int] = []
        used = 0
        for row in self.lengths:
            if row in self.errors:
                continue
            cost = sum([task.medium.patch_bytes for task in set(self._tasks[row])])
            if rows and used + cost > WINDOW_BYTES:
                yield rows
                rows, used = [], 0
            rows.append(row)
            used += cost
        if rows:
            yield rows

    def _start(self, rows: Iterable[int]) -> dict[Task, Future[ValueError | None]]:
        return self._identifier.decode(dict.fromkeys([task for row in rows for task in self._tasks[row]]))

    def _finish(
        self, row: int, running: dict[Task, Future[ValueError | None]], images: dict[tuple[str, bool], ImageRef]
    ) -> Request | ValueError:
        own, prompt, metrics = self._tasks[row], self._prompts[row], RequestMetrics()
        for task in reversed([task for task in own if task in running]):  # threads begin with the first ones
            if not running[task].cancelled() and running[task].cancel():  # not begun: run it here instead of waiting
                running[task] = _done(task.run())
        refs: list[ImageRef] = []
        for task, source in zip(own, prompt.sources, strict=True):
            try:
                error = running[task].result() if task in running else None
                # Aliases of images identified by their header are stored already.
                if error is None and self._lookup and not (task.is_known and task.uuid is None):
                    error = self._bind(task)
            except CancelledError as cancelled:
                raise RuntimeError(_CLOSED) from cancelled
            if error is not None:
                return task.error_of(source, error)
            refs += [images.setdefault(*pair) for pair in zip(task.shared, task.images, strict=True)]
            if id(task) not in self._counted:  # its time counts for the first request with the image
                self._counted.add(id(task))
                metrics.lookup += task.lookup
                metrics.decode_image += task.decode
                metrics.preprocess += task.preprocess
        token_ids, starts, _ = self._expansions[row].expanded()
        moments: list[Moment | None] = [] if prompt.videos else [None] * len(refs)
        videos: list[Inset] = []
        for task in own if prompt.videos else ():
            moments += task.medium.moments(len(videos))
            videos += [task.medium.inset] if moments[-1] is not None else []
        uses = [task.use for task in own if task.use is not None]
        begins = tuple(starts.tolist())
        return Request(
            prompt, token_ids, begins, tuple(refs), tuple(moments), self._owner, metrics, uses, tuple(videos)
        )

    def _bind(self, task: Task) -> ValueError | None:
        """Store what aliases stand for; return an error if a uuid stands for two images."""
        store = self._identifier.store
        if task.uuid is not None:
            alias = alias_key(task.uuid, self._salt)
            bound = self._bound.setdefault(alias, store.image_keys.get(alias) or task.image_key)
            if bound.content != task.image_key.content:
                return task.wrong_uuid()
            store.image_keys.put(alias, bound)
        for alias, image_key in task.aliases():
            store.image_keys.put(alias, image_key)
        return None


def _done(error: ValueError | None) -> Future[ValueError | None]:
    done: Future[ValueError | None] = Future()
    done.set_result(error)
    return done

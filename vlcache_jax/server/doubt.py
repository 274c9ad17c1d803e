"""What an error says of the engine: whether it will answer any more."""

from __future__ import annotations

import contextlib

from starlette.background import BackgroundTask
from starlette.responses import Response

from vlcache_jax.async_llm import AsyncLLM, QueueFullError
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.server.entrance import Entrance
from vlcache_jax.server.errors import as_api_error
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.responses import refuse
from vlcache_jax.serving import NotFiniteError

_DOUBTFUL = RuntimeError, NotFiniteError


class Doubt:
    """Hears of the errors of requests.

    Args:
      engine: may have failed.
      entrance: lets nobody in once it has.
      metrics: count answers that were not finite.
    """

    def __init__(self, engine: AsyncLLM, entrance: Entrance, metrics: ServerMetrics):
        self._engine, self._entrance, self._metrics = engine, entrance, metrics
        self._is_asking = False

    def refuse(self, error: Exception) -> Response:
        """What the client is told of an error, behind which somebody looks at the engine."""
        self.count(error)
        response = refuse(as_api_error(error))
        if isinstance(error, _DOUBTFUL):  # others would keep their bodies, by the frames of their tracebacks
            response.background = BackgroundTask(self.look, error)
        return response

    def count(self, error: Exception) -> None:
        """Counts an error, before the client is told."""
        if isinstance(error, NotFiniteError):
            self._metrics.corrupted()

    async def look(self, error: Exception) -> None:
        """After an error of the engine, which ends all that run, one of them finds out: unless a plain text is
        answered, nothing is any more."""
        if self._is_asking or not isinstance(error, _DOUBTFUL):
            return
        self._is_asking = True
        try:
            with contextlib.suppress(QueueFullError):
                async for _ in self._engine.deltas("Hello", SamplingParams(max_tokens=1)):
                    pass
        except (RuntimeError, NotFiniteError) as found:
            self._entrance.failure = f"not even a plain text is answered: {found}"
        finally:
            self._is_asking = False

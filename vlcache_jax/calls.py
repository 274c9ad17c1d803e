"""A call of the public API, from checked arguments to what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vlcache_jax.cache.keys import owner_key
from vlcache_jax.engine.ahead import Ahead
from vlcache_jax.engine.engine import Engine
from vlcache_jax.engine.identification import Arrivals, Identifier
from vlcache_jax.engine.interrupts import interruptible
from vlcache_jax.engine.linker import Linker
from vlcache_jax.engine.request import Forced, Generation, Linked
from vlcache_jax.engine.sampling import SamplingParams
from vlcache_jax.engine.sequences import SequenceBuilder, or_error
from vlcache_jax.engine.serving import serve
from vlcache_jax.engine.verification import Verification
from vlcache_jax.engine.verification import verify as verify_answers
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.outputs import Reporter, RequestOutput, Score
from vlcache_jax.progress import Progress
from vlcache_jax.reuse.policies import Policy


@dataclass(frozen=True)
class Call:
    """A call of `LLM`; see `LLM.chat`.

    Attributes:
      name: of the argument that lists the requests.
      listed: the requests as they came.
      render: makes a prompt of one.
      policy, salt, on_error: of all of them.
      show: whether progress is shown.
    """

    name: str
    listed: Sequence[Any]
    render: Callable[..., Prompt]
    policy: Policy
    salt: str | None
    on_error: str
    show: bool

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise ValueError(f'on_error must be "raise" or "return", got {self.on_error!r}')
        owner_key(self.salt)  # checks the salt

    def prompt(self, row: int) -> Prompt | ValueError:
        """The prompt of a request, or what is wrong with it."""
        name = f"{self.name}[{row}]"
        try:
            return self.render(self.listed[row], name=name)
        except ValueError as error:
            return error
        except Exception as error:  # a caller's own objects may raise anything
            return ValueError(f"{name} must be readable, got {type(error).__name__}: {error}")


class Caller:
    """Answers and scores prompts.

    Args:
      identifier, linker, engine, sequences, reporter: of the model.
      serving: is entered by each of several calls in turn.
      ahead: is told what was answered.
    """

    def __init__(
        self,
        identifier: Identifier,
        linker: Linker,
        engine: Engine,
        sequences: SequenceBuilder,
        reporter: Reporter,
        serving: Callable[[], AbstractContextManager[None]],
        ahead: Ahead,
    ):
        self._identifier, self._linker, self._engine = identifier, linker, engine
        self._sequences, self._reporter = sequences, reporter
        self._serving = serving
        self._ahead = ahead

    def generate(
        self, call: Call, sampling_params: SamplingParams | Sequence[SamplingParams] | None, *, verify: bool
    ) -> list[RequestOutput]:
        """See `LLM.chat`."""
        params = self._sequences.sampling_params(sampling_params, len(call.listed))
        prompts = self._prompts(call)
        stop = call.on_error == "raise"

        def run(numbers: Sequence[int], group: list[Linked]) -> list[RequestOutput | None]:
            answers = [
                self._sequences.answers(linked, _good(params[i])) for i, linked in zip(numbers, group, strict=True)
            ]
            sequences = [answer for own in answers for answer in own]
            self._engine.generate(sequences, lambda _: bar.update(), stop=stop)
            self._ahead.expect(call.policy, sequences)
            compared: list[Verification | None] = [None] * len(group)
            if verify:
                compared = verify_answers(self._engine, self._sequences, group, [own[0] for own in answers])
            self._forget_failed(group, answers)
            return [
                self._reporter.output(linked, own, found) if _has_ended(own) else None
                for linked, own, found in zip(group, answers, compared, strict=True)
            ]

        def failed(i: int, error: str) -> RequestOutput:
            prompt = prompts[i]
            return self._reporter.failed_output(prompt.text if isinstance(prompt, Prompt) else "", error)

        total = sum(own.n for own in params if isinstance(own, SamplingParams))
        with interruptible(), Progress("answering", total, show=call.show) as bar:
            arrivals = self._check(prompts, params, self._sequences.new_slots, call)
            outputs = serve(arrivals, self._linker, self._serving, call.policy, run, failed, stop=stop)
        self._ahead.start()
        return outputs

    def score(self, call: Call, continuations: Sequence[str | Sequence[int]], *, keep_logits: bool) -> list[Score]:
        """See `LLM.score`."""
        forced = self._sequences.continuations(continuations, len(call.listed))
        prompts = self._prompts(call)
        stop = call.on_error == "raise"

        def run(numbers: Sequence[int], group: list[Linked]) -> list[Score | None]:
            sequences = [
                self._sequences.forced(linked, _good(forced[i]), keep_logits=keep_logits, capture=True)
                for i, linked in zip(numbers, group, strict=True)
            ]
            self._engine.score(sequences, lambda _: bar.update(), stop=stop)
            self._forget_failed(group, [[sequence] for sequence in sequences])
            return [
                self._reporter.score(linked, sequence) if sequence.is_finished else None
                for linked, sequence in zip(group, sequences, strict=True)
            ]

        def failed(_: int, error: str) -> Score:
            return self._reporter.failed_score(error)

        with interruptible(), Progress("scoring", len(prompts), show=call.show) as bar:
            arrivals = self._check(prompts, forced, lambda _, tokens: len(tokens), call)
            return serve(arrivals, self._linker, self._serving, call.policy, run, failed, stop=stop)

    def close(self) -> None:
        """Lets go of the engine; who calls afterwards is told by `serving`."""
        self._engine = None  # type: ignore[assignment]

    def _prompts(self, call: Call) -> list[Prompt | ValueError]:
        """Side by side, as images may come from the network; behind all other checks for the same reason."""
        return self._identifier.side_by_side(call.prompt, range(len(call.listed)))

    def _forget_failed(self, group: list[Linked], sequences: Sequence[Sequence[Generation | Forced]]) -> None:
        """A request that failed was not served: its list of images is as unknown as before."""
        for linked, own in zip(group, sequences, strict=True):
            failed = any(sequence.error is not None or not sequence.is_finished for sequence in own)
            if failed and linked.request_key is not None and not linked.request_known:
                self._linker.store.forget_request(linked.request_key)

    def _check[T](
        self,
        prompts: Sequence[Prompt | ValueError],
        wanted: Sequence[T | ValueError],
        new_slots: Callable[[int, T], int],
        call: Call,
    ) -> Arrivals:
        """Finds every row that arguments and heads of files tell to be wrong.

        Args:
          wanted: what is asked of each row.
          new_slots: that it takes behind a prompt of so many tokens.
        """
        given = [
            own if isinstance(own, ValueError) and isinstance(prompt, Prompt) else prompt
            for prompt, own in zip(prompts, wanted, strict=True)
        ]
        arrivals = self._identifier.open(given, call.salt, lookup=call.policy.links)
        for i, length in arrivals.lengths.items():
            slots = new_slots(length, _good(wanted[i]))
            if error := or_error(self._sequences.check_length, _good(prompts[i]).name, length, slots):
                arrivals.errors[i] = error
        return arrivals


def _has_ended(answers: list[Generation]) -> bool:
    """Whether a request has its answers, or an error."""
    return all(answer.is_finished for answer in answers) or any(answer.error is not None for answer in answers)


def _good[T](value: T | ValueError) -> T:
    """Of a row that is not wrong."""
    assert not isinstance(value, ValueError)
    return value

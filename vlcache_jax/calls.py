"""A call of the public API, from checked arguments to what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vlcache_jax.engine.engine import Engine
from vlcache_jax.engine.identification import Arrivals, Identifier
from vlcache_jax.engine.interrupts import interruptible
from vlcache_jax.engine.linker import Linker
from vlcache_jax.engine.request import Generation, Linked
from vlcache_jax.engine.sampling import SamplingParams
from vlcache_jax.engine.sequences import SequenceBuilder, or_error
from vlcache_jax.engine.serving import serve
from vlcache_jax.engine.verification import Verification
from vlcache_jax.engine.verification import verify as verify_answers
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.outputs import Reporter, RequestOutput, Score
from vlcache_jax.reuse.policies import Policy


@dataclass(frozen=True)
class Call:
    """What all rows of a call have in common; see `LLM.chat`."""

    policy: Policy
    salt: str | None
    on_error: str

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise ValueError(f'on_error must be "raise" or "return", got {self.on_error!r}')


class Caller:
    """Answers and scores prompts.

    Args:
      identifier, linker, engine, sequences, reporter: of the model.
      serving: is entered by each of several calls in turn.
      answered: called with the policy and the sequences that were answered together.
    """

    def __init__(
        self,
        identifier: Identifier,
        linker: Linker,
        engine: Engine,
        sequences: SequenceBuilder,
        reporter: Reporter,
        serving: Callable[[], AbstractContextManager[None]],
        answered: Callable[[Policy, Sequence[Generation]], object],
    ):
        self._identifier, self._linker, self._engine = identifier, linker, engine
        self._sequences, self._reporter = sequences, reporter
        self._serving = serving
        self._answered = answered

    def generate(
        self,
        prompts: Sequence[Prompt | ValueError],
        params: Sequence[SamplingParams | ValueError],
        call: Call,
        *,
        verify: bool,
        progress: Callable[[], object],
    ) -> list[RequestOutput]:
        """Answers prompts; errors among them, and among their parameters, are rows that are wrong."""

        def run(numbers: Sequence[int], group: list[Linked]) -> list[RequestOutput]:
            answers = [
                self._sequences.answers(linked, _good(params[i])) for i, linked in zip(numbers, group, strict=True)
            ]
            sequences = [answer for own in answers for answer in own]
            self._engine.generate(sequences, lambda _: progress())
            self._answered(call.policy, sequences)
            compared: list[Verification | None] = [None] * len(group)
            if verify:
                compared = verify_answers(self._engine, self._sequences, group, [own[0] for own in answers])
            return [self._reporter.output(*each) for each in zip(group, answers, compared, strict=True)]

        def failed(i: int, error: str) -> RequestOutput:
            prompt = prompts[i]
            return self._reporter.failed_output(prompt.text if isinstance(prompt, Prompt) else "", error)

        with interruptible():
            arrivals = self._check(prompts, params, self._sequences.new_slots, call)
            return serve(arrivals, self._linker, self._serving, call.policy, run, failed, stop=call.on_error == "raise")

    def score(
        self,
        prompts: Sequence[Prompt | ValueError],
        continuations: Any,
        call: Call,
        *,
        keep_logits: bool,
        progress: Callable[[], object],
    ) -> list[Score]:
        """Scores a continuation of each prompt."""
        forced = self._sequences.continuations(continuations, len(prompts))

        def run(numbers: Sequence[int], group: list[Linked]) -> list[Score]:
            sequences = [
                self._sequences.forced(linked, _good(forced[i]), keep_logits=keep_logits, capture=True)
                for i, linked in zip(numbers, group, strict=True)
            ]
            self._engine.score(sequences, lambda _: progress())
            return [self._reporter.score(*each) for each in zip(group, sequences, strict=True)]

        def failed(_: int, error: str) -> Score:
            return self._reporter.failed_score(error)

        with interruptible():
            arrivals = self._check(prompts, forced, lambda _, tokens: len(tokens), call)
            return serve(arrivals, self._linker, self._serving, call.policy, run, failed, stop=call.on_error == "raise")

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


def _good[T](value: T | ValueError) -> T:
    """Of a row that is not wrong."""
    assert not isinstance(value, ValueError)
    return value

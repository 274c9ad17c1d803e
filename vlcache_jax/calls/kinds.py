"""What a call wants of its requests: answers, scores of continuations, or hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from vlcache_jax.calls.groups import Call, Job, ResultKind, good
from vlcache_jax.engine.request import Forced, Generation, Planned, PooledSequence
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.outputs import HiddenState, Reporter, RequestOutput, Score
from vlcache_jax.preparation.sequences import SequenceBuilder


class AnswerKind(ResultKind[RequestOutput]):
    """Generated answers.

    Args:
      call, builder, reporter: see `ResultKind`.

    Raises:
      ValueError: the sampling parameters for all of them are wrong.
    """

    generates = True

    def __init__(self, call: Call, builder: SequenceBuilder, reporter: Reporter):
        super().__init__(call, builder, reporter)
        self._params = builder.sampling_params(call.params, len(call.listed), call.first)

    def error(self, row: int, prompt: Prompt) -> ValueError | None:
        params = self._params[row]
        if isinstance(params, ValueError):
            return params
        if self.call.compressors is not None and isinstance(wrong := self.call.compressors[row], ValueError):
            return wrong
        return self.builder.held(params, prompt)

    def new_slots(self, row: int, length: int) -> int:
        return self.builder.new_slots(length, good(self._params[row]))

    def sequences(self, row: int, planned: Planned) -> Sequence[Generation]:
        return self.builder.answers(planned, good(self._params[row]))

    def result(self, job: Job) -> RequestOutput:
        return self.reporter.output(job.planned, job.answers, request_id=str(job.row))

    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> RequestOutput:
        text = prompt.text if isinstance(prompt, Prompt) else ""
        return self.reporter.failed_output(text, error, request_id=str(self.call.first + row))


class ScoreKind(ResultKind[Score]):
    """Log-probabilities of continuations.

    Args:
      call, builder, reporter: see `ResultKind`.
      continuations: of each prompt, a text or token ids.
      keep_logits: whether results have the logits.

    Raises:
      ValueError: there is not one continuation for each prompt.
    """

    def __init__(
        self,
        call: Call,
        builder: SequenceBuilder,
        reporter: Reporter,
        continuations: Sequence[str | Sequence[int]],
        *,
        keep_logits: bool,
    ):
        super().__init__(call, builder, reporter)
        self._keep_logits = keep_logits
        self._tokens = builder.continuations(continuations, len(call.listed))

    def error(self, row: int, prompt: Prompt) -> ValueError | None:
        tokens = self._tokens[row]
        return tokens if isinstance(tokens, ValueError) else None

    def new_slots(self, row: int, length: int) -> int:
        return len(good(self._tokens[row]))

    def sequences(self, row: int, planned: Planned) -> Sequence[Forced]:
        return [self.builder.forced(planned, good(self._tokens[row]), keep_logits=self._keep_logits, capture=True)]

    def result(self, job: Job) -> Score:
        [sequence] = job.sequences
        assert isinstance(sequence, Forced)
        return self.reporter.score(job.planned, sequence)

    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> Score:
        return self.reporter.failed_score(error)


class HiddenStateKind(ResultKind[HiddenState]):
    """Hidden states of the last tokens of prompts."""

    def new_slots(self, row: int, length: int) -> int:
        return 0

    def sequences(self, row: int, planned: Planned) -> Sequence[PooledSequence]:
        return [self.builder.pooled(planned)]

    def result(self, job: Job) -> HiddenState:
        [sequence] = job.sequences
        assert isinstance(sequence, PooledSequence)
        return self.reporter.hidden_state(job.planned, sequence)

    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> HiddenState:
        return self.reporter.failed_hidden_state(error)

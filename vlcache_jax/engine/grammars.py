"""Structured outputs: compilation of grammars, and search for the allowed tokens, in threads of their own (host).

llguidance does both and releases Python's lock meanwhile. A grammar may come from any client, so everything that it can
cost is bounded.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.common.checks import short, shorten
from vlcache_jax.inputs.prompt import CLOSE
from vlcache_jax.sampling import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    import llguidance

Bits = npt.NDArray[np.int32]
type _Constraint = tuple[StructuredOutputs, bool]  # the grammar, and whether it applies after the model's thinking

_LOOP = "no text matches it, for example because of an endless recursion"
_NO_TEXT = dict.fromkeys(("json", "json_object", "grammar", "structural_tag"), _LOOP) | dict.fromkeys(
    ("regex", "choice"), "it matches no text"
)
_KEPT = 64  # most compiled grammars in memory
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Grammars:
    """Compiler of grammars.

    The first compilation reads the vocabulary. If that is large, this takes seconds, and no other Python code runs
    meanwhile.

    Args:
      tokenizer: tokenizer of the checkpoint, with its `backend_tokenizer`.
      ends: end tokens of the checkpoint.
      vocab_size: vocabulary size of the model; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int], vocab_size: int):
        self._tokenizer, self._ends, self._vocab_size = tokenizer, ends, vocab_size
        self._built: llguidance.LLTokenizer | None = None
        self._added: dict[str, int] = {}  # ids of added tokens by their texts
        self._known: OrderedDict[_Constraint, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # guards `_known`
        self._compiling = ThreadPoolExecutor(1, "vlcache-grammars")
        self._filling = ThreadPoolExecutor(1, "vlcache-masks")

    def prepare(self) -> Future[llguidance.LLTokenizer]:
        """Read the vocabulary in the background, so that the first grammar need not wait for it."""
        return self._compiling.submit(self._vocabulary)

    def check(self, params: SamplingParams, *, opens_thought: bool = False) -> None:
        """Compile the grammar of an output, unless it is compiled already.

        Args:
          params: sampling parameters of the output.
          opens_thought: whether the prompt ends within the model's thinking; the grammar then applies to what follows
            it.

        Raises:
          ValueError: the grammar cannot be compiled, or is too large.
        """
        if (requested := params.structured_outputs) is not None:
            self._compiled(_constraint(requested, opens_thought))

    def matcher(self, params: SamplingParams, *, opens_thought: bool = False) -> Matcher | None:
        """Return a matcher for a new output, see `check`; None if it has no grammar."""
        if (requested := params.structured_outputs) is None:
            return None
        ends = bits(self._ends, self._vocab_size)
        return Matcher(self._compiled(_constraint(requested, opens_thought)), params, ends, self._filling)

    def close(self) -> None:
        """Stop the threads and discard pending work."""
        for threads in (self._compiling, self._filling):
            threads.shutdown(cancel_futures=True)

    def _compiled(self, constraint: _Constraint) -> llguidance.LLMatcher:
        return self._find(constraint) or self._compiling.submit(self._compile, constraint).result()

    def _find(self, constraint: _Constraint) -> llguidance.LLMatcher | None:
        with self._lock:
            if constraint in self._known:
                self._known.move_to_end(constraint)
            return self._known.get(constraint)

    def _compile(self, constraint: _Constraint) -> llguidance.LLMatcher:
        import llguidance

        if (known := self._find(constraint)) is not None:  # another request may have compiled it meanwhile
            return known
        requested, is_after_thought = constraint
        try:
            if not self._ends:
                raise ValueError("the checkpoint has no end tokens; set eos_token_id in its generation_config.json")
            vocabulary = self._vocabulary()
            limits = llguidance.LLParserLimits(**_LIMITS)
            source = _source(requested, self._added)
            if is_after_thought:
                source = _after_thought(source, self._added, self._ends)
            matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
            _try(matcher, bits(self._ends, self._vocab_size))
        except Exception as error:  # a converter in Python may raise anything
            why = _why(error, requested)
            raise ValueError(
                f"{requested.name} must compile to a grammar: {why}, got {short(requested.text)}"
            ) from error
        with self._lock:
            self._known[constraint] = matcher
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return matcher

    def _vocabulary(self) -> llguidance.LLTokenizer:
        import llguidance

        if self._built is None:
            text, self._added = _read(self._tokenizer)
            self._built = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=sorted(self._ends))
        return self._built


@dataclass(frozen=True, eq=False)
class NextTokens:
    """Tokens that may come next in an output.

    Attributes:
      forced: tokens each of which is the only one allowed at its place, in order.
      after: tokens allowed after `forced`: bit i % 32 of word i // 32 is token i. None if the output is complete there.
    """

    forced: tuple[int, ...]
    after: Bits | None


class Matcher:
    """Allowed tokens of one output. Only the thread that fills masks changes its state.

    Args:
      compiled: grammar of the output, in its initial state.
      params: sampling parameters of the output.
      ends: end tokens of the checkpoint, as bits.
      threads: executor with one thread.
    """

    def __init__(self, compiled: llguidance.LLMatcher, params: SamplingParams, ends: Bits, threads: ThreadPoolExecutor):
        self._compiled, self._params, self._ends, self._threads = compiled, params, ends, threads
        only = params.allowed_token_ids
        self._only = np.full_like(ends, -1) if only is None else bits(only, 32 * len(ends))
        self._own: llguidance.LLMatcher | None = None
        self._count = 0
        self._latest: NextTokens | None = None
        self._next: Future[NextTokens] = threads.submit(self._advance, ())

    def fresh(self) -> Matcher:
        """Return a new matcher for the same output, in its initial state."""
        return Matcher(self._compiled, self._params, self._ends, self._threads)

    def advance(self, tokens: Sequence[int]) -> None:
        """Start to compute what may follow these new tokens of the output."""
        self._next = self._threads.submit(self._advance, tuple(tokens))

    def wait(self, patience: float) -> bool:
        """Wait at most `patience` seconds for the allowed tokens; return whether they are known."""
        if patience > 0 and not self._next.done():
            wait([self._next], patience)
        return self._next.done()

    def allowed(self) -> NextTokens:
        """Return the tokens that may come next, once they are known.

        Raises:
          ValueError: the output has left its grammar, or a token exceeds the limits of cost.
        """
        try:
            return self._next.result()
        except Exception as error:
            raise ValueError(
                f"structured_outputs must constrain the full output, but the matcher failed: {shorten(str(error))}"
            ) from error

    def mask(self, ahead: int) -> Bits | None:
        """Return the tokens allowed after `ahead` forced tokens, once they are known; None if they are not known."""
        following = self.allowed()
        if ahead < len(following.forced):
            return bits([following.forced[ahead]], 32 * len(self._ends))
        return following.after if ahead == len(following.forced) else None

    def _advance(self, tokens: Sequence[int]) -> NextTokens:
        if self._own is None:
            self._own = self._compiled.deep_copy()
        self._count += len(tokens)
        # Tokens that were forced once stay forced: a preempted output must continue with the same tokens.
        forced = () if self._latest is None else self._latest.forced
        if self._latest is not None and len(tokens) <= len(forced):
            self._latest = dataclasses.replace(self._latest, forced=forced[len(tokens) :])
        else:
            self._latest = self._look(self._own, tokens[len(forced) :])
        return self._latest

    def _look(self, own: llguidance.LLMatcher, tokens: Sequence[int]) -> NextTokens:
        """Consume tokens, and the tokens that are forced after them."""
        _consume(own, tokens)
        mask = self._mask(own, self._count)
        if mask is None or (mask & self._ends).any():
            return NextTokens((), mask)
        if self._params.allowed_token_ids is not None or self._params.bad_words:
            return NextTokens((), mask)
        if forced := own.compute_ff_tokens():
            _consume(own, forced)
            mask = self._mask(own, self._count + len(forced))
        return NextTokens(tuple(forced), mask)

    def _mask(self, own: llguidance.LLMatcher, count: int) -> Bits | None:
        """Return the tokens allowed in an output of `count` tokens; None if there are none."""
        allowed = np.zeros_like(self._ends)
        _fill(own, allowed)
        content, ends = allowed & ~self._ends, allowed & self._ends & self._only
        if self._params.ignore_eos or count < self._params.min_tokens:
            ends = np.zeros_like(ends)
        return content & self._only | ends if content.any() or ends.any() else None


def bits(tokens: Collection[int], vocab_size: int) -> Bits:
    """Return tokens as bits, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 is token i."""
    ids = np.fromiter(tokens, np.int64, len(tokens))
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)


def _consume(matcher: llguidance.LLMatcher, tokens: Sequence[int]) -> None:
    """Advance the matcher by tokens. Raise a ValueError if they are not allowed."""
    if tokens and not matcher.consume_tokens(list(tokens)):
        raise ValueError(matcher.get_error())


def _fill(matcher: llguidance.LLMatcher, allowed: Bits) -> None:
    """Fill the mask of allowed tokens. Raise a ValueError if the matcher failed."""
    import llguidance.numpy

    llguidance.numpy.fill_next_token_bitmask(matcher, allowed[None])
    if matcher.is_error():
        raise ValueError(matcher.get_error())


def _try(matcher: llguidance.LLMatcher, ends: Bits) -> None:
    """Advance one token into a grammar, since excessive size may show only there. Raise a ValueError if it fails."""
    allowed = np.zeros_like(ends)
    _fill(matcher, allowed)
    content = np.flatnonzero(np.unpackbits((allowed & ~ends).view(np.uint8), bitorder="little"))
    if len(content):
        further = matcher.deep_copy()
        further.consume_token(int(content[0]))
        _fill(further, allowed)


def _why(error: Exception, requested: StructuredOutputs) -> str:
    """Return what is wrong with a grammar, without the grammar that the compiler wraps around it."""
    message = str(error).replace("<non-verbose/>", "")
    if message.strip() == "NoExtensionBias":  # the compiler's name of this error
        return _NO_TEXT[requested.kind]
    if requested.kind != "grammar" and (found := re.findall(r"(?m)^\s*error: (.+)", message)):  # a regular expression
        message = found[-1]
    return shorten(" ".join(message.split()) or type(error).__name__)


def _read(tokenizer: Any) -> tuple[str, dict[str, int]]:
    """Return a tokenizer as JSON whose added tokens have unspellable names, and the ids of these tokens by their texts.

    Text that is spelled like an added token is then plain text. The token itself is allowed only where a grammar has
    its id.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = content["model"]["vocab"], {}
    for token in content["added_tokens"]:
        text, name = token["content"], f"<\uf8ff{token['id']}\uf8ff>"
        added[text], token["content"] = token["id"], name
        if text in vocabulary:
            vocabulary[name] = vocabulary.pop(text)
    return json.dumps(content), added


def _source(requested: StructuredOutputs, added: dict[str, int]) -> str:
    """Return the grammar in the syntax of llguidance."""
    import llguidance

    if requested.kind in ("json", "json_object"):
        spaces: Any = {"whitespace_flexible": not requested.disable_any_whitespace}
        if requested.whitespace_pattern is not None:
            spaces["whitespace_pattern"] = requested.whitespace_pattern
        return llguidance.LLMatcher.grammar_from_json_schema(requested.text, overrides=spaces)
    if requested.kind == "structural_tag":
        return _tags(json.loads(requested.text), added)
    return llguidance.grammar_from(requested.kind, requested.text)  # type: ignore[arg-type]


def _constraint(requested: StructuredOutputs, opens_thought: bool) -> _Constraint:
    return requested, opens_thought and not requested.enable_in_reasoning


def _after_thought(source: str, added: dict[str, int], ends: frozenset[int]) -> str:
    """Return a grammar of the model's thinking, then `</think>` and an empty line, then text of another grammar.

    The thinking is any text and any added tokens except those that end it or the output.
    """
    if (close := added.get(CLOSE)) is None:
        rules = [f"thought[suffix={json.dumps(CLOSE)}]: /(.|\\n)*/"]
    else:
        # The tag spelled as text would end the thinking for a reader of the text, but not for this grammar.
        text = f"/(.|\\n)+/ & ~/(.|\\n)*{re.escape(CLOSE).replace('/', chr(92) + '/')}(.|\\n)*/"
        others = sorted(set(added.values()) - ends - {close})
        piece = f"TEXT | <[{','.join(map(str, others))}]>" if others else "TEXT"
        rules = [f"thought: ({piece})* <[{close}]>", f"TEXT: {text}"]
    thinking = "\n".join([f"start: thought {json.dumps(chr(10) * 2)} @answer", *rules])
    own = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": thinking}, own[0] | {"name": "answer"}, *own[1:]]})


def _tags(requested: dict[str, Any], added: dict[str, int]) -> str:
    """Return a grammar of text in which a trigger always begins one of the structures.

    Added tokens may be part of the structures.
    """
    tags: Any = requested.get("structures")
    triggers: Any = requested.get("triggers")
    if not (_are(triggers, str) and _are(tags, dict) and all(map(_is_tag, tags))):
        raise ValueError(
            "structures must be a list of objects with begin, schema and end, and triggers a list of strings"
        )
    options = " | ".join(f"tag_{i}" for i in range(len(tags)))
    lines = ["%llguidance {}", f"start: ({options})* TEXT", r"TEXT: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        trigger = next((one for one in triggers if one and tag["begin"].startswith(one)), None)
        if trigger is None:
            raise ValueError(f"begin must start with one of the triggers {triggers}, got {tag['begin']!r}")
        [first, *more] = _terms(trigger, added)
        rest = [*more, *_terms(tag["begin"][len(trigger) :], added), f"%json {json.dumps(tag['schema'])}"]
        head = f"TEXT {first}"
        if first.startswith('"'):  # the text before a trigger ends at its first occurrence
            lines.append(f"head_{i}[lazy]: {head}")
            head = f"head_{i}"
        lines.append(" ".join([f"tag_{i}: {head}", *rest, *_terms(tag["end"], added)]))
    return "\n".join(lines)


def _are(given: Any, kind: type) -> bool:
    return isinstance(given, list) and all(isinstance(one, kind) for one in given)


def _is_tag(given: dict[str, Any]) -> bool:
    return "schema" in given and _are([given.get("begin"), given.get("end")], str)


def _terms(text: str, added: dict[str, int]) -> list[str]:
    """Return a text as terms of a grammar: pieces of text, and added tokens by their ids."""
    longest_first = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    pieces = re.split(f"({longest_first})", text) if added else [text]
    return [f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces if piece]

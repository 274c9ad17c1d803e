"""What answers are held to: grammars are compiled, and what may come next is found, on threads of their own (host).

llguidance does both, and lets others run meanwhile. A grammar may come from anybody, so that all that it can cost is
bounded.
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
type _Held = tuple[StructuredOutputs, bool]  # what is asked, and whether it holds after the model's thinking

_LOOP = "no text fits it: it may refer to itself in a loop without an end"
_NO_TEXT = dict.fromkeys(("json", "json_object", "grammar", "structural_tag"), _LOOP) | dict.fromkeys(
    ("regex", "choice"), "it matches no text"
)
_KEPT = 64  # compiled grammars
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
    """Compiles what answers are held to.

    The first one reads the vocabulary, which takes seconds if that is large, and in these no other Python runs.

    Args:
      tokenizer: of the checkpoint, with its `backend_tokenizer`.
      ends: the checkpoint's end tokens.
      vocab_size: of the model; what lies beyond the tokenizer's never comes.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int], vocab_size: int):
        self._tokenizer, self._ends, self._vocab_size = tokenizer, ends, vocab_size
        self._built: llguidance.LLTokenizer | None = None
        self._added: dict[str, int] = {}  # ids of tokens that are added to the vocabulary
        self._known: OrderedDict[_Held, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of these
        self._compiling = ThreadPoolExecutor(1, "vlcache-grammars")
        self._filling = ThreadPoolExecutor(1, "vlcache-masks")

    def prepare(self) -> Future[llguidance.LLTokenizer]:
        """Reads the vocabulary, so that the first grammar need not wait for it."""
        return self._compiling.submit(self._vocabulary)

    def check(self, params: SamplingParams, *, opens_thought: bool = False) -> None:
        """Compiles what an answer is held to, if it is not yet.

        Args:
          opens_thought: the prompt ends within the model's thinking. What is held is what comes after that.

        Raises:
          ValueError: it cannot be, or is too large.
        """
        if (asked := params.structured_outputs) is not None:
            self._compiled(_held(asked, opens_thought))

    def matcher(self, params: SamplingParams, *, opens_thought: bool = False) -> Matcher | None:
        """Says of a new answer what may come next, see `check`; None: everything."""
        if (asked := params.structured_outputs) is None:
            return None
        ends = bits(self._ends, self._vocab_size)
        return Matcher(self._compiled(_held(asked, opens_thought)), params, ends, self._filling)

    def close(self) -> None:
        """What is under way is given up."""
        for threads in (self._compiling, self._filling):
            threads.shutdown(cancel_futures=True)

    def _compiled(self, held: _Held) -> llguidance.LLMatcher:
        return self._find(held) or self._compiling.submit(self._compile, held).result()

    def _find(self, held: _Held) -> llguidance.LLMatcher | None:
        with self._lock:
            if held in self._known:
                self._known.move_to_end(held)
            return self._known.get(held)

    def _compile(self, held: _Held) -> llguidance.LLMatcher:
        import llguidance

        if (known := self._find(held)) is not None:  # many may have asked for it at once
            return known
        asked, is_after_thought = held
        try:
            if not self._ends:
                raise ValueError("the checkpoint must have end tokens")
            vocabulary = self._vocabulary()
            limits = llguidance.LLParserLimits(**_LIMITS)
            source = _source(asked, self._added)
            if is_after_thought:
                source = _after_thought(source, self._added, self._ends)
            matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
            _try(matcher, bits(self._ends, self._vocab_size))
        except Exception as error:  # a converter in Python may raise anything
            raise ValueError(f"{asked.name} must be usable: {_why(error, asked)}, got {short(asked.text)}") from error
        with self._lock:
            self._known[held] = matcher
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
class Next:
    """What may come next in an answer.

    Attributes:
      forced: tokens of which each alone may come, one after the other.
      behind: which may come behind these: of each token bit i % 32 of word i // 32; None: none, the answer is complete
        then.
    """

    forced: tuple[int, ...]
    behind: Bits | None


class Matcher:
    """What may come next in one answer. Where it stands is changed by one thread, the one that fills masks.

    Args:
      compiled: what the answer is held to, at its beginning.
      params: of the answer.
      ends: the checkpoint's end tokens as bits.
      threads: one thread.
    """

    def __init__(self, compiled: llguidance.LLMatcher, params: SamplingParams, ends: Bits, threads: ThreadPoolExecutor):
        self._compiled, self._params, self._ends, self._threads = compiled, params, ends, threads
        only = params.allowed_token_ids
        self._only = np.full_like(ends, -1) if only is None else bits(only, 32 * len(ends))
        self._own: llguidance.LLMatcher | None = None
        self._count = 0
        self._told: Next | None = None
        self._next: Future[Next] = threads.submit(self._advance, ())

    def fresh(self) -> Matcher:
        """Of the same answer, begun anew."""
        return Matcher(self._compiled, self._params, self._ends, self._threads)

    def advance(self, tokens: Sequence[int]) -> None:
        """The answer has gone on with these. What follows is asked for."""
        self._next = self._threads.submit(self._advance, tuple(tokens))

    def wait(self, patience: float) -> bool:
        """Whether it is known what may come next; waits so many seconds for it."""
        if patience > 0 and not self._next.done():
            wait([self._next], patience)
        return self._next.done()

    def allowed(self) -> Next:
        """What may come next, once it is known.

        Raises:
          ValueError: the answer has left its grammar, or it costs more than a token may.
        """
        try:
            return self._next.result()
        except Exception as error:
            raise ValueError(f"structured_outputs must be followed to the end, got {shorten(str(error))}") from error

    def mask(self, ahead: int) -> Bits | None:
        """Once it is known: which tokens may come behind so many of those that are forced; None: that is not known."""
        told = self.allowed()
        if ahead < len(told.forced):
            return bits([told.forced[ahead]], 32 * len(self._ends))
        return told.behind if ahead == len(told.forced) else None

    def _advance(self, tokens: Sequence[int]) -> Next:
        if self._own is None:
            self._own = self._compiled.deep_copy()
        self._count += len(tokens)
        # What was forced before stays so: an answer that is put back must not go on in other tokens.
        forced = () if self._told is None else self._told.forced
        if self._told is not None and len(tokens) <= len(forced):
            self._told = dataclasses.replace(self._told, forced=forced[len(tokens) :])
        else:
            self._told = self._look(self._own, tokens[len(forced) :])
        return self._told

    def _look(self, own: llguidance.LLMatcher, tokens: Sequence[int]) -> Next:
        """Goes on with tokens, and with those that are forced behind them."""
        _consume(own, tokens)
        mask = self._mask(own, self._count)
        if mask is None or (mask & self._ends).any():
            return Next((), mask)
        if self._params.allowed_token_ids is not None or self._params.bad_words:
            return Next((), mask)
        if forced := own.compute_ff_tokens():
            _consume(own, forced)
            mask = self._mask(own, self._count + len(forced))
        return Next(tuple(forced), mask)

    def _mask(self, own: llguidance.LLMatcher, count: int) -> Bits | None:
        """Which tokens may come in an answer of so many; None: none."""
        allowed = np.zeros_like(self._ends)
        _fill(own, allowed)
        content, ends = allowed & ~self._ends, allowed & self._ends & self._only
        if self._params.ignore_eos or count < self._params.min_tokens:
            ends = np.zeros_like(ends)
        return content & self._only | ends if content.any() or ends.any() else None


def bits(tokens: Collection[int], vocab_size: int) -> Bits:
    """Tokens as bits, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 is token i."""
    ids = np.fromiter(tokens, np.int64, len(tokens))
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)


def _consume(matcher: llguidance.LLMatcher, tokens: Sequence[int]) -> None:
    """Raises a ValueError if they may not come."""
    if tokens and not matcher.consume_tokens(list(tokens)):
        raise ValueError(matcher.get_error())


def _fill(matcher: llguidance.LLMatcher, allowed: Bits) -> None:
    """Raises a ValueError if the matcher cannot go on."""
    import llguidance.numpy

    llguidance.numpy.fill_next_token_bitmask(matcher, allowed[None])
    if matcher.is_error():
        raise ValueError(matcher.get_error())


def _try(matcher: llguidance.LLMatcher, ends: Bits) -> None:
    """Goes a token into a grammar, as what is too large may show only there. Raises a ValueError if it is."""
    allowed = np.zeros_like(ends)
    _fill(matcher, allowed)
    content = np.flatnonzero(np.unpackbits((allowed & ~ends).view(np.uint8), bitorder="little"))
    if len(content):
        further = matcher.deep_copy()
        further.consume_token(int(content[0]))
        _fill(further, allowed)


def _why(error: Exception, asked: StructuredOutputs) -> str:
    """What is wrong with what was asked, without a grammar round it that nobody wrote."""
    told = str(error).replace("<non-verbose/>", "")
    if told.strip() == "NoExtensionBias":  # the compiler's word for it
        return _NO_TEXT[asked.kind]
    if asked.kind != "grammar" and (found := re.findall(r"(?m)^\s*error: (.+)", told)):  # of a regular expression
        told = found[-1]
    return shorten(" ".join(told.split()) or type(error).__name__)


def _read(tokenizer: Any) -> tuple[str, dict[str, int]]:
    """A tokenizer as JSON in which added tokens have names that nobody writes, and the ids of these by their texts.

    So text that is spelled like such a token is text, and the token itself comes only where a grammar has its id.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = content["model"]["vocab"], {}
    for token in content["added_tokens"]:
        text, name = token["content"], f"<\uf8ff{token['id']}\uf8ff>"
        added[text], token["content"] = token["id"], name
        if text in vocabulary:
            vocabulary[name] = vocabulary.pop(text)
    return json.dumps(content), added


def _source(asked: StructuredOutputs, added: dict[str, int]) -> str:
    """As llguidance has it."""
    import llguidance

    if asked.kind in ("json", "json_object"):
        spaces: Any = {"whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            spaces["whitespace_pattern"] = asked.whitespace_pattern
        return llguidance.LLMatcher.grammar_from_json_schema(asked.text, overrides=spaces)
    if asked.kind == "structural_tag":
        return _tags(json.loads(asked.text), added)
    return llguidance.grammar_from(asked.kind, asked.text)  # type: ignore[arg-type]


def _held(asked: StructuredOutputs, opens_thought: bool) -> _Held:
    return asked, opens_thought and not asked.enable_in_reasoning


def _after_thought(source: str, added: dict[str, int], ends: frozenset[int]) -> str:
    """A grammar that takes what a model thinks, then `</think>` and an empty line, then what another grammar takes.

    The thinking is any text, and any added tokens but those that end it or the answer.
    """
    if (close := added.get(CLOSE)) is None:
        rules = [f"thought[suffix={json.dumps(CLOSE)}]: /(.|\\n)*/"]
    else:
        # The tag as text would end the thinking for who reads it, but not here.
        text = f"/(.|\\n)+/ & ~/(.|\\n)*{re.escape(CLOSE).replace('/', chr(92) + '/')}(.|\\n)*/"
        others = sorted(set(added.values()) - ends - {close})
        piece = f"TEXT | <[{','.join(map(str, others))}]>" if others else "TEXT"
        rules = [f"thought: ({piece})* <[{close}]>", f"TEXT: {text}"]
    thinking = "\n".join([f"start: thought {json.dumps(chr(10) * 2)} @answer", *rules])
    held = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": thinking}, held[0] | {"name": "answer"}, *held[1:]]})


def _tags(asked: dict[str, Any], added: dict[str, int]) -> str:
    """Text in which what begins with a trigger is one of the structures. Added tokens in these are meant as such."""
    tags: Any = asked.get("structures")
    triggers: Any = asked.get("triggers")
    if not (_are(triggers, str) and _are(tags, dict) and all(map(_is_tag, tags))):
        raise ValueError("structures must be a list of objects with begin, schema and end, triggers a list of texts")
    options = " | ".join(f"tag_{i}" for i in range(len(tags)))
    lines = ["%llguidance {}", f"start: ({options})* TEXT", r"TEXT: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        trigger = next((one for one in triggers if one and tag["begin"].startswith(one)), None)
        if trigger is None:
            raise ValueError(f"one of {triggers} must begin {tag['begin']!r}")
        [first, *more] = _terms(trigger, added)
        rest = [*more, *_terms(tag["begin"][len(trigger) :], added), f"%json {json.dumps(tag['schema'])}"]
        head = f"TEXT {first}"
        if first.startswith('"'):  # the text before it ends with the first of its kind
            lines.append(f"head_{i}[lazy]: {head}")
            head = f"head_{i}"
        lines.append(" ".join([f"tag_{i}: {head}", *rest, *_terms(tag["end"], added)]))
    return "\n".join(lines)


def _are(given: Any, kind: type) -> bool:
    return isinstance(given, list) and all(isinstance(one, kind) for one in given)


def _is_tag(given: dict[str, Any]) -> bool:
    return "schema" in given and _are([given.get("begin"), given.get("end")], str)


def _terms(text: str, added: dict[str, int]) -> list[str]:
    """Of a grammar: pieces of text, and added tokens by their ids."""
    longest_first = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    pieces = re.split(f"({longest_first})", text) if added else [text]
    return [f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces if piece]

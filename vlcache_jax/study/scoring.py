"""How answers to benchmark files are scored, and how their questions are asked: as VLMEvalKit does without a judge.

Each method takes the accepted answers and the text of an answer, and gives a score from 0 to 1. The kit knows a file by
its name, and so does `rules_of`. What the kit would ask a judge model counts as wrong, as under its `exact_matching`.

Prompts are those of the kit's class for Qwen3-VL, for every model: where files are read, the model's family is not
known.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

_DIGITS = {
    name: str(number)
    for number, name in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
} | {"none": "0"}
_ARTICLES = ("a", "an", "the")
_CONTRACTED = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
    there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
# Each is also written with one of its apostrophes left out. The kit has one entry the other way round.
_CONTRACTIONS = {
    word[:i] + word[i + 1 :]: word for word in _CONTRACTED.split() for i, letter in enumerate(word) if letter == "'"
} | {"somebody'd": "somebodyd"}
_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_THOUSANDS = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"(?<!\d)\.(?!\d)")
_FULL_STOPS = 32  # the kit removes no more of them

_AROUND_LETTERS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_SAID = re.compile(r"answer\s+is\s+\**([ABCD])\**", re.IGNORECASE)
_WORD_BEHIND = r"(?=[ \t]+(?!is\b)[^\W\d_])"
_ARTICLE = re.compile(rf"(?:\A|[.!?]\s|\n)\s*A{_WORD_BEHIND}")  # where a sentence begins
_SMALL_ARTICLE = re.compile(rf"a{_WORD_BEHIND}")
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)


def words(answers: Sequence[str], text: str) -> float:
    """1 for the same words as an accepted answer; case, blanks and a full stop at the end do not count."""
    return float(_plain(text) in map(_plain, answers))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")


def vqa(answers: Sequence[str], text: str) -> float:
    """A third for each person who gave this answer, at most 1: the mean over leaving out one person at a time.

    Marks and articles are dropped, numbers written in digits and apostrophes put into contractions before. With one
    accepted answer nobody is left, so that the score is always 0.
    """
    given, said = [_processed(answer) for answer in answers], _processed(text)
    alike = given.count(said)
    return sum(min(1.0, (alike - (answer == said)) / 3) for answer in given) / len(given)


def _processed(text: str) -> str:
    kept = [
        _DIGITS.get(word, word)
        for word in _without_marks(text.replace("\n", " ").replace("\t", " ").strip()).lower().split()
        if word not in _ARTICLES
    ]
    return " ".join(_CONTRACTIONS.get(word, word) for word in kept)


def _without_marks(text: str) -> str:
    """Drops marks next to a blank, puts blanks for the others; numbers with thousands have all marks dropped."""
    drop_all = _THOUSANDS.search(text) is not None
    drops = {mark: drop_all or f"{mark} " in text or f" {mark}" in text for mark in _MARKS}
    plain = text.translate({ord(mark): "" if dropped else " " for mark, dropped in drops.items()})
    return _FULL_STOP.sub("", plain, count=_FULL_STOPS)


def anls(answers: Sequence[str], text: str) -> float:
    """How like the nearest accepted answer it is, in letters: 1 less edits over length, and 0 below a half."""
    score = 1 - min(_edits_by_length(answer, text) for answer in answers)
    return score if score >= 0.5 else 0.0


def _edits_by_length(answer: str, text: str) -> float:
    """Edits between two texts, over the length of the longer; 1 where the lengths alone say that it is above a half."""
    length = max(len(answer.upper()), len(text.upper()))
    one, other = (" ".join(part.lower().split()) for part in (answer, text))
    if 2 * abs(len(one) - len(other)) > length:
        return 1.0
    return edits(one, other) / length if length else 0.0


def edits(one: str, other: str) -> int:
    """Levenshtein distance: letters to insert, drop or replace.

    Myers' and Hyyrö's way: a column of the table of distances is two numbers, whose bits say where it rises and falls
    by one. Each letter of `other` takes a few operations on them, which keeps thousands of letters fast.
    """
    if not one:
        return len(other)
    whole, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    places: dict[str, int] = {}
    for i, letter in enumerate(one):
        places[letter] = places.get(letter, 0) | 1 << i
    rises, falls, distance = whole, 0, len(one)
    for letter in other:
        equal = places.get(letter, 0)
        down = equal | falls
        across = (((equal & rises) + rises) ^ rises) | equal
        more, less = falls | (whole & ~(across | rises)), rises & across
        distance += bool(more & last) - bool(less & last)
        more, less = more << 1 | 1, less << 1
        rises, falls = (less | ~(down | more)) & whole, more & down & whole
    return distance


def rouge_l(reference: str, text: str) -> float:
    """How like a reference a text is: harmonic mean of what the longest common subsequence of words is of each."""
    one, other = (part.casefold().split() for part in (reference, text))
    if not one or not other:
        return float(one == other)
    lengths = [0] * (len(other) + 1)  # of what the words of `one` so far have in common with the first of `other`
    for word in one:
        before = lengths
        lengths = [0]
        for i, second in enumerate(other):
            lengths.append(before[i] + 1 if word == second else max(before[i + 1], lengths[i]))
    return 2 * lengths[-1] / (len(one) + len(other))


def relaxed(answers: Sequence[str], text: str) -> float:
    """1 for a number within 5 % of an accepted one, or for the same text; percent signs divide by 100."""
    return float(any(_near(answer, text.strip()) for answer in answers))


def _near(answer: str, text: str) -> bool:
    right, said = _number(answer), _number(text)
    if said is None or not right:
        return answer.lower() == text.lower()
    return abs(said - right) / abs(right) <= 0.05


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def same(answers: Sequence[str], text: str) -> float:
    """1 for the text of an accepted answer; case and blanks around it do not count."""
    return float(_matches(answers, text) > 0)


def same_in_mean(answers: Sequence[str], text: str) -> float:
    """The share of accepted answers with this text; case and blanks around it do not count."""
    return _matches(answers, text) / len(answers)


def _matches(answers: Sequence[str], text: str) -> int:
    return [answer.strip().lower() for answer in answers].count(text.strip().lower())


def yes_no(answers: Sequence[str], text: str) -> float:
    """1 where the right one of the words yes and no is in the text, and the other is not."""
    found = {"yes", "no"} & set(_without_marks(text.lower()).split())
    return float(found in [{answer.strip().lower()} for answer in answers])


def option(options: Mapping[str, str], answers: Sequence[str], text: str) -> float:
    """1 where the text chooses the right one of the options, which are texts by letter."""
    return float(chosen_option(options, text) in answers)


def chosen_option(options: Mapping[str, str], text: str) -> str | None:
    """The letter that a text chooses.

    That is the one letter among its words, if it stands among the last four, or the one in "the answer is B", or that
    of the one option whose text is in it. In one case this is not what the kit finds: a bare A that begins a sentence,
    in front of a word other than "is", is an article, and the options' texts decide; so is a small one in "the answer
    is a dog".
    """
    if any(refusal in text for refusal in _REFUSALS):
        return None
    said = text.translate(_AROUND_LETTERS).split()
    letters = [letter for letter in options if letter in said]
    if len(letters) == 1 and said.index(letters[0]) > len(said) - 5:
        if letters[0] != "A" or "A" in _ARTICLE.sub("", text).translate(_AROUND_LETTERS).split():
            return letters[0]
        if said[said.index("A") + 1 :] == options["A"].translate(_AROUND_LETTERS).split():
            return "A"  # and its own text
    elif not letters and "Z" in said:
        return None  # how the kit calls none of them
    elif (
        (match := _SAID.search(text)) and match[1].upper() in options and not _SMALL_ARTICLE.match(text, match.start(1))
    ):
        return match[1].upper()
    return _option_with_text(options, text.lower())


def _option_with_text(options: Mapping[str, str], text: str) -> str | None:
    if len(text) > 2 * sum(map(len, options.values())):
        return None
    found = [letter for letter, own in options.items() if own.lower() in text]
    return found[0] if len(found) == 1 else None


METHODS: dict[str, Callable[[Sequence[str], str], float]] = {
    method.__name__: method for method in (words, vqa, anls, relaxed, same, same_in_mean, yes_no)
}
OPTION = "option"


@dataclasses.dataclass(frozen=True)
class Rules:
    """How the questions of a file are asked and scored.

    Attributes:
      method: of questions without options; None leaves it to the number of accepted answers.
      numbered: whether several images are numbered in the prompt.
      ending: what stands behind a question without options.
      choose: the line behind options.
      open: MMMU's questions without options have two for the score: the answer, A, and "Other Answers", B. Answers that
        are no letter stand for A.
      circular: whether rows with one index modulo a million are one question, right only if all of them are.
    """

    method: str | None = None
    numbered: bool = True
    ending: str = ""
    choose: str = "Please select the correct answer from the options above."
    open: bool = False
    circular: bool = False

    def method_of(self, answers: Sequence[str]) -> str:
        """The method of a question without options.

        In files that no rule knows, several accepted answers are scored as the kit does by default, `vqa`. That scores
        a single answer 0 always, so `words` scores those.
        """
        return self.method or ("vqa" if len(answers) > 1 else "words")


_BY_NAME = (
    (r"TextVQA", "vqa"),
    (r"ChartQA(?!Pro)", "relaxed"),  # ChartQAPro has a scorer of its own
    (r"OCRVQA", "same"),
    (r"GQA", "same_in_mean"),
    (r"DocVQA|InfoVQA", "anls"),
)
_YES_NO = re.compile(r"MME|HallusionBench|POPE|AMBER|VSR")
_OPTIONS = re.compile(
    r"MMBench|SEEDBench|ScienceQA|MMT-Bench|AesBench|Q-Bench|A-Bench|R-Bench|CCBench|AI2D|MMStar|RealWorldQA"
    r"|MLLMGuard|BLINK|TaskMeAnything|A-OKVQA|WorldMedQA|VisOnlyQA|MMCR|MMSci_DEV_MCQ|MMVP|K-DTCBench|VStarBench"
    r"|PathMMU|CMMU_MCQ|MicroVQA|MMSIBench|SpatialEval|StaticEmbodiedBench|MMMB"
)
_MMMU = re.compile(r"(?<!C)MMMU")  # CMMMU has a scorer of its own
_CIRCULAR = re.compile(r"mmbench|ccbench|circular|mmcr")


def rules_of(name: str, answers: Sequence[Sequence[str]]) -> Rules:
    """The rules of a file.

    Args:
      name: of the file, without its ending.
      answers: the accepted ones of each of its questions. A set of a name that is not known is one of yes and no if
        all its answers are.
    """
    circular = _CIRCULAR.search(name.lower()) is not None
    if _MMMU.search(name):
        return Rules(numbered=False, open=True, circular=circular)
    only_yes_no = all(answer.lower() in ("yes", "no") for accepted in answers for answer in accepted)
    if _YES_NO.fullmatch(name) or (only_yes_no and _YES_NO.match(name)):
        return Rules("yes_no", numbered=False, ending=" Please answer yes or no.", circular=circular)
    for pattern, method in _BY_NAME:
        if re.search(pattern, name):
            ending = "\nPlease answer concisely with short words or phrases when possible."
            return Rules(method, numbered=False, ending=ending, circular=circular)
    if _OPTIONS.match(name):
        return Rules(numbered=False, choose="Answer with the option letter only.", circular=circular)
    if only_yes_no:
        return Rules("yes_no", circular=circular)
    return Rules(circular=circular)

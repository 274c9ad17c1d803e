"""Prompts and scores of benchmark files, as in VLMEvalKit without a judge model.

Each method takes the accepted answers and the text of an answer, and returns a score from 0 to 1. `rules_of` selects
the method by the name of the file, as VLMEvalKit does. An answer that VLMEvalKit would pass to a judge model is wrong,
as with its `exact_matching`.

All models get the prompts of VLMEvalKit's class for Qwen3-VL, because the model's family is not known when files are
read.
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
# Each word is also found with one of its apostrophes left out. VLMEvalKit has one entry that is reversed.
_CONTRACTIONS = {
    word[:i] + word[i + 1 :]: word for word in _CONTRACTED.split() for i, letter in enumerate(word) if letter == "'"
} | {"somebody'd": "somebodyd"}
_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_THOUSANDS = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"(?<!\d)\.(?!\d)")
_FULL_STOPS = 32  # maximum number that VLMEvalKit removes

_AROUND_LETTERS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_SAID = re.compile(r"answer\s+is\s+\**([ABCD])\**", re.IGNORECASE)
_WORD_BEHIND = r"(?=[ \t]+(?!is\b)[^\W\d_])"
_ARTICLE = re.compile(rf"(?:\A|[.!?]\s|\n)\s*A{_WORD_BEHIND}")  # at the beginning of a sentence
_SMALL_ARTICLE = re.compile(rf"a{_WORD_BEHIND}")
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)


def words(answers: Sequence[str], text: str) -> float:
    """Return 1 if the words are those of an accepted answer. Case, spaces and a full stop at the end are ignored."""
    return float(_plain(text) in map(_plain, answers))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")


def vqa(answers: Sequence[str], text: str) -> float:
    """Return the VQA score: min(1, n / 3) for n people with this answer, averaged over leaving out one person.

    Before the comparison, punctuation and articles are removed, numbers are written in digits and contractions get
    their apostrophes. With one accepted answer the score is always 0, because that person is left out.
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
    """Return the text without punctuation marks.

    A mark with a space next to it anywhere in the text is removed, others become a space. If the text has a number with
    a thousands separator, all marks are removed.
    """
    drop_all = _THOUSANDS.search(text) is not None
    drops = {mark: drop_all or f"{mark} " in text or f" {mark}" in text for mark in _MARKS}
    plain = text.translate({ord(mark): "" if dropped else " " for mark, dropped in drops.items()})
    return _FULL_STOP.sub("", plain, count=_FULL_STOPS)


def anls(answers: Sequence[str], text: str) -> float:
    """Return the similarity to the nearest accepted answer: 1 - edits / length, or 0 if that is below 0.5."""
    score = 1 - min(_edits_by_length(answer, text) for answer in answers)
    return score if score >= 0.5 else 0.0


def _edits_by_length(answer: str, text: str) -> float:
    """Return the edits between two texts divided by the longer length; 1 if the lengths alone make it exceed 0.5."""
    length = max(len(answer.upper()), len(text.upper()))
    one, other = (" ".join(part.lower().split()) for part in (answer, text))
    if 2 * abs(len(one) - len(other)) > length:
        return 1.0
    return edits(one, other) / length if length else 0.0


def edits(one: str, other: str) -> int:
    """Return the Levenshtein distance: the number of characters to insert, remove or replace.

    The algorithm is that of Myers and Hyyrö. Two integers represent a column of the distance table: their bits are set
    if the distance rises or falls by one. Each character of `other` takes a few integer operations, which is fast for
    thousands of characters.
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
        plus, minus = falls | (whole & ~(across | rises)), rises & across
        distance += bool(plus & last) - bool(minus & last)
        plus, minus = plus << 1 | 1, minus << 1
        rises, falls = (minus | ~(down | plus)) & whole, plus & down & whole
    return distance


def rouge_l(reference: str, text: str) -> float:
    """Return ROUGE-L: the longest common subsequence of words relative to each text, as a harmonic mean."""
    one, other = (part.casefold().split() for part in (reference, text))
    if not one or not other:
        return float(one == other)
    lengths = [0] * (len(other) + 1)  # common subsequence of the words of `one` so far and the first i of `other`
    for word in one:
        before = lengths
        lengths = [0]
        for i, second in enumerate(other):
            lengths.append(before[i] + 1 if word == second else max(before[i + 1], lengths[i]))
    return 2 * lengths[-1] / (len(one) + len(other))


def relaxed(answers: Sequence[str], text: str) -> float:
    """Return 1 for a number within 5 % of an accepted one, or for the same text. A percent sign divides by 100."""
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
    """Return 1 for the text of an accepted answer. Case and surrounding spaces are ignored."""
    return float(_matches(answers, text) > 0)


def same_in_mean(answers: Sequence[str], text: str) -> float:
    """Return the fraction of accepted answers with this text. Case and surrounding spaces are ignored."""
    return _matches(answers, text) / len(answers)


def _matches(answers: Sequence[str], text: str) -> int:
    return [answer.strip().lower() for answer in answers].count(text.strip().lower())


def yes_no(answers: Sequence[str], text: str) -> float:
    """Return 1 if the text has the right one of the words "yes" and "no", and not the other."""
    found = {"yes", "no"} & set(_without_marks(text.lower()).split())
    return float(found in [{answer.strip().lower()} for answer in answers])


def option(options: Mapping[str, str], answers: Sequence[str], text: str) -> float:
    """Return 1 if the text chooses the right option. `options` has the texts by letter."""
    return float(chosen_option(options, text) in answers)


def chosen_option(options: Mapping[str, str], text: str) -> str | None:
    """Return the letter of the option that a text chooses, or None.

    It is the only option letter among the words, if it is one of the last four words. Otherwise it is the letter in
    "the answer is B", or that of the only option whose text occurs. One case differs from VLMEvalKit: an A that begins
    a sentence, before a word other than "is", is an article, and the texts of the options decide. The "a" in "the
    answer is a dog" is an article too.
    """
    if any(refusal in text for refusal in _REFUSALS):
        return None
    said = text.translate(_AROUND_LETTERS).split()
    letters = [letter for letter in options if letter in said]
    if len(letters) == 1 and said.index(letters[0]) > len(said) - 5:
        if letters[0] != "A" or "A" in _ARTICLE.sub("", text).translate(_AROUND_LETTERS).split():
            return letters[0]
        if said[said.index("A") + 1 :] == options["A"].translate(_AROUND_LETTERS).split():
            return "A"  # followed by the text of option A
    elif not letters and "Z" in said:
        return None  # VLMEvalKit's letter for no option
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
    """Prompts and scores of a benchmark file.

    Attributes:
      method: scoring method of questions without options; None: by the number of accepted answers.
      numbered: True if several images are numbered in the prompt.
      ending: text after a question without options.
      choose: line after the options.
      open: True for MMMU: questions without options are scored with two, A (the answer) and B ("Other Answers"). An
        accepted answer that is no letter counts as A.
      circular: True if rows with the same index modulo a million form one question, right only if all rows are.
    """

    method: str | None = None
    numbered: bool = True
    ending: str = ""
    choose: str = "Please select the correct answer from the options above."
    open: bool = False
    circular: bool = False

    def method_of(self, answers: Sequence[str]) -> str:
        """Return the method of a question without options.

        Without a rule for the file, several accepted answers are scored by `vqa`, VLMEvalKit's default. `vqa` is always
        0 for a single accepted answer, so `words` scores it.
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
    """Return the rules of a file.

    Args:
      name: name of the file without its extension.
      answers: accepted answers of each question. A file with an unknown name has the rules of yes/no questions if all
        answers are "yes" or "no".
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

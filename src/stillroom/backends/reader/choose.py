"""Chooses the answer among the readings of several chunks, and writes it as a quote with the number of its source."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stillroom.core.sentences import Span, sentence_at, sentences
from stillroom.engine.events import Quote
from stillroom.engine.reader_engine import ReaderAnswer

if TYPE_CHECKING:  # it imports torch
    from stillroom.models.reader import Reading

NO_ANSWER = "The documents do not say."

_MIN_WORDS = 3
"""A sentence with fewer words, such as a table cell, is shown with the lines around it."""
_MAX_AROUND, _MAX_LIST = 300, 400
"""Most characters of the lines around a fragment, and of the list or code after a colon."""

_RANK_WEIGHT, _MAX_RANKED = 0.25, 5
"""A score is lowered by this times the logarithm to base 2 of its chunk's rank in the search, at most of the fifth.
Chosen on held-out questions, half of them paraphrased: more weight loses answers to questions in words of the text."""

_SENTENCE_END = re.compile(r"[.!?:;][\"')\]*_`\u201d\u2019]*$")
_BREAK_IN_SENTENCE = re.compile(r"[ \t]*[\r\n]\s*")
_MARKER = re.compile(r"[ \t]*(?:(?:[-*+>\u2022]|#{1,6}|\(?\d{1,3}[.)]|\(?[a-z][.)])[ \t]+)+")
_FENCE = re.compile(r"[ \t]*(?:```|~~~)")
_BULLET = re.compile(r"[ \t]*(?:[-*+\u2022]|\(?\d{1,3}[.)]|\(?[a-z][.)])[ \t]")
_ITEM = re.compile(rf"{_BULLET.pattern}|[ \t]*\||[ ]{{4,}}\S|\t")
_GAP = re.compile(r"[ \t]*\n(?:[ \t]*\n)?")


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """What the score of a reading means; measured on held-out questions (`python -m training reader threshold`)."""

    threshold: float
    """Lowest score of an answer; below it the documents do not say."""
    slope: float
    bias: float
    """The quoted sentence holds the answer with the log odds `slope * score + bias`, if half of the questions have an
    answer in the chunks."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> "ScoreScale":
        """Read a reader's `config.json`. Before it is measured, confidence is 0.5 at the threshold."""
        threshold = float(config.get("threshold", 0.0))
        return ScoreScale(threshold, config.get("slope", 0.5), config.get("bias", -0.5 * threshold))

    def confidence(self, score: float) -> float:
        """Return the probability that the quoted sentence holds the answer, in [0, 1]."""
        return _sigmoid(self.slope * score + self.bias)


def ranked_score(score: float, rank: int) -> float:
    """Return the score of a reading beside those of other chunks of the same search.

    Args:
        rank: of its chunk in the search, from 0.
    """
    return score - _RANK_WEIGHT * math.log2(min(rank + 1, _MAX_RANKED))


def choose(texts: Sequence[str], readings: "Sequence[Reading | None]", scale: ScoreScale) -> ReaderAnswer:
    """Write the best reading as an answer: its sentence, unchanged except for line breaks, and ` [n]`.

    Args:
        texts: of the chunks, in the order of the search. Source 1 is the first.
        readings: one for each chunk; None where it has no words.
    """
    found = [(ranked_score(one.score, rank), rank, one) for rank, one in enumerate(readings) if one]
    if not found:
        return ReaderAnswer(NO_ANSWER, None, 0.0)
    score, rank, best = max(found, key=lambda one: one[0])
    confidence = scale.confidence(score)
    text, highlight = quote(texts[rank], best.span, best.sentence)
    quoted = Quote(text, highlight)
    if score < scale.threshold:
        return ReaderAnswer(NO_ANSWER, None, confidence, quoted)
    return ReaderAnswer(f"{text}{_gap_before_number(text)}[{rank + 1}]", highlight, confidence, quoted)


def quote(text: str, span: Span, sentence: Span) -> tuple[str, Span]:
    """Write a sentence of a text; returns it, and the characters of it that `span` has become.

    Line breaks inside the sentence become blanks if it ends like one, and a list marker before it is left out. After a
    colon, the list or code that follows is shown too, and an item of a short list is shown with the whole list. Code,
    and a sentence of one or two words, is shown with the lines around it.

    Args:
        span: characters of `text`, inside `sentence`.
    """
    start, end = sentence
    if listed := _list_of_item(text, start, end):
        intro, block = listed
        head = _on_one_line(text[slice(*intro)]) + "\n"
        shown, highlight = _as_lines(text, block, span)
        return head + shown, (highlight[0] + len(head), highlight[1] + len(head))
    if marker := _MARKER.match(text, start, span[0]):
        start = marker.end()
    if _num_words(text, start, end) < _MIN_WORDS or _is_in_fence(text[:start]):
        return _as_lines(text, _lines_around(text, start, end), span)
    if "\n" in text[start:end] and not _SENTENCE_END.search(text[start:end]):
        return _as_lines(text, (start, end), span)  # commands, addresses, verse
    shown = _on_one_line(text[start:end])
    highlight = len(_on_one_line(text[start : span[0]])), len(_on_one_line(text[start : span[1]]))
    if text[end - 1] == ":" and (after := _block_after(text, end)):
        shown += "\n" + _as_lines(text, after, after)[0]
    return shown, highlight


def _list_of_item(text: str, start: int, end: int) -> tuple[Span, Span] | None:
    """Return the sentence that introduces the list of an item, and the list; None if the characters [start, end) are no
    item of it, no such sentence ends in a colon, or both are long."""
    lines = _lines(text)
    first = max(index for index, line in enumerate(lines) if line[0] <= start)
    if not _BULLET.match(text, *lines[first]):
        return None
    while first > 0 and (_BULLET.match(text, *lines[first]) or not text[slice(*lines[first])][:1].strip()):
        first -= 1  # an item, a line that continues one, or a blank line
    intro_end = lines[first][0] + len(text[slice(*lines[first])].rstrip())
    if not text[lines[first][0] : intro_end].endswith(":"):
        return None
    intro = sentence_at(sentences(text[:intro_end]), intro_end - 1, intro_end)
    block = _block_after(text, intro_end)
    if block is None or not block[0] <= start <= end <= block[1] or block[1] - intro[0] > _MAX_LIST:
        return None
    return intro, block


def _on_one_line(text: str) -> str:
    return _BREAK_IN_SENTENCE.sub(" ", text)


def _lines(text: str) -> list[Span]:
    """Lines without their ends."""
    ends = [match.start() for match in re.finditer(r"\n", text)]
    return list(zip([0, *(end + 1 for end in ends)], [*ends, len(text)], strict=True))


def _lines_around(text: str, start: int, end: int) -> Span:
    """Return whole lines around the characters [start, end): those next to them, at most `_MAX_AROUND` characters.

    A blank line ends them, unless they have too few words before it.
    """
    lines = _lines(text)
    first = max(index for index, line in enumerate(lines) if line[0] <= start)
    last = max(index for index, line in enumerate(lines) if line[0] < max(end, start + 1))

    def fits(low: int, high: int) -> bool:
        return low >= 0 and high < len(lines) and lines[high][1] - lines[low][0] <= _MAX_AROUND

    def is_blank(index: int) -> bool:
        return not text[slice(*lines[index])].strip()

    can_grow = True
    while can_grow:
        can_grow = False
        if fits(first, last + 1) and not is_blank(last + 1):
            last, can_grow = last + 1, True
        if fits(first - 1, last) and not is_blank(first - 1):
            first, can_grow = first - 1, True
    while _num_words(text, lines[first][0], lines[last][1]) < _MIN_WORDS and fits(first, last + 1):
        last += 1
    while last > first and is_blank(last):
        last -= 1
    return min(lines[first][0], start), max(lines[last][1], end)


def _num_words(text: str, start: int, end: int) -> int:
    return len(re.findall(r"\w+", text[start:end]))


def _block_after(text: str, end: int) -> Span | None:
    """Return the whole lines of the list, table or code that begins on the line after `end`; None if there is none."""
    gap = _GAP.match(text, end)
    if gap is None:
        return None
    lines = [line for line in _lines(text) if line[0] >= gap.end()]
    if not lines or not (_ITEM.match(text, *lines[0]) or _FENCE.match(text, *lines[0])):
        return None
    is_code = _FENCE.match(text, *lines[0]) is not None
    last = None
    for index, line in enumerate(lines):
        if line[1] - lines[0][0] > _MAX_LIST or (not is_code and _ends_list(text, lines, index)):
            break
        last = line
        if is_code and index and _FENCE.match(text, *line):
            break
    return None if last is None else (lines[0][0], last[1])


def _ends_list(text: str, lines: Sequence[Span], index: int) -> bool:
    """Whether a list ends before a line: at a blank line, unless an item or an indented line follows."""
    if text[slice(*lines[index])].strip():
        return False
    following = lines[index + 1] if index + 1 < len(lines) else None
    return following is None or not (_ITEM.match(text, *following) or text[following[0] : following[0] + 1].isspace())


def _as_lines(text: str, block: Span, span: Span) -> tuple[str, Span]:
    """Return whole lines unchanged, with the marks of a code block that begins before or ends after them; and where
    `span` is in them."""
    start, end = block
    end = start + len(text[start:end].rstrip())
    opening = "```\n" if _is_in_fence(text[:start]) and not _FENCE.match(text, start, end) else ""
    shown = opening + text[start:end]
    closing = "\n```" if _is_in_fence(shown + "\n") else ""
    offset = len(opening) - start
    return shown + closing, (span[0] + offset, span[1] + offset)


def _is_in_fence(before: str) -> bool:
    """Whether a code block is open after these lines."""
    return sum(_FENCE.match(before, *line) is not None for line in _lines(before)) % 2 == 1


def _gap_before_number(text: str) -> str:
    """A line end after a code block, which the number would keep open; else a blank."""
    return "\n" if _FENCE.match(text.rpartition("\n")[2]) else " "


def _sigmoid(log_odds: float) -> float:
    if log_odds >= 0:
        return 1 / (1 + math.exp(-log_odds))
    odds = math.exp(log_odds)
    return odds / (1 + odds)

"""Finds spans of a sentence that can be answers: numbers, years, dates, names, short noun phrases."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from training.data.words import word_set

SpanKind = Literal["date", "year", "number", "name", "phrase"]
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)

_MONTH = r"(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_PATTERNS: tuple[tuple[SpanKind, re.Pattern[str]], ...] = (
    ("date", re.compile(rf"\b(?:\d{{1,2}} {_MONTH}(?: \d{{4}})?|{_MONTH} \d{{1,2}}(?:, \d{{4}})?|{_MONTH} \d{{4}})\b")),
    ("year", re.compile(r"\b(?:1[0-9]|20)\d\d\b(?![,.]\d)")),
    ("number", re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\w])|(?<![\w.,])\d+(?:\.\d+)?(?!\w|[,.]\d)")),
    ("number", re.compile(r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|fifty)\b")),
    ("name", re.compile(r"\b[A-Z][\w'-]*(?:(?: (?:of|de|von|van|the)(?= [A-Z]))? [A-Z][\w'-]*){0,4}")),
    ("phrase", re.compile(r"(?<=\bthe )[a-z]+(?: [a-z]+)?(?= (?:of|in|is|was|were|are|has|had|and)\b)")),
    ("phrase", re.compile(r"(?<=\b(?:an|of) )[a-z]{4,}(?: [a-z]{4,})?(?=[,.;]| (?:of|in|and|or|is|was)\b)")),
)
_NO_NAME = word_set(
    "The A An In On At It Its He His She Her They Their This These That Those There As For From With By To But And Or "
    "If When While After Before During Since Although However Because One Some Many Most All Each Both Other Such No "
    "Not We You I Our Your Another Later Also Then Thus According Under Over Until Once Where Which Who What How Why "
    "Let Note "
    "Only Even Among Between Through Despite Unlike Like Following First Second Several Today"
)


@dataclass(frozen=True, slots=True)
class Span:
    """`[start, end)` of a text."""

    start: int
    end: int
    kind: SpanKind

    def of(self, text: str) -> str:
        return text[self.start : self.end]


@lru_cache(maxsize=4096)
def find_spans(text: str) -> tuple[Span, ...]:
    """Find disjoint spans in order of position; kinds take precedence in the order of `_PATTERNS`."""
    taken: list[Span] = []
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            start, end = match.span()
            if kind == "name":
                start = _after_openers(text, start, end)
            if start < end and not any(start < other.end and other.start < end for other in taken):
                taken.append(Span(start, end, kind))
    return tuple(sorted(taken, key=lambda span: span.start))


def _after_openers(text: str, start: int, end: int) -> int:
    """Skip capitalised words at the start that are not part of a name."""
    while start < end:
        word = re.match(r"[\w'-]+", text[start:end])
        if word is None or word.group() not in _NO_NAME:
            return start
        start = min(end, start + word.end() + 1)
    return end


def occurs(answer: str, text: str) -> bool:
    """Return whether the answer occurs in the text as whole words, ignoring case."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def replace_all(text: str, old: str, new: str) -> str:
    """Replace every occurrence of `old` as whole words."""
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", lambda _: new, text)


def kind_of(answer: str) -> SpanKind | None:
    """Return the kind of span that the whole answer is; None if it is not a span."""
    spans = find_spans(answer)
    whole: Sequence[Span] = [span for span in spans if (span.start, span.end) == (0, len(answer))]
    return whole[0].kind if whole else None

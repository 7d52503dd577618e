"""Text as it stands in data sets, made plain: one kind of blank, punctuation where English has it, no note marks."""

import re
import unicodedata
from collections.abc import Iterable, Iterator

MIN_CHARS, MAX_CHARS = 120, 1000
"""Of a passage. The longer bound is about what the chunker makes of running text."""
_MIN_PLAIN = 0.93
"""Share of ASCII below which a passage is no English prose: pronunciations, tables of names."""
_MIN_LETTERS = 0.72
"""Share of letters and blanks below which it is code, or a table."""

_REPAIRS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\[(?:\d+|note \d+|citation needed)\]"), ""),
    (re.compile(r"\(\s*[;,]?\s*\)"), ""),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<=\w)\( "), " ("),
    (re.compile(r"\( "), "("),
    (re.compile(r" +([,.;:?!)])"), r"\1"),
    (re.compile(r"(?<=\w) ' (?=s\b)"), "'"),
    (re.compile(r"(?<=[a-z]) - (?=[a-z])"), "-"),
)
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\"'][.!?])\s+(?=[A-Z\"'(])")
_SMALL_SENTENCE_END = re.compile(r"(?<=[a-z0-9)]{2}[.!?])\s+(?=[a-z0-9\"'(])")
"""In text that has no capitals."""
_ABBREVIATION = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|No|Vol|ca?|e\.g|i\.e|etc|Inc|Ltd|Co|U\.S)\.$")


def clean(text: str) -> str:
    """One line of plain text; the same text gives the same line, and a clean one stays as it is."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(char if char.isprintable() or char.isspace() else " " for char in text)
    for pattern, replacement in _REPAIRS:
        text = pattern.sub(replacement, text)
    return text.strip()


def is_prose(text: str) -> bool:
    """Whether it reads as English sentences and not as code, a table or another language."""
    plain = sum(char.isascii() for char in text)
    letters = sum(char.isalpha() or char == " " for char in text)
    return len(text) > 0 and plain >= _MIN_PLAIN * len(text) and letters >= _MIN_LETTERS * len(text)


def sentences(text: str) -> list[str]:
    """The text cut after its sentences; together they are the text again, joined by blanks."""
    found: list[str] = []
    end = _SENTENCE_END if text != text.lower() else _SMALL_SENTENCE_END
    for part in end.split(text):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += " " + part
        else:
            found.append(part)
    return found


def passages(paragraphs: Iterable[str]) -> Iterator[str]:
    """Clean prose in pieces of `MIN_CHARS` to `MAX_CHARS`, cut between sentences only.

    Short paragraphs of one document are read on into the next. A sentence that is longer than a passage is left out,
    and so is a rest that is shorter than one.
    """
    piece = ""
    for paragraph in paragraphs:
        text = clean(paragraph)
        if not is_prose(text):
            continue
        for sentence in sentences(text):
            if len(sentence) > MAX_CHARS:
                continue
            if piece and len(piece) + 1 + len(sentence) > MAX_CHARS:
                yield piece
                piece = ""
            piece = f"{piece} {sentence}".strip()
        if len(piece) >= MAX_CHARS // 2:
            yield piece
            piece = ""
    if len(piece) >= MIN_CHARS:
        yield piece

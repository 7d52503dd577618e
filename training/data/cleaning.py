"""Cleans text of data sets: one kind of blank, English punctuation, no note marks; cuts it into passages."""

import re
import unicodedata
from collections.abc import Iterable, Iterator

MIN_CHARS, MAX_CHARS = 120, 1000
"""Length of a passage. The upper limit is about the chunker's chunk size."""
_MIN_PLAIN = 0.93
"""Minimum share of ASCII in English prose; pronunciations and tables of names have less."""
_MIN_LETTERS = 0.72
"""Minimum share of letters and blanks in prose; code and tables have less."""

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
"""Sentence end in text without capitals."""
_ABBREVIATION = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|No|Vol|ca?|e\.g|i\.e|etc|Inc|Ltd|Co|U\.S)\.$")


def clean(text: str) -> str:
    """Return the text as one cleaned line. Idempotent."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(char if char.isprintable() or char.isspace() else " " for char in text)
    for pattern, replacement in _REPAIRS:
        text = pattern.sub(replacement, text)
    return text.strip()


def is_prose(text: str) -> bool:
    """Return whether a text is English prose and not code, a table or another language."""
    plain = sum(char.isascii() for char in text)
    letters = sum(char.isalpha() or char == " " for char in text)
    return len(text) > 0 and plain >= _MIN_PLAIN * len(text) and letters >= _MIN_LETTERS * len(text)


def sentences(text: str) -> list[str]:
    """Split a text into sentences, which joined by blanks give the text."""
    found: list[str] = []
    end = _SENTENCE_END if text != text.lower() else _SMALL_SENTENCE_END
    for part in end.split(text):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += " " + part
        else:
            found.append(part)
    return found


def passages(paragraphs: Iterable[str]) -> Iterator[str]:
    """Yield passages of clean prose of `MIN_CHARS` to `MAX_CHARS`, cut between sentences.

    Short paragraphs of one document are joined with the next. Sentences longer than a passage, and a rest shorter than
    one, are dropped.
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

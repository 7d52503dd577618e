"""Finds the sentences of a text, as character offsets.

A sentence may run over line ends. Blank lines, list items, headings, table rows and lines of code end it. Text is never
changed, so that a quoted sentence is a part of its source.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator

Span = tuple[int, int]

_PARAGRAPH_END = re.compile(r"\n[ \t]*\n\s*")
_BREAK = re.compile(
    # a list item, heading or table row
    r"\n(?=[ \t]*(?:[-*+\u2022]|\d{1,3}[.)]|[a-z][.)]|#{1,6}|[|>]|```|~~~)(?:[ \t]|$))"
    r"|(?:(?<=[.:;,])|(?<= or)|(?<= and))\n(?=[ \t]*\((?:\d{1,3}|[a-z])\)[ \t])"  # (a), behind the end of another item
    r"|\n(?=[^\n]* \| )"  # a table row without marks at its ends
    r"|\n(?=[=~^-]{4,}\s*(?:\n|$))"  # an underline
)
_BREAK_IN_CODE = re.compile(rf"{_BREAK.pattern}|\n(?= {{4,}}\S|\t)")
_WORD = re.compile(r"[\"'(\u201c\u2018]*[A-Za-z]+(?:[-'\u2019][A-Za-z]+)*[.,;:!?)\"'\u201d\u2019]*$")
_CODE_LINE_END = re.compile(r"[;{}\\=(]$")
_WORDS_PER_LINE, _SHARE_OF_WORDS = 4, 0.7
"""Fewest words of a line of prose, on average, and of all its parts between blanks."""
_CODE_BLOCK = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"[^\n]+")
_END = re.compile(r"[.!?]+[\"')\]\u201d\u2019*_`]*(?=\s)|[\u3002\uff01\uff1f]+")
_ABBREVIATED = """
    e.g i.e cf vs etc al approx resp incl excl no nos nr fig figs eq eqs sec ch vol pp p ed eds mr mrs ms dr prof st sr
    jr inc ltd co corp dept est gen gov hon rev sgt lt col capt jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k
    u.n a.m p.m d.c ph.d b.c a.d viz ca min max art
"""
_ABBREVIATIONS = frozenset(_ABBREVIATED.split())
_BEFORE_NUMBERS = frozenset(["no", "nos", "nr", "fig", "figs", "eq", "eqs", "sec", "ch", "vol", "p", "pp", "min"])
"""Abbreviations only before a number: "No. 5", and not "No. It is not." """
_GERMAN_MONTH = re.compile(
    r"\s+(?:Januar|Februar|M\u00e4rz|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember)\b"
)
_BEFORE_GERMAN_ORDINAL = re.compile(r"\b(?:am|beim|das|dem|den|der|des|im|ins|vom|zum|zur)\s+\Z")
"""Before a number with a point that counts, as in "am 3. Tag"."""
_CAN_START = re.compile(
    r"[\"'(\[\u201c\u2018*_`]*[^\W_a-z]|[\"'(\[\u201c\u2018*_]*`|[\"'(\[\u201c\u2018*_]*[a-z]+[_A-Z(]"
)
_LEADER = re.compile(r"\.{4}|[ \t]\.")
"""Dots between a heading and its page number."""
_LAST_WORD = re.compile(r"\S+$")
_MAX_CHARS = 600
"""A longer sentence, such as a table that was extracted as one line, is cut between words."""


def sentences(text: str) -> list[Span]:
    """Return the sentences' first character and the character after the last, in order, without white space around."""
    return [span for block in _blocks(text) for piece in _split(text, *block) for span in _cut(text, *piece)]


def sentence_at(spans: list[Span], start: int, end: int) -> Span:
    """Return the smallest run of sentences that covers the characters [start, end); the characters themselves if no
    sentence does."""
    first = max(bisect_right(spans, (start, 1 << 60)) - 1, 0)
    covering = [span for span in spans[first:] if span[0] < end and span[1] > start]
    if not covering:
        return start, end
    return min(covering[0][0], start), max(covering[-1][1], end)


def _blocks(text: str) -> Iterator[Span]:
    start = 0
    for code in _CODE_BLOCK.finditer(text):
        yield from _prose_blocks(text, start, code.start())
        yield from (line.span() for line in _LINE.finditer(text, *code.span()))
        start = code.end()
    yield from _prose_blocks(text, start, len(text))


def _prose_blocks(text: str, start: int, end: int) -> Iterator[Span]:
    for match in _PARAGRAPH_END.finditer(text, start, end):
        yield from _lines_that_belong_together(text, start, match.start())
        start = match.end()
    yield from _lines_that_belong_together(text, start, end)


def _lines_that_belong_together(text: str, start: int, end: int) -> Iterator[Span]:
    """Cut a paragraph at list items and the like, and at indented lines unless they are prose (man pages)."""
    pattern = _BREAK if _is_prose(text[start:end]) else _BREAK_IN_CODE
    for match in pattern.finditer(text, start, end):
        yield start, match.start()
        start = match.end()
    yield start, end


def _is_prose(paragraph: str) -> bool:
    """Whether the lines of a paragraph read on: full of plain words, and none ends like a line of code."""
    *lines, last = (line.split() for line in paragraph.strip().split("\n"))
    parts = [part for line in lines for part in line]
    if any(_CODE_LINE_END.search(line[-1]) for line in (*lines, last) if line):
        return False
    num_words = sum(_WORD.match(part) is not None for part in parts)
    return num_words >= max(_WORDS_PER_LINE * len(lines), _SHARE_OF_WORDS * len(parts))


def _split(text: str, start: int, end: int) -> Iterator[Span]:
    for match in _END.finditer(text, start, end):
        if match.end() >= end or not _is_end(text, start, match, end):
            continue
        yield start, match.end()
        start = match.end()
    yield start, end


def _is_end(text: str, start: int, match: re.Match[str], end: int) -> bool:
    if _LEADER.search(text, max(start, match.start() - 1), match.end()):
        return False
    rest = text[match.end() : min(end, match.end() + 40)].lstrip()
    if not rest or match.group()[0] in "\u3002\uff01\uff1f":
        return True
    if not _CAN_START.match(rest):
        return False
    if match.group()[0] != ".":
        return True
    word = _LAST_WORD.search(text, start, match.start())
    last = word.group().strip("\"'([*_`").lower() if word else ""
    is_initial = len(last) == 1 and last.isalpha() and last != "i"
    is_number_of_item = last.isdigit() and text[start : match.start()].strip() == last
    if last.isdigit() and len(last) <= 2 and word:
        is_ordinal = _BEFORE_GERMAN_ORDINAL.search(text, start, word.start()) or _GERMAN_MONTH.match(text, match.end())
        if is_ordinal:
            return False
    is_unit = last in _BEFORE_NUMBERS and not rest[0].isdigit()
    return is_unit or not (last in _ABBREVIATIONS or is_initial or is_number_of_item)


def _cut(text: str, start: int, end: int) -> Iterator[Span]:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    while end - start > _MAX_CHARS:
        space = text.rfind(" ", start + _MAX_CHARS // 2, start + _MAX_CHARS)
        middle = space if space > 0 else start + _MAX_CHARS
        yield start, middle
        start = middle + (1 if space > 0 else 0)
    if end > start:
        yield start, end

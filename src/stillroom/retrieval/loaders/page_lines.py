"""Lines of pages: drops headers and footers that recur, finds headings by type size, joins lines into paragraphs."""

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stillroom.retrieval.loaders.source import Outline

_PARAGRAPH_GAP = 1.25
"""A line step above this multiple of the usual step ends a paragraph."""
_HEADING_SIZE = 1.15
_MAX_HEADING_CHARS = 200
_MAX_HEADING_SHARE = 0.2
"""If a larger share of the lines is in large type, as on posters and slides, they are not headings."""
MAX_LEVELS = 4
"""Levels of headings."""
_MIN_PAGES_TO_RECUR = 4
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_MAX_NUMBER_AHEAD = 999
"""Maximum difference of a page number and the page's index; larger numbers are not page numbers (invoices)."""


@dataclass(slots=True)
class Line:
    text: str
    page: int
    size: float
    """Type height in points."""
    top: float
    is_divided: bool
    """Whether the last word continues on the next line."""


_Pattern = tuple[str, str | None, int]
"""Texts before and after a page number, and the number minus the page's index; or a whole text, None and 0."""


@dataclass(slots=True)
class Bookmark:
    level: int
    title: str


def drop_recurring(pages: list[list[Line]]) -> None:
    """Remove headers and footers, lines at the edge of more than half of the pages, except their first occurrence."""
    if len(pages) < _MIN_PAGES_TO_RECUR:
        return
    edges = [{id(line): set(_patterns(line)) for line in (*page[:2], *page[-2:])} for page in pages]
    at_edges = [set().union(*edge.values()) for edge in edges]
    counts = Counter(pattern for patterns in at_edges for pattern in patterns)
    recurring = {pattern for pattern, count in counts.items() if count * 2 > len(pages)}
    seen: set[_Pattern] = set()
    for page, edge, patterns in zip(pages, edges, at_edges, strict=True):
        page[:] = [line for line in page if seen.isdisjoint(edge.get(id(line), ()))]
        seen |= patterns & recurring


def _patterns(line: Line) -> Iterator[_Pattern]:
    """Yield patterns that two lines share if they are equal, or equal except for their page number. Other numbers are
    content."""
    text = line.text.casefold()
    yield text, None, 0
    for number in _NUMBER.finditer(text) if len(text) <= _MAX_HEADING_CHARS else ():
        before, after, ahead = text[: number.start()], text[number.end() :], int(number.group()) - line.page
        if ahead <= _MAX_NUMBER_AHEAD or not any(map(str.isalnum, before + after)):
            yield before, after, ahead


# Headings


def large_lines(pages: Sequence[Sequence[Line]]) -> dict[int, list[Bookmark]]:
    """Return lines in larger type than the body as bookmarks, by page."""
    lines = [line for page in pages for line in page]
    sizes: Counter[float] = Counter()
    for line in lines:
        sizes[_rounded(line.size)] += len(line.text)
    body = sizes.most_common(1)[0][0]
    large = [line for line in lines if _is_large(line, body)]
    if len(large) > _MAX_HEADING_SHARE * len(lines) and len(lines) > 10:
        return {}
    levels = {
        size: level for level, size in enumerate(sorted({_rounded(line.size) for line in large}, reverse=True), 1)
    }
    found: dict[int, list[Bookmark]] = {}
    previous: Line | None = None
    for line in lines:
        if _is_large(line, body):
            known = found.setdefault(line.page, [])
            if previous is not None and known and _is_same_heading(previous, line):
                known[-1].title += " " + line.text
            else:
                known.append(Bookmark(min(levels[_rounded(line.size)], MAX_LEVELS), line.text))
            previous = line
        else:
            previous = None
    return found


def _is_large(line: Line, body: float) -> bool:
    is_word = any(char.isalpha() for char in line.text)
    return is_word and line.size >= _HEADING_SIZE * body and len(line.text) <= _MAX_HEADING_CHARS


def _is_same_heading(above: Line, below: Line) -> bool:
    is_near = 0 < above.top - below.top < 1.6 * above.size
    return above.page == below.page and _rounded(above.size) == _rounded(below.size) and is_near


def _rounded(size: float) -> float:
    return round(size * 2) / 2


# Paragraphs


def read_lines(outline: Outline, pages: Sequence[Sequence[Line]], headings: dict[int, list[Bookmark]]) -> None:
    """Fill the outline. A bookmark whose words are not on its page goes to the start of the page."""
    step = _usual_step(pages)
    for number, page in enumerate(pages, start=1):
        outline.page = number
        places = _places(page, headings.get(number, ()))
        run: list[Line] = []
        index = 0
        while index < len(page) or index in places:
            if index in places:
                _emit(outline, run)
                for level, title, num_lines in places.pop(index):
                    outline.heading(level, title)
                    index += num_lines
                continue
            if run and _ends_paragraph(run[-1], page[index], step):
                _emit(outline, run)
            run.append(page[index])
            index += 1
        _emit(outline, run)


def _places(page: Sequence[Line], headings: Sequence[Bookmark]) -> dict[int, list[tuple[int, str, int]]]:
    """Return headings (level, title, number of lines) by the index of their first line."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    after = 0
    for heading in headings:
        index, num_lines = _find(page, heading.title, after)
        found.setdefault(index, []).append((heading.level, heading.title, num_lines))
        after = index + num_lines
    return found


def _find(page: Sequence[Line], title: str, after: int) -> tuple[int, int]:
    """Return the first line and the number of lines of a heading from line `after` on; `(after, 0)` if not found."""
    wanted = _letters(title)
    for index in range(after, len(page)):
        text = ""
        for num_lines in range(1, 4):
            text += _letters(page[index + num_lines - 1].text) if index + num_lines <= len(page) else ""
            if text and (text == wanted or text.lstrip("0123456789.") == wanted):  # bookmarks often lack the number
                return index, num_lines
            if len(text) > len(wanted) + 8:
                break
    return after, 0


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


def _usual_step(pages: Sequence[Sequence[Line]]) -> float:
    """Return the median distance from one line to the next, in points."""
    steps = [above.top - below.top for page in pages for above, below in pairwise(page) if above.top > below.top]
    return statistics.median(steps) if steps else 0.0


def _ends_paragraph(above: Line, below: Line, step: float) -> bool:
    if above.is_divided:
        return False
    distance = above.top - below.top
    has_other_size = abs(above.size - below.size) > 0.1 * max(above.size, below.size)
    return distance < 0 or distance > _PARAGRAPH_GAP * max(step, above.size * 0.9) or has_other_size


def _emit(outline: Outline, run: list[Line]) -> None:
    text = "".join(line.text + ("" if line.is_divided else "\n") for line in run)
    outline.paragraph(text)
    run.clear()

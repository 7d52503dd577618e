"""From boxes of text on a picture to lines in reading order.

A region is cut into columns if each looks like running text, else into bands at its widest gap (recursive X-Y cut;
Nagy, Seth, Viswanathan, 1992). Boxes that remain side by side are one line, as cells of a table.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stillroom.retrieval.loaders.page_lines import Line

_MIN_COLUMN_LINES = 3
_MIN_COLUMN_CHARS = 16
"""Median length of the lines of a column; columns of a table have shorter ones."""
_CORE = 0.25
"""Share of a box's height that is cut off above and below: boxes of tight lines overlap a little."""
_SIZE_STEP = 1.25
"""Heights of boxes vary with their letters; lines in larger type differ at least by this factor."""


@dataclass(frozen=True, slots=True)
class Box:
    """A line of text, or a part of one, and its upright rectangle; `top` is less than `bottom`."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    @property
    def height(self) -> float:
        return self.bottom - self.top


def in_reading_order(boxes: Sequence[Box]) -> list[Box]:
    """Return the lines of a page. Boxes beside each other on a line are joined."""
    found: list[Box] = []
    regions = [list(boxes)] if boxes else []
    while regions:  # a stack, because a recursion could be as deep as there are lines
        region = regions.pop()
        parts = _columns(region) or _bands(region)
        if len(parts) > 1:
            regions += reversed(parts)
        else:
            found += _rows(region)
    return found


def _columns(region: Sequence[Box]) -> list[list[Box]]:
    """Return the columns of running text, from left to right; [] if there are none."""
    gap = statistics.median(box.height for box in region)
    columns = _groups(region, lambda box: (box.left, box.right), gap)
    is_prose = all(
        len(column) >= _MIN_COLUMN_LINES and statistics.median(len(box.text) for box in column) >= _MIN_COLUMN_CHARS
        for column in columns
    )
    return columns if is_prose and len(columns) > 1 else []


def _bands(region: Sequence[Box]) -> list[list[Box]]:
    """Cut a region at its widest horizontal gap; one part if there is none."""
    bands = _groups(region, _core, 0.0)
    if len(bands) < 2:
        return [list(region)]
    ends = [max(_core(box)[1] for box in band) for band in bands[:-1]]
    gaps = [min(_core(box)[0] for box in below) - end for below, end in zip(bands[1:], ends, strict=True)]
    cut = 1 + max(range(len(gaps)), key=gaps.__getitem__)
    return [[box for band in part for box in band] for part in (bands[:cut], bands[cut:])]


def _core(box: Box) -> tuple[float, float]:
    cut_off = _CORE * box.height
    return box.top + cut_off, box.bottom - cut_off


def _groups(boxes: Sequence[Box], span: Callable[[Box], tuple[float, float]], min_gap: float) -> list[list[Box]]:
    """Group boxes whose spans overlap or are less than `min_gap` apart, in the order of their spans."""
    groups: list[list[Box]] = []
    end = -math.inf
    for box in sorted(boxes, key=span):
        low, high = span(box)
        if not groups or low >= end + min_gap:
            groups.append([])
        groups[-1].append(box)
        end = max(end, high)
    return groups


def _rows(region: Sequence[Box]) -> list[Box]:
    """Join boxes whose middles are at nearly the same height, from left to right."""
    rows: list[list[Box]] = []
    for box in sorted(region, key=_middle):
        if rows and _middle(box) - _middle(rows[-1][0]) < box.height / 2:
            rows[-1].append(box)
        else:
            rows.append([box])
    return [_joined(sorted(row, key=lambda box: box.left)) for row in rows]


def _middle(box: Box) -> float:
    return (box.top + box.bottom) / 2


def _joined(row: Sequence[Box]) -> Box:
    return Box(
        " ".join(box.text for box in row),
        min(box.left for box in row),
        min(box.top for box in row),
        max(box.right for box in row),
        max(box.bottom for box in row),
    )


def lines_of_pages(pages: Mapping[int, Sequence[Box]], body_size: float = 0.0) -> dict[int, list[Line]]:
    """Return the boxes of each page as lines, with sizes that differ only where the type does.

    Args:
        pages: Boxes in reading order, by page from 1.
        body_size: Type size of the text on other pages; 0: the median height of the boxes.
    """
    heights = [box.height for boxes in pages.values() for box in boxes]
    usual = statistics.median(heights) if heights else 0.0
    return {
        page: [_line(page, boxes, at, usual, body_size or usual) for at in range(len(boxes))]
        for page, boxes in pages.items()
    }


def _line(page: int, boxes: Sequence[Box], at: int, usual: float, body_size: float) -> Line:
    box = boxes[at]
    following = boxes[at + 1].text if at + 1 < len(boxes) else ""
    is_divided = box.text.endswith("-") and box.text[-2:-1].isalpha() and following[:1].islower()
    steps = math.floor(math.log(max(box.height, usual) / usual, _SIZE_STEP))
    text = box.text[:-1] if is_divided else box.text
    return Line(text, page, body_size * _SIZE_STEP**steps, -_middle(box), is_divided)

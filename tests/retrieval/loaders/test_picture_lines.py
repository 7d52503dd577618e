"""Lines that OCR found: reading order by columns and rows, headings by height, and joined words."""

import random

import pytest

from stillroom.retrieval.loaders.picture_lines import Box, in_reading_order, lines_of_pages


def box(text: str, left: float, top: float, height: float = 10.0) -> Box:
    return Box(text, left, top, left + 6 * len(text), top + height)


def column(name: str, left: float, num_lines: int = 6) -> list[Box]:
    return [box(f"{name} line {number} of running text", left, 50 + 14 * number) for number in range(num_lines)]


def texts(boxes: list[Box]) -> list[str]:
    """Texts in reading order, given in random order."""
    shuffled = boxes[:]
    random.Random(0).shuffle(shuffled)
    return [found.text for found in in_reading_order(shuffled)]


def test_columns_are_read_one_after_the_other_below_a_title_and_above_a_footer() -> None:
    left, right = column("left", 0), column("right", 250)
    page = [box("A title that is as wide as both of the columns together are", 0, 10), *left, *right]
    page.append(box("A footer that is as wide as both of the columns together are", 0, 160))
    assert texts(page) == [found.text for found in page]


def test_cells_of_a_table_are_read_row_by_row() -> None:
    cells = [box(f"{name}{row}", left, 14 * row) for row in range(5) for name, left in (("key", 0), ("days", 200))]
    assert texts(cells) == [f"key{row} days{row}" for row in range(5)]


def test_lines_whose_boxes_overlap_stay_apart() -> None:
    lines = [box(f"line {number}", 0, 9 * number, height=13) for number in range(8)]
    assert texts(lines) == [line.text for line in lines]


def test_hundreds_of_lines_are_ordered() -> None:
    lines = [box(f"line {number}", 0, 14 * number + number * number / 100) for number in range(300)]
    assert texts(lines) == [line.text for line in lines]


def test_empty_page_has_no_lines() -> None:
    assert in_reading_order([]) == [] and lines_of_pages({1: []}) == {1: []}


def test_only_clearly_higher_lines_are_larger() -> None:
    heights = {"Heading": 16.0, "a body line": 10.0, "another": 11.4, "third": 9.0, "fourth": 10.2}
    boxes = [box(text, 0, 20.0 * number, height) for number, (text, height) in enumerate(heights.items())]
    heading, *body = lines_of_pages({1: boxes})[1]
    assert [line.size for line in body] == pytest.approx([10.2] * 4) and heading.size == pytest.approx(10.2 * 1.25**2)
    among_text = lines_of_pages({1: boxes}, body_size=12.0)[1]
    assert {line.size for line in among_text[1:]} == {12.0}


def test_hyphen_joins_a_word_that_goes_on_in_small_letters() -> None:
    boxes = [box(text, 0, 14.0 * number) for number, text in enumerate(("the ser-", "vice of 10-", "20 days, A-", "B"))]
    lines = lines_of_pages({1: boxes})[1]
    assert [(line.text, line.is_divided) for line in lines] == [
        ("the ser", True),
        ("vice of 10-", False),
        ("20 days, A-", False),
        ("B", False),
    ]

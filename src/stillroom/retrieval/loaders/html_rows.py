"""Rows of a table in HTML, while their cells are being read."""

from collections.abc import Callable

Lines = tuple[int, int]
"""First and last line of a text in its file; (0, 0) of none."""


class Row:
    """Cells gather and become one paragraph at the row's end: `Key | Days`.

    A cell that holds more than one text, as in tables that are there for a page's layout, is read as its paragraphs: it
    gives what there is of the row as a paragraph, and then itself.
    """

    def __init__(self, paragraph: Callable[[str, Lines], None]) -> None:
        """`paragraph` takes texts as they are complete, in reading order."""
        self._paragraph = paragraph
        self._cells: list[str] = []
        self._lines: Lines = (0, 0)
        self._text = ""
        self._text_lines: Lines = (0, 0)
        self._is_in_cell = False
        self._is_divided = False
        """The cell that is open is read as its paragraphs."""

    def begin_cell(self) -> None:
        """Ends the one before."""
        self.end_cell()
        self._is_in_cell = True

    def add(self, text: str, lines: Lines) -> None:
        """A text in the open cell, or in none."""
        if self._is_in_cell and not self._is_divided and not self._text:
            self._text, self._text_lines = text, lines
        else:
            self.interrupt()
            self._paragraph(text, lines)

    def interrupt(self) -> None:
        """Before something else than a text, or a second text, in the open cell."""
        self._give_cells()
        if self._text:
            self._paragraph(self._text, self._text_lines)
            self._text = ""
        self._is_divided = self._is_in_cell

    def end_cell(self) -> None:
        """Does nothing where none is open."""
        if self._is_in_cell and not self._is_divided:
            self._cells.append(self._text)
            if self._text:
                self._lines = (self._lines[0] or self._text_lines[0], self._text_lines[1])
        self._text = ""
        self._is_in_cell = self._is_divided = False

    def end(self) -> None:
        """All cells have been read; the next begins another row."""
        self.end_cell()
        self._give_cells()

    def _give_cells(self) -> None:
        if any(self._cells):
            self._paragraph(" | ".join(self._cells), self._lines)
        self._cells, self._lines = [], (0, 0)

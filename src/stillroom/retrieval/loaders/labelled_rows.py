"""Rows of a table as text that can be understood without the table. Shared by CSV and XLSX."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

_Place = TypeVar("_Place")


def labelled(rows: Iterable[tuple[_Place, Sequence[str]]]) -> Iterator[tuple[_Place, str]]:
    """Rows as text, with their places. A first row of names labels the cells of the others: `Name: Ann; Age: 31`.

    Without one, and for a row with more cells than names, cells stand beside each other: `Ann | 31`.
    """
    names: Sequence[str] | None = None
    for place, row in rows:
        if names is None:
            names = _names(row)
            if names:
                yield place, " | ".join(name for name in names if name)
                continue
        if names:
            pairs = [(names[index] if index < len(names) else "", cell) for index, cell in enumerate(row) if cell]
            yield place, "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs)
        else:
            yield place, " | ".join(cell for cell in row if cell)


def _names(row: Sequence[str]) -> Sequence[str]:
    """The row itself where it names columns: at least two cells, all different, and none a number; else nothing."""
    filled = [cell for cell in row if cell]
    is_header = len(filled) > 1 and len(set(filled)) == len(filled) and not any(_is_number(cell) for cell in filled)
    return row if is_header else ()


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", ".").rstrip("%"))
    except ValueError:
        return False
    return True

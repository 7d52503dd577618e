"""What goes where: results to stdout, everything else to stderr, and nothing that could steer a terminal.

Text of documents and models is shown with its control characters replaced; in JSON they are escaped.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from stillroom.errors import UsageError

_KEPT = "\n\t"
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in _KEPT}
_ESCAPES = {code: f"\\u{code:04x}" for code in range(127, 160)}
"""Those that a terminal may obey although JSON need not escape them."""
_MAX_WIDTH = 100


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor, change colours or worse."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """A piece of a result, at once, without a line end."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def line(text: str = "") -> None:
    """A line of a result, at once: whoever reads along waits for its end."""
    write(text + "\n")


def print_json(payload: Any, *, indent: int | None = 2) -> None:
    """A result as JSON; with `indent=None` on one line."""
    sys.stdout.write(_as_json(payload, sys.stdout, indent) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for the person who watches, on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def error(kind: str, message: str, *, as_json: bool) -> None:
    """What went wrong, on stderr: a line for people, or one JSON object for programs."""
    if as_json:
        print(_as_json({"error": {"type": kind, "message": message}}, sys.stderr), file=sys.stderr)
    else:
        note(message)


def as_text(what: str, given: str) -> str:
    """Words of an argument or of stdin. Raises UsageError where their bytes were no text."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not text in UTF-8; iconv converts it") from None
    return given


def _as_json(payload: Any, stream: TextIO, indent: int | None = None) -> str:
    is_utf8 = (stream.encoding or "").lower().replace("-", "") in ("", "utf8")  # none: it takes any character
    return json.dumps(payload, ensure_ascii=not is_utf8, indent=indent).translate(_ESCAPES)


def text_width() -> int:
    """Columns for running text."""
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH)


def short_path(document: str) -> str:
    """A document's path relative to the current folder where that is shorter."""
    if not os.path.isabs(document):
        return document
    relative = os.path.relpath(document, Path.cwd())
    return relative if len(relative) < len(document) else document


def place(document: str, lines: tuple[int, int], pages: tuple[int, int]) -> str:
    """`docs/a.md:3-7` or `docs/a.pdf, p. 3-4`; without lines or pages where the format has none."""
    where = short_path(document)
    if lines[0] > 0:
        where += f":{_span(*lines)}"
    if pages[0] > 0:
        where += f", p. {_span(*pages)}"
    return where


def _span(first: int, last: int) -> str:
    return f"{first}" if last <= first else f"{first}-{last}"


def duration(seconds: float) -> str:
    """`340 us`, `12 ms`, `3.4 s`, `2 min 5 s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def size(num_bytes: float) -> str:
    """`512 B`, `3.4 KiB`, `12 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """`1 file`, `3 files`, `2,000 chunks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

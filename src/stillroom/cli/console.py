"""What goes where: results to stdout, everything else to stderr, and nothing that could steer a terminal.

Text of documents and models is shown with its control characters replaced; in JSON they are escaped.
"""

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from stillroom.errors import UsageError

_KEPT = "\n\t"
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in _KEPT}
_OF_NAMES = _CONTROLS | dict.fromkeys(
    (*map(ord, "\n\t\u061c\u200e\u200f\u2028\u2029"), *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    "\N{REPLACEMENT CHARACTER}",
)
"""In the name of a file also what ends a line, or turns the direction in which it is read."""
_ESCAPES = {code: f"\\u{code:04x}" for code in range(127, 160)}
"""Those that a terminal may obey although JSON need not escape them."""
_MAX_WIDTH = 100

_is_line_open = False
"""Whether the last line on stdout has not ended yet."""


class OutputError(Exception):
    """A result cannot be written to stdout."""


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor, change colours or worse."""
    return text.translate(_CONTROLS)


def printable_name(name: str) -> str:
    """The name of a file or document on one line, read in the direction in which it is written."""
    return name.translate(_OF_NAMES)


def write(text: str) -> None:
    """A piece of a result, at once, without a line end. Raises OutputError."""
    _put(printable(text))


def _put(text: str) -> None:
    global _is_line_open
    with writing():
        sys.stdout.write(text)
        sys.stdout.flush()
    _is_line_open = not text.endswith("\n") if text else _is_line_open


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Write to stdout in here.

    Raises:
        BrokenPipeError: its reader went away.
        OutputError: it cannot be written for another reason.
    """
    try:
        if sys.stdout is None:  # closed by whoever called
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"stdout cannot be written: {error.strerror or error}") from error


def line(text: str = "") -> None:
    """A line of a result, at once: whoever reads along waits for its end."""
    write(text + "\n")


def print_json(payload: Any, *, indent: int | None = 2) -> None:
    """A result as JSON; with `indent=None` on one line."""
    _put(_as_json(payload, sys.stdout, indent) + "\n")


def note(text: str) -> None:
    """A line for the person who watches, on stderr."""
    begin_note()
    print(printable(text), file=sys.stderr, flush=True)


def begin_note() -> None:
    """What goes to stderr does not stand behind half a line of a result, where both are shown in one place."""
    global _is_line_open
    if _is_line_open:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a replaced stream may be no file
            if os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())):
                sys.stderr.write("\n")
                _is_line_open = False


def error(kind: str, message: str, *, as_json: bool) -> None:
    """What went wrong, on stderr: a line for people, or one JSON object for programs."""
    if as_json:
        begin_note()
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


def _as_json(payload: Any, stream: TextIO | None, indent: int | None = None) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # without one it takes any character
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    return json.dumps(payload, ensure_ascii=not is_utf8, indent=indent).translate(_ESCAPES)


def text_width() -> int:
    """Columns for running text."""
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH)


def short_path(document: str) -> str:
    """A document's path, printable, relative to the current folder where that is shorter."""
    relative = os.path.relpath(document, Path.cwd()) if os.path.isabs(document) else document
    return printable_name(relative if len(relative) < len(document) else document)


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

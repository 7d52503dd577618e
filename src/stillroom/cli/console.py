"""Output of commands: results to stdout, notes and errors to stderr, without terminal control characters.

Control characters in text of documents and models are replaced; in JSON they are escaped.
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
_NAME_CONTROLS = _CONTROLS | dict.fromkeys(
    (*map(ord, "\n\t\u061c\u200e\u200f\u2028\u2029"), *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    "\N{REPLACEMENT CHARACTER}",
)
"""In file names, line ends and characters that change the reading direction are replaced too."""
_ESCAPES = {code: f"\\u{code:04x}" for code in range(127, 160)}
"""Terminal control characters that JSON does not escape by itself."""
_MAX_WIDTH = 100
_LINKING_PROGRAMS = ("iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper", "zed")
_LINKING_TERMINALS = ("xterm-kitty", "alacritty", "foot", "xterm-ghostty")
_LINKING_VARIABLES = ("VTE_VERSION", "WT_SESSION", "KONSOLE_VERSION", "KITTY_WINDOW_ID", "DOMTERM")

_is_line_open = False
"""Whether the last line written to stdout has no line end yet."""


class OutputError(Exception):
    """Stdout cannot be written."""


def printable(text: str) -> str:
    """Replace control characters, which could move the cursor or change colours."""
    return text.translate(_CONTROLS)


def printable_name(name: str) -> str:
    """Return a file or document name that stays on one line and keeps its reading direction."""
    return name.translate(_NAME_CONTROLS)


def write(text: str) -> None:
    """Write a piece of a result without a line end, and flush. Raises OutputError."""
    _put(printable(text))


def _put(text: str) -> None:
    global _is_line_open
    with writing():
        sys.stdout.write(text)
        sys.stdout.flush()
    _is_line_open = not text.endswith("\n") if text else _is_line_open


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Context for writing to stdout.

    Raises:
        BrokenPipeError: the reader of stdout closed it.
        OutputError: stdout cannot be written for another reason.
    """
    try:
        if sys.stdout is None:  # closed by the caller
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"stdout cannot be written: {error.strerror or error}") from error


def line(text: str = "") -> None:
    write(text + "\n")


def write_link(text: str, file: Path | None) -> None:
    """Write a text as a hyperlink (OSC 8) to a file, where the terminal shows links; else the text alone."""
    if file is None or not shows_links() or not file.is_file():
        write(text)
        return
    _put(f"\x1b]8;;{file.absolute().as_uri()}\x1b\\{printable_name(text)}\x1b]8;;\x1b\\")


def shows_links() -> bool:
    """Return whether stdout is a terminal that is known to show hyperlinks. `FORCE_HYPERLINK` decides if it is set; 0
    is no. `NO_COLOR` and `TERM=dumb` switch links off."""
    environment = os.environ
    if forced := environment.get("FORCE_HYPERLINK"):
        return forced != "0"
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb" or not sys.stdout.isatty():
        return False
    is_known = environment.get("TERM_PROGRAM") in _LINKING_PROGRAMS or environment.get("TERM") in _LINKING_TERMINALS
    return is_known or any(environment.get(name) for name in _LINKING_VARIABLES)


def print_json(payload: Any, *, indent: int | None = 2) -> None:
    """Write a result as JSON; on one line if `indent` is None."""
    _put(_as_json(payload, sys.stdout, indent) + "\n")


def note(text: str) -> None:
    begin_note()
    print(printable(text), file=sys.stderr, flush=True)


def begin_note() -> None:
    """End an open line of stdout before writing to stderr, if both go to the same file."""
    global _is_line_open
    if _is_line_open:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a replaced stream may be no file
            if os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())):
                sys.stderr.write("\n")
                _is_line_open = False


def error(kind: str, message: str, *, as_json: bool) -> None:
    """Write an error to stderr: a line, or one JSON object."""
    if as_json:
        begin_note()
        print(_as_json({"error": {"type": kind, "message": message}}, sys.stderr), file=sys.stderr)
    else:
        note(message)


def as_text(what: str, given: str) -> str:
    """Return an argument or line of stdin. Raises UsageError: its bytes are not UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8 text; convert it with iconv") from None
    return given


def _as_json(payload: Any, stream: TextIO | None, indent: int | None = None) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a stream without encoding takes any character
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    return json.dumps(payload, ensure_ascii=not is_utf8, indent=indent).translate(_ESCAPES)


def text_width() -> int:
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH)


def short_path(document: str) -> str:
    """Return a printable path, relative to the current folder if that is shorter."""
    relative = os.path.relpath(document, Path.cwd()) if os.path.isabs(document) else document
    return printable_name(relative if len(relative) < len(document) else document)


def place(document: str, lines: tuple[int, int], pages: tuple[int, int]) -> str:
    """Format as `docs/a.md:3-7` or `docs/a.pdf, p. 3-4`; (0, 0) means no lines or pages."""
    where = short_path(document)
    if lines[0] > 0:
        where += f":{_span(*lines)}"
    if pages[0] > 0:
        where += f", p. {_span(*pages)}"
    return where


def _span(first: int, last: int) -> str:
    return f"{first}" if last <= first else f"{first}-{last}"


def described_hop(question: str, num_new: int, answer: str | None, end: str | None) -> str:
    """Format one search of several for a question, as `Hop: QUESTION (2 new documents; so far: ANSWER; last: limit)`.

    Args:
        end: why no other search followed; None if one did.
    """
    facts = [count(num_new, "new document")]
    facts += [] if answer is None else [f"so far: {answer}"]
    facts += [] if end is None else [f"last: {end.replace('_', ' ')}"]
    return f"Hop: {' '.join(question.split())} ({'; '.join(facts)})"


def duration(seconds: float) -> str:
    """Format as `340 us`, `12 ms`, `3.4 s` or `2 min 5 s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def size(num_bytes: float) -> str:
    """Format as `512 B`, `3.4 KiB` or `12 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """Format as `1 file`, `3 files` or `2,000 chunks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

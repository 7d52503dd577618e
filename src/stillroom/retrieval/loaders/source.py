"""Shared by all loaders: reading files, decoding text, limits, and the `Outline` of headings and paragraphs.

No readable text is dropped: a heading without content becomes a paragraph.
"""

import codecs
import dataclasses
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import clean_metadata
from stillroom.errors import DocumentError

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16: the UTF-32 mark begins with the UTF-16 mark
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DECLARED = re.compile(rb"""(?:charset|encoding|coding)\s*[:=]\s*["']?\s*([A-Za-z0-9][\w.:-]*)""", re.IGNORECASE)
_DECLARED_WITHIN = 1024
_LATIN_1 = frozenset({"iso-8859-1", "iso8859-1", "latin-1", "latin1", "us-ascii", "ascii"})
"""Declared encodings that are read as Windows-1252, as browsers do."""
_NO_CHARSETS = frozenset({"idna", "punycode", "unicode-escape", "raw-unicode-escape", "utf-7", "undefined"})
"""Python codecs that are not encodings of files."""
_UTF_8 = frozenset({"utf-8", "utf8"})
_CONTROLS = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f]")
_BEYOND_ASCII = bytes(range(128, 256))
_SAMPLE = 1 << 16
"""Bytes from which an encoding is guessed."""

_NOT_REGULAR = "not a regular file (a pipe, socket or device)"
_REASONS = {errno.ENXIO: _NOT_REGULAR, errno.ELOOP: "not a regular file (a symbolic link that leads to itself)"}


@dataclass(frozen=True, slots=True)
class File:
    """The content of a file, input of a loader."""

    path: Path
    """Absolute path."""
    data: bytes
    config: DocumentsConfig
    on_page: Callable[[int], None] = lambda page: None
    """Called before a page, from 1, is read by OCR: its time limit begins."""

    @property
    def name(self) -> str:
        """File name without extension: the fallback title."""
        return self.path.stem

    def document(self, title: str, paragraphs: tuple[Paragraph, ...], metadata: Mapping[str, object]) -> Document:
        """Make the document of this file; a title in `metadata` is left out."""
        kept = {name: value for name, value in metadata.items() if name != "title"}
        return Document(DocumentId(str(self.path)), title, paragraphs, metadata=clean_metadata(kept))


@contextmanager
def opened(path: Path) -> Iterator[tuple[BufferedReader, os.stat_result]]:
    """Open a regular file for reading. Pipes, sockets and devices are refused without waiting.

    Raises:
        DocumentError: The path is not a regular file or cannot be read.
    """
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        with open(path, "rb", opener=_open_without_waiting) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DocumentError(f"{path}: {_NOT_REGULAR}")
            yield stream, status
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"cannot be read: {error.strerror or error}")
        raise DocumentError(f"{path}: {reason}") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def read_file(path: Path, config: DocumentsConfig) -> File:
    """Read a whole file.

    Raises:
        DocumentError: The file cannot be read or is larger than `documents.max_file_bytes`.
    """
    with opened(path) as (stream, status):
        check_size(path, status.st_size, config)
        data = stream.read(max(status.st_size, _SAMPLE))  # bytes appended meanwhile are read by the next `add`
    return File(path, data, config)


def check_size(path: Path, num_bytes: int, config: DocumentsConfig) -> None:
    """Raises DocumentError if the file is larger than `documents.max_file_bytes`."""
    if num_bytes > config.max_file_bytes:
        raise DocumentError(
            f"{path}: larger than documents.max_file_bytes ({_mib(config.max_file_bytes)}); split it or raise the limit"
        )


def check_text(path: Path, num_bytes: int, config: DocumentsConfig) -> None:
    """Raises DocumentError if the text is larger than `documents.max_text_bytes`."""
    if num_bytes > config.max_text_bytes:
        raise DocumentError(
            f"{path}: more text than documents.max_text_bytes ({_mib(config.max_text_bytes)}); "
            "split it, make it a JSONL file, or raise the limit"
        )


def within_limits(path: Path, paragraphs: Iterable[Paragraph], config: DocumentsConfig) -> Iterator[Paragraph]:
    """Yield the paragraphs and count them; text that a format repeats counts each time.

    Raises:
        DocumentError: The number of paragraphs or the size of the text exceeds a limit of `config`.
    """
    num_bytes = num_expanded = 0
    for number, paragraph in enumerate(paragraphs, start=1):
        num_text = len(paragraph.text.encode("utf-8", "replace"))
        num_bytes += num_text
        num_expanded += num_text + sum(map(len, paragraph.heading_path))
        check_text(path, num_bytes, config)
        if num_expanded > config.max_expanded_bytes:
            raise DocumentError(
                f"{path}: with the headings above each paragraph more text than documents.max_expanded_bytes "
                f"({_mib(config.max_expanded_bytes)}); shorten its headings, or raise the limit"
            )
        if number > config.max_paragraphs:
            raise DocumentError(
                f"{path}: more paragraphs or rows than documents.max_paragraphs ({config.max_paragraphs:,}); "
                "split it, make it a JSONL file, or raise the limit"
            )
        yield paragraph


def text_of(file: File, *, strict: bool = False) -> str:
    """Return the text of a text file; see `decode`."""
    check_text(file.path, len(file.data), file.config)
    return decode(file.data, str(file.path), strict=strict)


def is_text(data: bytes) -> bool:
    """Return whether a file is text whatever its name says: UTF-8, or Unicode with a byte order mark, without the
    control characters of binary data. An empty file is none."""
    try:
        text = _with_mark(data, "")
        text = data.decode() if text is None else text
    except (UnicodeDecodeError, DocumentError):
        return False
    return bool(text) and not _CONTROLS.search(text)


def decode(data: bytes, name: str, *, strict: bool = False) -> str:
    """Decode text with universal newlines.

    Tried in order: a byte order mark; UTF-8, a few bad bytes replaced; the encoding that the file declares; the
    encoding that a detector guesses.

    Args:
        name: File name for the error.
        strict: Accept only UTF-8 and byte order marks; for files of unknown format.

    Raises:
        DocumentError: The bytes are not text.
    """
    text = _with_mark(data, name)
    if text is None and b"\0" in data:
        text = _utf16_without_mark(data)
        if text is None:
            raise DocumentError(f"{name}: binary data, not text")
    if text is None:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if strict:
                raise DocumentError(f"{name}: not UTF-8 text; convert it, or give it a known extension") from error
            declared = _declared(data)
            text = _damaged_utf8(data, declared) or _in_encoding(data, declared) or _guessed(data)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _with_mark(data: bytes, name: str) -> str | None:
    """Decode UTF-16 or UTF-32 with a byte order mark; None without a mark."""
    marks = [encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)]
    for encoding in marks:  # UTF-16 that begins with NUL has the mark of UTF-32
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    if marks:
        raise DocumentError(f"{name}: begins with the mark of {marks[-1].upper()}, but is not such text")
    return None


def _utf16_without_mark(data: bytes) -> str | None:
    """Decode UTF-16 without a byte order mark, in which most odd or most even bytes are NUL; None if it is not."""
    sample = data[:_SAMPLE]
    for encoding, at in (("utf-16-le", 1), ("utf-16-be", 0)):
        if sample[at::2].count(0) * 2 > len(sample[at::2]) and not sample[1 - at :: 2].count(0):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                return None
    return None


def _declared(data: bytes) -> str:
    """Return the encoding that HTML, XML or source code declares at its beginning, or ""."""
    match = _DECLARED.search(data[:_DECLARED_WITHIN])
    return match.group(1).decode("ascii").lower().replace("_", "-") if match else ""


def _damaged_utf8(data: bytes, declared: str) -> str | None:
    """Decode UTF-8 with a few bad bytes; None if it is another encoding.

    Non-ASCII bytes of other encodings rarely are valid UTF-8. So four valid characters for each bad byte are required,
    or one if the file declares UTF-8.
    """
    text = data.decode("utf-8-sig", "replace")
    num_bad = text.count("\ufffd") - data.count("\ufffd".encode())
    num_good = len(text) - len(data.translate(None, _BEYOND_ASCII)) - num_bad
    is_utf8 = data.startswith(codecs.BOM_UTF8) or num_good >= num_bad * (1 if declared in _UTF_8 else 4)
    return text if is_utf8 else None


def _in_encoding(data: bytes, name: str) -> str | None:
    """Decode with a named encoding; None if it is unknown or does not fit."""
    try:
        return data.decode("cp1252" if name in _LATIN_1 else name) if name not in _NO_CHARSETS else None
    except (LookupError, UnicodeError, ValueError):
        return None


def _guessed(data: bytes) -> str:
    """Decode with the encoding that a browser's detector guesses; any bytes are text in some encoding."""
    from chardetng_py import EncodingDetector

    detector = EncodingDetector()
    detector.feed(data[:_SAMPLE], last=True)
    try:
        return data.decode(detector.guess(tld=None, allow_utf8=False), "replace")
    except LookupError:  # an encoding that Python does not have
        return data.decode("latin-1")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.4g} MiB"


def blank_line_paragraphs(text: str, first_line: int = 1) -> Iterator[Paragraph]:
    """Yield runs of lines between blank lines. `first_line` is the line number of the text in its file."""
    run: list[str] = []
    for number, line in enumerate(chain(text.split("\n"), ("",)), start=first_line):
        if line.strip():
            run.append(line.rstrip())
        elif run:
            yield Paragraph("\n".join(run), (), number - len(run), number - 1)
            run = []


@dataclass(slots=True)
class _Heading:
    level: int
    text: str
    line: int
    page: int
    is_used: bool = False
    """Whether a heading path contains its text."""


class Outline:
    """Collects headings and blocks in reading order; `finish` returns title and paragraphs."""

    def __init__(self) -> None:
        self.page = 0
        """Page of the next block, from 1; 0 for formats without pages."""
        self._open: list[_Heading] = []
        self._all: list[_Heading] = []
        self._paragraphs: list[Paragraph] = []

    def heading(self, level: int, text: str, line: int = 0) -> None:
        """Start a section; `level` 1 is outermost."""
        text = " ".join(text.split())
        if not text:
            return
        self._close(level)
        for outer in self._open:
            outer.is_used = True
        heading = _Heading(level, text, line, self.page)
        self._open.append(heading)
        self._all.append(heading)

    def paragraph(self, text: str, start_line: int = 0, end_line: int = 0, end_page: int = 0) -> None:
        """Add a block under the current headings; blank blocks are ignored. Indentation is kept."""
        text = text.strip("\n").rstrip()
        if not text.strip():
            return
        for heading in self._open:
            heading.is_used = True
        path = tuple(heading.text for heading in self._open)
        lines = (start_line, max(start_line, end_line))
        self._paragraphs.append(Paragraph(text, path, *lines, self.page, max(self.page, end_page)))

    def finish(self, title: str, fallback_title: str) -> tuple[str, tuple[Paragraph, ...]]:
        """Return title and paragraphs.

        Args:
            title: Title from the format's metadata, or "". Without it, the first heading is the title if no other
                heading has its level or a higher one; it is then removed from the heading paths.
            fallback_title: Title of documents with neither.
        """
        self._close(0)
        top = self._only_top_heading()
        if top is not None and (not title or top.text.casefold() in title.casefold()):
            return title or top.text, tuple(_without(top.text, paragraph) for paragraph in self._paragraphs)
        return title or fallback_title, tuple(self._paragraphs)

    def _only_top_heading(self) -> _Heading | None:
        if not self._all or any(other.level <= self._all[0].level for other in self._all[1:]):
            return None
        return self._all[0]

    def _close(self, level: int) -> None:
        """End the sections at `level` and deeper."""
        while self._open and self._open[-1].level >= level:
            heading = self._open.pop()
            if not heading.is_used:
                path = tuple(outer.text for outer in self._open)
                where = (heading.line, heading.line, heading.page, heading.page)
                self._paragraphs.append(Paragraph(heading.text, path, *where))


def _without(title: str, paragraph: Paragraph) -> Paragraph:
    if paragraph.heading_path[:1] != (title,):
        return paragraph
    return dataclasses.replace(paragraph, heading_path=paragraph.heading_path[1:])

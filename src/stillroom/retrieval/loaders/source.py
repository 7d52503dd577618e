"""What all loaders share: files to bytes, bytes to text, and an outline that turns headings and blocks into paragraphs.

No readable text is dropped: a heading with nothing under it becomes a paragraph itself.
"""

import codecs
import dataclasses
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
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
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DECLARED = re.compile(rb"""(?:charset|encoding|coding)\s*[:=]\s*["']?\s*([A-Za-z0-9][\w.:-]*)""", re.IGNORECASE)
_DECLARED_WITHIN = 1024
_LATIN_1 = frozenset({"iso-8859-1", "iso8859-1", "latin-1", "latin1", "us-ascii", "ascii"})
"""What files say that mean Windows-1252, which has quotation marks and dashes; browsers read it so too."""
_NO_CHARSETS = frozenset({"idna", "punycode", "unicode-escape", "raw-unicode-escape", "utf-7", "undefined"})
"""What Python takes for an encoding and no file is written in."""
_UTF_8 = frozenset({"utf-8", "utf8"})
_BEYOND_ASCII = bytes(range(128, 256))
_SAMPLE = 1 << 16
"""Bytes from which an encoding is guessed."""


_NOT_REGULAR = "not a regular file (a pipe, socket or device)"
_REASONS = {errno.ENXIO: _NOT_REGULAR, errno.ELOOP: "not a regular file (a symbolic link that leads to itself)"}
"""What opening says of a socket, and of a link in a circle."""


@dataclass(frozen=True, slots=True)
class File:
    """One file on its way through a loader."""

    path: Path
    """Absolute."""
    data: bytes
    config: DocumentsConfig

    @property
    def name(self) -> str:
        """Of the file without its extension: the title of a document that names none."""
        return self.path.stem

    def document(self, title: str, paragraphs: tuple[Paragraph, ...], metadata: Mapping[str, object]) -> Document:
        """What a loader returns. A title among the metadata is left out: it is the document's."""
        kept = {name: value for name, value in metadata.items() if name != "title"}
        return Document(DocumentId(str(self.path)), title, paragraphs, metadata=clean_metadata(kept))


@contextmanager
def opened(path: Path) -> Iterator[tuple[BufferedReader, os.stat_result]]:
    """A regular file, open for reading; whatever else has a name is refused without waiting for it.

    Raises:
        DocumentError: it is no regular file, or cannot be read.
    """
    try:
        # without O_NONBLOCK, opening a pipe waits for somebody who writes to it
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
    """A file whole.

    Raises:
        DocumentError: it cannot be read or is larger than `documents.max_file_bytes`.
    """
    with opened(path) as (stream, status):
        check_size(path, status.st_size, config)
        data = stream.read(max(status.st_size, _SAMPLE))  # what is added to it meanwhile is for the next time
    return File(path, data, config)


def check_size(path: Path, num_bytes: int, config: DocumentsConfig) -> None:
    """Raises:
    DocumentError: the file is larger than `documents.max_file_bytes`.
    """
    if num_bytes > config.max_file_bytes:
        raise DocumentError(
            f"{path}: larger than documents.max_file_bytes ({_mib(config.max_file_bytes)}); split it or raise the limit"
        )


def check_text(path: Path, num_bytes: int, config: DocumentsConfig) -> None:
    """Raises:
    DocumentError: there is more text than `documents.max_text_bytes`.
    """
    if num_bytes > config.max_text_bytes:
        raise DocumentError(
            f"{path}: more text than documents.max_text_bytes ({_mib(config.max_text_bytes)}); "
            "split it, make it a JSONL file, or raise the limit"
        )


def within_limits(path: Path, paragraphs: Iterable[Paragraph], config: DocumentsConfig) -> Iterator[Paragraph]:
    """The same paragraphs, counted as they are made: text that a format repeats counts each time.

    Raises:
        DocumentError: there are more paragraphs, or there is more text, than `documents` allows.
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
    """The text of a file of text; see `decode`."""
    check_text(file.path, len(file.data), file.config)
    return decode(file.data, str(file.path), strict=strict)


def decode(data: bytes, name: str, *, strict: bool = False) -> str:
    """Bytes to text with universal newlines: UTF-8, a few bad bytes of which are replaced, else what a byte order mark
    or the file itself declares, else what the bytes look like.

    Args:
        name: for the error.
        strict: guess nothing; for files whose name does not say that they are text.

    Raises:
        DocumentError: these bytes are no text.
    """
    text = _marked(data, name)
    if text is None and b"\0" in data:
        text = _wide(data)
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


def _marked(data: bytes, name: str) -> str | None:
    """Text that says with its first bytes that it is UTF-16 or UTF-32."""
    marks = [encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)]
    for encoding in marks:  # what begins as UTF-32 may be UTF-16 that begins with NUL
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    if marks:
        raise DocumentError(f"{name}: begins as {marks[-1].upper()} text, but is none")
    return None


def _wide(data: bytes) -> str | None:
    """UTF-16 without a byte order mark: of ordinary text nearly every second byte is NUL."""
    sample = data[:_SAMPLE]
    for encoding, at in (("utf-16-le", 1), ("utf-16-be", 0)):
        if sample[at::2].count(0) * 2 > len(sample[at::2]) and not sample[1 - at :: 2].count(0):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                return None
    return None


def _declared(data: bytes) -> str:
    """The encoding that the file names at its beginning, as HTML, XML and source code can; empty where it does not."""
    match = _DECLARED.search(data[:_DECLARED_WITHIN])
    return match.group(1).decode("ascii").lower().replace("_", "-") if match else ""


def _damaged_utf8(data: bytes, declared: str) -> str | None:
    """UTF-8 with a few bad bytes; None where it is none. In other encodings few sequences of bytes are characters of
    UTF-8 by chance, so four of five tell that it is UTF-8, and half of them where the file says so."""
    text = data.decode("utf-8-sig", "replace")
    num_bad = text.count("\ufffd") - data.count("\ufffd".encode())
    num_good = len(text) - len(data.translate(None, _BEYOND_ASCII)) - num_bad
    is_utf8 = data.startswith(codecs.BOM_UTF8) or num_good >= num_bad * (1 if declared in _UTF_8 else 4)
    return text if is_utf8 else None


def _in_encoding(data: bytes, name: str) -> str | None:
    """None where there is no such encoding, or the bytes are no text in it."""
    try:
        return data.decode("cp1252" if name in _LATIN_1 else name) if name not in _NO_CHARSETS else None
    except (LookupError, UnicodeError, ValueError):
        return None


def _guessed(data: bytes) -> str:
    """By what it looks like, as a browser would: any bytes are text in some encoding."""
    from chardetng_py import EncodingDetector

    detector = EncodingDetector()
    detector.feed(data[:_SAMPLE], last=True)
    try:
        return data.decode(detector.guess(tld=None, allow_utf8=False), "replace")
    except LookupError:  # browsers know some that Python does not
        return data.decode("latin-1")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.4g} MiB"


def blank_line_paragraphs(text: str, first_line: int = 1) -> Iterator[Paragraph]:
    """Runs of lines between blank lines; `first_line` is the number of the text's first line in its file."""
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
    """Something stands under it, so its text is in some heading path."""


class Outline:
    """Collects headings and blocks in reading order; `finish` gives title and paragraphs."""

    def __init__(self) -> None:
        self.page = 0
        """Where what comes next stands, from 1; 0 where the format has no pages."""
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
        """Title and paragraphs.

        Args:
            title: what the format itself says the title is; empty if it does not. Then a first heading that has no
                equal is the title, and it leaves the heading paths, for they exclude the title.
            fallback_title: for documents with neither.
        """
        self._close(0)
        lone = self._lone_heading()
        if lone is not None and (not title or lone.text.casefold() in title.casefold()):
            return title or lone.text, tuple(_without(lone.text, paragraph) for paragraph in self._paragraphs)
        return title or fallback_title, tuple(self._paragraphs)

    def _lone_heading(self) -> _Heading | None:
        if not self._all or any(other.level <= self._all[0].level for other in self._all[1:]):
            return None
        return self._all[0]

    def _close(self, level: int) -> None:
        """Leave the sections at `level` and deeper."""
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

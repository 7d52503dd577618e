"""Configures logging: one line per record on stderr, as text or JSON. Called once, by the process's entry point.

Modules log with `logging.getLogger(__name__)` only.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

REQUEST_ID: ContextVar[str | None] = ContextVar("stillroom_request_id", default=None)
"""Id of the current HTTP request; the server sets it for itself and the threads that it starts."""

_NOISY_LIBRARIES = (
    "asyncio",
    "faiss",
    "filelock",
    "fsspec",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "sentence_transformers",
    "transformers",
    "urllib3",
    "uvicorn.access",
    "uvicorn.error",
)
"""Libraries whose records below WARNING are not logged."""

_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""Control characters, which could steer a terminal, for example in a file name."""


def configure_logging(
    level: str | int = "WARNING",
    *,
    as_json: bool = False,
    is_dated: bool = True,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Send the records of this process to stderr. A further call replaces the earlier configuration.

    Args:
        level: lowest level of Stillroom's records; that of libraries is at least WARNING, unless this is DEBUG.
        as_json: one JSON object per line, with the stack trace of an exception; text shows its last frame only.
        is_dated: whether text has time and logger; without them, for a command that ends soon: `warning: message`.
        before: called before each record is written.
    """
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if not isinstance(number, int):
        raise ValueError(f"{level!r} is not a logging level")
    handler = _StderrHandler(before)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter(is_dated))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
    quiet = logging.NOTSET if number <= logging.DEBUG else max(number, logging.WARNING)
    for name in _NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(quiet)
    if quiet:  # transformers sets its own level when it is first imported, from these
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress display or a test may have replaced."""

    def __init__(self, before: Callable[[], None]) -> None:
        logging.Handler.__init__(self)
        self._before = before

    def emit(self, record: logging.LogRecord) -> None:
        self._before()
        super().emit(record)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("the stream is always sys.stderr")


class _TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING stillroom.engine: message`, or `warning: message`."""

    def __init__(self, is_dated: bool) -> None:
        super().__init__()
        self._is_dated = is_dated

    def format(self, record: logging.LogRecord) -> str:
        dated = f"{_time(record)} {record.levelname} {record.name}"
        line = f"{dated if self._is_dated else record.levelname.lower()}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f" [{_last_frame(record.exc_info[1])}]"
        return line.replace("\n", "\\n").translate(_ESCAPED)


class _JsonFormatter(logging.Formatter):
    """A JSON object: time, level, logger, message, request_id of the HTTP request, the record's `fields`, and the
    traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            entry["request_id"] = request_id
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            entry |= {name: value for name, value in fields.items() if name not in entry}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False).translate(_ESCAPED)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _last_frame(error: BaseException) -> str:
    """`ValueError: bad (file.py:12)`."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame else ""
    return f"{type(error).__name__}: {error}{where}"

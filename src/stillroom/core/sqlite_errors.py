"""Descriptions of SQLite errors without SQLite's messages, which may quote a damaged row."""

import sqlite3

_REASONS = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk failed",
    sqlite3.SQLITE_READONLY: "it may not be written",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: "it may not be read",
    sqlite3.SQLITE_NOMEM: "there is not enough memory",
    sqlite3.SQLITE_CORRUPT: "its pages are damaged",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database",
}


def code_of(error: sqlite3.Error, unknown: int) -> int:
    """Return SQLite's primary result code, `unknown` where the error has none."""
    return int(getattr(error, "sqlite_errorcode", unknown)) & 0xFF


def reason_of(error: sqlite3.Error) -> str:
    """Say what kind of error it is, with the name of its code and without its message."""
    reason = _REASONS.get(code_of(error, 0), "its content cannot be read")
    name = getattr(error, "sqlite_errorname", "")
    return f"{reason} ({name})" if name else reason

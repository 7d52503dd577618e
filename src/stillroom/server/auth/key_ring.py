"""The file of API keys: each key's tenant, limits and SHA-256. A key itself is shown once, when it is made.

A key is 256 random bits, so one SHA-256 suffices; a slow hash (scrypt) protects words chosen by people, and would cost
every unauthenticated request its time and memory. A presented key is compared with every hash, each in constant time.
The file is read again when it has changed, so a removed key is refused from the next request on. If the file cannot be
read, or other users may read it, every key is refused.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import Timeout

from stillroom.core.folder_lock import FolderLock
from stillroom.errors import ConfigError, UsageError

logger = logging.getLogger(__name__)

PREFIX = "sk-stillroom-"
"""Begins every key, so that secret scanners and people recognise one."""
_SECRET_BYTES = 32
_VERSION = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""Names of keys and tenants. A tenant's name is also a folder's, so it holds no path characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    name: str
    """Shown in the log."""
    tenant: str
    sha256: str
    """SHA-256 of the key, in hexadecimal."""
    created: str
    is_operator: bool = False
    """May read /metrics and the figures of /healthz, which cover all tenants."""
    requests_per_minute: int | None = None
    """None: the server's setting. 0: no limit."""
    max_concurrent: int | None = None
    """None: the server's setting. 0: no limit."""


class UnreadableKeysError(ConfigError):
    """The file of keys cannot be read now; a later attempt may succeed."""


def new_key(name: str, tenant: str, **options: Any) -> tuple[str, ApiKey]:
    """Make a key. Returns the key and its row for the file.

    Raises:
        UsageError: a name is invalid.
    """
    for what, text in (("key", name), ("tenant", tenant)):
        check_name(what, text)
    key = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    created = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    return key, ApiKey(name=name, tenant=tenant, sha256=_hash(key), created=created, **options)


def check_name(what: str, text: str) -> None:
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"{text!r} is not a {what} name; use 1 to 63 of a-z, 0-9, '-' and '_', beginning with a letter or digit"
        )


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the rows of a file of keys.

    Raises:
        ConfigError: the file cannot be read, is damaged, or other users may read or write it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} can be read or written by other users; run: chmod 600 {path}")
            content = json.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; make a key: stillroom keys add NAME --keys {path}") from None
    except OSError as error:
        raise UnreadableKeysError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a file of keys: {error}") from error
    try:
        if content["version"] != _VERSION:
            raise ConfigError(f"{path} has version {content['version']!r}; this Stillroom reads version {_VERSION}")
        rows = tuple(_row(entry) for entry in content["keys"])
    except (KeyError, TypeError, AttributeError, UsageError) as error:
        raise ConfigError(f"{path} is not a file of keys: {error!r}") from error
    if len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"{path} has two keys of one name; remove one: stillroom keys remove NAME --keys {path}")
    return rows


def _row(entry: dict[str, Any]) -> ApiKey:
    row = ApiKey(**entry)
    for what, text in (("key", row.name), ("tenant", row.tenant)):
        check_name(what, text)
    if not re.fullmatch(r"[0-9a-f]{64}", row.sha256):
        raise UsageError(f"sha256 of {row.name} is not 64 hexadecimal digits")
    for limit in (row.requests_per_minute, row.max_concurrent):
        if limit is not None and (type(limit) is not int or limit < 0):
            raise UsageError(f"a limit of {row.name} is {limit!r}; use an integer of at least 0, or null")
    if type(row.is_operator) is not bool:
        raise UsageError(f"is_operator of {row.name} is {row.is_operator!r}; use true or false")
    return row


@contextlib.contextmanager
def edit_keys(path: Path) -> Iterator[dict[str, ApiKey]]:
    """Yield the rows by name; the caller changes them, and the file is then replaced atomically, with mode 600.

    A file that does not exist has no rows.

    Raises:
        ConfigError: as `load_keys`, or the file cannot be written.
    """
    lock = FolderLock(path.with_name(path.name + ".lock"), timeout_s=10)
    try:
        with lock:
            rows = {row.name: row for row in load_keys(path)} if path.exists() else {}
            yield rows
            content = {"version": _VERSION, "keys": [asdict(row) for row in rows.values()]}
            _write_privately(path, json.dumps(content, indent=2) + "\n")
    except Timeout:
        raise ConfigError(f"{path} is being changed by another process; try again") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_privately(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class KeyRing:
    """The current keys of a file, read again whenever it changes. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: as `load_keys`, or the file has no key."""
        self._path = path
        self._lock = Lock()
        self._seen = _signature(path)
        self._rows = load_keys(path)
        if not self._rows:
            raise ConfigError(f"{path} has no key; make one: stillroom keys add NAME --keys {path}")

    @property
    def rows(self) -> tuple[ApiKey, ...]:
        """The file's rows; empty while the file cannot be used."""
        with self._lock:
            signature = _signature(self._path)
            if signature != self._seen:
                self._reload(signature)
            return self._rows

    def _reload(self, signature: tuple[int, ...] | None) -> None:
        is_first, self._rows = bool(self._rows), ()  # no old key stays valid, whatever happens next
        try:
            self._rows = load_keys(self._path)
            logger.info("%s has changed; it has %d keys", self._path, len(self._rows))
        except UnreadableKeysError as error:
            if is_first:
                logger.error("every key is refused until the file can be read: %s", error)
            return
        except Exception as error:
            logger.error("every key is refused until the file is repaired: %s", error)
        self._seen = signature

    def find(self, key: str) -> ApiKey | None:
        """Return the row of a key, in a time that depends on the number of keys only."""
        presented = _hash(key)
        found = None
        for row in self.rows:
            if hmac.compare_digest(row.sha256, presented):
                found = row
        return found


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return values that change when the file does; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode, found.st_ctime_ns)

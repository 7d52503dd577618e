"""API keys: who may ask, and as which tenant. The file holds hashes only; a key is shown once, when it is made.

A key is 256 random bits, so one SHA-256 is all the hashing it needs: nobody guesses one, however fast the guessing. A
slow hash (scrypt) would protect words that people choose, and here cost every request its time and memory, before it is
known who asks. Every hash in the file is compared with every key that comes, in constant time. The file is read again
when it has changed, so a key that was removed opens nothing from the next request on; a file that cannot be read, or
that others may read, lets nobody in.
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
"""Of every key: secret scanners and people know it when they see it."""
_SECRET_BYTES = 32
_VERSION = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""Of keys and tenants; a tenant's name is a folder's too, so nothing of it can lead elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One row of the file."""

    name: str
    """Whose it is; shown in the log."""
    tenant: str
    sha256: str
    """Of the key, in hexadecimal."""
    created: str
    is_operator: bool = False
    """May read /metrics and the figures of /healthz, which tell of all tenants."""
    requests_per_minute: int | None = None
    """None: as configured. 0: no limit."""
    max_concurrent: int | None = None
    """None: as configured. 0: no limit."""


class UnreadableKeysError(ConfigError):
    """What the file holds is not known; the next attempt may say."""


def new_key(name: str, tenant: str, **options: Any) -> tuple[str, ApiKey]:
    """A key, which only its owner will know, and its row.

    Raises:
        UsageError: a name is not possible.
    """
    for what, text in (("key", name), ("tenant", tenant)):
        check_name(what, text)
    key = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    created = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    return key, ApiKey(name=name, tenant=tenant, sha256=_hash(key), created=created, **options)


def check_name(what: str, text: str) -> None:
    """Raises UsageError."""
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"{text!r} is no name of a {what}; use 1 to 63 of a-z, 0-9, '-' and '_', beginning with a letter or digit"
        )


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """The rows of a file.

    Raises:
        ConfigError: it cannot be read, others may read or write it, or it is damaged.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} is open to others than its owner; run: chmod 600 {path}")
            content = json.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; make a key: stillroom keys add NAME --keys {path}") from None
    except OSError as error:
        raise UnreadableKeysError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a file of keys: {error}") from error
    try:
        if content["version"] != _VERSION:
            raise ConfigError(f"{path} is of version {content['version']!r}; this Stillroom knows {_VERSION}")
        rows = tuple(_row(entry) for entry in content["keys"])
    except (KeyError, TypeError, AttributeError, UsageError) as error:
        raise ConfigError(f"{path} is not a file of keys: {error!r}") from error
    if len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"{path} has a name twice; remove one: stillroom keys remove NAME --keys {path}")
    return rows


def _row(entry: dict[str, Any]) -> ApiKey:
    row = ApiKey(**entry)
    for what, text in (("key", row.name), ("tenant", row.tenant)):
        check_name(what, text)
    if not re.fullmatch(r"[0-9a-f]{64}", row.sha256):
        raise UsageError(f"the sha256 of {row.name} is none")
    for limit in (row.requests_per_minute, row.max_concurrent):
        if limit is not None and (type(limit) is not int or limit < 0):
            raise UsageError(f"a limit of {row.name} is {limit!r}")
    if type(row.is_operator) is not bool:
        raise UsageError(f"is_operator of {row.name} is {row.is_operator!r}")
    return row


@contextlib.contextmanager
def changing(path: Path) -> Iterator[dict[str, ApiKey]]:
    """The rows by name, to be changed; what is there at the end is the file, whole or not at all, of mode 600.

    Raises:
        ConfigError: as `load_keys`, except that a file that is not there has no rows; or it cannot be written.
    """
    lock = FolderLock(path.with_name(path.name + ".lock"), timeout_s=10)
    try:
        with lock:
            rows = {row.name: row for row in load_keys(path)} if path.exists() else {}
            yield rows
            content = {"version": _VERSION, "keys": [asdict(row) for row in rows.values()]}
            _write_privately(path, json.dumps(content, indent=2) + "\n")
    except Timeout:
        raise ConfigError(f"{path} is being changed by somebody else; try again") from None
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
    """The keys of a file as they are now. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError as `load_keys`, or that there is no key: nobody could ask."""
        self._path = path
        self._lock = Lock()
        self._seen = _signature(path)
        self._rows = load_keys(path)
        if not self._rows:
            raise ConfigError(f"{path} holds no key; make one: stillroom keys add NAME --keys {path}")

    @property
    def rows(self) -> tuple[ApiKey, ...]:
        """Nobody's while the file cannot be used."""
        with self._lock:
            signature = _signature(self._path)
            if signature != self._seen:
                self._read_again(signature)
            return self._rows

    def _read_again(self, signature: tuple[int, ...] | None) -> None:
        is_first, self._rows = bool(self._rows), ()  # whatever happens now, no old key is left
        try:
            self._rows = load_keys(self._path)
            logger.info("%s has changed; it holds %d keys", self._path, len(self._rows))
        except UnreadableKeysError as error:
            if is_first:
                logger.error("nobody is let in until it can be read: %s", error)
            return
        except Exception as error:
            logger.error("nobody is let in until this is mended: %s", error)
        self._seen = signature

    def find(self, key: str) -> ApiKey | None:
        """The row of a key; how long it takes says nothing about any key but how many there are."""
        presented = _hash(key)
        found = None
        for row in self.rows:
            if hmac.compare_digest(row.sha256, presented):
                found = row
        return found


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _signature(path: Path) -> tuple[int, ...] | None:
    """What changes with the file; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode, found.st_ctime_ns)

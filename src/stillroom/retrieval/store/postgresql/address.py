"""Addresses of knowledge bases in PostgreSQL, and the local folder of each.

`postgresql://user@host:5432/database?kb=handbook` names the knowledge base `handbook`. All other parts and parameters
are those of libpq. A password may stand in the URL, in `PGPASSWORD` or in `~/.pgpass`; it is never written to a file,
printed or logged.

The local folder is below the user's cache folder. It holds this machine's copy of the documents, its indexes, kept KV
and request log, and `postgresql.json`, which names the address without the password. The folder's path can be given in
place of the URL.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from stillroom.config.places import cache_root
from stillroom.core.private_files import make_folder
from stillroom.errors import CorruptKnowledgeBaseError, StorageError, UsageError

ADDRESS_FILE = "postgresql.json"

_SCHEMES = ("postgresql://", "postgres://")
_DEFAULT_NAME = "kb"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")

_passwords: dict[Path, str] = {}
"""Passwords of URLs that this process was given, by local folder."""


@dataclass(frozen=True, slots=True)
class DatabaseAddress:
    """A knowledge base in a database."""

    url: str
    """URL of the database for libpq, without password."""
    name: str
    """Name of the knowledge base."""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Return the URL of the knowledge base, without password."""
        mark = "&" if urlsplit(self.url).query else "?"
        return f"{self.url}{mark}kb={self.name}"


def is_address(kb: str | Path) -> bool:
    """Return whether a knowledge base is named by a URL of PostgreSQL."""
    return isinstance(kb, str) and kb.startswith(_SCHEMES)


def parse_address(url: str) -> DatabaseAddress:
    """Parse the URL of a knowledge base. Raises UsageError, without the password."""
    try:
        parts = urlsplit(url)
        parameters = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise UsageError(
            "the URL of the knowledge base cannot be read; write postgresql://user@host:5432/database?kb=name"
        ) from None
    user, at, hosts = parts.netloc.rpartition("@")
    user, _, password = user.partition(":")
    given = dict(parameters)
    name = given.pop("kb", _DEFAULT_NAME)
    password = given.pop("password", unquote(password))
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"kb={name!r} is no name of a knowledge base; use up to 63 of a-z, 0-9, '-' and '_', such as ?kb=handbook"
        )
    query = f"?{urlencode(given, quote_via=quote)}" if given else ""
    return DatabaseAddress(f"postgresql://{user}{at}{hosts}{parts.path}{query}", name, password)


def local_folder(kb: str | Path) -> Path:
    """Return the folder of a knowledge base: the path itself, or the local folder of a URL, which is made if needed.

    Raises:
        UsageError: The URL cannot be read.
        StorageError: The local folder cannot be made.
    """
    if not is_address(kb):
        return Path(kb)
    address = parse_address(str(kb))
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:12]
    folder = Path(os.path.abspath(cache_root())) / "postgresql" / f"{address.name}-{digest}"
    if address.password:
        _passwords[folder] = address.password
    from stillroom.retrieval.atomic_files import write_atomically  # numpy, which --help does without

    try:
        make_folder(folder)
        if not (folder / ADDRESS_FILE).exists():
            content = {"url": address.url, "kb": address.name}
            write_atomically(folder / ADDRESS_FILE, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be made: {error.strerror or error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def address_of(folder: Path) -> DatabaseAddress | None:
    """Return the address of a local folder; None for the folder of an ordinary knowledge base."""
    path = folder / ADDRESS_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return DatabaseAddress(str(content["url"]), str(content["kb"]), _passwords.get(folder, ""))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptKnowledgeBaseError(
            f"{path} cannot be read ({type(error).__name__}); remove the folder: it is made again from the database",
            part=path.name,
        ) from None

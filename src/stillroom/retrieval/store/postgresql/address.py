"""Addresses of knowledge bases in PostgreSQL, and the local folder of each.

`postgresql://user@host:5432/database?kb=handbook` names the knowledge base `handbook`. All other parts and parameters
are those of libpq. A password may stand in the URL, in `PGPASSWORD` or in `~/.pgpass`; it is never written to a file,
printed or logged.

Another URL, or a mistyped one, is refused rather than taken as the path of a folder, and a message never repeats it: it
may hold a password.

The local folder is below the user's cache folder, and is made when the knowledge base is first opened. It holds this
machine's copy of the documents, its indexes, kept KV and request log, and `postgresql.json`, which names the address
without the password. The folder's path can be given in place of the URL.
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

_ADDRESS = re.compile(r"\s*postgres(ql)?://", re.IGNORECASE)
_MISTYPED = re.compile(r"\s*(postgres[a-z0-9+.-]*):", re.IGNORECASE)
_OTHER_URL = re.compile(r"\s*([a-z][a-z0-9+.-]+):/", re.IGNORECASE)
"""A scheme has two letters or more, so drive letters of Windows are none."""
_EXAMPLE = "postgresql://user@host:5432/database?kb=name"
_DEFAULT_NAME = "kb"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_MAX_PORT = 65535

_addresses: dict[Path, "DatabaseAddress"] = {}
"""Addresses of URLs that this process was given, with their passwords, by local folder."""


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
    return isinstance(kb, str) and _ADDRESS.match(kb) is not None


def parse_address(url: str) -> DatabaseAddress:
    """Parse the URL of a knowledge base. Raises UsageError, without the password."""
    try:
        parts = urlsplit(url.strip())
        query = parts.query.replace("+", "%2B")  # as in libpq, + is no space
        parameters = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise UsageError(f"the URL of the knowledge base cannot be read; write {_EXAMPLE}") from None
    if "#" in url or "@" in parts.path + parts.query:
        raise UsageError(
            "the URL of the knowledge base has a character that must be escaped, for example in its password: write # "
            "as %23, @ as %40, / as %2F and ? as %3F, or give the password in PGPASSWORD"
        )
    user, at, hosts = parts.netloc.rpartition("@")
    user, _, password = user.partition(":")
    given = _unique(parameters)
    _check_ports([*map(_port_of, hosts.split(",")), *given.get("port", "").split(",")])
    name = given.pop("kb", _DEFAULT_NAME)
    password = given.pop("password", unquote(password))
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"kb={name!r} is no name of a knowledge base; use up to 63 of a-z, 0-9, '-' and '_', such as ?kb=handbook"
        )
    query = f"?{urlencode(given, quote_via=quote)}" if given else ""
    return DatabaseAddress(f"postgresql://{user}{at}{hosts}{parts.path}{query}", name, password)


def _unique(parameters: list[tuple[str, str]]) -> dict[str, str]:
    given = dict(parameters)
    if len(given) != len(parameters):
        keys = [key for key, _ in parameters]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(f"{twice}= stands more than once in the URL of the knowledge base; give it once")
    if "sslpassword" in given:
        raise UsageError(
            "sslpassword= cannot stand in the URL of a knowledge base, which is written to a file; put it into a "
            "service file of libpq, and service=NAME into the URL"
        )
    return given


def _port_of(host: str) -> str:
    return "" if host.endswith("]") else host.rpartition(":")[2] if ":" in host else ""


def _check_ports(ports: list[str]) -> None:
    for port in ports:
        if port and not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= _MAX_PORT):
            raise UsageError(
                f"the port in the URL of the knowledge base is no number from 1 to {_MAX_PORT}; write {_EXAMPLE}"
            )


def local_folder(kb: str | Path) -> Path:
    """Return the folder of a knowledge base: the path itself, or the local folder of a URL, which may not exist yet.

    Raises:
        UsageError: The URL cannot be read, or is none of PostgreSQL.
    """
    if not is_address(kb):
        _refuse_other_url(kb)
        return Path(kb)
    address = parse_address(str(kb))
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:12]
    folder = Path(os.path.abspath(cache_root())) / "postgresql" / f"{address.name}-{digest}"
    known = _addresses.get(folder)
    if address.password or known is None:
        _addresses[folder] = address
    return folder


def _refuse_other_url(kb: str | Path) -> None:
    """Refuse what looks like a URL, so that it becomes neither the name of a folder nor part of a message."""
    found = _MISTYPED.match(str(kb))
    if found is None:
        found = _OTHER_URL.match(str(kb))
        if found is None or Path(kb).is_dir():
            return
    how = f"write {_EXAMPLE}" if isinstance(kb, str) else "give a URL as text, not as a Path"
    raise UsageError(
        f"the knowledge base begins with {found[1]}: but is no URL of PostgreSQL; {how}. A folder of such a name is "
        "given as ./NAME"
    )


def make_local_folder(folder: Path, address: DatabaseAddress) -> None:
    """Make the local folder, with the address in it, unless it is there. Raises StorageError: it cannot be made."""
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


def address_of(folder: Path) -> DatabaseAddress | None:
    """Return the address of a local folder; None for the folder of an ordinary knowledge base."""
    if folder in _addresses:
        return _addresses[folder]
    path = folder / ADDRESS_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return DatabaseAddress(str(content["url"]), str(content["kb"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptKnowledgeBaseError(
            f"{path} cannot be read ({type(error).__name__}); remove the folder: it is made again from the database",
            part=path.name,
        ) from None

"""Address of the tier of KV that several processes share, as users write it."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from stillroom.errors import ConfigError

_EXAMPLES = "write valkey://host:6379, rediss://user:password@host/0 (with TLS), or file:///shared/folder"
_SERVERS = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Whether connections use TLS, by scheme."""
_PORT = 6379


@dataclass(frozen=True, slots=True)
class TierAddress:
    """A server that speaks the Redis protocol, or a folder."""

    folder: Path | None = None
    """None: a server."""
    host: str = ""
    port: int = _PORT
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    uses_tls: bool = False
    ca_file: str = ""
    """Certificates that are trusted with TLS; empty: those of the system."""
    prefix: str = "stillroom"
    """Of all names on the server."""

    @property
    def public(self) -> str:
        """For messages: without user and password."""
        if self.folder is not None:
            return f"file://{self.folder}"
        return f"{'rediss' if self.uses_tls else 'redis'}://{self.host}:{self.port}/{self.database}"


def parse_tier_address(name: str, address: str) -> TierAddress:
    """Read the value of the setting `name`.

    Raises:
        ConfigError: It is not the address of a tier. The message shows no password.
    """
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError:
        raise ConfigError(f"{name} is not an address; {_EXAMPLES}") from None
    if url.scheme == "file":
        if url.netloc or not url.path.startswith("/") or url.query:
            raise ConfigError(f"{name}={address!r} is not a folder; write three slashes, as in file:///shared/folder")
        return TierAddress(folder=Path(unquote(url.path)))
    if url.scheme not in _SERVERS:
        raise ConfigError(f"{name} begins with {url.scheme + '://' if url.scheme else 'no scheme'}; {_EXAMPLES}")
    if not url.hostname or port == 0:
        raise ConfigError(f"{name} names no host; {_EXAMPLES}")
    database = url.path.strip("/")
    if database and not database.isdecimal():
        raise ConfigError(f"{name} has {database!r} where the number of a database stands; leave it out, or write /0")
    options = parse_qs(url.query)
    unknown = options.keys() - {"prefix", "ca"}
    if unknown or any(len(values) != 1 for values in options.values()):
        raise ConfigError(f"{name} has the options {url.query!r}; prefix=NAME and ca=FILE exist, each once")
    return TierAddress(
        host=url.hostname,
        port=port or _PORT,
        user=unquote(url.username or ""),
        password=unquote(url.password or ""),
        database=int(database or 0),
        uses_tls=_SERVERS[url.scheme],
        ca_file=options.get("ca", [""])[0],
        prefix=options.get("prefix", ["stillroom"])[0],
    )

"""Address of the tier of KV that several processes share, as users write it."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from stillroom.errors import ConfigError

_EXAMPLES = "write valkey://host:6379, rediss://user:password@host/0 (with TLS), or file:///shared/folder"
_ENCODE = "percent-encode the user and the password (@ is %40, / %2F, ? %3F, # %23, % %25)"
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
    scheme: str = "redis"
    """Of a server's address."""
    ca_file: str = ""
    """Certificates that are trusted with TLS; empty: those of the system."""
    prefix: str = "stillroom"
    """Of all names on the server."""

    @property
    def uses_tls(self) -> bool:
        return _SERVERS[self.scheme]

    @property
    def public(self) -> str:
        """For messages: without user and password."""
        if self.folder is not None:
            return f"file://{self.folder}"
        return f"{self.scheme}://{self.host}:{self.port}/{self.database}"


def parse_tier_address(name: str, address: str) -> TierAddress:
    """Read the value of the setting `name`.

    Raises:
        ConfigError: It is not the address of a tier. The message shows no part of it, as any part may be a password
            that is written in the wrong place or not percent-encoded.
    """
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError:
        raise ConfigError(f"{name} is not an address: host and port cannot be read; {_ENCODE}; {_EXAMPLES}") from None
    if url.scheme == "file":
        if url.netloc or not url.path.startswith("/") or url.query:
            raise ConfigError(
                f"{name} is not the address of a folder; write three slashes, as in file:///shared/folder"
            )
        return TierAddress(folder=Path(unquote(url.path)))
    if url.scheme not in _SERVERS:
        raise ConfigError(f"{name} begins with no scheme of a tier; {_EXAMPLES}")
    if not url.hostname or port == 0:
        raise ConfigError(f"{name} names no host; {_EXAMPLES}")
    database = url.path.strip("/")
    if database and not database.isdecimal():
        raise ConfigError(f"{name} has no number in the place of the database; leave it out, or write /0; {_ENCODE}")
    if url.fragment:
        raise ConfigError(f"{name} has a # in it; {_ENCODE}")
    options = parse_qs(url.query, keep_blank_values=True)
    unknown = options.keys() - {"prefix", "ca"}
    if unknown or any(len(values) != 1 for values in options.values()):
        raise ConfigError(
            f"{name} has an unknown option, or one twice, after the ?; prefix=NAME and ca=FILE exist; {_ENCODE}"
        )
    return TierAddress(
        host=url.hostname,
        port=port or _PORT,
        user=unquote(url.username or ""),
        password=unquote(url.password or ""),
        database=int(database or 0),
        scheme=url.scheme,
        ca_file=options.get("ca", [""])[0],
        prefix=options.get("prefix", ["stillroom"])[0],
    )

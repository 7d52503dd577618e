"""Addresses of engines as users write them: of one engine, or of a place that tells where engines are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

from stillroom.errors import ConfigError

ENGINE_PORT = 9100
"""Port of `stillroom engine`, and of the addresses that a DNS name resolves to if `dns://` names no port."""

EngineSource = Literal["engine", "dns", "file", "list"]

_EXAMPLES = (
    "write http://host:9100 for one engine, dns://name:9100 for all addresses of a name, file:///folder/engines for a "
    "file with an address a line, or list+http://host:8000/ for such a list on a server"
)
_SCHEMES: dict[str, EngineSource] = {
    "http": "engine",
    "https": "engine",
    "dns": "dns",
    "file": "file",
    "list+http": "list",
    "list+https": "list",
}


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one engine is, or where to ask for engines."""

    source: EngineSource
    url: str = ""
    """`engine`: base URL without a slash at the end; `list`: URL to ask."""
    host: str = ""
    """`dns`: the name to resolve."""
    port: int = ENGINE_PORT
    """`dns`: of each engine."""
    file: Path | None = None

    def __str__(self) -> str:
        """Return the address as users write it."""
        if self.source == "dns":
            return f"dns://{self.host}:{self.port}"
        if self.source == "file":
            return f"file://{self.file}"
        return self.url if self.source == "engine" else f"list+{self.url}"


def parse_engine_addresses(name: str, text: str) -> tuple[EngineAddress, ...]:
    """Read the value of the setting `name`: addresses separated by commas, each once.

    Raises:
        ConfigError: one is not an address, or there is none.
    """
    found = tuple(parse_engine_address(name, part.strip()) for part in text.split(",") if part.strip())
    if not found:
        raise ConfigError(f"{name} names no engine; {_EXAMPLES}")
    return tuple(dict.fromkeys(found))


def parse_engine_address(name: str, address: str) -> EngineAddress:
    """Read one address.

    Raises:
        ConfigError: it is not an address. The message does not repeat one that may hold a password.
    """
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError:
        raise ConfigError(f"{name} has an address whose host and port cannot be read; {_EXAMPLES}") from None
    if url.username is not None or url.password is not None:
        raise ConfigError(
            f"{name} holds a name or password; engines and fronts share STILLROOM_CLUSTER__SECRET in the environment"
        )
    problem = ConfigError(f"{name}={address!r} is not the address of an engine; {_EXAMPLES}")
    source = _SCHEMES.get(url.scheme)
    if source is None or url.fragment or (url.query and source != "list"):
        raise problem
    if source == "file":
        if url.netloc or not url.path.startswith("/"):
            raise ConfigError(f"{name}={address!r} is not the address of a file; write three slashes: file:///folder")
        return EngineAddress("file", file=Path(unquote(url.path)))
    if not url.hostname or port == 0 or (url.path.strip("/") and source != "list"):
        raise problem
    if source == "dns":
        return EngineAddress("dns", host=url.hostname, port=port or ENGINE_PORT)
    return EngineAddress(source, url=_base_url(url) if source == "engine" else address.removeprefix("list+"))


def engine_url(host: str, port: int) -> str:
    """Return the base URL of the engine at an IP address or host name."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _base_url(url: SplitResult) -> str:
    """Return scheme, host and port; two spellings of one address give the same text."""
    host = (url.hostname or "").rstrip(".")
    port = f":{url.port}" if url.port else ""
    return f"{url.scheme}://{f'[{host}]' if ':' in host else host}{port}"

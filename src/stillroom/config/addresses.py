"""Checks addresses of servers and their keys; messages never show a key."""

from urllib.parse import urlsplit

from stillroom.errors import ConfigError


def check_address(name: str, address: str, example: str, key_name: str) -> None:
    """Raise ConfigError if the setting `name` is not the address of a server, or holds a name or password."""
    try:
        url = urlsplit(address)
        is_possible = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        raise ConfigError(f"{name} is not an address; write one like {example}") from None
    if url.username is not None:
        raise ConfigError(f"{name} holds a name or password; give a key in {key_name}")
    if not is_possible or url.query or url.fragment:
        raise ConfigError(f"{name}={address!r} is not an address; write one like {example}")


def split_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of a text, which are separated by commas."""
    return tuple(address.strip() for address in text.split(","))


def with_path(address: str) -> str:
    """Return an address without trailing slashes, with the path /v1 if it has no path."""
    address = address.rstrip("/")
    return address if urlsplit(address).path else f"{address}/v1"


def check_key(name: str, key: str) -> None:
    """Raise ConfigError if the environment variable `name` holds a character that no key has."""
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError(f"{name} holds a space, a line break or another character that no key has")

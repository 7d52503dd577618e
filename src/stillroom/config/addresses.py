"""What an address of a server and its key may look like; messages never show a key."""

from urllib.parse import urlsplit

from stillroom.errors import ConfigError


def check_address(name: str, address: str, example: str, key_name: str) -> None:
    """Of a setting called `name`.

    Raises:
        ConfigError: this is no address of a server, or it holds what belongs into the key.
    """
    try:
        url = urlsplit(address)
        is_possible = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        raise ConfigError(f"{name} is no address; it is like {example}") from None
    if url.username is not None:
        raise ConfigError(f"{name} holds a name or password; give a key in {key_name}")
    if not is_possible or url.query or url.fragment:
        raise ConfigError(f"{name}={address!r}; it must be like {example}")


def check_key(name: str, key: str) -> None:
    """Of an environment variable called `name`. Raises ConfigError where no server can have such a key."""
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError(f"{name} holds a blank, a line break or a letter that no key has")

"""Settings of fronts and engines in processes of their own.

Users import them from `config.settings`.
"""

from dataclasses import dataclass, field
from typing import Annotated

from stillroom.config.quantities import Range
from stillroom.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Fronts and engines in processes of their own (docs/wire.md)."""

    secret: str = field(default="", repr=False)
    """Secret that fronts send to engines. Read from the environment only, never from files or flags; the same value for
    all of them. Empty: an engine listens on a loopback address only."""
    host: str = "127.0.0.1"
    """Address that `stillroom engine` listens on. The default accepts connections of this machine only."""
    port: Annotated[int, Range(0, 65535)] = 9100
    """TCP port of `stillroom engine`; 0 picks a free one."""

    def __post_init__(self) -> None:
        if not self.secret.isascii() or not self.secret.isprintable() or " " in self.secret:
            raise ConfigError(
                "STILLROOM_CLUSTER__SECRET has a character that an HTTP header cannot carry; use printable ASCII "
                "without blanks, such as the output of: openssl rand -hex 32"
            )

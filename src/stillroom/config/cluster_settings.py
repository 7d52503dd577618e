"""Settings of fronts and engines in processes of their own.

Users import them from `config.settings`.
"""

from dataclasses import dataclass, field
from typing import Annotated

from stillroom.config.quantities import Range


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

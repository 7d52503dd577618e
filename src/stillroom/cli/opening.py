"""Loading of settings and opening of a knowledge base for commands, with late imports."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stillroom.config.load import load_config
from stillroom.config.settings import StillroomConfig
from stillroom.errors import UsageError

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom


def load_settings(file: Path | None, flags: dict[str, object] | None = None) -> StillroomConfig:
    """Merge defaults, file, environment and flags. Raises ConfigError."""
    return load_config(file, overrides=flags)


def open_stillroom(kb: Path, config: StillroomConfig, *, create: bool = False) -> "Stillroom":
    """Open a knowledge base; models load on first use. Raises KnowledgeBaseError."""
    from stillroom.rag.stillroom import Stillroom

    return Stillroom.open(kb, config=config, create=create)


def needs_mcp() -> None:
    """Raises UsageError: the library of the Model Context Protocol is not installed."""
    if find_spec("mcp") is None:
        raise UsageError("MCP needs a library that is not installed; run: pip install 'stillroom[mcp]'")

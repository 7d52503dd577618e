"""How commands come by their settings and their `Stillroom`. The engine is imported here, when a command runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from stillroom.config.load import load_config
from stillroom.config.settings import StillroomConfig

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom


def load_settings(file: Path | None, flags: dict[str, object] | None = None) -> StillroomConfig:
    """Defaults, file, environment, flags. Raises ConfigError."""
    return load_config(file, overrides=flags)


def open_stillroom(kb: Path, config: StillroomConfig, *, create: bool = False) -> "Stillroom":
    """The knowledge base; models load when they are first needed. Raises KnowledgeBaseError."""
    from stillroom.rag.stillroom import Stillroom

    return Stillroom.open(kb, config=config, create=create)

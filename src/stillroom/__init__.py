"""Stillroom: a RAG serving engine that keeps an organisation's knowledge prepared.

from stillroom import Stillroom

stillroom = Stillroom.open("kb")
stillroom.add("docs/")
print(stillroom.ask("How do I rotate keys?").text)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stillroom.backends.conversation import Exchange
    from stillroom.config.settings import StillroomConfig
    from stillroom.rag.answer import Answer, AskOptions, Citation, Support
    from stillroom.rag.stillroom import Stillroom

    __version__: str

__all__ = ["Answer", "AskOptions", "Citation", "Exchange", "Stillroom", "StillroomConfig", "Support", "__version__"]

_MODULES = {
    "Answer": "stillroom.rag.answer",
    "AskOptions": "stillroom.rag.answer",
    "Citation": "stillroom.rag.answer",
    "Support": "stillroom.rag.answer",
    "Exchange": "stillroom.backends.conversation",
    "Stillroom": "stillroom.rag.stillroom",
    "StillroomConfig": "stillroom.config.settings",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import stillroom` and `stillroom --help` do not load PyTorch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("stillroom")
    if name not in _MODULES:
        raise AttributeError(f"module 'stillroom' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)

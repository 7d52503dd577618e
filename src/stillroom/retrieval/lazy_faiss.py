"""faiss, imported when it is first used: listing and showing documents do without it."""

from importlib import import_module
from typing import Any


class _Faiss:
    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module("faiss"), name)
        setattr(self, name, found)  # Python calls `__getattr__` for missing attributes only
        return found


faiss: Any = _Faiss()
"""The module. `Any`, because its type information lacks names that are made at import."""

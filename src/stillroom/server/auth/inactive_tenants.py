"""How many documents there are of tenants who have not asked yet, so that metrics tell of all.

Their rooms are not opened for it. Each corpus is counted in its file, again only once that has changed.
"""

import os
from contextlib import suppress
from pathlib import Path

from stillroom.errors import StillroomError
from stillroom.retrieval.store.closed_corpus import State, state_of
from stillroom.retrieval.store.corpus import counts_of
from stillroom.retrieval.store.folder import CORPUS
from stillroom.server.auth.tenants import Tenants

Counts = tuple[int, int]
"""Documents, chunks."""


class InactiveTenantCounts:
    """Of the tenants whose rooms are not open, by folder. From any thread."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._counted: dict[str, tuple[State, Counts]] = {}

    def __call__(self) -> dict[str, Counts]:
        """What cannot be read, or is no knowledge base, is left out."""
        if self._tenants.folder is None:
            return {}
        folder = Path(os.path.abspath(self._tenants.folder))
        found: dict[str, Counts] = {}
        with suppress(OSError):  # nobody has made the folder yet
            for path in folder.iterdir():
                if not self._tenants.is_open(path.name):
                    with suppress(OSError, StillroomError):
                        found[str(path)] = self._counts_of(path)
        return found

    def _counts_of(self, path: Path) -> Counts:
        corpus = path / CORPUS
        state = state_of(corpus)
        known = self._counted.get(str(path))
        if known is None or known[0] != state:
            known = self._counted[str(path)] = state, counts_of(corpus)
        return known[1]

"""Counts how often searches return each document, in fixed memory (a Count-Min sketch, llmds 2.4)."""

import threading
from collections.abc import Iterable

from stillroom.core.count_min import CountMinSketch
from stillroom.core.ids import DocumentId

_HALVE_EVERY = 100_000
"""Results after which all counts are halved."""


class DocumentDemand:
    """Counts how often searches return each document. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CountMinSketch(halve_every=_HALVE_EVERY)

    def add(self, document_ids: Iterable[DocumentId]) -> None:
        """Count one search that returned these documents, each once."""
        with self._lock:
            for document_id in set(document_ids):
                self._counts.add(document_id.encode())

    def of(self, document_id: DocumentId) -> int:
        """Return an upper bound on a document's count, halved now and then."""
        with self._lock:
            return self._counts.estimate(document_id.encode())

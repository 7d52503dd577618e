"""Which documents of a knowledge base one engine of a cluster prepares."""

import hashlib
from collections.abc import Collection
from threading import Lock

from stillroom.cluster.placing import weight
from stillroom.core.ids import DocumentId

HOLD_SECONDS = 10.0
"""A share that a front has confirmed so lately is kept, whatever another front says: two that do not agree on the
engines would else change it back and forth."""


class DocumentShare:
    """The documents whose home is one engine, by rendezvous hashing of the addresses that a front tells. Thread-safe.

    With an added or lost engine, only the documents that get another home move. The router sends questions to the
    engine that holds their documents' KV (`CostRouter`).
    """

    def __init__(self, *, waits: bool = False) -> None:
        """
        Args:
            waits: whether there is a cluster, so that the share is empty until the engines are known. Else it is all
                documents.
        """
        self._waits = waits
        self._lock = Lock()
        self._known: tuple[frozenset[str], str] | None = None
        """Addresses of the engines that share the documents, and of this one."""
        self._told_at = 0.0
        self.num_changes = 0

    def tell(self, engines: Collection[str], me: str, now: float) -> bool:
        """Take over what a front knows; returns whether the share has changed.

        Args:
            engines: addresses of the engines that share the documents.
            me: address of this one.
            now: seconds on a monotonic clock.
        """
        known = frozenset(engines) | {me}, me
        with self._lock:
            if known == self._known:
                self._told_at = now
                return False
            if self._known is not None and now - self._told_at < HOLD_SECONDS:
                return False
            self._known, self._told_at = known, now
            self.num_changes += 1
            return True

    def has(self, document_id: DocumentId) -> bool:
        """Return whether a document is prepared here."""
        if self._known is None:
            return not self._waits
        engines, me = self._known
        name = hashlib.blake2b(document_id.encode(), digest_size=32).digest()
        return max(engines, key=lambda one: (weight(name, one), one)) == me

"""What a shared tier needs of the server or folder that holds its records. No torch."""

from collections.abc import Collection, Sequence
from typing import Protocol

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, OwnerTag
from stillroom.kvstore.record import VERSION, Buffer


class TierFullError(OSError):
    """The server or folder takes no record, because it is full or may not be written to; reading works."""


class SharedRecords(Protocol):
    """Bytes by key, of one model. Thread-safe. Methods raise OSError when their time is up, and if the place fails."""

    def num_present(self, keys: Sequence[NodeKey]) -> int:
        """Return how many of these records exist, counted from the first to the first that does not."""
        ...

    def read(self, key: NodeKey, max_bytes: int) -> bytearray | None:
        """Return the bytes of a record, not verified; None if there are none. Longer ones are cut, or an error."""
        ...

    def write(self, key: NodeKey, parts: Sequence[Buffer], owner: OwnerTag | None, seen: Collection[ChunkId]) -> None:
        """Store a record in place of an earlier one, so that `forget` finds it.

        Args:
            owner: None: of none, such as a probe; it is not found.
            seen: chunks whose text its KV has attended to.

        Raises:
            TierFullError: there is no room for it.
        """
        ...

    def remove(self, key: NodeKey) -> None:
        """Remove a record, if it exists."""
        ...

    def forget(self, owner: OwnerTag, chunk_ids: Collection[ChunkId] | None) -> int:
        """Remove an owner's records, of every model, that have seen one of these chunks; None: all of the owner's.

        Returns:
            The number of records removed.

        Raises:
            OSError: a record that had to be removed may be left.
        """
        ...

    def maintain(self) -> None:
        """Do what keeps the place within its limits; called now and then by the thread that writes."""
        ...

    def close(self) -> None: ...


def namespace(group: str) -> str:
    """Return the name under which records of this version are kept; others never meet them.

    Args:
        group: of the processes that have the same key; empty without one.
    """
    return f"v{VERSION}-{group}" if group else f"v{VERSION}"

"""Interface of vectors that are searched where they are stored, in a database, and not in this process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MOST_CANDIDATES = 1000
"""Most candidates of a search that is not exact: the highest `hnsw.ef_search` of pgvector."""


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Rows of the table."""

    ids: NDArray[np.int64]
    """[n]"""
    vectors: NDArray[np.float32]
    """[n, d]"""
    generations: NDArray[np.int64]
    """[n], of the commits that wrote them; empty where they were not asked for."""


class VectorTable(Protocol):
    """Thread-safe. Every method raises IndexUnavailableError if the database cannot be reached, or refuses."""

    def nearest(self, query: NDArray[np.float32], num: int, ef_search: int) -> StoredVectors:
        """Return about the `num` nearest to a query [d], as the HNSW index finds them; fewer if it finds no more.

        Args:
            ef_search: Candidates of the search; more than `MOST_CANDIDATES` count as these.
        """
        ...

    def compared(self, query: NDArray[np.float32], num: int, among: Sequence[int] | None = None) -> StoredVectors:
        """Return the `num` nearest to a query [d], comparing all vectors, or those of the chunks `among`."""
        ...

    def batches(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield ids [n] and vectors [n, d] of all chunks, by id."""
        ...

    def rebuild_index(self) -> None:
        """Build the HNSW index again from the stored vectors; commits wait."""
        ...

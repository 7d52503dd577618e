"""What a dense index does. Implementations: `flat` (exact), `hnsw` (approximate)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.ranking import Ranking


class VectorIndex(Protocol):
    """Vectors of length 1 by chunk id; the score is the inner product, so the cosine. Not thread-safe."""

    def __len__(self) -> int:
        """Chunks that can be found."""
        ...

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add vectors [n, d] under ids [n], none of which is in the index."""
        ...

    def remove(self, ids: Sequence[int]) -> None:
        """Remove what there is of these ids."""
        ...

    def search(self, query: NDArray[np.float32], k: int) -> Ranking:
        """The k best for a query [d], best first; fewer where the index holds fewer."""
        ...

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything, to be stored."""
        ...

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Become what `to_arrays` described.

        Raises:
            ValueError: these arrays are not of such an index.
        """
        ...

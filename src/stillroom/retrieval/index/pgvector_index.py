"""Dense index in pgvector, for a knowledge base in PostgreSQL whose machines keep no vectors (docs/postgresql.md).

The vectors are in a table that every commit brings up to date (`store/postgresql/embedding_table.py`), so there is
nothing to follow or to write here. PostgreSQL selects the near chunks. Scores are computed here from their vectors, as
a `flat` index does, so scores and the order of ties do not depend on the server.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, PgvectorConfig
from stillroom.core.ids import ChunkId
from stillroom.errors import ConfigError
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.vector_table import MOST_CANDIDATES, StoredVectors, VectorTable
from stillroom.retrieval.vector_index import SearchedIndex

_ROUNDING = 1e-6
"""Most by which a score differs from PostgreSQL's, which adds in another order."""


class PgvectorIndex(SearchedIndex):
    """A `SearchedIndex`. A search takes one round trip, two where it has to ask for more."""

    def __init__(self, table: VectorTable, corpus: Corpus, dimension: int, ef_search: int, *, exact: bool) -> None:
        self._table, self._corpus = table, corpus
        self._dimension, self._ef_search, self._exact = dimension, ef_search, exact

    def __len__(self) -> int:
        return self._corpus.num_chunks

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """See `SearchedIndex`. `effort` is `hnsw.ef_search`. Yields one list: a server answers once.

        Raises:
            IndexUnavailableError: the server cannot be reached.
        """
        num_all = len(self)
        num_allowed = num_all if allowed is None else min(num_all, len(allowed))
        if k < 1 or not num_allowed:
            yield []
            return
        ef_search, widening = effort or self._ef_search, num_all / num_allowed
        num = k + 1
        is_exact = self._exact
        while True:
            wide = math.ceil(num * widening)
            is_exact = is_exact or wide > MOST_CANDIDATES or wide >= num_all
            if is_exact:
                among = None if allowed is None else allowed.ids.tolist()
                found = self._table.compared(query, num, among)
            else:
                found = self._table.nearest(query, wide, max(math.ceil(ef_search * widening), wide))
                if len(found.ids) < wide:  # removed rows were in the way
                    is_exact = True
                    continue
            ranking, last = self._scored(query, found, allowed)
            is_all = is_exact and len(found.ids) < num
            if is_all or (len(ranking) >= k and last < ranking[k - 1][1] - _ROUNDING):
                yield ranking[:k]
                return
            num *= 2  # for all of a tie, or because other machines have just added chunks

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        yield from self._table.batches()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return nothing: the server owns its graph."""
        return {}

    def _scored(
        self, query: NDArray[np.float32], found: StoredVectors, allowed: AllowedIds | None
    ) -> tuple[Ranking, float]:
        """Return the ranking of the chunks that are allowed and that this machine knows, and the least score of all."""
        if not len(found.ids):
            return [], -math.inf
        exact = FlatIndex(self._dimension)
        exact.add(found.ids, found.vectors)
        ranking = exact.search(query, len(found.ids))
        known = self._corpus.existing([ChunkId(chunk_id) for chunk_id in found.ids.tolist()])
        if allowed is not None:
            known &= {ChunkId(chunk_id) for chunk_id in found.ids[allowed.has(found.ids)].tolist()}
        return [pair for pair in ranking if pair[0] in known], ranking[-1][1]


class PgvectorStore:
    """Counterpart of `DenseStore` for a table that is always up to date."""

    def __init__(self, corpus: Corpus, config: IndexConfig, pgvector: PgvectorConfig, dimension: int) -> None:
        """
        Raises:
            ConfigError: the corpus is not in PostgreSQL.
        """
        table = corpus.embedding_table
        if table is None:
            raise ConfigError("index.kind = 'pgvector' needs a knowledge base in PostgreSQL; give its URL as --kb")
        self._table, self._corpus = table, corpus
        self._index = PgvectorIndex(table, corpus, dimension, config.ef_search, exact=pgvector.exact)

    @property
    def generation(self) -> int:
        """Generation of the corpus that searches show."""
        return self._corpus.generation

    def current(self) -> PgvectorIndex:
        return self._index

    def discard(self) -> None:
        """Do nothing: there is no file that could be damaged."""

    def needs_write(self) -> bool:
        """Return False: every commit writes the table. Asks no server."""
        return False

    def prepare_write(self) -> Callable[[], None] | None:
        """Return None, as `needs_write`."""
        return None

    @property
    def figures(self) -> None:
        """None: there are no tiers."""
        return None

    def rebuild(self) -> None:
        """Build the HNSW index again from the stored vectors. Raises as `VectorTable`."""
        self._table.rebuild_index()

    def close(self) -> None:
        """Do nothing: the corpus closes the table."""

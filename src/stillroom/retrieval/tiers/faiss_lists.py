"""The inverted lists of faiss indexes: indexes over other lists, entries, and files of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.tiers.list_file import Entries, ListFile, Origin, write_list_file

Vectors = NDArray[np.float32]


def index_over(shell: Any, inverted_lists: Any, kept: Any = None) -> Any:
    """Return an index over inverted lists that shares the quantizers of `shell`.

    Args:
        kept: objects to keep alive with the index.
    """
    index = without_entries(shell)
    index.replace_invlists(inverted_lists, False)
    index.referenced_objects = [shell, inverted_lists, kept]  # faiss stores pointers
    return index


def without_entries(lists: Any) -> Any:
    """Return an empty index with the quantizers of an IndexIVFPQ. Precondition: `lists` outlives it."""
    index = faiss.IndexIVFPQ(lists.quantizer, lists.d, lists.nlist, lists.pq.M, lists.pq.nbits, lists.metric_type)
    index.pq = lists.pq
    index.by_residual = lists.by_residual
    index.is_trained = True
    return index


def write_bare_list_file(lists: Any, path: Path) -> ListFile:
    """Write the lists of an index in RAM to a file without full vectors, for measuring."""
    ids = np.arange(lists.ntotal, dtype=np.int64)
    write_list_file(path, Origin("", 0, int(lists.ntotal)), without_entries(lists), all_entries(lists), ids)
    return ListFile(path)


def entries_of(inverted_lists: Any, number: int) -> Entries:
    """Return a copy of ids and codes of one list of an index in RAM."""
    size = inverted_lists.list_size(number)
    if not size:
        return np.empty(0, dtype=np.int64), np.empty((0, inverted_lists.code_size), dtype=np.uint8)
    codes = faiss.rev_swig_ptr(inverted_lists.get_codes(number), size * inverted_lists.code_size)
    ids = faiss.rev_swig_ptr(inverted_lists.get_ids(number), size)
    return ids.copy(), codes.reshape(size, -1).copy()


def all_entries(lists: Any) -> Iterator[Entries]:
    """Yield ids and codes of each list of an index in RAM."""
    for number in range(lists.nlist):
        yield entries_of(lists.invlists, number)


def accesses(lists: Any, queries: Vectors, nprobe: int) -> NDArray[np.float64]:
    """Return how many of queries [q, d] probe each list, [nlist]."""
    probed = lists.quantizer.search(np.ascontiguousarray(queries), min(nprobe, int(lists.nlist)))[1]
    found: NDArray[np.float64] = np.bincount(probed[probed >= 0].ravel(), minlength=int(lists.nlist)).astype(float)
    return found

"""Rows of a tiered index: those of its file, then recent ones, added since the file was written.

Rows are numbered in the order of addition, which is also the order of training. Removing a row of the file masks it;
the next file leaves it out.
"""

from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.retrieval.filters.allowed import AllowedIds, FilterMemo
from stillroom.retrieval.filters.allowed_lists import AllowedLists
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import Ranking, best_of
from stillroom.retrieval.tiers.faiss_lists import all_entries, without_entries
from stillroom.retrieval.tiers.host_scan import Scored, scan
from stillroom.retrieval.tiers.list_file import Entries, ListFile, Origin, blocks, write_list_file
from stillroom.retrieval.tiers.partition import Lists, Nearness
from stillroom.retrieval.tiers.scratch_files import Spill
from stillroom.retrieval.tiers.tiered_ivf import TieredLists

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class AllowedRows:
    """Rows and list entries that a filter allows."""

    rows: Ids
    """Ascending."""
    bits: NDArray[np.uint8]
    """Memory of the selector in `lists`."""
    lists: AllowedLists


class TieredRows:
    """Vectors of an index in a list file, and recent ones not in it yet. Not thread-safe, except for `tiers`."""

    def __init__(self, file: ListFile, folder: Path) -> None:
        """`folder`: place of recent vectors."""
        self.file = file
        self.tiers = TieredLists(file)
        self._folder = folder
        self._is_kept = np.ones(len(file.ids), dtype=bool)
        self._num_kept = len(file.ids)
        self._selector: tuple[Any, Any] | None = None
        """Selector of the kept rows of the file, and its memory; None if all are kept."""
        self._recent: Any = without_entries(file.shell)
        self._recent_ids = np.empty(0, dtype=np.int64)
        self._is_recent_kept = np.empty(0, dtype=bool)
        self._spill: Spill | None = None
        self._list_of: NDArray[np.int32] | None = None
        """List of each row of the file; None until a filter needs it."""
        self._allowed_rows: FilterMemo[AllowedRows] = FilterMemo()

    def __len__(self) -> int:
        return self._num_kept + int(self._recent.ntotal)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add vectors [n, d] under ids [n].

        Raises:
            OSError: the disk is full; nothing was added.
        """
        self._allowed_rows.clear()
        if self.file.has_vectors:
            self._spill = self._spill or Spill(self._folder, vectors.shape[1])
            self._spill.put(len(self._recent_ids), vectors)
        start = len(self.file.ids) + len(self._recent_ids)
        rows = np.arange(start, start + len(ids), dtype=np.int64)
        run_in_short_lived_thread(lambda: self._recent.add_with_ids(vectors, rows))
        self._recent_ids = np.append(self._recent_ids, ids)
        self._is_recent_kept = np.append(self._is_recent_kept, np.ones(len(ids), dtype=bool))

    def remove(self, ids: Ids) -> None:
        """Remove those of ids [n] that exist."""
        self._allowed_rows.clear()
        gone = np.isin(self.file.ids, ids) & self._is_kept
        if gone.any():
            self._is_kept &= ~gone
            self._num_kept -= int(gone.sum())
            bits = np.packbits(self._is_kept, bitorder="little")
            self._selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits)), bits
        gone = np.isin(self._recent_ids, ids) & self._is_recent_kept
        if gone.any():
            self._is_recent_kept &= ~gone
            self._recent.remove_ids(np.flatnonzero(gone) + len(self.file.ids))

    def allowed_rows(self, allowed: AllowedIds) -> "AllowedRows":
        """Return the rows that a filter allows. The first call reads every list.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged in the file.
        """
        return self._allowed_rows.get(allowed, lambda: self._find_allowed_rows(allowed))

    def _find_allowed_rows(self, allowed: AllowedIds) -> "AllowedRows":
        alive = self.alive()
        rows = alive[allowed.has(self.ids_of(alive))]
        is_left = np.zeros(len(self.file.ids) + len(self._recent_ids), dtype=bool)
        is_left[rows] = True
        bits = np.packbits(is_left, bitorder="little")
        if self._list_of is None:
            self._list_of = np.zeros(len(self.file.ids), dtype=np.int32)
            for number in range(len(self.file.sizes)):
                self._list_of[self.file.entries(number)[0]] = number
        num_lists = len(self.file.sizes)
        old = rows[rows < len(self.file.ids)]
        counts, sizes = np.bincount(self._list_of[old], minlength=num_lists), np.array(self.file.sizes)
        for number, (recent, _) in enumerate(self.recent_entries() if self._recent.ntotal else ()):
            counts[number] += is_left[recent].sum()
            sizes[number] += len(recent)
        selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
        return AllowedRows(rows, bits, AllowedLists(counts, sizes, selector))

    def best_exact(self, query: Vectors, k: int, allowed_rows: "AllowedRows") -> Ranking:
        """Compare a query [d] with the full vectors of all allowed rows; return the k best. Raises as `vectors`."""
        return best_of(self.ids_of(allowed_rows.rows), self.vectors(allowed_rows.rows) @ query, k)

    def best(
        self, query: Vectors, num: int, probed: Lists, nearness: Nearness, allowed_rows: "AllowedRows | None" = None
    ) -> Scored:
        """Return rows and approximate scores of the best `num` for a query [d], and others that score as the last.

        Args:
            probed: lists [p] to scan, with `nearness` [p] of their centres.
            among: the only rows to return; None allows all.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged in the file.
        """
        chosen = self._selector and self._selector[0] if allowed_rows is None else allowed_rows.lists.selector
        found = self.tiers.scan(query, num, probed, nearness, chosen)
        return self._with_recent(found, query, num, probed, nearness, allowed_rows)

    def best_of_batch(
        self, queries: Vectors, num: int, probed: Lists, nearness: Nearness
    ) -> Iterator[tuple[int, Scored]]:
        """Run `best` for queries [q, d]; yield each number and result as soon as its last list is scanned. Raises as
        `best`."""
        told: SimpleQueue[tuple[int, Scored] | BaseException] = SimpleQueue()

        def on_end(one: Future[None]) -> None:
            error = one.exception()
            if error is not None:
                told.put(error)

        running = self.tiers.start_batch(
            queries, num, probed, nearness, lambda *found: told.put(found), self._selector and self._selector[0]
        )
        try:
            for one in running:
                one.add_done_callback(on_end)
            for _ in queries:
                next_one = told.get()
                if isinstance(next_one, BaseException):
                    raise next_one
                number, found = next_one
                yield number, self._with_recent(found, queries[number], num, probed[number], nearness[number])
        finally:
            wait(running)  # the next change may replace what running scans read

    def _with_recent(
        self,
        found: Scored,
        query: Vectors,
        num: int,
        probed: Lists,
        nearness: Nearness,
        allowed_rows: "AllowedRows | None" = None,
    ) -> Scored:
        if not self._recent.ntotal:
            return found
        rows, scores = scan(self._recent, query, num, probed, nearness, allowed_rows and allowed_rows.lists.selector)
        return np.append(found[0], rows), np.append(found[1], scores)

    def ids_of(self, rows: Ids) -> Ids:
        """Return chunk ids [r] of rows [r]."""
        found = np.empty(len(rows), dtype=np.int64)
        is_old = rows < len(self.file.ids)
        found[is_old] = self.file.ids[rows[is_old]]
        found[~is_old] = self._recent_ids[rows[~is_old] - len(self.file.ids)]
        return found

    def vectors(self, rows: Ids) -> Vectors:
        """Return full vectors [r, d] of rows [r].

        Raises:
            CorruptKnowledgeBaseError: a vector is damaged in the file.
        """
        is_old = rows < len(self.file.ids)
        old = self.file.vectors(rows[is_old])
        if self._spill is None:
            return old
        found = np.empty((len(rows), old.shape[1]), dtype=np.float32)
        found[is_old] = old
        found[~is_old] = self._spill.vectors(rows[~is_old] - len(self.file.ids))
        return found

    def alive(self) -> Ids:
        """Return all rows that were not removed, ascending."""
        recent = np.flatnonzero(self._is_recent_kept) + len(self.file.ids)
        return np.append(np.flatnonzero(self._is_kept), recent)

    def check(self) -> None:
        """Read every list of the file.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged, or a row is not in exactly one list.
        """
        rows = [self.file.entries(number)[0] for number in range(len(self.file.sizes))]
        if not np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(self.file.ids))):
            raise CorruptKnowledgeBaseError(
                f"{self.file.path}: its lists do not hold each row once; it will be rebuilt"
            )

    def in_order(self) -> Iterator[tuple[Ids, Vectors]]:
        """Yield ids and full vectors of all rows in blocks, in the order of addition."""
        for rows in blocks(self.alive()):
            yield self.ids_of(rows), self.vectors(rows)

    def whole_vectors(self) -> tuple[Ids, Vectors]:
        """Return ids [n] and full vectors [n, d] of all rows in the order of addition; vectors are mapped from an
        unnamed file."""
        copy = Spill(self._folder, int(self.file.shell.d))
        for _, vectors in self.in_order():
            copy.put(len(copy), vectors)
        return self.ids_of(self.alive()), copy.as_array()

    def snapshot(self) -> "Snapshot":
        """Return the present rows; later changes do not affect them."""
        return Snapshot(self)

    def recent_entries(self) -> list[Entries]:
        """Return rows and codes of the recent rows in each list."""
        return list(all_entries(self._recent))


class Snapshot:
    """Content of the next file: rows renumbered without the removed ones."""

    def __init__(self, rows: TieredRows) -> None:
        self._file = rows.file
        self._alive = rows.alive()
        self._recent = rows.recent_entries()
        self._ids = rows.ids_of(self._alive)
        self._vectors_of = rows.vectors  # existing rows never change

    def write(self, path: Path, corpus_id: str, generation: int, commit_id: str = "") -> None:
        """Write the file, one list and one block of vectors at a time.

        Raises:
            CorruptKnowledgeBaseError: the old file is damaged.
        """
        origin = Origin(corpus_id, generation, self._file.origin.num_trained, commit_id)
        vectors = map(self._vectors_of, blocks(self._alive)) if self._file.has_vectors else ()
        write_list_file(path, origin, self._file.shell, self._lists(), self._ids, vectors)

    def whole(self) -> Any:
        """Return an IndexIVFPQ in RAM under chunk ids."""
        lists = without_entries(self._file.shell)
        for number, (rows, codes) in enumerate(self._lists()):
            if len(rows):
                ids = self._ids[rows]
                lists.invlists.add_entries(number, len(rows), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
        lists.ntotal = len(self._ids)
        return lists

    def _lists(self) -> Iterator[Entries]:
        """Yield the entries of each list with renumbered rows."""
        for number, (recent_rows, recent_codes) in enumerate(self._recent):
            old_rows, old_codes = self._file.entries(number)
            rows = np.append(old_rows, recent_rows)
            places = np.searchsorted(self._alive, rows)
            is_alive = self._alive[np.minimum(places, len(self._alive) - 1)] == rows if len(self._alive) else rows < 0
            yield places[is_alive], np.concatenate([old_codes, recent_codes])[is_alive]

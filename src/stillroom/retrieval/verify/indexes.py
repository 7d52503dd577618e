"""Do vectors and postings show what SQLite holds: the same chunks, the same vectors, the same words, nothing more?

Both indexes are opened anew from their files, so what is checked is what the next process would search in.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId, format_chunk_id
from stillroom.errors import CorruptKnowledgeBaseError, IndexUnavailableError
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.dense_store import DENSE_FILES, DenseStore
from stillroom.retrieval.index.qdrant_index import CollectionStore
from stillroom.retrieval.index.words import WordAnalyzer, searched_text
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.vector_index import VectorIndex
from stillroom.retrieval.verify.report import Finding, Part, Steps, finding

_BATCH = 1000
_TOLERANCE = 1e-5
"""Between a stored vector and the corpus'. They are equal, but for those that a server gives back."""

_REBUILD = "Repairing makes it anew from SQLite; nothing is embedded again"


def check_dense(store: DenseStore | CollectionStore, folder: Path, corpus: Corpus, step: Steps) -> Iterator[Finding]:
    """Args: store: freshly opened."""
    try:
        yield from _check_dense_state(store, folder, corpus)
        wrong = _wrong_vectors(store.current(), corpus, step)
    except CorruptKnowledgeBaseError as error:
        yield finding("dense", f"the index is damaged: {error}", _REBUILD)
        return
    except IndexUnavailableError as error:
        meaning = "see that the server runs, and check again"
        yield finding("dense", f"the index cannot be reached: {error}", meaning, is_repairable=False)
        return
    yield from _differences("dense", wrong)


def check_sparse(sparse: Bm25Index, corpus: Corpus, step: Steps) -> Iterator[Finding]:
    """Args: sparse: freshly opened."""
    if sparse.generation != corpus.generation:
        yield _out_of_step("sparse", sparse.folder, sparse.exists_on_disk, sparse.generation, corpus.generation)
        return
    damaged = sparse.damaged_files()
    if damaged:
        yield finding("sparse", "files whose checksum is wrong", _REBUILD, damaged)
        return
    there = sparse.ids()
    known = set(there.tolist())
    lost = ChunkWords(sparse)
    missing: list[int] = []
    num_known = 0
    for batch in _all_ids(corpus):
        found = corpus.chunks(batch)
        for chunk_id, chunk in found.items():
            if int(chunk_id) not in known:
                missing.append(int(chunk_id))
            else:
                num_known += 1
                lost.check(int(chunk_id), searched_text(chunk))
        step(len(batch))
    num_extra = len(there) - num_known
    yield from _differences("sparse", Differences(missing, num_extra, lost.wrong))


class ChunkWords:
    """Compares the words of chunks with what their postings hold."""

    def __init__(self, sparse: Bm25Index) -> None:
        self._sparse = sparse
        self._analyzer = WordAnalyzer()
        self.wrong: list[int] = []

    def check(self, chunk_id: int, text: str) -> None:
        if not self._sparse.has_stems(chunk_id, set(self._analyzer.stems(text))):
            self.wrong.append(chunk_id)


class Differences:
    """Between an index and the corpus."""

    def __init__(self, missing: Sequence[int], num_extra: int, wrong: Sequence[int]) -> None:
        self.missing, self.num_extra, self.wrong = missing, num_extra, wrong


def _differences(part: Part, found: Differences) -> Iterator[Finding]:
    what = "vectors" if part == "dense" else "postings"
    if found.missing:
        yield finding(
            part, "chunks that are not in the index", f"searches miss them. {_REBUILD}", _named(found.missing)
        )
    if found.num_extra:
        problem = f"{found.num_extra} entries of chunks that SQLite does not have, or has once"
        yield finding(part, problem, f"they take places in rankings and are then left out. {_REBUILD}")
    if found.wrong:
        yield finding(
            part, f"chunks with other {what}", f"they are misplaced in rankings. {_REBUILD}", _named(found.wrong)
        )


def _check_dense_state(store: DenseStore | CollectionStore, folder: Path, corpus: Corpus) -> Iterator[Finding]:
    """Which state the files show, before they are brought up to date in memory."""
    if isinstance(store, CollectionStore):
        if store.needs_write():
            yield finding("dense", "the collection is missing, foreign, incomplete or behind SQLite", _LATE)
        return
    store.current()
    if store.needs_conversion or store.saved_generation == corpus.generation:
        return
    exists_on_disk = any((folder / name).exists() for name in DENSE_FILES)
    yield _out_of_step("dense", folder, exists_on_disk, store.saved_generation, corpus.generation)


_LATE = "a writer was interrupted; nothing is lost, and the next search or `stillroom add` would bring it up to date"


def _out_of_step(part: Part, folder: Path, exists_on_disk: bool, generation: int, wanted: int) -> Finding:
    if not exists_on_disk:
        return finding(part, f"the index is missing in {folder}", f"the next search would make it. {_REBUILD}")
    if 0 < generation < wanted:
        return finding(part, f"the index is behind SQLite, {wanted - generation} commits", _LATE)
    return finding(part, "the index is damaged, or shows another corpus or another state of it", _REBUILD)


def _wrong_vectors(index: VectorIndex, corpus: Corpus, step: Steps) -> Differences:
    num_good, num_there = 0, 0
    wrong: list[int] = []
    seen: list[NDArray[np.int64]] = []
    for ids, vectors in index.in_order():
        num_there += len(ids)
        kept, truth = corpus.embeddings(ids.tolist())
        is_kept = np.isin(ids, kept)
        seen.append(np.unique(kept))
        num_good += len(seen[-1])
        if vectors is not None and len(kept):
            is_off = ~np.isclose(vectors[is_kept], truth, atol=_TOLERANCE).all(axis=1)
            wrong += kept[is_off].tolist()
        step(len(ids))
    unique = np.unique(np.concatenate(seen)) if seen else np.empty(0, dtype=np.int64)
    missing = [one for batch in _all_ids(corpus) for one in batch if not _has(unique, one)]
    return Differences(missing, num_there - len(unique), wrong)


def _has(ordered: NDArray[np.int64], one: int) -> bool:
    at = int(np.searchsorted(ordered, one))
    return at < len(ordered) and int(ordered[at]) == one


def _all_ids(corpus: Corpus) -> Iterator[list[ChunkId]]:
    ids = list(corpus.changes_since(0).added)
    for start in range(0, len(ids), _BATCH):
        yield ids[start : start + _BATCH]


def _named(chunk_ids: Sequence[int]) -> list[str]:
    return [format_chunk_id(ChunkId(chunk_id)) for chunk_id in chunk_ids]

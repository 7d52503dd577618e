"""Checks that the dense and the sparse index hold exactly the chunks, vectors and words of the corpus.

Both indexes are opened again from their files, so the check sees what the next process would search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId
from stillroom.errors import CorruptKnowledgeBaseError, IndexUnavailableError
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.dense_store import DENSE_FILES, DenseStore
from stillroom.retrieval.index.indexes import AnyStore
from stillroom.retrieval.index.words import WordAnalyzer, searched_text
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.vector_sets import is_of_later_set
from stillroom.retrieval.vector_index import SearchedIndex
from stillroom.retrieval.verify.verify_report import Finding, Part, StepCounter, finding, hex_ids

_BATCH = 1000
_TOLERANCE = 1e-5
"""Tolerance for vectors of an index. They are equal to those of the corpus, except from a server."""

_REBUILD = "Repairing rebuilds it from SQLite; nothing is embedded again"
_LATE = "a writer was interrupted; nothing is lost, and the next search or `stillroom add` updates it"


def check_dense(store: AnyStore, folder: Path, corpus: Corpus, step: StepCounter) -> Iterator[Finding]:
    """Compare a freshly opened dense index with the corpus."""
    try:
        yield from _check_dense_state(store, folder, corpus)
        wrong = _wrong_vectors(store.current(), corpus, step)
    except CorruptKnowledgeBaseError as error:
        yield finding("dense", f"the index is damaged: {error}", _REBUILD)
        return
    except IndexUnavailableError as error:
        meaning = "start its server and verify again"
        yield finding("dense", f"the index cannot be reached: {error}", meaning, is_repairable=False)
        return
    yield from _differences("dense", wrong)


def check_sparse(sparse: Bm25Index, corpus: Corpus, step: StepCounter) -> Iterator[Finding]:
    """Compare a freshly opened sparse index with the corpus."""
    if sparse.generation != corpus.generation:
        if corpus.is_copy and sparse.has_state:
            return  # of an earlier state of the copy; the next search updates it
        yield _out_of_step("sparse", sparse.folder, sparse.exists_on_disk, sparse.generation, corpus.generation)
        return
    damaged = sparse.damaged_files()
    if damaged:
        yield finding("sparse", "files with wrong checksums", _REBUILD, damaged)
        return
    indexed = sparse.ids()
    known = set(indexed.tolist())
    analyzer = WordAnalyzer()
    missing: list[int] = []
    wrong: list[int] = []
    num_known = 0
    for batch in _all_ids(corpus):
        for chunk_id, chunk in corpus.chunks(batch).items():
            if int(chunk_id) not in known:
                missing.append(int(chunk_id))
                continue
            num_known += 1
            text = searched_text(chunk)
            if not sparse.has_stems(int(chunk_id), set(analyzer.stems(text, analyzer.language_of(text)))):
                wrong.append(int(chunk_id))
        step(len(batch))
    yield from _differences("sparse", _Differences(missing, len(indexed) - num_known, wrong))


@dataclass(frozen=True, slots=True)
class _Differences:
    """Chunks of the corpus that an index lacks, further entries of the index, and chunks with other content."""

    missing: Sequence[int]
    num_extra: int
    wrong: Sequence[int]


def _differences(part: Part, found: _Differences) -> Iterator[Finding]:
    content = "vectors" if part == "dense" else "postings"
    if found.missing:
        yield finding(
            part, "chunks that are not in the index", f"searches miss them. {_REBUILD}", hex_ids(found.missing)
        )
    if found.num_extra:
        problem = f"{found.num_extra} duplicate entries, or entries of chunks that SQLite does not have"
        yield finding(part, problem, f"they take places in rankings and are then left out. {_REBUILD}")
    if found.wrong:
        yield finding(
            part, f"chunks with other {content}", f"they are misplaced in rankings. {_REBUILD}", hex_ids(found.wrong)
        )


def _check_dense_state(store: AnyStore, folder: Path, corpus: Corpus) -> Iterator[Finding]:
    """Compare the state of the files with the corpus, before the index is updated in memory."""
    if not isinstance(store, DenseStore):
        if store.needs_write():
            yield finding("dense", "the collection is missing, foreign, incomplete or behind SQLite", _LATE)
        return
    store.current()
    if store.needs_conversion or store.saved_generation == corpus.generation:
        return
    exists_on_disk = any((folder / name).exists() for name in DENSE_FILES)
    if corpus.is_copy and exists_on_disk and store.is_readable():
        return  # of an earlier state of the copy; its content is compared as the next search updates it
    if corpus.is_copy and not exists_on_disk and is_of_later_set(folder):
        return  # another machine has changed the embedder; the next search makes the index
    yield _out_of_step("dense", folder, exists_on_disk, store.saved_generation, corpus.generation)


def _out_of_step(part: Part, folder: Path, exists_on_disk: bool, generation: int, wanted: int) -> Finding:
    if not exists_on_disk:
        return finding(part, f"the index is missing in {folder}", f"the next search makes it. {_REBUILD}")
    if 0 < generation < wanted:
        return finding(part, f"the index is behind SQLite by {wanted - generation} commits", _LATE)
    return finding(part, "the index is damaged, or was made from another corpus or another state of it", _REBUILD)


def _wrong_vectors(index: SearchedIndex, corpus: Corpus, step: StepCounter) -> _Differences:
    num_entries = 0
    wrong: list[int] = []
    seen: list[NDArray[np.int64]] = []
    for ids, vectors in index.in_order():
        num_entries += len(ids)
        kept, truth = corpus.embeddings(ids.tolist())
        is_kept = np.isin(ids, kept)
        seen.append(np.unique(kept))
        if vectors is not None and len(kept):
            is_off = ~np.isclose(vectors[is_kept], truth, atol=_TOLERANCE).all(axis=1)
            wrong += kept[is_off].tolist()
        step(len(ids))
    unique = np.unique(np.concatenate(seen)) if seen else np.empty(0, dtype=np.int64)
    all_ids = np.array(corpus.changes_since(0).added, dtype=np.int64)
    missing = all_ids[~np.isin(all_ids, unique)].tolist()
    return _Differences(missing, num_entries - len(unique), wrong)


def _all_ids(corpus: Corpus) -> Iterator[list[ChunkId]]:
    ids = list(corpus.changes_since(0).added)
    for start in range(0, len(ids), _BATCH):
        yield ids[start : start + _BATCH]

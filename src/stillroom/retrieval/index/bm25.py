"""Sparse index: BM25 over stems, each of the language of its text (`words.py`), in a tantivy index on disk.

A query is plain words, never query syntax. Only the holder of the write lock calls `apply` and `clear`; any process may
search, and `refresh` shows later commits of the writer. A state file beside the index holds its generation. It is
written after the commit, so after a crash in between the changes are applied again, which is harmless.

If files are damaged under an open index, tantivy panics, refuses or returns nonsense. Such a search raises
DamagedPostingsError, and so does every search until the index is rebuilt.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tantivy
from numpy.typing import NDArray

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.core.panics import NativePanicError, panics_as_errors
from stillroom.core.private_files import close_files, make_folder
from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.atomic_files import write_atomically
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.postings_files import SegmentFiles, disk_error, identity_of, open_borrowed, open_index
from stillroom.retrieval.index.words import DOCUMENT_TOKENIZER, WordAnalyzer, searched_text
from stillroom.retrieval.ranking import Ranking, top_k

_WRITER_BYTES = 64_000_000
_STATE = "stillroom.json"

_MOST_NAMED = 5000
"""Most allowed chunks named in the query; with more, a longer result list is fetched and filtered."""

_FORMAT = 3
"""Raise it when the indexed text (`words.searched_text`) or the analyzer changes: indexes are rebuilt."""


class DamagedPostingsError(CorruptKnowledgeBaseError):
    """The postings are damaged and must be rebuilt from the corpus before they can be searched."""


@dataclass(frozen=True, slots=True)
class _View:
    """State that searches use; replaced as a whole, so that a search in another thread never mixes two states."""

    index: Any = None
    searcher: Any = None
    generation: int = 0
    num_removed: int = 0
    """Removals since the last rebuild; their words still count in BM25's statistics."""
    written: tuple[int, int] | None = None
    """Identity of the state file."""
    is_borrowed: bool = False
    """Whether it was opened by `open_borrowed` and must be opened again to see later commits."""
    is_damaged: bool = False
    """Whether searches raise DamagedPostingsError."""
    languages: Mapping[str, int] = field(default_factory=dict)
    """Languages of the chunks, with the number of chunks of each that were added since the last rebuild."""


class Bm25Index:
    """Thread-safe for searching; writing needs the write lock."""

    def __init__(
        self, folder: Path, corpus_id: str, commit_id: Callable[[int], str | None] = lambda generation: ""
    ) -> None:
        """Open the index in `folder`.

        An index that is missing, damaged, of another corpus, or of commits that were undone counts as empty, with
        generation 0.

        Args:
            commit_id: see `Corpus.commit_id`.
        """
        self._folder = folder
        self._corpus_id, self._commit_id = corpus_id, commit_id
        self._schema = _schema()
        self._analyzer = WordAnalyzer()
        self._view = _View()
        self._segments = SegmentFiles(folder)
        self._damaged: set[tuple[int, int] | None] = set()
        """Identities of state files whose segments were found damaged."""
        self.refresh()

    def __len__(self) -> int:
        searcher = self._view.searcher
        return int(searcher.num_docs) if searcher is not None else 0

    @property
    def generation(self) -> int:
        """Generation of the corpus that searches see."""
        return self._view.generation

    @property
    def is_damaged(self) -> bool:
        """Whether searches raise DamagedPostingsError."""
        return self._view.is_damaged

    @property
    def share_removed(self) -> float:
        """Share of removed chunks; if it is high, a rebuild corrects BM25's statistics."""
        return self._view.num_removed / max(1, self._view.num_removed + len(self))

    def refresh(self, *, is_strict: bool = False) -> None:
        """Use what the writer has committed. Reads one small file if nothing has changed.

        Args:
            is_strict: use an empty index if the files are not usable. Otherwise searches keep the earlier state, as
                while the writer rebuilds the index.
        """
        state = self._read_state()
        generation = self._generation_of(state)
        view, written = self._view, identity_of(self._folder / _STATE)
        if (generation, written) == (view.generation, view.written) and not (is_strict and view.is_borrowed):
            return
        try:
            if generation == 0:
                raise ValueError("there is no index of this corpus")
            num_removed, languages = int(state.get("num_removed", 0)), dict(state.get("languages", {}))
            with panics_as_errors("tantivy"):
                if not os.access(self._folder, os.W_OK):
                    index = open_borrowed(self._folder)
                    self._view = _View(
                        index, index.searcher(), generation, num_removed, written, True, languages=languages
                    )
                    return
                index = (view.index if not (is_strict or view.is_borrowed) else None) or open_index(self._folder)
                index.reload()
                self._view = _View(index, index.searcher(), generation, num_removed, written, languages=languages)
        except (ValueError, OSError, NativePanicError):  # damaged, or being rebuilt by the writer
            if is_strict:
                self._view = _View(is_damaged=view.is_damaged)

    def clear(self) -> None:
        """Delete the index; searches raise DamagedPostingsError until it is rebuilt. Needs the write lock."""
        self._view = _View(is_damaged=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def apply(
        self, removed: Sequence[int], added: Iterable[Chunk], generation: int, *, is_rebuild: bool = False
    ) -> None:
        """Remove chunks, add chunks and record `generation`. Idempotent. Needs the write lock.

        Args:
            is_rebuild: remove everything first. Searches keep the old state until the new one is complete.

        Raises:
            ValueError: the index is damaged.
            OSError: it cannot be written; the old content stays.
        """
        try:
            with panics_as_errors("tantivy"):
                self._apply(removed, added, generation, is_rebuild=is_rebuild)
        except NativePanicError as error:
            raise ValueError("the postings are damaged") from error
        except ValueError as error:
            if (number := disk_error(str(error))) is not None:
                raise OSError(number, os.strerror(number), str(self._folder)) from error
            raise

    def _apply(self, removed: Sequence[int], added: Iterable[Chunk], generation: int, *, is_rebuild: bool) -> None:
        index = self._view.index
        num_removed = 0 if is_rebuild else self._view.num_removed + len(removed)
        is_new = index is None
        languages = Counter({} if is_new or is_rebuild else self._view.languages)
        if is_new:
            shutil.rmtree(self._folder, ignore_errors=True)
            make_folder(self._folder)
            index = tantivy.Index(self._schema, path=str(self._folder))
        elif self.damaged_files():
            raise ValueError("the postings are damaged")  # a commit over them would abort the process
        writer = index.writer(_WRITER_BYTES, 1)
        try:
            if is_rebuild:
                writer.delete_all_documents()
            for chunk_id in removed:
                writer.delete_documents_by_term("chunk_id", int(chunk_id))
            for chunk in added:
                if not (is_new or is_rebuild):
                    writer.delete_documents_by_term("chunk_id", int(chunk.chunk_id))
                text = searched_text(chunk)
                language = self._analyzer.language_of(text)
                languages[language] += 1
                writer.add_document(_document(chunk, self._analyzer.stemmed(text, language)))
            writer.commit()
            writer.wait_merging_threads()
        finally:
            del writer  # releases tantivy's lock, which an exception would keep
            close_files(self._folder)
        state = {
            "format": _FORMAT,
            "generation": generation,
            "corpus_id": self._corpus_id,
            "commit_id": self._commit_id(generation),
            "num_removed": num_removed,
            "languages": languages,
        }
        write_atomically(self._folder / _STATE, json.dumps(state).encode())
        self.refresh()

    def build_private(self, chunks: Iterable[Chunk], generation: int) -> None:
        """Build a private index of all chunks, for a process that cannot write to the folder.

        It is used until the folder holds an index. Its files are unnamed, among the system's temporary files.

        Raises:
            OSError: the disk is full.
        """
        with tempfile.TemporaryDirectory(prefix="stillroom-") as place:
            made = Bm25Index(Path(place) / "sparse", self._corpus_id, self._commit_id)
            made.apply((), chunks, generation)
            self._view = dataclasses.replace(made._view, is_borrowed=True)

    # Verification

    @property
    def saved_generation(self) -> int:
        """Generation of the files on disk; 0 if they are missing or not usable."""
        return self._generation_of(self._read_state())

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def exists_on_disk(self) -> bool:
        """Whether the folder exists, usable or not."""
        return self._folder.exists()

    @property
    def has_state(self) -> bool:
        """Whether the state file can be read, of whatever corpus and state it is."""
        return bool(self._read_state())

    def ids(self) -> NDArray[np.int64]:
        """Return the chunk ids [n] of all entries."""
        with self._reading() as searcher:
            if searcher is None or not searcher.num_docs:
                return np.empty(0, dtype=np.int64)
            hits = searcher.search(tantivy.Query.all_query(), int(searcher.num_docs), count=False).hits
            found = searcher.fast_field_values("chunk_id", [address for _, address in hits])
            return np.array(found, dtype=np.int64)

    def has_stems(self, chunk_id: int, stems: Collection[str]) -> bool:
        """Whether exactly one entry of a chunk contains all of these stems."""
        terms = [tantivy.Query.term_query(self._schema, "chunk_id", chunk_id)]
        terms += [tantivy.Query.term_query(self._schema, "body", stem, index_option="freq") for stem in sorted(stems)]
        every = tantivy.Query.boolean_query([(tantivy.Occur.Must, term) for term in terms])
        with self._reading() as searcher:
            return searcher is not None and len(searcher.search(every, 2, count=False).hits) == 1

    def damaged_files(self) -> list[str]:
        """Return the names of segment files with a wrong checksum. Reads only new and changed files."""
        return self._segments.damaged()

    def document_frequency(self, word: str) -> int:
        """Return the number of chunks with a stem; removed chunks count until their segment is merged."""
        with self._reading() as searcher:
            return int(searcher.doc_freq("body", word)) if searcher is not None else 0

    def search(self, text: str, k: int, allowed: AllowedIds | None = None) -> Ranking:
        """Return the k best chunks among those that share a word of the query, stop words left out (`words.py`).

        Args:
            allowed: the only chunks that may be found; None allows all. Scores do not depend on it.

        Raises:
            DamagedPostingsError: the files were damaged since they were opened.
        """
        query = self._query(text)
        with self._reading() as searcher:
            if searcher is None or query is None:
                return []
            num_docs = int(searcher.num_docs)
            if allowed is None:
                return top_k(lambda n: _hits(searcher, query, n), k, num_docs)
            if len(allowed) <= _MOST_NAMED:
                named = self._among(query, allowed.ids.tolist())
                return top_k(lambda n: _hits(searcher, named, n), k, len(allowed)) if len(allowed) else []
            return top_k(lambda n: _hits_among(searcher, query, n, allowed, num_docs), k, len(allowed))

    def scores(self, text: str, ids: Sequence[ChunkId]) -> dict[ChunkId, float]:
        """Return the BM25 score of each given chunk, 0 if it shares no word with the query. Raises as `search`."""
        found = dict.fromkeys(ids, 0.0)
        query = self._query(text)
        with self._reading() as searcher:
            if searcher is not None and query is not None and ids:
                found.update(_hits(searcher, self._among(query, ids), len(ids)))
        return found

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """Yield the searcher, None if there is no index. Raises DamagedPostingsError if using it fails."""
        view = self._view
        if not view.is_damaged:
            try:
                with panics_as_errors("tantivy"):
                    yield view.searcher
                return
            except (NativePanicError, ValueError, TypeError, OverflowError, MemoryError, OSError):
                if self._view is view:  # otherwise it was rebuilt meanwhile
                    self._damaged.add(identity_of(self._folder / _STATE))
                    self._view = _View(is_damaged=True)
        raise DamagedPostingsError(f"the postings in {self._folder} are damaged; they are rebuilt from SQLite")

    def _among(self, query: Any, ids: Sequence[int]) -> Any:
        """Restrict a query to the given chunks without changing scores."""
        chosen = tantivy.Query.term_set_query(self._schema, "chunk_id", [int(chunk_id) for chunk_id in ids])
        unscored = tantivy.Query.const_score_query(chosen, 0.0)
        return tantivy.Query.boolean_query([(tantivy.Occur.Must, query), (tantivy.Occur.Must, unscored)])

    def _query(self, text: str) -> Any:
        """Return a query for any of the text's words; None if it has none."""
        words = Counter(self._analyzer.query_words(text, self._view.languages))
        if not words:
            return None
        return tantivy.Query.boolean_query([self._word_query(stems, count) for stems, count in sorted(words.items())])

    def _word_query(self, stems: Sequence[str], count: int) -> tuple[Any, Any]:
        """Search any of the stems of a word; the best of them counts. Weight it by its count in the query, as in BM25's
        sum over query words."""
        terms = [tantivy.Query.term_query(self._schema, "body", stem, index_option="freq") for stem in stems]
        query = terms[0] if len(terms) == 1 else tantivy.Query.disjunction_max_query(terms)
        return tantivy.Occur.Should, tantivy.Query.boost_query(query, float(count)) if count > 1 else query

    def _generation_of(self, state: dict[str, Any]) -> int:
        """Return the generation of a state file; 0 if it is of another corpus, format or commit."""
        generation = int(state.get("generation", 0))
        is_ours = (state.get("corpus_id"), state.get("format")) == (self._corpus_id, _FORMAT)
        return generation if is_ours and state.get("commit_id", "") == self._commit_id(generation) else 0

    def _read_state(self) -> dict[str, Any]:
        """Read the state file; empty if it is missing or its segments are known to be damaged."""
        if self._damaged and identity_of(self._folder / _STATE) in self._damaged:
            return {}
        try:
            state = json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}


def _hits(searcher: Any, query: Any, n: int) -> Ranking:
    """Return the n best, ties in any order."""
    hits = searcher.search(query, n, count=False).hits
    ids = searcher.fast_field_values("chunk_id", [address for _, address in hits])
    return [(ChunkId(int(chunk_id)), float(hit[0])) for chunk_id, hit in zip(ids, hits, strict=True)]


def _document(chunk: Chunk, stemmed: str) -> Any:
    document = tantivy.Document()
    document.add_integer("chunk_id", int(chunk.chunk_id))
    document.add_text("body", stemmed)
    return document


def _hits_among(searcher: Any, query: Any, n: int, allowed: AllowedIds, num_docs: int) -> Ranking:
    """Return the n best allowed chunks, from as long a result list as that takes."""
    depth = min(num_docs, n * num_docs // len(allowed) * 5 // 4 + n)
    while True:
        hits = _hits(searcher, query, depth)
        is_allowed = allowed.has([chunk_id for chunk_id, _ in hits])
        if is_allowed.sum() >= n or len(hits) < depth or depth >= num_docs:
            return [hit for hit, is_one in zip(hits, is_allowed.tolist(), strict=True) if is_one][:n]
        depth = min(num_docs, depth * 4)


def _schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("chunk_id", stored=True, indexed=True, fast=True)
    builder.add_text_field("body", stored=False, tokenizer_name=DOCUMENT_TOKENIZER, index_option="freq")
    return builder.build()

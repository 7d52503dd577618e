"""Sparse search: BM25 over stemmed English words, in a tantivy index on disk.

A query is words and never query syntax. Only the holder of the knowledge base's write lock calls `apply` and `clear`;
everyone may search, and `refresh` shows what the writer has done since. A generation beside the index says how far it
is; it is written after the commit, so a crash in between repeats changes, which does no harm.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tantivy
from numpy.typing import NDArray

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.retrieval.filters.allowed import Allowed
from stillroom.retrieval.index.words import DOCUMENT_TOKENIZER, WordAnalyzer, searched_text
from stillroom.retrieval.index_file import write_atomically
from stillroom.retrieval.ranking import Ranking, top_k

_WRITER_BYTES = 64_000_000
_STATE = "stillroom.json"

_MOST_NAMED = 5000
"""Chunks that a filter may leave for the query to name each; of more, a longer list is fetched and filtered."""

_FORMAT = 2
"""Raise it when what is indexed of a chunk changes (`words.searched_text`, the analyzer): older indexes are rebuilt."""


@dataclass(frozen=True, slots=True)
class _View:
    """What searches see; replaced as a whole, so that a search in another thread is never half in the new."""

    index: Any = None
    searcher: Any = None
    generation: int = 0
    num_removed: int = 0
    """Removals since the index was empty; their words still count in BM25's statistics."""
    is_borrowed: bool = False
    """Whether it was opened elsewhere (`_borrowed`), so that it has to be opened anew to see more."""


class Bm25Index:
    """Thread-safe for searching; see the module's docstring for writing."""

    def __init__(
        self, folder: Path, corpus_id: str, commit_id: Callable[[int], str | None] = lambda generation: ""
    ) -> None:
        """Open the index in `folder`; a missing or damaged one counts as empty, with generation 0, and so does one of
        another corpus or of commits that were undone.

        Args:
            commit_id: see `Corpus.commit_id`.
        """
        self._folder = folder
        self._corpus_id, self._commit_id = corpus_id, commit_id
        self._schema = _schema()
        self._analyzer = WordAnalyzer()
        self._view = _View()
        self.refresh()

    def __len__(self) -> int:
        searcher = self._view.searcher
        return int(searcher.num_docs) if searcher is not None else 0

    @property
    def generation(self) -> int:
        """Of the corpus, as far as searches see it."""
        return self._view.generation

    @property
    def share_removed(self) -> float:
        """Removals in proportion to what was added; where it is high, a rebuild makes the statistics true again."""
        return self._view.num_removed / max(1, self._view.num_removed + len(self))

    def refresh(self, *, is_strict: bool = False) -> None:
        """See what the writer has committed. Reads one small file if nothing has changed.

        Args:
            is_strict: see nothing where nothing usable is there. Else, while an index is being made anew, searches go
                on in what they saw before.
        """
        state = self._read_state()
        generation = self._generation_of(state)
        view = self._view
        if generation == view.generation and not (is_strict and view.is_borrowed):
            return
        try:
            if generation == 0:
                raise ValueError("there is no index of this corpus")
            num_removed = int(state.get("num_removed", 0))
            if not os.access(self._folder, os.W_OK):
                index = _borrowed(self._folder)
                self._view = _View(index, index.searcher(), generation, num_removed, is_borrowed=True)
                return
            index = (view.index if not (is_strict or view.is_borrowed) else None) or _open(self._folder)
            index.reload()
            self._view = _View(index, index.searcher(), generation, num_removed)
        except (ValueError, OSError):  # damaged, or just being rebuilt by the writer
            if is_strict:
                self._view = _View()

    def clear(self) -> None:
        """Throw the index away. Only under the write lock."""
        self._view = _View()
        shutil.rmtree(self._folder, ignore_errors=True)

    def apply(
        self, removed: Sequence[int], added: Iterable[Chunk], generation: int, *, is_rebuild: bool = False
    ) -> None:
        """Remove, then add, and be at `generation`. Only under the write lock; repeating it changes nothing.

        Args:
            is_rebuild: remove everything first. Searches go on in the old state until the new one is complete.

        Raises:
            ValueError: the index is damaged.
            OSError: it cannot be written; what was there is still there.
        """
        try:
            self._apply(removed, added, generation, is_rebuild=is_rebuild)
        except ValueError as error:
            if (number := _disk_error(str(error))) is not None:
                raise OSError(number, os.strerror(number), str(self._folder)) from error
            raise

    def _apply(self, removed: Sequence[int], added: Iterable[Chunk], generation: int, *, is_rebuild: bool) -> None:
        index = self._view.index
        num_removed = 0 if is_rebuild else self._view.num_removed + len(removed)
        is_new = index is None
        if is_new:
            self.clear()
            self._folder.mkdir(parents=True)
            index = tantivy.Index(self._schema, path=str(self._folder))
        writer = index.writer(_WRITER_BYTES, 1)
        try:
            if is_rebuild:
                writer.delete_all_documents()
            for chunk_id in removed:
                writer.delete_documents_by_term("chunk_id", int(chunk_id))
            for chunk in added:
                if not (is_new or is_rebuild):
                    writer.delete_documents_by_term("chunk_id", int(chunk.chunk_id))
                writer.add_document(_document(chunk))
            writer.commit()
            writer.wait_merging_threads()
        finally:
            del writer  # it holds tantivy's lock, and an exception would hold it
        state = {
            "format": _FORMAT,
            "generation": generation,
            "corpus_id": self._corpus_id,
            "commit_id": self._commit_id(generation),
            "num_removed": num_removed,
        }
        write_atomically(self._folder / _STATE, json.dumps(state).encode())
        self.refresh()

    def make_apart(self, chunks: Iterable[Chunk], generation: int) -> None:
        """Search in an index of all chunks that no other process sees, until there is one in the folder: for whoever
        may not write there. It lies among the system's temporary files, and without a name as soon as it is made.

        Raises:
            OSError: there is no room.
        """
        with tempfile.TemporaryDirectory(prefix="stillroom-") as place:
            made = Bm25Index(Path(place) / "sparse", self._corpus_id, self._commit_id)
            made.apply((), chunks, generation)
            self._view = dataclasses.replace(made._view, is_borrowed=True)

    # For checking it

    @property
    def saved_generation(self) -> int:
        """Of the corpus, as far as the files say that they are; 0 where there are none of use."""
        return self._generation_of(self._read_state())

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def is_there(self) -> bool:
        """Whether there is anything on disk, of whatever use."""
        return self._folder.exists()

    def ids(self) -> NDArray[np.int64]:
        """Chunk ids [n] of all that searches can find, one for each entry."""
        searcher = self._view.searcher
        if searcher is None or not searcher.num_docs:
            return np.empty(0, dtype=np.int64)
        hits = searcher.search(tantivy.Query.all_query(), int(searcher.num_docs), count=False).hits
        found = searcher.fast_field_values("chunk_id", [address for _, address in hits])
        return np.array(found, dtype=np.int64)

    def has_words(self, chunk_id: int, stems: Collection[str]) -> bool:
        """Whether exactly one entry of a chunk holds all of these stems."""
        searcher = self._view.searcher
        terms = [tantivy.Query.term_query(self._schema, "chunk_id", chunk_id)]
        terms += [tantivy.Query.term_query(self._schema, "body", stem, index_option="freq") for stem in sorted(stems)]
        every = tantivy.Query.boolean_query([(tantivy.Occur.Must, term) for term in terms])
        return searcher is not None and len(searcher.search(every, 2, count=False).hits) == 1

    def damaged_files(self) -> list[str]:
        """Names of segments' files that are not as tantivy wrote them, by the checksum at their end."""
        return [path.name for path in sorted(self._folder.glob("*.*")) if _is_segment(path) and not _is_whole(path)]

    def document_frequency(self, word: str) -> int:
        """How many chunks hold a stem, as BM25 counts them: a removed one still counts until its segment is merged."""
        searcher = self._view.searcher
        return int(searcher.doc_freq("body", word)) if searcher is not None else 0

    def search(self, text: str, k: int, allowed: Allowed | None = None) -> Ranking:
        """The k chunks that match best, best first; only those that share a telling word with the text.

        Args:
            allowed: the only chunks that may be found; None allows all. It changes no score.
        """
        searcher = self._view.searcher
        query = self._query(text)
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
        """The BM25 score of each of these chunks, 0 where it shares no telling word with the text."""
        found = dict.fromkeys(ids, 0.0)
        searcher = self._view.searcher
        query = self._query(text)
        if searcher is not None and query is not None and ids:
            found.update(_hits(searcher, self._among(query, ids), len(ids)))
        return found

    def _among(self, query: Any, ids: Sequence[int]) -> Any:
        """The same query, of these chunks only."""
        chosen = tantivy.Query.term_set_query(self._schema, "chunk_id", [int(chunk_id) for chunk_id in ids])
        unscored = tantivy.Query.const_score_query(chosen, 0.0)
        return tantivy.Query.boolean_query([(tantivy.Occur.Must, query), (tantivy.Occur.Must, unscored)])

    def _query(self, text: str) -> Any:
        """Any of the text's words; None where it has none."""
        words = Counter(self._analyzer.query_stems(text))
        if not words:
            return None
        return tantivy.Query.boolean_query([self._word_query(word, count) for word, count in sorted(words.items())])

    def _word_query(self, word: str, count: int) -> tuple[Any, Any]:
        """A word that the query repeats counts as often, as in BM25's sum over query words."""
        query = tantivy.Query.term_query(self._schema, "body", word, index_option="freq")
        return tantivy.Occur.Should, tantivy.Query.boost_query(query, float(count)) if count > 1 else query

    def _generation_of(self, state: dict[str, Any]) -> int:
        """0 where it is of no use here."""
        generation = int(state.get("generation", 0))
        is_ours = (state.get("corpus_id"), state.get("format")) == (self._corpus_id, _FORMAT)
        return generation if is_ours and state.get("commit_id", "") == self._commit_id(generation) else 0

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}


def _hits(searcher: Any, query: Any, n: int) -> Ranking:
    """The n best, ties in any order."""
    hits = searcher.search(query, n, count=False).hits
    ids = searcher.fast_field_values("chunk_id", [address for _, address in hits])
    return [(ChunkId(int(chunk_id)), float(hit[0])) for chunk_id, hit in zip(ids, hits, strict=True)]


def _document(chunk: Chunk) -> Any:
    document = tantivy.Document()
    document.add_integer("chunk_id", int(chunk.chunk_id))
    document.add_text("body", searched_text(chunk))
    return document


def _disk_error(message: str) -> int | None:
    """The number of the system's error that tantivy speaks of, where it is the disk's and not of what lies on it."""
    found = re.search(r"(?:os error |code: )(\d+)", message)
    if found is not None:
        return int(found[1]) if int(found[1]) in _DISK_ERRORS else None
    return errno.EIO if "worker thread" in message else None  # it does not say, but supposes so


_DISK_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE)
)


def _hits_among(searcher: Any, query: Any, n: int, allowed: Allowed, num_docs: int) -> Ranking:
    """The n best of those allowed, from as deep a list as that takes."""
    depth = min(num_docs, n * num_docs // len(allowed) * 5 // 4 + n)
    while True:
        hits = _hits(searcher, query, depth)
        is_allowed = allowed.has([chunk_id for chunk_id, _ in hits])
        if is_allowed.sum() >= n or len(hits) < depth or depth >= num_docs:
            return [hit for hit, is_one in zip(hits, is_allowed.tolist(), strict=True) if is_one][:n]
        depth = min(num_docs, depth * 4)


def _is_segment(path: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", path.name.partition(".")[0]) is not None


def _is_whole(path: Path) -> bool:
    """A segment's file ends with JSON that has the CRC-32 of what stands before it, its length and a magic number."""
    content = path.read_bytes()
    try:
        size, magic = _SEGMENT_END.unpack(content[-_SEGMENT_END.size :])
        end = len(content) - _SEGMENT_END.size
        crc = json.loads(content[end - size : end])["crc"]
    except (struct.error, ValueError, KeyError, TypeError):
        return False
    return bool(magic == _SEGMENT_MAGIC and zlib.crc32(content[: end - size]) == crc)


_SEGMENT_END, _SEGMENT_MAGIC = struct.Struct("<II"), 1337


def _open(folder: Path) -> Any:
    index = tantivy.Index.open(str(folder))
    index.config_reader("manual")  # no thread that watches the folder; `refresh` looks
    return index


def _borrowed(folder: Path) -> Any:
    """An index in a folder that cannot be written, where tantivy would make files to lock it even for reading: opened
    by links in another folder, which it no longer needs once its files are mapped."""
    with tempfile.TemporaryDirectory(prefix="stillroom-") as place:
        for file in folder.iterdir():
            if file.suffix != ".lock":
                (Path(place) / file.name).symlink_to(file.absolute())
        index = _open(Path(place))
        index.reload()
        return index


def _schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("chunk_id", stored=True, indexed=True, fast=True)
    builder.add_text_field("body", stored=False, tokenizer_name=DOCUMENT_TOKENIZER, index_option="freq")
    return builder.build()

"""Files of the dense index of one knowledge base: loads it, follows the corpus, writes it.

    dense.npz        the whole index, read into RAM
    dense.lists      a trained IVF-PQ index whose lists are mapped (`list_file`), with `index.hot_bytes` or
                     `index.device_bytes`
    list_heat.npz    accesses of its lists; best effort, any process may write it

Either of the first two serves either setting: one is converted to the other with the same quantizers, so the setting
can be changed at any time. A missing, damaged or foreign file is rebuilt from the corpus without embedding again.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stillroom.config.settings import IndexConfig
from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.atomic_files import load_arrays, save_arrays
from stillroom.retrieval.background import Background
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.store.vector_sets import VectorSource
from stillroom.retrieval.tiers.hot_lists import Counts, ListFigures, Spawn
from stillroom.retrieval.tiers.list_file import ListFile
from stillroom.retrieval.vector_index import VectorIndex

DENSE_FILES = ("dense.npz", "dense.lists")

_BATCH = 4096
"""Chunks per read from the corpus."""

_WINDOWS_PER_SAVE = 16
"""Windows of queries between two writes of `list_heat.npz`."""


class DenseStore:
    """Keeps one dense index equal to the corpus, in memory and on disk. Not thread-safe."""

    def __init__(
        self, folder: Path, corpus: VectorSource, config: IndexConfig, dimension: int, spawn: Spawn | None = None
    ) -> None:
        """
        Args:
            corpus: What the index shows.
            spawn: Runs exchanges of lists; None takes a thread.
        """
        self._folder, self._corpus, self._config, self._dimension = folder, corpus, config, dimension
        self._arrays_path, self._lists_path = (folder / name for name in DENSE_FILES)
        self._heat_path = folder / "list_heat.npz"
        self._is_tiered = config.has_tiers
        self._background = Background("stillroom-lists")
        self._spawn = spawn or self._background.run
        self._index: VectorIndex | None = None
        self.generation = 0
        """Generation of the index in memory."""
        self._saved_generation = 0
        """Generation of the file at its last read or write by this process; -1 if it must be rewritten."""
        self._opened_file: tuple[int, int] | None = None
        """Identity of the file of lists that was opened last."""
        self._damaged: set[tuple[int, int]] = set()
        self._num_windows = 0

    def current(self) -> VectorIndex:
        """Return the index, brought up to date in memory."""
        try:
            return self._brought_up_to_date()
        except CorruptKnowledgeBaseError:
            self.discard()
            return self._brought_up_to_date()

    def discard(self) -> None:
        """Mark the file as damaged: the next `current` rebuilds the index."""
        if self._opened_file is not None:
            self._damaged.add(self._opened_file)
        self._index = None

    def needs_write(self) -> bool:
        """Whether the file is missing, damaged or behind the corpus."""
        self.current()
        return self._saved_generation != self._corpus.generation

    @property
    def saved_generation(self) -> int:
        """Generation of the file; 0 if none is usable. Precondition: `current` was called."""
        return max(0, self._saved_generation)

    @property
    def needs_conversion(self) -> bool:
        """Whether the file is usable but will be rewritten in another form. Precondition: `current` was called."""
        return self._saved_generation == -1 and self.generation > 0 and not self._damaged

    def is_readable(self) -> bool:
        """Whether a file exists and its checksums are right, of whatever corpus and state it is. Reads it whole."""
        if self._damaged:
            return False
        try:
            load_arrays(self._arrays_path)
        except FileNotFoundError:
            return self._lists_path.exists()  # its lists are checked when they are read
        except CorruptKnowledgeBaseError:
            return False
        return True

    def rebuild(self) -> None:
        """Remove the files; the next `current` builds the index from the corpus. Needs the write lock."""
        for path in (self._arrays_path, self._lists_path):
            path.unlink(missing_ok=True)
        self._index = None

    def prepare_write(self) -> Callable[[], None] | None:
        """Return a function that brings the file up to date; None if it is.

        The function needs the write lock; other threads may use this store meanwhile.

        Raises:
            CorruptKnowledgeBaseError: a file that is needed for it is damaged; the function raises it too.
        """
        index, generation = self.current(), self.generation
        if generation == self._saved_generation:
            return None
        commit_id = self._corpus.commit_id(generation) or ""
        if isinstance(index, TieredIvfPqIndex) and index.is_trained:
            snapshot = index.snapshot()

            def write_lists() -> None:
                snapshot.write(self._lists_path, self._corpus.corpus_id, generation, commit_id)
                self._arrays_path.unlink(missing_ok=True)
                self._saved_generation = generation

            return write_lists
        arrays = index.to_arrays()
        arrays["generation"] = np.array(generation)
        arrays["corpus_id"] = np.array(self._corpus.corpus_id)
        arrays["commit_id"] = np.array(commit_id)

        def write_arrays() -> None:
            save_arrays(self._arrays_path, arrays)
            self._lists_path.unlink(missing_ok=True)
            self._saved_generation = generation

        return write_arrays

    @property
    def figures(self) -> ListFigures | None:
        """Figures of the tiers; None if there are none or the index is not loaded."""
        return self._index.figures if isinstance(self._index, TieredIvfPqIndex) else None

    def close(self) -> None:
        """Stop exchanging lists and write their accesses. Idempotent."""
        if isinstance(self._index, TieredIvfPqIndex):
            self._index.close()
        self._background.close()
        figures = self.figures
        if figures is not None and figures.num_probes:
            self._save_heat()

    # Inside

    def _brought_up_to_date(self) -> VectorIndex:
        if self._index is None:
            self._index = self._load()
        elif isinstance(self._index, TieredIvfPqIndex):
            self._switch_to_new_file(self._index)
        if self._corpus.generation != self.generation:
            changes = self._corpus.changes_since(self.generation)
            self._index.remove([*changes.removed, *changes.added])
            for start in range(0, len(changes.added), _BATCH):
                ids, vectors = self._corpus.embeddings(changes.added[start : start + _BATCH])
                if len(ids):
                    self._index.add(ids, vectors)
            self.generation = changes.generation
        return self._index

    def _load(self) -> VectorIndex:
        self.generation, self._saved_generation = 0, 0 if not self._damaged else -1
        index = self._empty()
        loads = (
            (self._load_lists, self._load_arrays)
            if self._is_tiered
            else (self._load_arrays, self._load_lists)
            if self._config.kind == "ivf_pq"
            else (self._load_arrays,)
        )
        for load in loads:
            try:
                self.generation = load(index)
                is_kept_so = load == self._load_lists or not (isinstance(index, TieredIvfPqIndex) and index.is_trained)
                self._saved_generation = self.generation if is_kept_so else -1
                return index
            except (FileNotFoundError, CorruptKnowledgeBaseError, ValueError, KeyError, RuntimeError):
                index = self._empty()  # rebuilt from the corpus
        return index

    def _empty(self) -> VectorIndex:
        if self._is_tiered:
            return self._empty_tiered()
        if self._config.kind == "hnsw":
            return HnswIndex(self._dimension, self._config)
        if self._config.kind == "ivf_pq":
            return IvfPqIndex(self._dimension, self._config)
        return FlatIndex(self._dimension)

    def _empty_tiered(self) -> TieredIvfPqIndex:
        return TieredIvfPqIndex(self._dimension, self._config, self._folder, self._spawn, on_window=self._count_window)

    def _load_arrays(self, index: VectorIndex) -> int:
        arrays = load_arrays(self._arrays_path)
        generation = int(arrays["generation"])
        self._check_origin(str(arrays["corpus_id"]), generation, str(arrays.get("commit_id", "")))
        index.restore(arrays)
        return generation

    def _load_lists(self, index: VectorIndex) -> int:
        file = self._open_lists()
        if isinstance(index, TieredIvfPqIndex):
            index.use_file(file, self._load_heat(file))
        else:
            plain = dataclasses.replace(self._config, hot_bytes=0, device_bytes=0)
            tiered = TieredIvfPqIndex(self._dimension, plain, self._folder, lambda _: None)
            tiered.use_file(file)
            index.restore(tiered.to_arrays())
        return file.origin.generation

    def _open_lists(self) -> ListFile:
        while True:
            self._opened_file = _identity(self._lists_path)
            if self._opened_file in self._damaged:
                raise CorruptKnowledgeBaseError(f"{self._lists_path} is damaged; it will be rebuilt")
            try:
                file = ListFile(self._lists_path)
                break
            except CorruptKnowledgeBaseError:
                if _identity(self._lists_path) == self._opened_file:
                    raise  # otherwise a writer has just replaced it
        self._check_origin(file.origin.corpus_id, file.origin.generation, file.origin.commit_id)
        return file

    def _check_origin(self, corpus_id: str, generation: int, commit_id: str) -> None:
        if (corpus_id, commit_id) != (self._corpus.corpus_id, self._corpus.commit_id(generation)):
            raise ValueError("it shows another corpus, or another state of it")

    def _switch_to_new_file(self, index: TieredIvfPqIndex) -> None:
        """Switch to a newer file of lists, so that vectors added since the old one leave RAM.

        Raises:
            CorruptKnowledgeBaseError: the mapped file was changed in place; writers only replace it.
        """
        identity = _identity(self._lists_path)
        if identity is None or identity == self._opened_file:
            return
        if self._opened_file is not None and identity[0] == self._opened_file[0]:
            raise CorruptKnowledgeBaseError(f"{self._lists_path} was changed in place; the index will be rebuilt")
        with contextlib.suppress(FileNotFoundError, CorruptKnowledgeBaseError, ValueError):
            file = self._open_lists()
            index.use_file(file, self._load_heat(file) if index.heat is None else None)
            self.generation = self._saved_generation = file.origin.generation

    # Heat

    def _load_heat(self, file: ListFile) -> Counts | None:
        try:
            arrays = load_arrays(self._heat_path)
            counts = np.asarray(arrays["counts"], dtype=np.float64)
            is_ours = int(arrays["quantizers"]) == file.quantizers_crc() and counts.shape == file.sizes.shape
            return counts if is_ours and np.isfinite(counts).all() and (counts >= 0).all() else None
        except (OSError, CorruptKnowledgeBaseError, ValueError, KeyError, TypeError):
            return None

    def _count_window(self) -> None:
        self._num_windows += 1
        if self._num_windows % _WINDOWS_PER_SAVE == 0:
            self._spawn(self._save_heat)

    def _save_heat(self) -> None:
        heat = self._index.heat if isinstance(self._index, TieredIvfPqIndex) else None
        if heat is not None:
            with contextlib.suppress(OSError):
                save_arrays(self._heat_path, {"quantizers": np.array(heat[0]), "counts": heat[1]})


def _identity(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a file; None if it is missing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns

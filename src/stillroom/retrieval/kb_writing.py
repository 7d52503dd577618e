"""What `add` needs beside the corpus: a collection that keeps up."""

from collections.abc import Callable

from stillroom.retrieval.corpus import Corpus
from stillroom.retrieval.indexes import Indexes
from stillroom.retrieval.ingest import AddProgress


class Following:
    """Told how far an `add` is, keeps a collection close behind each commit: readers hold the rest in memory."""

    def __init__(self, corpus: Corpus, indexes: Indexes, progress: Callable[[AddProgress], None] | None) -> None:
        self._corpus = corpus
        self._indexes = indexes
        self._progress = progress
        self._generation = corpus.generation

    def __call__(self, done: AddProgress) -> None:
        generation = self._corpus.generation
        if generation != self._generation:
            self._indexes.write_collection()
            self._generation = generation
        if self._progress is not None:
            self._progress(done)

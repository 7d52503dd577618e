"""The chunks that a filter allows: found once per filter and generation of the corpus, then shared by all searches."""

from collections import OrderedDict
from threading import Lock

from stillroom.retrieval.corpus import Corpus
from stillroom.retrieval.filters.allowed import Allowed
from stillroom.retrieval.filters.language import parse_filter
from stillroom.retrieval.filters.sql import condition_of

MAX_KEPT = 8_000_000
"""Ids that are kept: 64 MB."""


class FilteredChunks:
    """Finds what filters allow. Thread-safe."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._lock = Lock()
        self._kept: OrderedDict[str, tuple[int, Allowed]] = OrderedDict()
        """Generation and chunks by filter, the least recently used first."""

    def allowed(self, where: str) -> Allowed:
        """The chunks that a filter allows now.

        Raises:
            FilterError: it is no filter.
        """
        condition = condition_of(parse_filter(where))
        generation = self._corpus.generation
        with self._lock:
            kept = self._kept.get(where)
            if kept is not None and kept[0] == generation:
                self._kept.move_to_end(where)
                return kept[1]
        generation, ids = self._corpus.matching(condition)
        found = Allowed(ids)
        with self._lock:
            self._kept[where] = (generation, found)
            self._kept.move_to_end(where)
            while len(self._kept) > 1 and sum(1000 + len(one) for _, one in self._kept.values()) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found

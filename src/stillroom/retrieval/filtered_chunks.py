"""The chunks that a filter allows: found once per filter and generation of the corpus, then shared by all searches."""

from collections import OrderedDict
from difflib import get_close_matches
from threading import Lock

from stillroom.errors import FilterError
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.filters.language import Filter, fields_of, parse_filter
from stillroom.retrieval.filters.sql import BUILT_IN, condition_of
from stillroom.retrieval.store.corpus import Corpus

MAX_KEPT = 8_000_000
"""Ids that are kept: 64 MB."""
_MAX_FIELDS = 1000
"""Names of fields that are looked at; with more, an unknown one is not complained about."""
_MAX_SHOWN, _MAX_NAME = 10, 100


class FilteredChunks:
    """Finds what filters allow. Thread-safe."""

    def __init__(self, corpus: Corpus) -> None:
        self.hides_folders = False
        """Whether `path` tells nothing of the folders of this machine; see `condition_of`. Set before the first use."""
        self._corpus = corpus
        self._lock = Lock()
        self._kept: OrderedDict[str, tuple[int, AllowedIds, str]] = OrderedDict()
        """By filter: the generation, the chunks, and why there can be none; the least recently used first."""

    def allowed(self, where: str) -> AllowedIds:
        """The chunks that a filter allows now.

        Raises:
            FilterError: it is no filter, or allows nothing and names a field that no document has.
        """
        allowed, complaint = self._found(where, parse_filter(where))
        if complaint:
            raise FilterError(complaint)
        return allowed

    def _found(self, where: str, parsed: Filter) -> tuple[AllowedIds, str]:
        generation = self._corpus.generation
        with self._lock:
            kept = self._kept.get(where)
            if kept is not None and kept[0] == generation:
                self._kept.move_to_end(where)
                return kept[1:]
        generation, ids = self._corpus.matching(condition_of(parsed, hides_folders=self.hides_folders))
        found, complaint = AllowedIds(ids), "" if len(ids) else self._complaint(parsed)
        with self._lock:
            self._kept[where] = (generation, found, complaint)
            self._kept.move_to_end(where)
            while len(self._kept) > 1 and sum(1000 + len(one) for _, one, _ in self._kept.values()) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found, complaint

    def _complaint(self, parsed: Filter) -> str:
        """Names fields of a filter that no document has, and those that may be meant; empty if there is none such."""
        known = [*BUILT_IN, *self._corpus.field_names(_MAX_FIELDS)]
        unknown = sorted(fields_of(parsed) - set(known))
        if not unknown or len(known) >= _MAX_FIELDS or not self._corpus.num_chunks:
            return ""
        near = [one for name in unknown for one in get_close_matches(name, known, n=3)]
        names = ", ".join(dict.fromkeys(near)) or ", ".join(known[:_MAX_SHOWN])
        what = "has the field" if len(unknown) == 1 else "has any of the fields"
        shown = ", ".join(repr(name[:_MAX_NAME]) for name in unknown[:_MAX_SHOWN])
        return f"the filter allows no document, and none {what} {shown}; known fields are {names}"

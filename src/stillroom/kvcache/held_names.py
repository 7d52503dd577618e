"""Tells other processes which KV is kept here: a bounded log of the names that the knowledge tree gains and loses.

A name is the key or the content of a node (`tree.pieces`). The log holds every name that is kept, in the order of its
last change, and the names that were lost lately.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

from stillroom.core.kv import Tier
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree

_MAX_LOST = 65_536
"""Lost names that are remembered, about 150 bytes each. A reader that has missed more gets all names that are kept."""


@dataclass(frozen=True, slots=True)
class HeldChanges:
    """What changed since a reader asked last."""

    sequence: int
    """Number of the last change, for the next question."""
    is_all: bool
    """Whether `tiers` are all names that are kept."""
    tiers: Mapping[bytes, Tier | None]
    """Fastest tier by name; None: not kept any more."""


class HeldNames:
    """Log of the names that a tree holds. `read` is called by the engine's thread; the others by any thread."""

    def __init__(self, tree: KnowledgeTree, *, only_prepared: bool = False, max_lost: int = _MAX_LOST) -> None:
        """
        Args:
            only_prepared: as in `KnowledgeTree.tier_of`: what answers can place here.
        """
        self._tree = tree
        self._only_prepared = only_prepared
        self._max_lost = max_lost
        self._lock = Lock()
        self._sequence = 0
        self._complete_since = 0
        """Changes behind this one are all known."""
        self._held: dict[bytes, tuple[int, Tier]] = {}  # in order of the last change, as `_lost`
        self._lost: dict[bytes, int] = {}
        self._changed = tree.watch_changes()
        self._changed |= {name for node in tree for name in (node.key, node.content)}
        self.read()

    def read(self) -> None:
        """Take over what has changed in the tree. O(changes)."""
        tiers = [(name, self._tree.tier_of(name, only_prepared=self._only_prepared)) for name in sorted(self._changed)]
        self._changed.clear()
        with self._lock:
            for name, tier in tiers:
                before = self._held.get(name)
                if tier is not (None if before is None else before[1]):
                    self._change(name, tier)

    def since(self, sequence: int) -> HeldChanges:
        """Return the changes after one that an earlier call returned, each name once with its present tier.

        Args:
            sequence: 0, or any other that was not returned or is too old: all names that are kept.
        """
        with self._lock:
            if not self._complete_since <= sequence <= self._sequence or sequence == 0:
                return HeldChanges(self._sequence, True, {name: tier for name, (_, tier) in self._held.items()})
            return HeldChanges(self._sequence, False, dict(self._changes_after(sequence)))

    def _change(self, name: bytes, tier: Tier | None) -> None:
        self._sequence += 1
        self._held.pop(name, None)
        self._lost.pop(name, None)
        if tier is not None:
            self._held[name] = self._sequence, tier
            return
        self._lost[name] = self._sequence
        if len(self._lost) > self._max_lost:
            oldest = next(iter(self._lost))
            self._complete_since = self._lost.pop(oldest)

    def _changes_after(self, sequence: int) -> Iterator[tuple[bytes, Tier | None]]:
        for name, (at, tier) in reversed(self._held.items()):
            if at <= sequence:
                break
            yield name, tier
        for name, at in reversed(self._lost.items()):
            if at <= sequence:
                break
            yield name, None

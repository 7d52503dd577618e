"""Drops training text that overlaps with held-out documents, and splits names of generated worlds.

Passages of any source that have a held-out title or share runs of words with a held-out passage are dropped.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["train", "eval"]

SHINGLE_WORDS = 8
MAX_SHARED = 2
"""Shingles that a passage may share with held-out text: common phrases share few, copies share dozens."""
_SEEN_SHARE = 0.5
"""Share of shingles in earlier passages from which on a passage is a copy."""
_WORD = re.compile(r"\w+")


def held_out(names: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """Return the held-out share of the names by a hash of seed and name, independent of the other names."""
    limit = share * 2**64

    def place(name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "big")

    return frozenset(name for name in names if place(name) < limit)


def shingles(text: str) -> frozenset[int]:
    """Return process-independent hashes of every run of `SHINGLE_WORDS` words; of a shorter text, its own hash."""
    words = _WORD.findall(text.lower())
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return frozenset(_hash(words[start : start + SHINGLE_WORDS]) for start in starts)


def _hash(words: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest(), "big")


def same_name(title: str) -> str:
    """Normalise a title, so that titles that differ in punctuation or case are equal."""
    return " ".join(_WORD.findall(title.replace("_", " ").lower()))


@dataclass(slots=True)
class Filter:
    """Admits each passage once, and none that overlaps with held-out documents."""

    titles: frozenset[str]
    """Titles of held-out documents, normalised by `same_name`."""
    held: frozenset[int]
    """Shingles of all held-out text."""
    dropped: dict[str, int] = field(default_factory=lambda: {"title": 0, "shingles": 0, "copy": 0})
    """Number of dropped passages by reason."""
    _seen: set[int] = field(default_factory=set)

    def admits(self, title: str, text: str) -> bool:
        """Return whether a passage is admitted, and record it if so."""
        reason = self._objection(title, text)
        if reason:
            self.dropped[reason] += 1
            return False
        self._seen |= shingles(text)
        return True

    def _objection(self, title: str, text: str) -> str:
        if title and same_name(title) in self.titles:
            return "title"
        own = shingles(text)
        if len(own & self.held) > MAX_SHARED:
            return "shingles"
        return "copy" if len(own & self._seen) >= _SEEN_SHARE * len(own) else ""

"""Which documents are for evaluation only, and which other text says the same and has to go.

A document is held out whole. Nothing that shares runs of words with it is seen in training, whatever its source.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["train", "eval"]

SHINGLE_WORDS = 8
MAX_SHARED = 2
"""Shingles that a passage may share with held-out text: set phrases do, copies share dozens."""
_SEEN_SHARE = 0.5
"""A passage with so many of its shingles in earlier ones is a copy of them."""
_WORD = re.compile(r"\w+")


def held_out(documents: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """The share of the documents that is for evaluation, by a hash of seed and name: it depends on no other name."""
    limit = share * 2**64

    def place(name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "big")

    return frozenset(name for name in documents if place(name) < limit)


def shingles(text: str) -> frozenset[int]:
    """Every run of `SHINGLE_WORDS` words, as a hash that is the same in every process; of a shorter text, itself."""
    words = _WORD.findall(text.lower())
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return frozenset(_hash(words[start : start + SHINGLE_WORDS]) for start in starts)


def _hash(words: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest(), "big")


def same_name(title: str) -> str:
    """Titles that differ in punctuation or case only name the same document."""
    return " ".join(_WORD.findall(title.replace("_", " ").lower()))


@dataclass(slots=True)
class Filter:
    """Lets each passage pass once, and none that is in held-out documents."""

    titles: frozenset[str]
    """Of held-out documents, as `same_name` gives them."""
    held: frozenset[int]
    """Shingles of all held-out text."""
    dropped: dict[str, int] = field(default_factory=lambda: {"title": 0, "shingles": 0, "copy": 0})
    """How many passages did not pass, by reason."""
    _seen: set[int] = field(default_factory=set)

    def admits(self, title: str, text: str) -> bool:
        """Remembers the text if it does."""
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

"""Which of the ranked chunks a search shows: a repeated text once, table rules and bare headings after all others.

It sees the candidates of a search only, so only chunks that the search's filter allows.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.retrieval.ranking import Ranking

_MIN_WORDS = 4
"""Least words of a text that is never taken for a bare heading."""
_MIN_OWN_WORDS = 8
"""Least words of a text that says the same under every heading; `Yes.` does not."""
_BATCH = 16
"""Least chunks that are read at a time, so that copies, which are close in a ranking, are found."""
_WORD = re.compile(r"[^\W\d_]+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\uffff\U00020000-\U0003ffff]")
"""Letters of scripts without spaces between words. Each counts as a word."""
_ENDS = (".", "!", "?", ":", ";", "\u2026", "\u3002", "\uff01", "\uff1f")
_CLOSERS = "\"'`*_)]\u201d\u2019"


@dataclass(frozen=True, slots=True)
class Selected:
    """A chunk of a ranking."""

    chunk: Chunk
    score: float
    copies: list[Chunk] = field(default_factory=list)
    """Chunks with the same text that were ranked lower, best first."""


def select(ranking: Ranking, fetch: Callable[[Sequence[ChunkId]], Mapping[ChunkId, Chunk]], num: int) -> list[Selected]:
    """Return the first `num` texts of a ranking, each once; if there are too few, table rules and bare headings follow.

    Args:
        fetch: ids -> chunks; those that do not exist any more are absent.
    """
    found: dict[Hashable, Selected] = {}
    texts: list[Selected] = []
    bare: list[Selected] = []
    step = max(num, _BATCH)
    for start in range(0, len(ranking), step):
        batch = ranking[start : start + step]
        chunks = fetch([chunk_id for chunk_id, _ in batch])
        for chunk_id, score in batch:
            chunk = chunks.get(chunk_id)
            if chunk is None:
                continue
            key = same_text(chunk)
            if key in found:
                found[key].copies.append(chunk)
                continue
            found[key] = one = Selected(chunk, score)
            (bare if is_bare(chunk) else texts).append(one)
        if len(texts) >= num:
            break
    return [*texts, *bare][:num]


def is_bare(chunk: Chunk) -> bool:
    """Whether a chunk says nothing by itself: it has no letters, or is a heading without a text.

    A heading has under four words, no digit and no end of a sentence, and repeats words of the headings above it, or
    has only the document's title above it. (`None.` under *Security implications* is an answer, and so is `port 8321`.)
    A record of a JSONL file is no heading: its author made it a unit.
    """
    text = chunk.text
    words = _WORD.findall(text)
    if not words:
        return True
    num_words = sum(len(_UNSPACED.findall(word)) or 1 for word in words)
    ends_sentence = text.rstrip().rstrip(_CLOSERS).endswith(_ENDS)
    if num_words >= _MIN_WORDS or ends_sentence or chunk.record_id is not None or any(map(str.isdigit, text)):
        return False
    return not chunk.heading_path or _folded(words) <= _folded(_WORD.findall(chunk.heading))


def _folded(words: Sequence[str]) -> set[str]:
    return {word.casefold() for word in words}


def same_text(chunk: Chunk) -> Hashable:
    """Equal for chunks of which one is enough."""
    words = chunk.text.split()
    text = " ".join(words)
    return text if len(words) >= _MIN_OWN_WORDS else (chunk.heading, text)

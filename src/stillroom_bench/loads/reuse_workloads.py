"""Workloads of `stillroom bench policies`: sequences of prompts as pieces of the knowledge tree.

Generated workloads have the document popularity that RAGCache measured (Figure 5); recorded ones are traces of a data
folder in their order. The key of a piece is a hash over everything before it, as in `PrefixKeys`, but over the names
of documents instead of their text, since only equality matters here.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.errors import UsageError
from stillroom.kvcache.tree.pieces import Piece
from stillroom_bench.loads.retrieved_traces import QUESTION_TOKENS, count_tokens, read_retrieved

SYSTEM_TOKENS = 64
TRACE_BLOCK_TOKENS = 512
"""Tokens per hash id of the Mooncake trace."""

_ROOT = NodeKey(hashlib.sha256(b"bench policies").digest())


@dataclass(frozen=True)
class Ask:
    """One request of a workload."""

    prompt: SegmentedPrompt
    pieces: tuple[Piece, ...]
    """Pieces of the prompt, without the question."""
    free_tokens: int
    """Tokens of the system prompt, which every request shares; hit rates exclude them."""

    @cached_property
    def segment_lengths(self) -> list[int]:
        return [len(segment.token_ids) for segment in self.prompt.segments]

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.segment_lengths)


@dataclass(frozen=True)
class ReuseWorkload:
    """Requests in order of arrival."""

    name: str
    asks: tuple[Ask, ...]
    block_size: int = 16

    @cached_property
    def num_document_tokens(self) -> int:
        """Document tokens of all requests: the denominator of hit rates."""
        return sum(sum(piece.num_tokens for piece in ask.pieces) - ask.free_tokens for ask in self.asks)

    @cached_property
    def num_distinct_blocks(self) -> int:
        """Blocks that hold every distinct piece."""
        sizes = {piece.key: -(-piece.num_tokens // self.block_size) for ask in self.asks for piece in ask.pieces}
        return sum(sizes.values())

    @cached_property
    def num_blocks_of_largest(self) -> int:
        """Blocks of the largest request."""
        return max(sum(-(-length // self.block_size) for length in ask.segment_lengths) for ask in self.asks)


@dataclass(frozen=True, slots=True)
class Popularity:
    """A popularity distribution of documents."""

    name: str
    top_share: float
    """Share of requests for the most popular 3 % of documents."""


MMLU_LIKE = Popularity("mmlu-like", 0.60)
"""RAGCache section 3.2: "the top 3% documents are referred to by 60% requests in the MMLU dataset"."""
NQ_LIKE = Popularity("nq-like", 0.30)
"""Flatter; RAGCache plots Natural Questions in Figure 5 without a number, so the share is Stillroom's choice."""


def zipf_exponent(num_documents: int, top_share: float, top: float = 0.03) -> float:
    """Find by bisection the Zipf exponent that gives the first `top` of documents the share `top_share`."""
    ranks = np.arange(1, num_documents + 1, dtype=float)
    num_top = max(1, round(top * num_documents))
    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = ranks**-middle
        if weights[:num_top].sum() / weights.sum() < top_share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of document lengths, in tokens."""

    median: float = 400.0
    spread: float = 0.8
    """Sigma of the logarithm."""
    most: int = 4096

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw lengths of at least 32 tokens."""
        drawn = rng.lognormal(np.log(self.median), self.spread, count)
        return np.clip(drawn, 32, self.most).astype(int).tolist()  # type: ignore[no-any-return]


def windows_of(workload: ReuseWorkload, count: int, size: int, *, first: int = 0) -> list[ReuseWorkload]:
    """Return `count` disjoint windows of at most `size` consecutive requests, at equal distances from request `first`
    on; fewer if there are not enough requests."""
    left = len(workload.asks) - first
    count = max(0, min(count, left))
    starts = [first + number * left // count for number in range(count)] + [len(workload.asks)]
    return [replace(workload, asks=workload.asks[start : min(start + size, end)]) for start, end in pairwise(starts)]


def changing_workload(
    lengths: Lengths, *, num_changes: int, num_asks: int = 600, num_documents: int = 400, top_k: int = 2, seed: int = 0
) -> ReuseWorkload:
    """Generate requests whose popular documents change at once, `num_changes` times, at equal distances.

    Popularity, and the documents beside the first, are those of `made_workload` with `MMLU_LIKE`: at each change every
    document takes the place of another one in the order of popularity, and keeps its length and similar documents.
    """
    rng = np.random.default_rng([seed, num_changes, 5])
    weights = np.arange(1, num_documents + 1, dtype=float) ** -zipf_exponent(num_documents, MMLU_LIKE.top_share)
    shares = weights / weights.sum()
    tokens = lengths.draw(rng, num_documents)
    similar = rng.choice(num_documents, size=(num_documents, 4 * top_k), p=shares).tolist()
    phase = -(-num_asks // (num_changes + 1))
    asks = []
    for number in range(num_asks):
        if number % phase == 0:
            order = rng.permutation(num_documents).tolist()
        chosen = [order[rng.choice(num_documents, p=shares)]]
        while len(chosen) < top_k:
            near = (one for one in similar[chosen[0]] if one not in chosen)
            one = next(near, None) if rng.random() < 0.5 else None
            while one is None or one in chosen:
                one = order[rng.choice(num_documents, p=shares)]
            chosen.append(one)
        asks.append(document_ask([(str(one), tokens[one]) for one in chosen]))
    return ReuseWorkload(f"{num_changes} changes", tuple(asks))


def made_workload(
    popularity: Popularity, top_k: int, *, num_asks: int, num_documents: int = 1000, follow: float = 0.5, seed: int = 0
) -> ReuseWorkload:
    """Generate requests for `top_k` documents each, of log-normal length (median 400 tokens, sigma 0.8, 32 to 4,096).

    The first document is drawn by popularity. Each further one is, with probability `follow`, the next on the first
    document's fixed list of similar documents, else drawn by popularity. So documents co-occur neither at random nor
    always in the same sets.
    """
    rng = np.random.default_rng([seed, top_k, round(1000 * popularity.top_share)])
    weights = np.arange(1, num_documents + 1, dtype=float) ** -zipf_exponent(num_documents, popularity.top_share)
    shares = weights / weights.sum()
    lengths = np.clip(rng.lognormal(np.log(400), 0.8, num_documents), 32, 4096).astype(int)
    lengths = rng.permutation(lengths)
    similar = rng.choice(num_documents, size=(num_documents, 4 * top_k), p=shares)
    draws = iter(rng.choice(num_documents, size=num_asks * top_k * 20, p=shares).tolist())
    follows = rng.random((num_asks, top_k)) < follow
    asks = []
    for row in follows.tolist():
        chosen = [next(draws)]
        for is_following in row[1:]:
            near = (one for one in similar[chosen[0]].tolist() if one not in chosen)
            one = next(near, None) if is_following else None
            while one is None or one in chosen:
                one = next(draws)
            chosen.append(one)
        asks.append(document_ask([(str(one), int(lengths[one])) for one in chosen]))
    return ReuseWorkload(f"{popularity.name}, k={top_k}", tuple(asks))


def document_ask(documents: Iterable[tuple[str, int]], question_tokens: int = QUESTION_TOKENS) -> Ask:
    """Make a request with a system prompt, documents (name, tokens) and a question."""
    named = [("system", SYSTEM_TOKENS), *documents]
    kinds = [SegmentKind.SYSTEM] + [SegmentKind.CHUNK] * (len(named) - 1)
    pieces = _chain(named, kinds)
    segments = [Segment(piece.kind, _tokens(piece.num_tokens), piece.chunk_id) for piece in pieces]
    question = Segment(SegmentKind.QUESTION, _tokens(question_tokens))
    return Ask(SegmentedPrompt((*segments, question)), pieces, SYSTEM_TOKENS)


def trace_workload(path: Path, num_asks: int) -> ReuseWorkload:
    """Read the first requests of a Mooncake trace.

    A prompt is one segment of pieces of 512 tokens, whose last block is always computed.

    Raises:
        UsageError: the file is not such a trace.
    """
    asks = []
    try:
        with path.open(encoding="utf-8") as lines:
            for _, line in zip(range(num_asks), lines, strict=False):
                ids = json.loads(line)["hash_ids"]
                if len(ids) > 1:
                    asks.append(_trace_ask([str(one) for one in ids]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a trace with `hash_ids` in each line: {error}") from None
    return ReuseWorkload(path.stem, tuple(asks), TRACE_BLOCK_TOKENS)


def _trace_ask(blocks: Sequence[str]) -> Ask:
    kept = blocks[:-1]
    pieces = _chain([(name, TRACE_BLOCK_TOKENS) for name in kept], [SegmentKind.QUESTION] * len(kept), is_whole=True)
    prompt = SegmentedPrompt((Segment(SegmentKind.QUESTION, _tokens(TRACE_BLOCK_TOKENS * len(blocks))),))
    return Ask(prompt, pieces, 0)


def retrieved_workload(path: Path, top_k: int, num_asks: int) -> ReuseWorkload:
    """Read a trace of retrieved passages, with the first `top_k` passages of each request.

    Raises:
        UsageError: the file is not such a trace.
    """
    asks = [
        document_ask([(text, count_tokens(text)) for text in one.documents[:top_k]])
        for one in read_retrieved(path)[:num_asks]
    ]
    return ReuseWorkload(f"{path.stem}, k={top_k}", tuple(asks))


def _chain(
    named: Sequence[tuple[str, int]], kinds: Sequence[SegmentKind], *, is_whole: bool = False
) -> tuple[Piece, ...]:
    """Return consecutive pieces.

    Args:
        is_whole: all pieces belong to one segment.
    """
    pieces: list[Piece] = []
    parent, start = _ROOT, 0
    for index, ((name, num_tokens), kind) in enumerate(zip(named, kinds, strict=True)):
        content = hashlib.sha256(name.encode()).digest()
        key = NodeKey(hashlib.sha256(parent + content).digest())
        chunk_id = ChunkId(int.from_bytes(content[:6], "little")) if kind is SegmentKind.CHUNK else None
        pieces.append(Piece(key, parent, content, start, num_tokens, 0 if is_whole else index, kind, chunk_id))
        parent, start = key, start + num_tokens
    return tuple(pieces)


@cache
def _tokens(count: int) -> tuple[int, ...]:
    """Return placeholder tokens; the keys of pieces are made from document names."""
    return (0,) * count

"""Requests of `stillroom bench cluster`: recorded retrievals, and generated topics and independent chunks.

Tokens are drawn from the text's hash or the chunk's number, so equal chunks have equal tokens and no others do.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stillroom.core.ids import ChunkId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.planner.simulation.simulated_corpus import PreparingPrompt, SimulatedCorpus
from stillroom.planner.simulation.stepped_engine import Prompt, Tokens
from stillroom_bench.loads.retrieved_traces import QUESTION_TOKENS, count_tokens, read_retrieved

SYSTEM_TOKENS = 64
TOPIC_CHUNKS = 10
"""Chunks of a generated topic."""
CHUNK_TOKENS = 200
"""Length of a generated chunk."""
_VOCABULARY = 30_000


@dataclass(frozen=True)
class ClusterTraffic:
    """Questions with their chunks; every draw has the same corpus."""

    name: str
    chunks: tuple[Tokens, ...]
    retrieved: tuple[tuple[int, ...], ...]
    """Chunks of each question, in the order of the prompt."""
    question_tokens: tuple[int, ...]
    """Length of each question."""
    popularity: float | None = None
    """Exponent of Zipf's law over the questions; None: each question is asked once, in random order."""

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of all chunks together."""
        return sum(map(len, self.chunks))

    def corpus(self) -> SimulatedCorpus:
        """Return the corpus, each chunk a document of its own."""
        return SimulatedCorpus(
            [[Segment(SegmentKind.CHUNK, tokens, ChunkId(1 + at))] for at, tokens in enumerate(self.chunks)]
        )

    def windows(self) -> list[PreparingPrompt]:
        """Return what to prepare: each chunk is a document of its own, behind the system message."""
        system = Segment(SegmentKind.SYSTEM, _tokens("system", SYSTEM_TOKENS))
        question = Segment(SegmentKind.QUESTION, _tokens("preparing", 1))
        found = []
        for chunk_id, tokens in enumerate(self.chunks, start=1):
            chunk = Segment(SegmentKind.CHUNK, tokens, ChunkId(chunk_id))
            found.append(PreparingPrompt(SegmentedPrompt((system, chunk, question)), frozenset({ChunkId(chunk_id)})))
        return found

    def prompts(self, count: int, seed: Sequence[int]) -> list[Prompt]:
        """Draw prompts. Without popularity at most one of each question."""
        rng = np.random.default_rng(seed)
        num_questions = len(self.retrieved)
        order = rng.permutation(num_questions)
        if self.popularity is not None:
            weights = np.arange(1, num_questions + 1, dtype=np.float64) ** -self.popularity
            order = order[rng.choice(num_questions, size=count, p=weights / weights.sum())]
        system = _tokens("system", SYSTEM_TOKENS)
        return [
            (
                system,
                *(self.chunks[chunk] for chunk in self.retrieved[at]),
                _tokens(f"question {at}", self.question_tokens[at]),
            )
            for at in order[:count].tolist()
        ]


def trace_name(path: Path) -> str:
    return path.stem.removeprefix("rag_")


def recorded_traffic(path: Path, popularity: float | None = None) -> ClusterTraffic:
    """Read a trace of `retrieved_traces`; raises as `read_retrieved`."""
    requests = read_retrieved(path)
    numbers: dict[str, int] = {}
    retrieved = tuple(
        tuple(numbers.setdefault(text, len(numbers)) for text in dict.fromkeys(request.documents))
        for request in requests
    )
    chunks = tuple(_tokens(text, count_tokens(text)) for text in numbers)
    name = trace_name(path) + ("" if popularity is None else ", repeated")
    return ClusterTraffic(name, chunks, retrieved, tuple(one.question_tokens for one in requests), popularity)


def made_traffic(num_chunks: int, num_questions: int, k: int, seed: int, *, has_topics: bool) -> ClusterTraffic:
    """Make questions for chunks with Zipf popularity, exponent 1.

    Args:
        k: chunks of a question, at most `TOPIC_CHUNKS`.
        has_topics: a question takes chunks of one topic; else each chunk is drawn independently.
    """
    rng = np.random.default_rng([seed, 11])
    chunks = tuple(_tokens(f"chunk {number}", CHUNK_TOKENS) for number in range(num_chunks))
    size = num_chunks // TOPIC_CHUNKS if has_topics else num_chunks
    weights = 1.0 / np.arange(1, size + 1)
    weights /= weights.sum()

    def question() -> tuple[int, ...]:
        if not has_topics:
            return tuple(rng.choice(size, size=k, replace=False, p=weights).tolist())
        first = int(rng.choice(size, p=weights)) * TOPIC_CHUNKS
        return tuple((first + rng.permutation(TOPIC_CHUNKS)[:k]).tolist())

    retrieved = tuple(question() for _ in range(num_questions))
    name = "topics" if has_topics else "independent chunks"
    return ClusterTraffic(name, chunks, retrieved, (QUESTION_TOKENS,) * num_questions)


def _tokens(name: str, length: int) -> Tokens:
    rng = np.random.default_rng([zlib.crc32(name.encode()), len(name)])
    return tuple(rng.integers(1, _VOCABULARY, size=length).tolist())

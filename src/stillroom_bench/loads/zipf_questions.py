"""Questions about documents of Zipf popularity, a given share of which are about documents never asked for before.

The number of documents follows from the number of questions, the exponent and that share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import UsageError
from stillroom_bench.loads.popularity import Companions

MIN_DOCUMENTS = 3
"""A document and the two that are related to it."""
_MAX_DOCUMENTS = 100_000
_NUM_RELATED = MIN_DOCUMENTS - 1
_NUM_DRAWS = 2000
_RANKS, _TOPICS, _RELATED, _CHUNKS = range(4)
"""What a random generator is for."""


@dataclass(frozen=True, slots=True)
class DocumentQuestion:
    """A question with the chunks that its search returns."""

    topic: int
    """The document that it is about."""
    chunks: tuple[int, ...]
    """Best first; chunk c of document d is d * document_chunks + c."""
    is_first: bool
    """Whether no earlier question of the sequence is about this document."""


def zipf_shares(num_documents: int, exponent: float) -> NDArray[np.float64]:
    """Return the probability of each rank under Zipf's law, [num_documents]."""
    weights = np.arange(1, num_documents + 1, dtype=np.float64) ** -exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def expected_first_share(num_documents: int, num_questions: int, exponent: float) -> float:
    """Return the expected share of questions about documents that no earlier question of the sequence asked for."""
    shares = zipf_shares(num_documents, exponent)
    return float((1.0 - (1.0 - shares) ** num_questions).sum()) / num_questions


def documents_for(num_questions: int, first_share: float, exponent: float) -> int:
    """Return the smallest number of documents with which the expected share of first questions reaches `first_share`.

    At least `MIN_DOCUMENTS`.

    Raises:
        UsageError: not even 100,000 documents are enough.
    """
    low, high = MIN_DOCUMENTS, _MAX_DOCUMENTS
    if expected_first_share(high, num_questions, exponent) < first_share:
        raise UsageError(
            f"{num_questions} questions with a Zipf exponent of {exponent:g} never reach a share of {first_share:.0%} "
            "first questions; lower the exponent or the share"
        )
    while low < high:
        middle = (low + high) // 2
        if expected_first_share(middle, num_questions, exponent) < first_share:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class ZipfQuestions:
    """A corpus of documents with equally many chunks, and the questions about them.

    A search returns chunks of the topic, at least half of the prompt as far as the document has them, and chunks of two
    related documents, which are drawn by popularity once per topic. A chunk of the topic is the best.
    """

    num_documents: int
    exponent: float
    document_chunks: int
    num_chunks: int
    """Chunks of a search; at most three documents' worth."""
    companions: Companions
    """`fixed`: every question about a document finds the same chunks in the same order; `drawn`: each finds others."""
    seed: int

    def __post_init__(self) -> None:
        assert self.num_documents >= MIN_DOCUMENTS and self.num_chunks <= MIN_DOCUMENTS * self.document_chunks

    def draw(self, count: int, first_share: float) -> list[DocumentQuestion]:
        """Return questions in order of arrival; of 2,000 draws the first whose share of first questions is nearest."""
        draws = self._topics(_NUM_DRAWS * count, 0).reshape(_NUM_DRAWS, count)
        num_distinct = 1 + (np.diff(np.sort(draws, axis=1), axis=1) > 0).sum(axis=1)
        return self._questions(draws[np.argmin(np.abs(num_distinct - round(first_share * count)))].tolist(), 0)

    def draw_earlier(self, count: int) -> list[DocumentQuestion]:
        """Return questions of the same law, drawn independently of those of `draw`."""
        return self._questions(self._topics(count, 1).tolist(), 1)

    def _topics(self, count: int, sequence: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([self.seed, _TOPICS, sequence])
        return rng.choice(self.num_documents, size=count, p=self._popularity())

    def _popularity(self) -> NDArray[np.float64]:
        """The probability of each document; its number tells nothing about it."""
        shares = np.empty(self.num_documents)
        by_rank = np.random.default_rng([self.seed, _RANKS]).permutation(self.num_documents)
        shares[by_rank] = zipf_shares(self.num_documents, self.exponent)
        return shares

    def _questions(self, topics: Sequence[int], sequence: int) -> list[DocumentQuestion]:
        seen: set[int] = set()
        questions = []
        for number, topic in enumerate(topics):
            is_fixed = self.companions == "fixed"
            chunks = self._search(topic, [topic] if is_fixed else [topic, sequence, number])
            questions.append(DocumentQuestion(topic, chunks, topic not in seen))
            seen.add(topic)
        return questions

    def _search(self, topic: int, drawn_by: Sequence[int]) -> tuple[int, ...]:
        rng = np.random.default_rng([self.seed, _CHUNKS, *drawn_by])
        num_own = min(math.ceil(self.num_chunks / 2), self.document_chunks)
        own = rng.permutation(self._chunks_of(topic))[:num_own].tolist()
        related = [chunk for document in self._related(topic) for chunk in self._chunks_of(document)]
        others = rng.permutation(related)[: self.num_chunks - num_own].tolist()
        return (own[0], *rng.permutation([*own[1:], *others]).tolist())

    def _related(self, topic: int) -> list[int]:
        shares = self._popularity()
        shares[topic] = 0.0
        rng = np.random.default_rng([self.seed, _RELATED, topic])
        related: list[int] = rng.choice(
            self.num_documents, size=_NUM_RELATED, replace=False, p=shares / shares.sum()
        ).tolist()
        return related

    def _chunks_of(self, document: int) -> list[int]:
        return list(range(document * self.document_chunks, (document + 1) * self.document_chunks))

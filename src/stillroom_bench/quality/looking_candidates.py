"""Candidates of `stillroom bench looking`: chunks of a question's own and other documents, or what a search found."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.answer_quality.beir import read_judged_queries
from stillroom.core.document import Chunk
from stillroom.retrieval.fusion import convex
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom_bench.quality.context_questions import ContextQuestion, Place, renumbered

Floats = NDArray[np.float64]

_NAME = re.compile(r"(?:[A-Z]\w*\s)*[A-Z]\w*")


@dataclass(frozen=True, slots=True)
class CandidateQuestion:
    """A question with its candidates: `question.retrieved`, in an order by chance."""

    question: ContextQuestion
    num_missing: int = 0
    """Needed passages that are no candidates."""

    @property
    def chunks(self) -> list[Chunk]:
        return [self.question.chunk(place) for place in self.question.retrieved]

    @property
    def is_needed(self) -> NDArray[np.bool_]:
        """[candidates]"""
        return np.array([place in self.question.needed for place in self.question.retrieved])


def draw_candidates(questions: Sequence[ContextQuestion], count: int, seed: int) -> list[CandidateQuestion]:
    """Give each question `count` candidates, fewer if there are no more chunks.

    The needed chunks come first, then those that were retrieved, then others of the same documents, then documents of
    other questions that share no name with the question, so that they cannot answer it.
    """
    return [_drawn(number, questions, count, random.Random(f"{seed} {number}")) for number in range(len(questions))]


def _drawn(number: int, questions: Sequence[ContextQuestion], count: int, rng: random.Random) -> CandidateQuestion:
    question = questions[number]
    own = [(at, chunk) for at, document in enumerate(question.documents) for chunk in range(len(document))]
    rng.shuffle(own)
    places = list(dict.fromkeys([*question.needed, *question.retrieved, *own]))
    documents = list(question.documents)
    names = names_in(question.question)
    others = [other for at, other in enumerate(questions) if at != number]
    rng.shuffle(others)
    for document in (document for other in others for document in other.documents):
        if len(places) >= count:
            break
        if not any(name in chunk.text for chunk in document for name in names):
            places += [(len(documents), chunk) for chunk in range(len(document))]
            documents.append(renumbered(document, len(documents)))
    candidates = places[: max(count, len(question.needed))]
    rng.shuffle(candidates)
    return CandidateQuestion(replace(question, documents=tuple(documents), retrieved=tuple(candidates)))


def names_in(question: str) -> frozenset[str]:
    """Return the runs of capitalised words, without the question's first word."""
    return frozenset(_NAME.findall(question.partition(" ")[2]))


def write_corpus(questions: Sequence[CandidateQuestion], folder: Path) -> dict[str, str]:
    """Write the texts of all candidates as a corpus in BEIR layout; return the record of each text."""
    records = {
        text: str(number) for number, text in enumerate({chunk.text: None for one in questions for chunk in one.chunks})
    }
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"_id": record, "text": text}) for text, record in records.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return records


def search_scores(kb: KnowledgeBase, question: str, records: Sequence[str]) -> Floats:
    """Return the score of each record by the product's fusion rule among all chunks; -inf if no index finds it."""
    found = kb.candidates(question, kb.num_chunks)
    record_of = kb.record_ids(list(found.cosines))
    best: dict[str, float] = {}
    for chunk_id, score in convex(found.cosines, found.bm25):
        best.setdefault(record_of[chunk_id], score)
    return np.array([best.get(record, -np.inf) for record in records])


def with_neighbours(question: ContextQuestion, scores_C: Floats) -> Floats:
    """Add to the score of each candidate half of the better of the chunks directly before and after it, if they are
    candidates: a search that knows documents, for the price of none."""
    found = dict(zip(question.retrieved, scores_C.tolist(), strict=True))
    return np.array(
        [
            score + 0.5 * max(found.get((document, chunk - 1), 0.0), found.get((document, chunk + 1), 0.0), 0.0)
            for (document, chunk), score in found.items()
        ]
    )


def searched(
    dataset: Path, kb: KnowledgeBase, count: int, limit: int | None
) -> list[tuple[CandidateQuestion, Floats, float]]:
    """Return the questions of a data set with the first chunks of a search, their scores, and the search's seconds."""
    queries, qrels = read_judged_queries(dataset)
    found = []
    for query, text in list(queries.items())[:limit]:
        result = kb.search(text, top_k=count)
        relevant = {record for record, grade in qrels[query].items() if grade > 0}
        places: tuple[Place, ...] = tuple((number, 0) for number in range(len(result.results)))
        chunks = [scored.chunk for scored in result.results]
        first = {chunk.record_id: place for place, chunk in reversed(list(zip(places, chunks, strict=True)))}
        needed = tuple(place for record, place in first.items() if record in relevant)
        documents = tuple((chunk,) for chunk in chunks)
        question = ContextQuestion(documents, places, needed, text, "", dataset.name, 0)
        scores = np.array([scored.score for scored in result.results])
        seconds = result.embed_seconds + result.search_seconds
        found.append((CandidateQuestion(question, len(relevant) - len(needed)), scores, seconds))
    return found

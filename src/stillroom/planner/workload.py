"""Which questions a plan is made for, how often each is asked, and when."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stillroom.errors import KnowledgeBaseError, UsageError
from stillroom.planner.simulation.arrivals import arrivals_of
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.trace import TRACE_FILE, TraceLog

logger = logging.getLogger(__name__)

_KEYS = ("question", "query", "text")
_WORDS = 12


@dataclass(frozen=True, slots=True)
class QuestionCounts:
    """Different questions, and how often each was asked."""

    texts: tuple[str, ...]
    counts: tuple[int, ...]
    source: str
    """Where they are from, in words."""
    answer_tokens: int | None = None
    """Mean length of their answers, where it is known."""

    @property
    def has_popularity(self) -> bool:
        """Whether counts tell how often each is asked: no question twice tells nothing."""
        return max(self.counts) > 1


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """Requests: numbers of questions, in their order."""

    warm: tuple[int, ...]
    """Asked before anything counts, so that what is kept is there."""
    asked: tuple[int, ...]
    dues: tuple[float, ...]
    """Seconds at which those are asked, ascending."""
    rate: float
    """Per second."""


def questions_of(kb: KnowledgeBase, file: Path | None, most: int, seed: int) -> QuestionCounts:
    """From a file, else the questions that the knowledge base was asked lately, else made from its chunks; at most so
    many different ones, those most asked first.

    Raises:
        UsageError: the file holds no question, or the knowledge base no chunk.
    """
    if file is not None:
        return _counted(read_questions(file), file.name, most)
    past = _past_questions(kb.path / TRACE_FILE)
    if len({question for question, _ in past}) >= 2:
        answer_tokens = round(sum(tokens for _, tokens in past) / len(past))
        questions = _counted([question for question, _ in past], "the questions asked lately", most)
        return QuestionCounts(questions.texts, questions.counts, questions.source, max(1, answer_tokens))
    made = made_questions(kb, most, seed)
    if not made:
        raise UsageError(f"{kb.path} holds no chunks; add documents first: stillroom add PATH --kb {kb.path}")
    return QuestionCounts(tuple(made), (1,) * len(made), "made from the documents, for want of real ones")


def _past_questions(diary: Path) -> list[tuple[str, int]]:
    """None where the diary cannot be read: a plan can do without, but says so."""
    try:
        return TraceLog(diary, 0).questions()
    except KnowledgeBaseError as error:
        logger.warning("the questions asked lately are not known: %s", error)
        return []


def _counted(texts: Sequence[str], source: str, most: int) -> QuestionCounts:
    counts = Counter(texts).most_common(most)
    return QuestionCounts(tuple(text for text, _ in counts), tuple(count for _, count in counts), source)


def read_questions(file: Path) -> list[str]:
    """A question on each line, as text or as a JSON object with `question` (or `query`, `text`); repeated ones count.

    Raises:
        UsageError: there is none, or a line is neither.
    """
    found = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text.startswith("{"):
            try:
                record = json.loads(text)
            except ValueError as error:
                raise UsageError(f"{file}:{number} is not JSON: {error}") from None
            text = next((str(record[key]).strip() for key in _KEYS if record.get(key)), "")
            if not text:
                raise UsageError(f"{file}:{number} has no question; name it `question`")
        if text:
            found.append(text)
    if not found:
        raise UsageError(f"{file} holds no question; write one on each line")
    return found


def made_questions(kb: KnowledgeBase, most: int, seed: int) -> list[str]:
    """The first words of chunks, drawn over all documents."""
    rng = np.random.default_rng([seed, 21])
    documents = kb.documents()
    found: dict[str, None] = {}
    for at in rng.permutation(len(documents)).tolist():
        chunks = kb.chunks_of(documents[at].document_id)
        num = max(1, -(-most // len(documents)))
        for place in rng.permutation(len(chunks))[:num].tolist():
            found[" ".join(chunks[place].text.split()[:_WORDS])] = None
        if len(found) >= most:
            break
    return [text for text in found if text][:most]


def workload(
    questions: QuestionCounts,
    num_requests: int,
    rate: float,
    *,
    zipf: float = 0.8,
    trace: Path | None = None,
    seed: int = 0,
) -> PlannedWorkload:
    """Draw requests: by the counts of the questions where they tell something, else by Zipf's law in a drawn order.

    Args:
        rate: requests per second.
        zipf: exponent; 0 asks all alike often.
        trace: of arrivals; None: a Poisson process.

    Raises:
        UsageError: the trace is none, or too short.
    """
    rng = np.random.default_rng([seed, 22])
    if questions.has_popularity:
        weights = np.array(questions.counts, dtype=float)
    else:
        weights = np.arange(1, len(questions.texts) + 1, dtype=float) ** -zipf
        weights = weights[rng.permutation(len(weights))]
    drawn = rng.choice(len(weights), size=2 * num_requests, p=weights / weights.sum()).tolist()
    dues = arrivals_of(trace)(num_requests, rate, [seed, 23])
    return PlannedWorkload(tuple(drawn[:num_requests]), tuple(drawn[num_requests:]), tuple(dues), rate)

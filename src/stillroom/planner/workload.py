"""Questions of a plan, how often each is asked, and when."""

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
    """Distinct questions, and how often each was asked."""

    texts: tuple[str, ...]
    counts: tuple[int, ...]
    source: str
    """Where they came from, in words."""
    answer_tokens: int | None = None
    """Mean length of their answers, if known."""

    @property
    def has_popularity(self) -> bool:
        """Whether some question was asked twice, so that the counts mean something."""
        return max(self.counts) > 1


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """Requests, as numbers of questions, in their order."""

    warm: tuple[int, ...]
    """Asked before measuring, to fill the caches."""
    asked: tuple[int, ...]
    dues: tuple[float, ...]
    """Arrival times of `asked` in seconds, ascending."""
    rate: float
    """Requests per second."""
    searched: tuple[int, ...] = ()
    """Searched for before `warm`, which makes their documents more likely to be prepared; not asked."""


def questions_of(kb: KnowledgeBase, file: Path | None, most: int, seed: int) -> QuestionCounts:
    """Return the `most` most frequent questions: from `file`, else from the request log, else made from chunks.

    Raises:
        UsageError: the file holds no question, or the knowledge base holds no chunk.
    """
    if not kb.num_chunks:
        raise UsageError(f"{kb.path} holds no chunks; add documents first: stillroom add PATH --kb {kb.path}")
    if file is not None:
        return _counted(read_questions(file), file.name, most)
    past = _past_questions(kb.path / TRACE_FILE)
    if len({question for question, _ in past}) >= 2:
        answer_tokens = round(sum(tokens for _, tokens in past) / len(past))
        questions = _counted([question for question, _ in past], "the questions asked lately", most)
        return QuestionCounts(questions.texts, questions.counts, questions.source, max(1, answer_tokens))
    made = made_questions(kb, most, seed)
    return QuestionCounts(tuple(made), (1,) * len(made), "made from the documents, for want of real ones")


def _past_questions(log: Path) -> list[tuple[str, int]]:
    """Return past questions with their numbers of answer tokens; none, with a warning, if the log cannot be read."""
    try:
        return TraceLog(log, 0).questions()
    except KnowledgeBaseError as error:
        logger.warning("the request log cannot be read, so the plan does not use past questions: %s", error)
        return []


def _counted(texts: Sequence[str], source: str, most: int) -> QuestionCounts:
    counts = Counter(texts).most_common(most)
    return QuestionCounts(tuple(text for text, _ in counts), tuple(count for _, count in counts), source)


def read_questions(file: Path) -> list[str]:
    """Read one question per line: text, or a JSON object with `question` (or `query`, `text`). Repeated lines count.

    Raises:
        UsageError: the file holds no question, or a line is neither text nor such an object.
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
    """Return the first words of chunks drawn from all documents."""
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
    """Draw requests by the counts of the questions, or by Zipf's law in a random order if no question was asked twice.

    Args:
        rate: requests per second.
        zipf: exponent; 0 draws uniformly.
        trace: file of arrival times; None draws a Poisson process.

    Raises:
        UsageError: the trace cannot be read or is too short.
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

"""Searches for one question in several hops; between two hops, the documents so far are read by a request of its own.

What to search for next comes from that request (`search.hop_question`):

- `model`: the model writes a question, or that the documents suffice, as JSON that a grammar enforces.
- `answer`: the model answers from the documents so far; question and answer together are the next search. A reader's
  question is rewritten instead (rag/follow_up.py), and what is left of it is asked in the end.
"""

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stillroom.backends.base import Backend
from stillroom.config.settings import HopQuestion
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk, SearchResult
from stillroom.core.ids import RequestId
from stillroom.engine.events import Quote, TokenEvent
from stillroom.errors import UsageError
from stillroom.rag.answer import Answer, AskOptions, SpeculationOutcome, SpeculationReport
from stillroom.rag.answer_collector import AnswerCollector, AnswerStart
from stillroom.rag.citations import says_nothing
from stillroom.rag.follow_up import follow_up, whole_name
from stillroom.rag.hops import Hop, Reading, Search, hops
from stillroom.rag.markers import statements
from stillroom.rag.question import Asked, stop_strings
from stillroom.rag.speculation import Attempt, CompletedSearch
from stillroom.rag.stream import AnswerStream

Hold = Callable[[Callable[[], None]], None]
"""Takes the function that cancels the request that was just submitted; calls it if the caller has stopped waiting."""

_MAX_QUESTION_TOKENS, _MAX_QUESTION_CHARACTERS = 96, 240

_ASK_NEXT = (
    "{question}\n\nDo not answer yet. Decide what to search for next. If the documents above hold every fact that the "
    'answer needs, write {{"done": true}}. Otherwise write {{"question": "..."}} with one short question about the '
    "fact that is missing, which names everything it is about."
)


def _object(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}


_SCHEMA: Mapping[str, Any] = {
    "anyOf": [
        _object("question", {"type": "string", "minLength": 1, "maxLength": _MAX_QUESTION_CHARACTERS}),
        _object("done", {"const": True}),
    ]
}


def hop_question(backend: Backend, wanted: HopQuestion) -> HopQuestion:
    """Return how the next question is found: `model` or `answer`.

    Raises:
        UsageError: `model` is wanted of a backend that cannot be held to JSON.
    """
    if wanted == "model" and not backend.writes_json:
        raise UsageError(
            f"search.hop_question = 'model' needs a model that can be held to JSON, and {backend.name} cannot; set it "
            "to 'auto' or 'answer'"
        )
    return ("model" if backend.writes_json else "answer") if wanted == "auto" else wanted


@dataclass(frozen=True, slots=True)
class HopSearch:
    """Searches for one question in hops. Blocks while it searches and reads."""

    request_id: RequestId
    """Of the answer that the hops lead to."""
    asked: Asked
    by: HopQuestion
    """`model` or `answer`."""
    request: Callable[[Sequence[ScoredChunk], Asked, RequestId | None], Attempt]
    """Makes the request that asks something about chunks; with this id, or with a new one."""
    backend: Backend
    clock: Clock
    hold: Hold

    def find(self, most: int, search: Search, count: Callable[[Hop], object]) -> CompletedSearch:
        """Search up to `most` times. Returns all chunks found and the request that answers from them.

        Args:
            count: called with each hop, before the caller's `on_hop`.

        Raises:
            EngineError: a request failed, was cancelled or came too late.
            UsageError: a prompt does not fit the model.
        """
        asked, done, sure = self.asked, list[Hop](), list[str]()
        found: Sequence[ScoredChunk] = ()

        def read(question: str, found: Sequence[ScoredChunk]) -> Reading:
            reading = self.read(question, found)
            if reading.is_sure:
                sure.append(question)
            return reading

        for hop, so_far in hops(self.request_id, asked.question, most, search, read):
            found = so_far
            done.append(hop)
            count(hop)
            if asked.options.on_hop is not None:
                asked.options.on_hop(hop)
        ended_at = self.clock.monotonic()
        last = replace(asked, question=self._last_question(done, found, sure)) if self.backend.quotes else asked
        report = SpeculationReport(SpeculationOutcome.OFF)
        attempt = self.request(found, last, self.request_id)
        return CompletedSearch(SearchResult(tuple(found)), ended_at, attempt, report, tuple(done))

    def _last_question(self, done: Sequence[Hop], found: Sequence[ScoredChunk], sure: Sequence[str]) -> str:
        """Return the question that a reader answers from all documents: that of the last hop, unless it has no answer
        and an earlier one had.

        Args:
            sure: questions of the hops whose reading had an answer.
        """
        last = done[-1].question
        if not sure or sure[-1] == last or (done[-1].answer is None and self.read(last, found).is_sure):
            return last
        return sure[-1]

    def read(self, question: str, found: Sequence[ScoredChunk]) -> Reading:
        """Read all chunks found so far. Raises as `find`.

        Args:
            question: what the last hop searched for.
        """
        attempt = self.request(found, self._asked_of_hop(question), None)
        answer, best = self._run(attempt)
        read = set(attempt.prepared.chunk_ids)
        return replace(
            self._reading(question, answer, best),
            is_full=any(scored.chunk.chunk_id not in read for scored in found),
            num_prompt_tokens=answer.reuse.num_prompt_tokens,
            num_cached_tokens=answer.reuse.num_cached_tokens,
            num_generated_tokens=answer.num_generated_tokens,
        )

    def _reading(self, question: str, answer: Answer, best: Quote | None) -> Reading:
        if self.by == "model":
            return Reading(next_question_of(answer.text))
        if best is not None:
            found = whole_name(best.text, *best.highlight)
            return Reading(follow_up(question, best.text, found), found, is_sure=not says_nothing(answer.text))
        found_text = short_answer(answer)
        return Reading(found_text and f"{self.asked.question}\n{found_text}", found_text)

    def _asked_of_hop(self, question: str) -> Asked:
        """What is asked about the documents of a hop. The next question is written greedily, whatever the answer's
        sampling is."""
        options = self.asked.options
        if self.by == "answer":
            own = replace(options, json_schema=None, logprobs=None, answer_start="")
            asked = question if self.backend.quotes else self.asked.question
            return replace(self.asked, question=asked, options=own, num_samples=1)
        own = AskOptions(
            max_tokens=_MAX_QUESTION_TOKENS,
            temperature=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            priority=options.priority,
            deadline_seconds=options.deadline_seconds,
            json_schema=_SCHEMA,
        )
        return Asked(_ASK_NEXT.format(question=self.asked.question), own, 1, self.asked.arrival)

    def _run(self, attempt: Attempt) -> tuple[Answer, Quote | None]:
        """Submit a request and wait for its answer and, from a reader, its best quote."""
        [sample] = attempt.samples
        now = self.clock.monotonic()
        started = AnswerStart(sample.request_id, now, 0.0, (), attempt.prepared.num_tokens)
        stops = stop_strings(self.asked.options) if self.by == "answer" else ()
        collector = AnswerCollector(started, self.backend.tokenizer, stops, lambda answer: None)
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

        def cancel() -> None:
            self.backend.cancel(sample.request_id)

        attempt.deliver([events.put], now)
        self.hold(cancel)
        return AnswerStream(collector, events, cancel).read_to_end(), collector.best


def next_question_of(text: str) -> str | None:
    """Return the question in a model's JSON; None if it says that it is done, or `max_tokens` has cut it."""
    try:
        written = json.loads(text)
    except ValueError:
        return None
    question = written.get("question") if isinstance(written, dict) else None
    return question.strip() or None if isinstance(question, str) else None


def short_answer(answer: Answer) -> str | None:
    """Return the text without numbers of sources; None if it says that the documents do not say."""
    text = " ".join(statement.text for statement in statements(answer.text)).strip()
    return None if says_nothing(text) else text or None

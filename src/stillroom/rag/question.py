"""One question: its checks, its search with the earlier turns, the samples wanted of its prompt, and its sources."""

import secrets
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stillroom.backends.base import PreparedPrompt
from stillroom.backends.conversation import History, history_of, merge, search_with_previous
from stillroom.config.settings import GenerationConfig, SearchMode
from stillroom.core.document import Chunk, ScoredChunk, SearchResult
from stillroom.core.ids import ChunkId, RequestId, format_chunk_id
from stillroom.core.request import MaySee, SampleRequest, SamplingParams, seed_of_sample
from stillroom.errors import NothingFoundError, PromptTooLongError, UsageError
from stillroom.rag.answer import NO_LIMIT, AskOptions, CopyOfChunk, Source
from stillroom.rag.hops import checked_hops
from stillroom.rag.query_cache import QueryCache
from stillroom.retrieval.filters.language import parse_filter

T = TypeVar("T")


def check_options(options: AskOptions) -> None:
    """Raises UsageError: the filter, the number of hops, a stop string or the deadline is invalid."""
    if options.where.strip():
        parse_filter(options.where)
    if options.hops is not None:
        checked_hops(options.hops)
    if not all(stop_strings(options)):
        raise UsageError("stop contains an empty text; remove it")
    if options.deadline_seconds is not None and not 0 < options.deadline_seconds < float("inf"):
        raise UsageError(f"deadline_seconds={options.deadline_seconds}; it must be a positive number")


def stop_strings(options: AskOptions) -> Sequence[str]:
    """The stop strings as a sequence."""
    return (options.stop,) if isinstance(options.stop, str) else options.stop


def history_without_search(options: AskOptions) -> History:
    """The conversation before a question, without documents."""
    history = history_of(options.history, options.system, lambda _: (), 0)
    return replace(history, answer_start=options.answer_start)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as it arrived."""

    question: str
    """Empty for a prompt that is continued without a search."""
    options: AskOptions
    num_samples: int
    arrival: float
    """On the engine's clock."""

    @property
    def deadline(self) -> float | None:
        """On the engine's clock; None: no deadline."""
        seconds = self.options.deadline_seconds
        return None if seconds is None else self.arrival + seconds


class QuestionSearch:
    """Searches for a question and for the earlier turns of its conversation."""

    def __init__(self, search: QueryCache, question: str, options: AskOptions, mode: SearchMode, top_k: int) -> None:
        self._search = search
        self._question = question
        self._options = options
        self._mode = mode
        self._top_k = top_k
        self.history = history_of(options.history, options.system, self._chunks, top_k)
        """The earlier turns, each with what its own search finds now."""
        self._found_with_previous = search_with_previous(options.history, question, self._chunks)

    def stages(self, num_stages: int) -> Iterator[SearchResult]:
        """Search for the question: at most `num_stages` results, of which the last is final."""
        extra, top_k = self._found_with_previous, self._top_k
        for found in self._search.search_staged(self._question, self._mode, top_k, num_stages, self._options.where):
            yield replace(found, results=merge(found.results, extra, top_k)) if extra else found

    def hop(self, text: str) -> Sequence[ScoredChunk]:
        """Search for the text of a hop: the question itself as `stages` does, another one alone."""
        if text != self._question:
            return self._chunks(text)
        *_, result = self.stages(1)
        return result.results

    def _chunks(self, text: str) -> Sequence[ScoredChunk]:
        return self._search.search(text, self._mode, self._top_k, self._options.where).results


def new_request_id() -> RequestId:
    return RequestId(f"req-{uuid.uuid4().hex[:16]}")


def samples_of(  # noqa: PLR0913  what a request is made of
    prepared: PreparedPrompt,
    options: AskOptions,
    defaults: GenerationConfig,
    num_samples: int,
    deadline: float | None,
    may_see: MaySee | None = None,
    name: RequestId | None = None,
) -> list[SampleRequest]:
    """The samples of a prompt, each with its own request id and seed. Only the first computes the prompt.

    Args:
        name: request id of the first; None: a new one.
    """
    name = name or new_request_id()
    sampling = _sampling(options, defaults, prepared.max_answer_tokens)
    first = SampleRequest(
        request_id=name, sampling=sampling, priority=options.priority, deadline=deadline, may_see=may_see
    )
    others = (
        replace(
            first,
            request_id=RequestId(f"{name}-{index}"),
            sampling=replace(sampling, seed=seed_of_sample(sampling.seed, index)),
        )
        for index in range(1, num_samples)
    )
    return [first, *others]


def _sampling(options: AskOptions, defaults: GenerationConfig, max_answer_tokens: int | None) -> SamplingParams:
    """The question's settings over the configured ones.

    -1 is what clients of vLLM and llama.cpp send for no limit, no `top_k` and a random seed.
    """
    top_k = options.sample_top_k

    def chosen(own: T | None, default: T) -> T:
        return default if own is None else own

    return SamplingParams(
        max_tokens=_num_answer_tokens(options.max_tokens, defaults.max_tokens, max_answer_tokens),
        min_tokens=options.min_tokens,
        temperature=chosen(options.temperature, defaults.temperature),
        top_k=0 if top_k == -1 else chosen(top_k, defaults.sample_top_k),
        top_p=chosen(options.top_p, defaults.top_p),
        min_p=chosen(options.min_p, defaults.min_p),
        repetition_penalty=chosen(options.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=chosen(options.presence_penalty, defaults.presence_penalty),
        frequency_penalty=chosen(options.frequency_penalty, defaults.frequency_penalty),
        logit_bias=options.logit_bias,
        logprobs=options.logprobs,
        seed=secrets.randbits(63) if options.seed == -1 else chosen(options.seed, defaults.seed),
    )


def _num_answer_tokens(requested: int | None, default: int, limit: int | None) -> int:
    """Most tokens of an answer. The default is cut to the limit; a requested number is not.

    Args:
        limit: what model and KV pool have room for; None: not known.

    Raises:
        UsageError: `NO_LIMIT` is requested and the limit is not known.
    """
    if requested is None:
        return default if limit is None else min(default, limit)
    if requested != NO_LIMIT:
        return requested
    if limit is None:
        raise UsageError(
            "max_tokens=-1 needs the model's context length, which this engine does not report; set a number of tokens"
        )
    return limit


def sources_of(prompt: Sequence[ChunkId], found: Sequence[ScoredChunk], history: History) -> tuple[Source, ...]:
    """The chunks of a prompt as sources: those found for the question first, then those of earlier turns, latest turn
    first; each group in the order of the prompt.

    Args:
        prompt: the chunks of the prompt, in order.
        found: what the question's own search found. A chunk that an earlier turn found too stands in that turn.
    """
    by_turn = [found, *(turn.found for turn in reversed(history.turns))]
    latest: dict[ChunkId, tuple[int, ScoredChunk]] = {}
    for turns_ago, results in enumerate(by_turn):
        for scored in results:
            latest.setdefault(scored.chunk.chunk_id, (turns_ago, scored))
    sources = [_source(position, *latest[chunk_id]) for position, chunk_id in enumerate(prompt, start=1)]
    return tuple(sorted(sources, key=lambda source: (source.turns_ago, source.position)))


def _source(position: int, turns_ago: int, scored: ScoredChunk) -> Source:
    chunk = scored.chunk
    return Source(
        document=chunk.document_id,
        chunk_id=format_chunk_id(chunk.chunk_id),
        text=chunk.text,
        score=scored.score,
        scores=dict(scored.scores),
        position=position,
        heading=chunk.heading,
        start_line=chunk.start_line,
        end_line=chunk.end_line,
        start_page=chunk.start_page,
        end_page=chunk.end_page,
        turns_ago=turns_ago,
        also_in=tuple(map(_copy, scored.copies)),
    )


def _copy(chunk: Chunk) -> CopyOfChunk:
    return CopyOfChunk(
        document=chunk.document_id,
        chunk_id=format_chunk_id(chunk.chunk_id),
        heading=chunk.heading,
        start_line=chunk.start_line,
        end_line=chunk.end_line,
        start_page=chunk.start_page,
        end_page=chunk.end_page,
    )


def no_room_error(num_tokens: int | None, max_tokens: int | None) -> PromptTooLongError:
    """Documents were found, but none fits into the prompt."""
    return PromptTooLongError(
        f"no document that was found fits: without documents the prompt has {num_tokens} tokens, and the answer leaves "
        f"room for {max(max_tokens or 0, 0)}; lower max_tokens, shorten the question, or raise "
        "generation.max_prompt_tokens"
    )


def nothing_found_error(where: str, mode: SearchMode) -> NothingFoundError:
    """The search and those of the earlier turns found no document."""
    allowed = f"of those that the filter allows ({where.strip()})" if where.strip() else "of the knowledge base"
    remedy = "change or leave out the filter" if where.strip() else "ask in other words"
    if mode == "sparse":
        remedy += ", or search by meaning too (mode hybrid)"
    return NothingFoundError(f"no document {allowed} was found for the question, so nothing was generated; {remedy}")

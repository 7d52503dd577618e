"""Options of a question, and its answer: text, sources, timing, reuse. `stillroom ask --json` has the same fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, get_args

from stillroom.backends.conversation import Exchange
from stillroom.backends.tool_chat import ToolChat
from stillroom.config.settings import SearchConfig, SearchMode
from stillroom.core.arguments import integer, number, one_of, text
from stillroom.core.ids import RequestId
from stillroom.core.request import LookupCounts
from stillroom.engine.events import Route
from stillroom.errors import UsageError
from stillroom.rag.hops import Hop, OnHop

NO_LIMIT = -1
"""As `max_tokens`: the answer ends where the model ends it, or where model or KV pool have no more room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """Options of one question; None takes the configured default.

    Raises:
        UsageError: a value is of the wrong type. Sampling settings and ranges are checked when the question is asked.
    """

    search: bool = True
    """False: no search. The model answers from the conversation alone, and the request log keeps nothing of it."""
    mode: SearchMode | None = None
    top_k: int | None = None
    where: str = ""
    """A filter on documents, such as `year >= 2020 and team = legal` (docs/filters.md)."""
    hops: int | None = None
    """Most searches, 1 to 5: each after the first looks for what the documents so far leave open (docs/hops.md)."""
    on_hop: OnHop | None = field(default=None, compare=False)
    """With several hops, called after each, in the thread that searches; must return quickly."""
    max_tokens: int | None = None
    """`NO_LIMIT` (-1): as many as model and KV pool have room for."""
    temperature: float | None = None
    top_p: float | None = None
    sample_top_k: int | None = None
    """Sample from this many of the most likely tokens; 0 or -1: all. (`top_k` is the number of chunks.)"""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """-1: random for each question."""
    priority: int = 0
    """Among questions that wait for the engine, the lowest number goes first."""
    deadline_seconds: float | None = None
    """Longest time from the question's arrival to its last token; a question that takes longer is cancelled."""
    min_tokens: int = 0
    """The model cannot end its answer before this many tokens; a stop string can."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    stop: str | Sequence[str] = ()
    """Stop strings: the answer ends before the first of them."""
    json_schema: Mapping[str, Any] | None = None
    """Makes the answer JSON of this schema, unless `max_tokens` cuts it. The prompt does not mention the schema; the
    question should."""
    history: Sequence[Exchange] = ()
    """Earlier questions and answers, oldest first. Each stands in the prompt with the documents found for it
    (docs/conversations.md)."""
    system: str = ""
    """A system message; stands in the prompt after Stillroom's own instructions."""
    tool_chat: ToolChat | None = None
    """The whole conversation, with tools that may be called. It takes the place of the question, `history` and
    `system`, and needs `search=False`."""
    answer_start: str = ""
    """Beginning of the answer: the model continues it. The answer's text does not repeat it."""
    logprobs: int | None = None
    """Report each token's log probability and those of this many most likely tokens (0 to 20)."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            one_of("search mode", self.mode, get_args(SearchMode))
        for name in ("top_k", "hops", "max_tokens"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name))
        of_search = (self.mode, self.top_k, self.hops)
        if not self.search and (self.where.strip() or any(one is not None for one in of_search)):
            raise UsageError("without a search, mode, top_k, hops and where have no effect; leave them out, or search")
        integer("priority", self.priority)
        if self.deadline_seconds is not None:
            number("deadline_seconds", self.deadline_seconds)
        for name in ("where", "system", "answer_start"):
            text(name, getattr(self, name))
        if not isinstance(self.json_schema, Mapping | None):
            raise UsageError(f"json_schema={self.json_schema!r}; it must be a mapping")
        if self.json_schema is not None and self.answer_start:
            raise UsageError("json_schema is of a whole answer; leave out answer_start (the last message's text)")
        self._check_tool_chat()
        self._check_lists()

    def _check_tool_chat(self) -> None:
        if not isinstance(self.tool_chat, ToolChat | None):
            raise UsageError(f"tool_chat={self.tool_chat!r}; it must be ToolChat(messages, tools)")
        if self.tool_chat is not None and (self.search or self.json_schema is not None or self.answer_start):
            raise UsageError(
                "tools are called in a chat without a search, and not with json_schema or answer_start; leave them out"
            )

    def _check_lists(self) -> None:
        if not isinstance(self.stop, Sequence):
            raise UsageError(f"stop={self.stop!r}; it must be a text or a list of texts")
        for one in self.stop:
            text("stop", one)
        if not isinstance(self.history, Sequence) or not all(isinstance(one, Exchange) for one in self.history):
            raise UsageError(f"history={self.history!r}; it must be a list of Exchange(question, answer)")
        for exchange in self.history:
            text("history", exchange.question)
            text("history", exchange.answer)


def checked_options(question: object, options: AskOptions | None, num_samples: object) -> AskOptions:
    """The options, or the defaults. Raises UsageError: an argument is of the wrong type."""
    text("the question", question)
    integer("n", num_samples)
    if options is None:
        return AskOptions()
    if not isinstance(options, AskOptions):
        raise UsageError(f"options={options!r}; it must be AskOptions(...)")
    return options


def checked_query(
    query: object, mode: SearchMode | None, top_k: int | None, defaults: SearchConfig
) -> tuple[str, SearchMode, int]:
    """A query with the default mode and `top_k` filled in. Raises UsageError: an argument is of the wrong type."""
    return text("the query", query), mode or defaults.mode, integer("top_k", defaults.top_k if top_k is None else top_k)


@dataclass(frozen=True, slots=True)
class CopyOfChunk:
    """Another place with the same text."""

    document: str
    """This field and the next ones are as in `Source`."""
    chunk_id: str
    heading: str
    start_line: int
    end_line: int
    start_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk of the prompt."""

    document: str
    """Document id: the file's path, with `#record` for one record of a JSONL file."""
    chunk_id: str
    text: str
    score: float
    """The score by which it was ranked; higher is better."""
    scores: dict[str, float]
    """Scores by retriever, of those that found it."""
    position: int
    """Position among the chunks of the prompt, from 1."""
    heading: str
    """`Title > Section`; empty where the document has none."""
    start_line: int
    """First line in the file, from 1; 0 where the format has no lines."""
    end_line: int
    start_page: int = 0
    """First page of the file, from 1; 0 where the format has no pages."""
    end_page: int = 0
    turns_ago: int = 0
    """0: found for this question. In a conversation, the number of questions since the one that it was found for."""
    also_in: tuple[CopyOfChunk, ...] = ()
    """Other places with the same text, which the search found too, best first."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds by phase. TTFT counts from the question's arrival, so it includes retrieval."""

    retrieval_seconds: float
    ttft_seconds: float
    """Time to the first token."""
    tpot_seconds: float
    """Time per output token after the first: (total - TTFT) / (tokens - 1); 0 for a single token."""
    total_seconds: float
    queue_seconds: float | None = None
    """From the end of the search to admission by the engine: tokenising the prompt, and waiting. Null, like the next
    two, if the engine is a server elsewhere, which does not report it."""
    load_seconds: float | None = None
    """From admission until computing began: loading KV of this question and of those admitted in the same step."""
    prefill_seconds: float | None = None
    """From then until the first token. Retrieval, queue, load and prefill add up to TTFT; the rest is decoding."""


@dataclass(frozen=True, slots=True)
class VariantReport:
    """The stored copy whose KV was reused for a document at another position (docs/chunk-reuse.md)."""

    behind: tuple[str | None, ...]
    """Ids of the chunks that stood before it when it was computed; null for a chunk that is no longer stored."""
    first_position: int
    """The position of its first token when it was computed."""
    overlap: float
    """beta': overlap of its old and its new context, in [0, 1]."""
    impact: float | None
    """CCI: influence of its old context on it, from 0.5 to 1; null if not measured."""
    overhead: float
    """CFO: share of its tokens to recompute, from overlap and impact."""
    is_focused: bool | None
    """Whether the question attends to it; null if not measured (`reuse.focus_window`)."""
    saved_seconds: float
    """By the cost profile: seconds to compute it, less those to load it and to recompute some of its tokens."""
    bits: int
    """Of each of its numbers where it was read: 16 as it was computed, 8 or 4 (docs/kv-records.md)."""


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """A segment of the prompt, and where its KV came from."""

    kind: str
    """`system`, `chunk`, `question`, or `turn`: an earlier question and its answer."""
    chunk_id: str | None
    num_tokens: int
    source: str
    """`device`, `host`, `disk` or `computed`."""
    reason: str
    """The reason, a value of `core.reuse.Reason`."""
    num_recomputed: int = 0
    """Tokens that were recomputed, for a document whose KV was reused at another position."""
    variant: VariantReport | None = None
    """The copy used for such a document."""


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """How much of the prompt's KV came from a cache."""

    num_prompt_tokens: int
    """0 if a server elsewhere did not report it."""
    num_cached_tokens: int
    """Prompt tokens whose KV came from a cache."""
    num_recomputed_tokens: int = 0
    """Tokens of cached chunks that were recomputed (selective recompute)."""
    num_device_tokens: int = 0
    """Cached tokens whose KV was on the device."""
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_network_tokens: int = 0
    """Those from the tier that several processes share (docs/kv-tier.md)."""
    load_seconds: float = 0.0
    """Seconds to load them, by the cost profile."""
    saved_seconds: float = 0.0
    """Seconds saved by the cost profile, loading deducted."""
    recompute_ratio: float = 0.0
    """Share of the tokens of documents reused at another position that was to be recomputed; 0 if there were none."""
    segments: tuple[SegmentReport, ...] = ()
    """In the prompt's order; empty from a server elsewhere."""


class SpeculationOutcome(StrEnum):
    """Outcome of speculative prefill, which begins before the search has ended (docs/pipelining.md)."""

    OFF = "off"
    """Switched off, or the engine is the reader or a server elsewhere."""
    PLAIN = "plain"
    """The search ran without stages, because speculation does not pay here, or to measure a plain search."""
    NONE = "none"
    """No prefill was started: the engine was busy, no stage was promising, or the first list was the final one."""
    WRONG = "wrong"
    """The speculative prefill was not of the final list."""
    RIGHT = "right"
    """The speculative prefill was of the final list."""


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """How far search and prefill of a question overlapped."""

    outcome: SpeculationOutcome
    num_stages: int = 1
    """Lists that the search returned."""
    num_started: int = 0
    """Prompts started from provisional lists."""
    ahead_seconds: float = 0.0
    """Seconds that the right prompt had been in the engine when the search ended."""
    break_even_seconds: float | None = None
    """Search time from which speculation pays, by the measurements so far; null if nothing was measured."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log probability before penalties, temperature and truncation."""

    token_id: int
    text: str
    """The token decoded on its own; U+FFFD stands for part of a character."""
    utf8: tuple[int, ...]
    """Its bytes."""
    logprob: float
    top: tuple["TokenScore", ...] = ()
    """The most likely tokens at its position, most likely first."""


class Support(StrEnum):
    """Whether a source supports a sentence of an answer (docs/citations.md)."""

    SUPPORTED = "supported"
    PARTLY = "partly"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Citation:
    """A sentence of an answer, and the words of a source that support it.

    Lines and pages are those of the quote where its chunk has the lines of its file, else those of the chunk.
    """

    source: int
    """`Source.position`; 0 if no source supports the sentence."""
    document: str
    """As in `Source`; empty, like the fields up to `quote`, if `source` is 0. The numbers are then 0."""
    chunk_id: str
    heading: str
    start_line: int
    end_line: int
    start_page: int
    end_page: int
    quote: str
    """Part of `Source.text`; empty if the source does not support the sentence."""
    quote_start: int
    """Its first character in `Source.text`."""
    quote_end: int
    start: int
    """First character of the sentence in `Answer.text`. A sentence ends before the numbers behind it."""
    end: int
    is_explicit: bool
    """Whether the answer names the source itself, as `[n]`."""
    support: Support


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    """Generated tokens without the end-of-sequence token; the last ones may belong to a stop string. Empty from the
    reader and from a server elsewhere, which send text."""
    finish_reason: str
    """`stop`: the model ended the answer, or a stop string did. `length`: `max_tokens` was reached."""
    sources: tuple[Source, ...]
    timing: Timing
    reuse: ReuseReport
    num_generated_tokens: int
    """As counted by the engine."""
    logprobs: tuple[TokenScore, ...] | None = None
    """One per token of `token_ids`, if requested."""
    speculation: SpeculationReport = SpeculationReport(SpeculationOutcome.OFF)
    lookup: LookupCounts = LookupCounts()
    citations: tuple[Citation, ...] = ()
    """In the order of the text; several for a sentence that names several sources. Sentences that state nothing have
    none. Empty if `generation.citations` is off."""
    highlight: tuple[int, int] | None = None
    """Characters of `text` that the reader marks as the answer; None from other models, and if the documents do not
    say."""
    confidence: float | None = None
    """How sure the reader is that the sources answer the question, from 0 to 1: 0.5 at its threshold. Not a calibrated
    probability. None from other models."""
    warnings: tuple[str, ...] = ()
    """What a reader of the answer must know, such as that the model cannot read documents."""
    hops: tuple[Hop, ...] = ()
    """The searches of a question that was asked with several hops, in order; empty otherwise."""
    route: Route | None = None
    """The engine of a cluster or the remote server that generated the answer; None from the engine of this process."""

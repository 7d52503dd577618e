"""What a question comes back with. The field names are those of `stillroom ask --json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, get_args

from stillroom.backends.conversation import Exchange
from stillroom.config.settings import SearchConfig, SearchMode
from stillroom.core.arguments import integer, number, one_of, text
from stillroom.core.ids import RequestId
from stillroom.errors import UsageError

NO_LIMIT = -1
"""As `max_tokens`: the answer ends where the model ends it, or where there is no more room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """What one question may set; None takes the configuration's default.

    Raises:
        UsageError: a value is of the wrong type. What is wrong with settings of sampling, and what is out of range,
            is said when the question is asked.
    """

    mode: SearchMode | None = None
    top_k: int | None = None
    where: str = ""
    """Only documents that this filter allows, such as `year >= 2020 and team = legal` (docs/filters.md)."""
    max_tokens: int | None = None
    """`NO_LIMIT` (-1): as many as model and KV pool have room for."""
    temperature: float | None = None
    top_p: float | None = None
    sample_top_k: int | None = None
    """Sample from this many of the most likely tokens; 0 or -1: all. `top_k` counts chunks."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """-1: a random one each time."""
    priority: int = 0
    """Of two questions that wait for the engine, the one with the lower number goes first."""
    deadline_seconds: float | None = None
    """How long the question may take from its arrival to its last token; then it is given up, wherever it is."""
    min_tokens: int = 0
    """The model cannot end its answer before this many tokens; stop strings can."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    stop: str | Sequence[str] = ()
    """Texts before which the answer ends."""
    json_schema: Mapping[str, Any] | None = None
    """The answer is JSON of this schema, unless `max_tokens` cuts it. The model is not told: say it in the question."""
    history: Sequence[Exchange] = ()
    """What was asked and answered before, oldest first. Each stands before the question with what it finds
    (docs/conversations.md)."""
    system: str = ""
    """Stands behind our own instructions."""
    answer_start: str = ""
    """How the answer begins: the model continues it, and the answer's text is what comes behind it."""
    logprobs: int | None = None
    """Report each token's log probability, and those of this many most likely tokens (up to 20)."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            one_of("search mode", self.mode, get_args(SearchMode))
        for name in ("top_k", "max_tokens"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name))
        integer("priority", self.priority)
        if self.deadline_seconds is not None:
            number("deadline_seconds", self.deadline_seconds)
        for name in ("where", "system", "answer_start"):
            text(name, getattr(self, name))
        if not isinstance(self.json_schema, Mapping | None):
            raise UsageError(f"json_schema={self.json_schema!r}; it must be a mapping")
        if self.json_schema is not None and self.answer_start:
            raise UsageError("json_schema is of a whole answer; leave out answer_start (the last message's text)")
        self._check_lists()

    def _check_lists(self) -> None:
        if not isinstance(self.stop, Sequence):
            raise UsageError(f"stop={self.stop!r}; it must be text, or several in a list")
        for one in self.stop:
            text("stop", one)
        if not isinstance(self.history, Sequence) or not all(isinstance(one, Exchange) for one in self.history):
            raise UsageError(f"history={self.history!r}; it must be a list of Exchange(question, answer)")
        for exchange in self.history:
            text("history", exchange.question)
            text("history", exchange.answer)


def checked_options(question: object, options: AskOptions | None, num_samples: object) -> AskOptions:
    """What a question sets, or the defaults. Raises UsageError: one of the three is of the wrong type."""
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
    """What to search for, with the defaults. Raises UsageError: something is of the wrong type."""
    return text("the query", query), mode or defaults.mode, integer("top_k", defaults.top_k if top_k is None else top_k)


@dataclass(frozen=True, slots=True)
class Source:
    """One chunk that was put into the prompt."""

    document: str
    """Document id: the file's path, with `#record` for one record of a JSONL file."""
    chunk_id: str
    text: str
    score: float
    """The score that ranked it; higher is better."""
    scores: dict[str, float]
    """The score from each retriever that found it."""
    position: int
    """Place in the prompt, from 1."""
    heading: str
    """`Title > Section`; empty where the document has none."""
    start_line: int
    """First line in the file, from 1; 0 where the format has no lines."""
    end_line: int
    start_page: int = 0
    """First page of the file, from 1; 0 where the format has no pages."""
    end_page: int = 0
    turns_ago: int = 0
    """0: found for this question. In a conversation: for one so many questions before, and in the prompt since."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in seconds. TTFT counts from the question's arrival and so includes retrieval."""

    retrieval_seconds: float
    ttft_seconds: float
    """Time to the first token."""
    tpot_seconds: float
    """Time per output token after the first: (total - TTFT) / (tokens - 1); 0 for a single token."""
    total_seconds: float
    queue_seconds: float | None = None
    """From the end of the search until the engine took it on: prompt tokenised, waiting for others. Null, like the next
    two, where an engine elsewhere does not say."""
    load_seconds: float | None = None
    """Until computing began: kept KV loaded, of this question and of those taken on with it."""
    prefill_seconds: float | None = None
    """Until the first token: search, queue, load and prefill add up to TTFT; the rest of the total is decoding."""


@dataclass(frozen=True, slots=True)
class VariantReport:
    """The copy that a document was placed from (docs/chunk-reuse.md)."""

    behind: tuple[str | None, ...]
    """Ids of the chunks that stood before it when it was computed; null for one of which nothing is kept any more."""
    first_position: int
    """Where it stood."""
    overlap: float
    """beta': how alike old and new context are for it, in [0, 1]."""
    impact: float | None
    """CCI: how much it owes to its old context, from 0.5 to 1; null if nobody measured it."""
    overhead: float
    """CFO: share of its tokens to compute again by these."""
    is_focused: bool | None
    """Whether the question looks at it; null if nobody asked (`reuse.focus_window`)."""
    saved_seconds: float
    """Expected by the cost profile: computing it, less loading it and computing some of it again."""


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment of the prompt, and where its KV came from."""

    kind: str
    """`system`, `chunk`, `question`, or `turn`: an earlier question and its answer."""
    chunk_id: str | None
    num_tokens: int
    source: str
    """`device`, `host` or `disk`, or `computed`."""
    reason: str
    """Why: see `core.reuse.Reason`."""
    num_recomputed: int = 0
    """Of the tokens of a document that was reused at another place: computed again to repair it."""
    variant: VariantReport | None = None
    """Of such a document."""


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """How much of the prompt's KV came from a cache."""

    num_prompt_tokens: int
    """0 if an engine elsewhere did not say."""
    num_cached_tokens: int
    """Prompt tokens whose KV was taken from a cache and not computed."""
    num_recomputed_tokens: int = 0
    """Tokens of cached chunks that were computed again to repair them (selective recompute)."""
    num_device_tokens: int = 0
    """Of the cached ones: on the device already."""
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    load_seconds: float = 0.0
    """What loading them was expected to take."""
    saved_seconds: float = 0.0
    """What it saved by the cost model, loading deducted."""
    recompute_ratio: float = 0.0
    """Share of the tokens of documents reused at another place that was to be computed again; 0 if there were none."""
    segments: tuple[SegmentReport, ...] = ()
    """In order; empty from an engine elsewhere."""


class SpeculationOutcome(StrEnum):
    """What became of beginning to read before the search had ended (docs/pipelining.md)."""

    OFF = "off"
    """It is switched off, or the engine is elsewhere."""
    PLAIN = "plain"
    """The search ran in one go: it is too fast to gain by it, or to measure that."""
    NONE = "none"
    """Nothing was begun: the engine was busy, no stage promising, or the first list the last."""
    WRONG = "wrong"
    """What was begun was not what the search ended with."""
    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """How far search and prefill overlapped."""

    outcome: SpeculationOutcome
    num_stages: int = 1
    """Lists that the search gave."""
    num_started: int = 0
    """Prompts begun with provisional lists."""
    ahead_seconds: float = 0.0
    """How long the model had worked on the right prompt when the search ended: gained by the overlap."""
    break_even_seconds: float | None = None
    """Searches of at least this time gain by it, as far as has been measured; null where nothing is known."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log probability as the model gave it: before penalties, temperature and cuts."""

    token_id: int
    text: str
    """What it reads as on its own; a replacement character stands for part of a character."""
    utf8: tuple[int, ...]
    """Its bytes."""
    logprob: float
    top: tuple["TokenScore", ...] = ()
    """The most likely tokens at its place, most likely first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    """Generated tokens, without the end-of-sequence token; the last ones may reach into a stop string. None from an
    engine elsewhere, which sends text."""
    finish_reason: str
    """`stop`: the model ended the answer, or a stop string did. `length`: `max_tokens` was reached."""
    sources: tuple[Source, ...]
    timing: Timing
    reuse: ReuseReport
    num_generated_tokens: int
    """As the engine counted them."""
    logprobs: tuple[TokenScore, ...] | None = None
    """One per token of `token_ids`, if asked for."""
    speculation: SpeculationReport = SpeculationReport(SpeculationOutcome.OFF)


def trace_of(question: str, model: str, answer: Answer) -> dict[str, Any]:
    """What `stillroom explain` will know of a question: everything but the text of its documents."""
    sources = [asdict(source) for source in answer.sources]
    for source in sources:
        del source["text"]
    return {
        "question": question,
        "model": model,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "num_generated_tokens": answer.num_generated_tokens,
        "sources": sources,
        "timing": asdict(answer.timing),
        "reuse": asdict(answer.reuse),
        "speculation": asdict(answer.speculation),
    }

"""Bodies of replies: OpenAI's types, with the extension field `stillroom`.

The extension holds the dataclasses of `rag.answer`, so that HTTP, the command line and Python report the same values.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from stillroom.config.settings import SearchMode
from stillroom.core.request import LookupCounts
from stillroom.engine.events import Route
from stillroom.rag.answer import Citation, CopyOfChunk, ReuseReport, Source, SpeculationReport, Timing
from stillroom.rag.hops import Hop


class Reply(BaseModel):
    """Part of a reply. The texts under its fields are in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    """The invalid field."""
    code: str | None


class ErrorReply(Reply):
    """Error reply of every route, in OpenAI's shape."""

    error: ErrorDetail


class PromptTokensDetails(Reply):
    cached_tokens: int
    """Prompt tokens whose KV was reused."""


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerDetails(Reply):
    """Extension of a complete reply. Only chats have `sources`."""

    request_id: str
    sources: list[Source] | None = None
    highlight: tuple[int, int] | None = None
    """First character of the text that answers the question, and the one after the last; null unless a reader
    answered."""
    confidence: float | None = None
    """How sure a reader is that the sources answer the question, from 0 to 1; null unless a reader answered."""
    warnings: list[str] = []
    """What a reader of the answer must know, such as that the model cannot read documents."""
    timing: Timing
    reuse: ReuseReport
    speculation: SpeculationReport
    lookup: LookupCounts
    citations: list[Citation] = []
    """Of the answer with the index 0."""
    hops: list[Hop] = []
    """The searches of a question that was asked with several hops."""
    route: Route | None = None
    """The engine of a cluster or the remote server that generated the answer; null from the server's own engine."""


class StreamDetails(Reply):
    """Extension of a stream. With several hops, each has a chunk with `request_id` and `hop` first. Then a chunk has
    `request_id` and `sources`; the chunk with the finish reason has the other fields."""

    request_id: str
    sources: list[Source] | None = None
    highlight: tuple[int, int] | None = None
    confidence: float | None = None
    warnings: list[str] | None = None
    timing: Timing | None = None
    reuse: ReuseReport | None = None
    speculation: SpeculationReport | None = None
    lookup: LookupCounts | None = None
    citations: list[Citation] | None = None
    hop: Hop | None = None
    hops: list[Hop] | None = None
    route: Route | None = None


class UrlCitation(Reply):
    """The place in a document that supports a sentence."""

    start_index: int
    """First character of the sentence in the message."""
    end_index: int
    title: str
    url: str
    """Path on this server, with `#L10-L14` or `#page=3` where the document has lines or pages."""


class Annotation(Reply):
    """A citation in OpenAI's form."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: UrlCitation


class CalledFunction(Reply):
    name: str
    arguments: str
    """JSON of the tool's schema."""


class MessageToolCall(Reply):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    annotations: list[Annotation] = []
    """The sentences that a source supports, fully or partly."""


class CallingMessage(Reply):
    """The message of a model that calls a tool."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """What it says before the call."""
    refusal: None = None
    tool_calls: list[MessageToolCall]


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None = None


class Choice(Reply):
    index: int = 0
    message: CallingMessage | AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    stillroom: AnswerDetails


class DeltaToolCall(MessageToolCall):
    index: int


class Delta(Reply):
    """Addition of a chunk to the message; unset fields are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    annotations: list[Annotation] | None = None
    """In the chunk with the finish reason, if there are any."""
    tool_calls: list[DeltaToolCall] | None = None
    """A whole call, in one chunk."""


class ChunkChoice(Reply):
    index: int = 0
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Reply):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    stillroom: StreamDetails | None = None


class CompletionLogprobs(Reply):
    """Four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""


class CompletionChoice(Reply):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Reply):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    stillroom: AnswerDetails | None = None


class CompletionChunk(Completion):
    """One event of a streamed completion."""


class Model(Reply):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stillroom"


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[Model]


class Embedding(Reply):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingUsage(Reply):
    """Always 0, because the embedder does not report tokens; clients expect the fields."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class EmbeddingList(Reply):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class FoundChunk(Reply):
    """A chunk found by a search, as `stillroom search --json` prints it."""

    model_config = ConfigDict(extra="allow")

    document: str
    chunk_id: str
    text: str
    score: float
    scores: dict[str, float]
    heading: str
    start_line: int
    end_line: int
    start_page: int
    end_page: int
    also_in: list[CopyOfChunk] = []


class SearchTiming(Reply):
    embed_seconds: float
    search_seconds: float
    rerank_seconds: float
    total_seconds: float


class SearchReply(Reply):
    query: str
    mode: SearchMode
    num_reranked: int
    """Candidates that the reranker read; 0 without one."""
    results: list[FoundChunk]
    timing: SearchTiming


class RerankedText(Reply):
    text: str


class RerankResult(Reply):
    index: int
    """Position of the document in the request, from 0."""
    relevance_score: float
    """From 0 to 1; higher is better."""
    document: RerankedText | None = None
    """Present if the request asked for documents."""


class RerankApiVersion(Reply):
    version: str


class RerankMeta(Reply):
    """As in Cohere's replies."""

    api_version: RerankApiVersion


class RerankUsage(Reply):
    """As in Jina's replies. Always 0, because the reranker does not report tokens; clients expect the fields."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class RerankReply(Reply):
    id: str
    model: str
    results: list[RerankResult]
    """Best first."""
    meta: RerankMeta
    usage: RerankUsage


class Blocks(Reply):
    free: int
    total: int


class IndexListsReply(Reply):
    device: int | None = None
    """Present if lists are on devices."""
    host: int
    total: int


class DatabaseReply(Reply):
    answers: bool
    """Whether the database answered when it was last asked, every second; searches go on without it."""
    copy_age_s: float
    """Seconds since this machine's copy was last known to be up to date."""


class Health(Reply):
    """Health of the server. On a server with keys, only operators get more than the status."""

    status: Literal["ok"] = "ok"
    model: str | None = None
    documents: int | None = None
    kv_blocks: Blocks | None = None
    index_lists: IndexListsReply | None = None
    """Present with `index.hot_bytes`, after the first search."""
    database: DatabaseReply | None = None
    """Present for a knowledge base in PostgreSQL."""

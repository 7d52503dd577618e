"""The bodies of responses: OpenAI's types, plus one field of ours called `stillroom`.

What the field holds are the dataclasses of `rag.answer`, so that HTTP, the command line and Python say the same. The
bodies of requests: `protocol`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from stillroom.config.settings import SearchMode
from stillroom.rag.answer import ReuseReport, Source, SpeculationReport, Timing


class ErrorDetail(BaseModel):
    """What went wrong, and what to do about it."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorReply(BaseModel):
    """Every error of every route, in OpenAI's shape."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    """Of the prompt: taken from kept KV."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerDetails(BaseModel):
    """Ours, of a whole response. `sources`: of a chat only."""

    request_id: str
    sources: list[Source] | None = None
    timing: Timing
    reuse: ReuseReport
    speculation: SpeculationReport


class StreamDetails(BaseModel):
    """Ours, of a stream. The first chunk: `request_id`, `sources`. The one with the finish reason: the others."""

    request_id: str
    sources: list[Source] | None = None
    timing: Timing | None = None
    reuse: ReuseReport | None = None
    speculation: SpeculationReport | None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class Choice(BaseModel):
    index: int = 0
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    stillroom: AnswerDetails


class Delta(BaseModel):
    """What a chunk adds to the message; unset fields are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    stillroom: StreamDetails | None = None


class CompletionLogprobs(BaseModel):
    """Four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    """The whole response."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    stillroom: AnswerDetails | None = None


class CompletionChunk(Completion):
    """One event of a stream."""


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stillroom"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingUsage(BaseModel):
    """Always 0: the embedder does not report tokens. The fields are there because clients expect them."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class FoundChunk(BaseModel):
    """A chunk that a search found; what `stillroom search --json` prints."""

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


class SearchTiming(BaseModel):
    embed_seconds: float
    search_seconds: float
    total_seconds: float


class SearchReply(BaseModel):
    query: str
    mode: SearchMode
    results: list[FoundChunk]
    timing: SearchTiming


class Blocks(BaseModel):
    free: int
    total: int


class IndexListsReply(BaseModel):
    host: int
    total: int


class Health(BaseModel):
    """With keys, all but the status is for operators."""

    status: Literal["ok"] = "ok"
    model: str | None = None
    documents: int | None = None
    kv_blocks: Blocks | None = None
    index_lists: IndexListsReply | None = None
    """With `index.hot_bytes`, once something was searched."""


class DocumentObject(BaseModel):
    """A document of the knowledge base."""

    id: str
    object: Literal["document"] = "document"
    status: Literal["indexed", "not_indexed"] = "indexed"
    """`not_indexed`: an uploaded file that searches do not find, as its upload or removal was interrupted. Upload it
    again, or delete it."""
    name: str | None
    """As it was uploaded, and `#record` for a record of a JSONL file; null for what came from elsewhere."""
    title: str
    num_chunks: int
    num_bytes: int
    added_at: float
    """Unix time in seconds."""
    metadata: dict[str, Any]


class DocumentChunk(BaseModel):
    chunk_id: str
    text: str
    heading: str
    start_line: int
    end_line: int
    start_page: int
    end_page: int


class DocumentWithChunks(DocumentObject):
    chunks: list[DocumentChunk]
    """Those of this page; `num_chunks` counts all."""
    has_more: bool


class DocumentList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DocumentObject]
    first_id: str | None
    last_id: str | None
    """Give it as `after` to see the next page."""
    has_more: bool


class DocumentDeleted(BaseModel):
    id: str
    object: Literal["document.deleted"] = "document.deleted"
    deleted: Literal[True] = True
    num_documents: int
    num_chunks: int


class UploadedFile(BaseModel):
    """What became of one file of an upload."""

    name: str
    status: Literal["added", "updated", "unchanged", "failed"]
    documents: list[DocumentObject]
    """What is in the knowledge base of it now; each record of a JSONL file is one."""
    error: ErrorDetail | None = None
    """Why it failed."""


class JobProgress(BaseModel):
    """How far an upload is."""

    num_files_done: int
    num_files_total: int
    num_bytes_done: int
    num_bytes_total: int
    num_chunks: int


class DocumentJob(BaseModel):
    """An upload that goes on after its request was answered."""

    id: str
    object: Literal["documents.job"] = "documents.job"
    status: Literal["in_progress", "cancelling", "completed", "failed", "cancelled"]
    created_at: float
    """Unix time in seconds."""
    finished_at: float | None = None
    progress: JobProgress | None = None
    data: list[UploadedFile] = []
    """What became of each file, once it is completed."""
    error: ErrorDetail | None = None
    """Why it failed."""


class DocumentJobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DocumentJob]
    """The newest first."""


class UploadReply(BaseModel):
    object: Literal["documents.uploaded"] = "documents.uploaded"
    data: list[UploadedFile]
    error: ErrorDetail | None = None
    """If all of them failed."""

"""The bodies of requests and responses: OpenAI's types, plus one field of ours called `stillroom`.

Fields of OpenAI's that are not here are ignored, so that its clients work; an unknown field inside `stillroom` is an
error, because it is ours and can only be a mistake. Which fields mean what: docs/http.md
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stillroom.config.settings import SearchMode

TopK = Annotated[int, Field(ge=1)]
StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1)]], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)
]
MaxTokens = Annotated[int, Field(ge=1)]

MAX_EMBEDDING_INPUTS = 2048
"""Most texts in one request for embeddings; OpenAI's own limit."""


class TextPart(BaseModel):
    """A piece of a message. Other kinds (images, audio) are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(BaseModel):
    include_usage: bool = False


class SearchOptions(BaseModel):
    """Our extension of the request."""

    model_config = ConfigDict(extra="forbid")

    top_k: TopK | None = None
    mode: SearchMode | None = None


class JsonSchema(BaseModel):
    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    """Empty: any JSON."""


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @property
    def schema_to_enforce(self) -> dict[str, Any] | None:
        """None for free text."""
        if self.type == "json_schema":
            return (self.json_schema or JsonSchema()).schema_
        return {"type": "object"} if self.type == "json_object" else None


class GenerationRequest(BaseModel):
    """What both kinds of completion take."""

    model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Not OpenAI's, but usual: tokens to sample from. The number of chunks is `stillroom.top_k`."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Not OpenAI's, but usual: of requests that wait, those with the lower number go first."""
    deadline_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Ours: how long the request may take until its last token."""
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: StopStrings | None = None
    """A text or a list of texts."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with an event of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    prompt: str | list[int]
    """Text, in which special tokens count as such, or tokens."""
    n: Literal[1] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stillroom: SearchOptions | None = None

    @property
    def question(self) -> str:
        """The last message of the user; empty if there is none."""
        texts = (message.text for message in reversed(self.messages) if message.role == "user")
        return next(texts, "")


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    stillroom: dict[str, Any]
    """`request_id`, `sources`, `timing`, `reuse`, `speculation`."""


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    """The whole response, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    stillroom: dict[str, Any] | None = None
    """Of a whole response: `request_id`, `timing`, `reuse`, `speculation`."""


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
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    stillroom: dict[str, Any] | None = None
    """First chunk: `request_id`, `sources`. The one with the finish reason: `request_id`, `timing`, `reuse`,
    `speculation`."""


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stillroom"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class EmbeddingRequest(BaseModel):
    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_EMBEDDING_INPUTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


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


class SearchRequest(SearchOptions):
    query: str

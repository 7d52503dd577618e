"""Bodies of requests: OpenAI's types, with the extension field `stillroom`.

Types are strict: a number in quotes is an error. Unsupported fields of OpenAI's are ignored, so that its clients work;
an unknown field inside `stillroom` is an error. Lists are bounded and validated up to their first error, so that no
body causes a million errors. Fields are explained in docs/http.md.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from stillroom.config.settings import SearchMode
from stillroom.errors import FilterError
from stillroom.rag.hops import MAX_HOPS
from stillroom.retrieval.filters.language import MAX_CHARS, parse_filter

MAX_EMBEDDING_INPUTS = 2048
"""Most texts in one request for embeddings; OpenAI's own limit."""
MAX_RERANKED = 1000
"""Most texts in one request for reranking; Cohere's own limit."""
MAX_PROMPTS = 128
"""Most prompts in one request for completions."""
MAX_CHOICES = 128
"""Most answers to one prompt; OpenAI's own limit. `runtime.max_num_seqs` may allow less."""
MAX_DOCUMENTS = 1000
"""Most documents in one upload."""
MAX_TOP_K = 1000
"""Most chunks that a search returns over HTTP."""
MAX_PARAGRAPHS = 10_000
"""Most paragraphs of a document in one reply."""
MAX_STOPS = 64
"""Most stop texts; OpenAI's own limit is 4."""
MAX_MESSAGES = 2048
"""Most messages of a conversation."""
MAX_PARTS = 1024
"""Most text parts of a message."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: object) -> object:
    is_tokens = isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
    return [value] if isinstance(value, str) or is_tokens else value


def _is_prompt(value: object) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(one) is int and 0 <= one < 2**31 for one in value):
        return value
    raise ValueError("must be a non-empty text or a non-empty list of token ids")


def _is_filter(text: str) -> str:
    if text.strip():
        try:
            parse_filter(text)
        except FilterError as error:
            raise ValueError(str(error)) from None
    return text


def _is_max_tokens(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for no limit")
    return value


class ContentQuery(BaseModel):
    """Query of `GET /v1/documents/{document}/content`."""

    format: Literal["json", "html"] | None = None
    """`html`: a page to read. Without it, the `Accept` header decides."""
    download: Literal["0", "1"] = "0"
    """`1`: the original file; all other parameters are ignored."""
    start_line: Annotated[int, Field(ge=0, lt=2**31)] = 0
    end_line: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Inclusive; 0: to the end."""
    page: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Only this page; 0: all."""
    highlight: Annotated[str, Field(pattern=r"^(L?[0-9]{1,9}(-L?[0-9]{1,9})?)?$")] = ""
    """Lines that the HTML page marks, such as `L10-L14`."""
    offset: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Paragraphs before the first one."""
    limit: Annotated[int, Field(ge=1, le=MAX_PARAGRAPHS)] = MAX_PARAGRAPHS
    """Paragraphs in the reply."""


TopK = Annotated[int, Field(ge=1, le=MAX_TOP_K)]
MaxTokens = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(_is_max_tokens)]
StopText = Annotated[str, Field(min_length=1)]
StopTexts = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]),
]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Prompt = Annotated[str | list[int], BeforeValidator(_is_prompt, json_schema_input_type=Text | Tokens)]
_MANY = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
Prompts = Annotated[
    list[Prompt],
    _MANY,
    BeforeValidator(
        _as_prompts,
        json_schema_input_type=Text | Tokens | Annotated[list[Text], _MANY] | Annotated[list[Tokens], _MANY],
    ),
]
_EMBEDDED = Field(min_length=1, max_length=MAX_EMBEDDING_INPUTS, fail_fast=True)
EmbeddingInputs = Annotated[
    list[Prompt],
    _EMBEDDED,
    BeforeValidator(
        _as_prompts,
        json_schema_input_type=Text | Tokens | Annotated[list[Text], _EMBEDDED] | Annotated[list[Tokens], _EMBEDDED],
    ),
]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class Body(BaseModel):
    """A strictly typed body."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)


class TextPart(Body):
    """A text part of a message. Other parts (images, audio) are refused."""

    type: Literal["text"]
    text: str


_Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


def _text_only(content: Any) -> Any:
    """Refuse images and audio with a clearer message than the type check gives."""
    parts = content if isinstance(content, list) else []
    kinds = (part.get("type") for part in parts if isinstance(part, dict))
    odd = next((kind for kind in kinds if isinstance(kind, str) and kind != "text"), None)
    if odd is not None:
        raise ValueError(f"a part of type {odd[:40]!r} is not supported; send text parts only")
    return content


class ChatMessage(Body):
    role: str
    content: Annotated[str | _Parts | None, BeforeValidator(_text_only, json_schema_input_type=str | _Parts | None)] = (
        None
    )
    tool_calls: list[Any] | None = None
    """Calls that the assistant made, as they were returned."""
    tool_call_id: str | None = None
    """Of the role `tool`: the call whose result this is."""

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Body):
    include_usage: bool = False


class SearchOptions(Body):
    model_config = ConfigDict(extra="forbid")

    top_k: TopK | None = None
    mode: SearchMode | None = None
    where: Annotated[str, Field(max_length=MAX_CHARS), AfterValidator(_is_filter)] | None = None
    """A filter (docs/filters.md); blank or null allows every document."""


class ChatExtension(SearchOptions):
    """The extension field `stillroom` of a chat request."""

    search: bool = True
    """False: no search, and no entry in the request log; the model answers from the messages alone."""
    hops: Annotated[int, Field(ge=1, le=MAX_HOPS)] | None = None
    """Most searches for the question (docs/hops.md)."""
    source_events: bool | None = None
    """Overrides `server.source_events`."""


def _is_tool_choice(value: object) -> object:
    if value is None or isinstance(value, dict) or value in ("auto", "none", "required"):
        return value
    raise ValueError('must be "auto", "none", "required", or an object that names a tool')


ToolChoice = Annotated[
    Any,
    BeforeValidator(
        _is_tool_choice, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any] | None
    ),
]


class JsonSchema(Body):
    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """An empty schema allows any JSON."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    """Of the type `json_schema`, which needs it."""

    @model_validator(mode="before")
    @classmethod
    def _has_its_schema_in_place(cls, given: Any) -> Any:
        if isinstance(given, dict):
            inner = given.get("json_schema")
            is_there = isinstance(inner, JsonSchema) or (isinstance(inner, dict) and "schema" in inner)
            is_elsewhere = given.get("schema") is not None
            if is_elsewhere or (is_there if given.get("type") != "json_schema" else not is_there):
                raise ValueError(
                    'a schema belongs in json_schema.schema: {"type": "json_schema", "json_schema": {"schema": {...}}}'
                )
        return given

    @property
    def schema_to_enforce(self) -> dict[str, Any] | None:
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class SamplingRequest(Body):
    """Fields that every route that generates has in common."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """-1 picks a random seed."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Not OpenAI's, but common: number of likeliest tokens to sample from; 0 and -1 take all. The number of chunks is
    `stillroom.top_k`."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Not OpenAI's, but common: waiting requests with a lower number run first."""
    deadline_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Extension: seconds until the last token, after which the request fails."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: StopTexts | None = None
    """A text or a list of texts."""
    stream: bool | None = None


class GenerationRequest(SamplingRequest):
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_are_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true; set it, or leave stream_options out")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    """A text, in which special tokens are recognised, or a list of token ids; or a list of either."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of must equal n; ask for n answers with logprobs, and choose among them")
        if self.suffix:
            raise ValueError("suffix is not supported; leave it out")
        if self.echo and self.logprobs is not None:
            raise ValueError(
                "echo and logprobs exclude each other (the prompt's log probabilities are not computed); leave one out"
            )
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return self.prompt


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    continue_final_message: bool | None = None
    """As in vLLM. A last assistant message is continued with or without it; false is refused there."""
    add_generation_prompt: bool | None = None
    """As in vLLM; the opposite of `continue_final_message`."""
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    """Called by models whose chat template knows tools, in a chat without a search. Otherwise read and ignored, like
    `functions`, with a warning in the reply; front ends send them with every question."""
    tool_choice: ToolChoice = None
    """`auto`, `none`, `required`, or a tool by name. That a tool must be called is refused where none are called."""
    functions: list[Any] | None = None
    function_call: Any = None
    stillroom: ChatExtension | None = None

    @property
    def needs_tool_call(self) -> bool:
        return any(one == "required" or isinstance(one, dict) for one in (self.tool_choice, self.function_call))


class EmbeddingRequest(Body):
    input: EmbeddingInputs
    """A text, a list of the embedder's token ids, or a list of either. Ids of another tokenizer often pass
    unnoticed and give the vector of an unrelated text."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """The first numbers of each vector, scaled to length 1 again."""

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        return self.input


class SearchRequest(SearchOptions):
    query: str


class RerankText(Body):
    text: str


def _has_text(value: object) -> object:
    if not isinstance(value, str | RerankText) and not (isinstance(value, dict) and isinstance(value.get("text"), str)):
        raise ValueError('must be a text, or an object with a text: {"text": "..."}')
    return value


def _is_text_field(names: list[str]) -> list[str]:
    if names not in ([], ["text"]):
        raise ValueError('can only be ["text"]; put all that is to be ranked into the text of each document')
    return names


RerankDocument = Annotated[str | RerankText, BeforeValidator(_has_text, json_schema_input_type=str | RerankText)]


class RerankRequest(Body):
    """As Cohere's (v1 and v2) and Jina's clients send it."""

    query: str
    documents: Annotated[list[RerankDocument], Field(min_length=1, max_length=MAX_RERANKED, fail_fast=True)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Results in the reply, the best ones; null: all."""
    return_documents: bool | None = None
    rank_fields: (
        Annotated[list[str], Field(max_length=MAX_PARTS, fail_fast=True), AfterValidator(_is_text_field)] | None
    ) = None
    """Cohere's v1. Only `text` is read."""

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class DocumentText(Body):
    model_config = ConfigDict(extra="forbid")

    name: Text
    """A path such as `notes/keys.md`; its extension selects the loader."""
    text: str


class DocumentsRequest(Body):
    model_config = ConfigDict(extra="forbid")

    documents: Annotated[list[DocumentText], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
    metadata: dict[str, Any] | None = None
    """Metadata of all documents, for filters; a null value removes a name."""

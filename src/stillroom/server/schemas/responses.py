"""Bodies of `POST /v1/responses`: OpenAI's Responses API, with the extension field `stillroom`.

A request is a chat request in another form: `ResponsesRequest.as_chat` makes one of it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from stillroom.server.schemas.replies import AnswerDetails, Reply, StreamDetails
from stillroom.server.schemas.requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    Body,
    ChatCompletionRequest,
    ChatExtension,
    ChatMessage,
    JsonSchema,
    MaxTokens,
    ResponseFormat,
    SamplingRequest,
    ToolChoice,
)

MAX_METADATA = 16
"""Most pairs of metadata; OpenAI's own limit."""
_TEXT_PARTS = ("input_text", "output_text", "text")


class InputPart(Body):
    """A text part of a message. Other parts (images, files) are refused."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _as_parts(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise ValueError(f"a part of type {kind[:40]!r} is not supported; send text parts only")
    return content


_Parts = Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[_Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts)]


def _as_messages(given: object) -> object:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    for item in given if isinstance(given, list) else ():
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind != "message":
            raise ValueError(f"an item of type {kind[:40]!r} is not supported; send messages only")
    return given


_Messages = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    """Of the type `json_schema`, which needs it; an empty schema allows any JSON."""

    @model_validator(mode="before")
    @classmethod
    def _has_its_schema_in_place(cls, given: Any) -> Any:
        if isinstance(given, dict):
            is_there, is_elsewhere = given.get("schema") is not None, given.get("json_schema") is not None
            if is_elsewhere or is_there != (given.get("type") == "json_schema"):
                raise ValueError('a schema belongs beside the type: {"type": "json_schema", "schema": {...}}')
        return given

    def as_response_format(self) -> ResponseFormat:
        schema = JsonSchema.model_validate({"name": self.name, "schema": self.schema_})
        return ResponseFormat(type=self.type, json_schema=schema if self.type == "json_schema" else None)


class TextOptions(Body):
    format: TextFormat | None = None


def _refuse_stored(value: object) -> object:
    if value is not None:
        raise ValueError("not supported, because no response is stored; leave it out, and send the whole input")
    return value


def _refuse_true(value: object) -> object:
    if value is True:
        raise ValueError("true is not supported, because no response is stored; leave it out")
    return value


NotStored = Annotated[None, BeforeValidator(_refuse_stored)]
Never = Annotated[Literal[False] | None, BeforeValidator(_refuse_true)]
MetadataName = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]


class ResponsesRequest(SamplingRequest):
    """Fields that change nothing here, such as `user`, are read and ignored; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    input: Annotated[_Messages, BeforeValidator(_as_messages, json_schema_input_type=str | _Messages)]
    """A question, or the messages of a conversation."""
    instructions: str | None = None
    """A system message."""
    max_output_tokens: MaxTokens | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[MetadataName, MetadataText], Field(max_length=MAX_METADATA)] | None = None
    """Returned as it was sent."""
    store: Never = None
    """Responses are not stored."""
    background: Never = None
    previous_response_id: NotStored = None
    conversation: NotStored = None
    prompt: NotStored = None
    tools: list[Any] | None = None
    """Read and ignored, with a warning in the reply."""
    tool_choice: ToolChoice = None
    """That a tool must be called is refused."""
    top_logprobs: Literal[0] | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """The oldest turns of a conversation that is too long are left out in either case."""
    user: str | None = None
    stillroom: ChatExtension | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if "message.output_text.logprobs" in (self.include or ()):
            raise ValueError("include: this route returns no log probabilities; use /v1/chat/completions for them")
        return self

    def as_chat(self) -> ChatCompletionRequest:
        """Return the chat request that asks for the same."""
        said = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        said += [
            ChatMessage(role=message.role, content="\n".join(part.text for part in message.content))
            for message in self.input
        ]
        form = self.text.format if self.text is not None else None
        return ChatCompletionRequest(
            **{name: getattr(self, name) for name in SamplingRequest.model_fields},
            messages=said,
            max_completion_tokens=self.max_output_tokens,
            response_format=None if form is None else form.as_response_format(),
            tools=self.tools,
            tool_choice=self.tool_choice,
            stillroom=self.stillroom,
        )


class InputTokensDetails(Reply):
    cached_tokens: int
    """Prompt tokens whose KV was reused."""


class OutputTokensDetails(Reply):
    reasoning_tokens: int = 0


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class UrlAnnotation(Reply):
    """The place in a document that supports a sentence."""

    type: Literal["url_citation"] = "url_citation"
    start_index: int
    """First character of the sentence in the text."""
    end_index: int
    title: str
    url: str
    """Path on this server, with `#L10-L14` or `#page=3` where the document has lines or pages."""


class OutputText(Reply):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[UrlAnnotation] = []
    """The sentences that a source supports, fully or partly."""
    logprobs: list[Any] = []


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Reply):
    id: str
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(Reply):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    """The format of the request."""
    tool_choice: str = "auto"
    tools: list[Any] = []
    """Empty, because none are called."""
    top_p: float
    truncation: Literal["auto"] = "auto"
    usage: ResponseUsage | None = None
    user: str | None = None
    background: Literal[False] = False
    stillroom: AnswerDetails | StreamDetails
    """In a stream, the first two events have `request_id` and `sources`, and the last one all fields."""


class ResponseEvent(Reply):
    """One event of a streamed response. The other fields depend on `type`."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.annotation.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "error",
    ]
    sequence_number: int
    """Counts the events of the stream from 0."""
    response: ResponseReply | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    annotation: UrlAnnotation | None = None

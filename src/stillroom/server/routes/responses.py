"""`POST /v1/responses`: one answer as a complete response or as typed events. The chat route's code asks for it."""

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from stillroom.config.settings import GenerationConfig
from stillroom.rag.answer import Answer
from stillroom.rag.as_json import JsonObject, details_as_json
from stillroom.server.routes.annotations import annotations_of, public_sources
from stillroom.server.routes.answer_events import as_event, usage_of
from stillroom.server.routes.chat import as_sent
from stillroom.server.schemas.replies import AnswerDetails, StreamDetails
from stillroom.server.schemas.requests import ChatCompletionRequest
from stillroom.server.schemas.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
    Status,
    TextFormat,
    UrlAnnotation,
)

if TYPE_CHECKING:
    from stillroom.rag.stream import AsyncAnswerStream

_AT_TEXT = {"output_index": 0, "content_index": 0}


class Responses:
    """The response to one request, complete or as events."""

    def __init__(
        self,
        stream: "AsyncAnswerStream",
        model: str,
        body: ResponsesRequest,
        asked: ChatCompletionRequest,
        defaults: GenerationConfig,
    ) -> None:
        """
        Args:
            asked: `body` as a chat request.
        """
        self._stream = stream
        self._asked = asked
        self._sources = public_sources(stream.sources)
        self._item_id = f"msg_{stream.request_id}"
        form = (body.text.format if body.text else None) or TextFormat()
        self._common: dict[str, Any] = {
            "id": f"resp_{stream.request_id}",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) | {"type": form.type}},
            "user": body.user,
        }
        self._num_events = 0

    def whole(self, answer: Answer) -> ResponseReply:
        """Return the complete response."""
        answer = as_sent(answer, self._asked, calls_tools=False)
        usage = usage_of([answer], 1)
        is_cut = answer.finish_reason == "length"
        return ResponseReply(
            **self._common,
            status=_status(answer),
            incomplete_details=IncompleteDetails() if is_cut else None,
            output=[self._message(_text(answer), _status(answer))],
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
            stillroom=AnswerDetails(request_id=answer.request_id, sources=self._sources, **details_as_json(answer)),
        )

    async def events(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events. OpenAI's streams of responses end without `[DONE]`."""
        begun = self._begun()
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=self._message(None, "in_progress"))
        yield self._at_text("response.content_part.added", part=OutputText(text=""))
        async for piece in self._stream:
            yield self._at_text("response.output_text.delta", delta=piece, logprobs=[])
        whole = self.whole(self._stream.answer)
        message = whole.output[0]
        (part,) = message.content
        for index, annotation in enumerate(part.annotations):
            yield self._at_text("response.output_text.annotation.added", annotation_index=index, annotation=annotation)
        yield self._at_text("response.output_text.done", text=part.text, logprobs=[])
        yield self._at_text("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{whole.status}", response=whole)

    def error(self, body: JsonObject) -> str:
        """Format an error as the last event. OpenAI's clients raise what its field `error` says."""
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"], error=error)

    def _begun(self) -> ResponseReply:
        ours = StreamDetails(request_id=self._stream.request_id, sources=self._sources)
        return ResponseReply(**self._common, status="in_progress", output=[], stillroom=ours)

    def _message(self, text: OutputText | None, status: Status) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=[] if text is None else [text])

    def _at_text(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._item_id, **_AT_TEXT, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        written = {name: one.model_dump() if isinstance(one, BaseModel) else one for name, one in fields.items()}
        data = {"type": kind, "sequence_number": self._num_events, **written}
        self._num_events += 1
        return f"event: {kind}\n{as_event(data)}"


def _status(answer: Answer) -> Status:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _text(answer: Answer) -> OutputText:
    found = [UrlAnnotation(**one.url_citation.model_dump()) for one in annotations_of(answer)]
    return OutputText(text=answer.text, annotations=found)

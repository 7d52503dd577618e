"""`/v1/completions`: a prompt is continued as it is, without a search. What another Stillroom's engine asks for."""

import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from stillroom.errors import StillroomError
from stillroom.rag.answer import Answer
from stillroom.server.chat import as_event, costs, usage_of
from stillroom.server.errors import describe
from stillroom.server.protocol import Completion, CompletionChoice

if TYPE_CHECKING:
    from stillroom.rag.stream import AsyncAnswerStream

logger = logging.getLogger(__name__)


def whole_completion(answer: Answer, model: str) -> Completion:
    """The whole response."""
    return Completion(
        id=_name(answer.request_id),
        created=int(time.time()),
        model=model,
        choices=[CompletionChoice(text=answer.text, finish_reason=answer.finish_reason)],
        usage=usage_of([answer]),
        stillroom={"request_id": answer.request_id, **costs(answer)},
    )


async def completion_events(stream: "AsyncAnswerStream", model: str, *, include_usage: bool) -> AsyncIterator[str]:
    """The response as server-sent events."""
    name, created = _name(stream.request_id), int(time.time())

    def event(text: str, reason: str | None = None) -> str:
        choice = CompletionChoice(text=text, finish_reason=reason)
        content = Completion(id=name, created=created, model=model, choices=[choice]).model_dump(exclude_none=True)
        content["choices"][0].setdefault("finish_reason", None)  # null until the end, but never absent
        return as_event(content)

    try:
        async for piece in stream:
            yield event(piece)
        answer = stream.answer
        yield event("", answer.finish_reason)
        if include_usage:
            last = Completion(id=name, created=created, model=model, choices=[], usage=usage_of([answer]))
            yield as_event(last.model_dump(exclude_none=True))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status line is out already: the error is one more event
        if not isinstance(error, StillroomError):
            logger.exception("streaming %s failed", stream.request_id)
        yield as_event(describe(error)[1])


def _name(request_id: str) -> str:
    return f"cmpl-{request_id}"

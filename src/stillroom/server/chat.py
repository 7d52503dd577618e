"""`/v1/chat/completions`: the last user message is the question, and the answer comes whole or as a stream of events.

A client that goes away takes its request with it: the stream is cancelled, and its KV blocks are free after the
current step.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stillroom.errors import StillroomError
from stillroom.rag.answer import Answer, AskOptions
from stillroom.server.errors import CLIENT_CLOSED_REQUEST, describe
from stillroom.server.payloads import Payload, source_payload
from stillroom.server.protocol import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    Delta,
    PromptTokensDetails,
    SearchOptions,
    Usage,
)

if TYPE_CHECKING:
    from stillroom.rag.stream import AsyncAnswerStream

logger = logging.getLogger(__name__)


def ask_options(body: ChatCompletionRequest) -> AskOptions:
    """What the request sets; the rest is left to the configuration."""
    extension = body.stillroom or SearchOptions()
    return AskOptions(
        mode=extension.mode,
        top_k=extension.top_k,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
    )


async def whole_answer(stream: "AsyncAnswerStream", model: str, request: Request) -> Response:
    """Wait for the complete answer, unless the client goes away first."""
    reading = asyncio.create_task(_read_to_end(stream))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            stream.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(_completion(reading.result(), model).model_dump())
    finally:
        stream.cancel()
        reading.cancel()
        leaving.cancel()


async def _read_to_end(stream: "AsyncAnswerStream") -> Answer:
    async for _ in stream:
        pass
    return stream.answer


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _completion(answer: Answer, model: str) -> ChatCompletion:
    return ChatCompletion(
        id=completion_id(answer.request_id),
        created=int(time.time()),
        model=model,
        choices=[Choice(message=AssistantMessage(content=answer.text), finish_reason=answer.finish_reason)],
        usage=_usage(answer),
        stillroom={
            "request_id": answer.request_id,
            "sources": [source_payload(source) for source in answer.sources],
            **_costs(answer),
        },
    )


def completion_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


def _usage(answer: Answer) -> Usage:
    num_prompt, num_generated = answer.reuse.num_prompt_tokens, len(answer.token_ids)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=answer.reuse.num_cached_tokens),
    )


def _costs(answer: Answer) -> Payload:
    return {"timing": asdict(answer.timing), "reuse": asdict(answer.reuse)}


class AnswerEvents(StreamingResponse):
    """The answer as server-sent events. However the response ends, its request does not outlive it."""

    def __init__(self, stream: "AsyncAnswerStream", model: str, *, include_usage: bool) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(stream, model, include_usage), headers=headers, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()


async def _events(stream: "AsyncAnswerStream", model: str, include_usage: bool) -> AsyncIterator[str]:
    chunks = _Chunks(stream.request_id, model)
    try:
        sources = [source_payload(source) for source in stream.sources]
        yield chunks.event(
            Delta(role="assistant", content=""),
            stillroom={"request_id": stream.request_id, "sources": sources},
        )
        async for piece in stream:
            yield chunks.event(Delta(content=piece))
        answer = stream.answer
        yield chunks.event(
            Delta(),
            finish_reason=answer.finish_reason,
            stillroom={"request_id": stream.request_id, **_costs(answer)},
        )
        if include_usage:
            yield chunks.usage_event(_usage(answer))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status line is out already: the error is one more event
        if not isinstance(error, StillroomError):
            logger.exception("streaming %s failed", stream.request_id)
        yield _as_event(describe(error)[1])


class _Chunks:
    """The chunks of one answer, with what they have in common."""

    def __init__(self, request_id: str, model: str) -> None:
        self._id = completion_id(request_id)
        self._model = model
        self._created = int(time.time())

    def event(self, delta: Delta, *, finish_reason: str | None = None, stillroom: Payload | None = None) -> str:
        chunk = ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[ChunkChoice(delta=delta, finish_reason=finish_reason)],
            stillroom=stillroom,
        )
        content = chunk.model_dump(exclude_none=True)
        content["choices"][0].setdefault("finish_reason", None)  # null until the end, but never absent
        return _as_event(content)

    def usage_event(self, usage: Usage) -> str:
        chunk = ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)
        return _as_event(chunk.model_dump(exclude_none=True))


def _as_event(content: Payload) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"

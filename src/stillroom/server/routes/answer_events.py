"""Shared by chat, responses and completions: request options, complete replies, server-sent events, usage.

When a client disconnects, its streams are cancelled and their KV blocks freed after the current step.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stillroom.core.panics import ENDINGS
from stillroom.errors import StillroomError
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.as_json import JsonObject
from stillroom.server.error_replies import CLIENT_CLOSED_REQUEST, STREAM_ERROR_STATUS, describe
from stillroom.server.schemas.replies import PromptTokensDetails, Usage
from stillroom.server.schemas.requests import GenerationRequest

if TYPE_CHECKING:
    from stillroom.rag.stream import AsyncAnswerStream

T = TypeVar("T")

LEAST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON lacks."""
DONE = "data: [DONE]\n\n"

logger = logging.getLogger(__name__)


def generation_options(body: GenerationRequest) -> AskOptions:
    """Return the options that a request sets; the configuration sets the others."""
    return AskOptions(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        sample_top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        min_tokens=body.min_tokens or 0,
        priority=body.priority,
        deadline_seconds=body.deadline_seconds,
        logit_bias={int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()},
        stop=body.stop or (),
        json_schema=body.response_format.schema_to_enforce if body.response_format else None,
    )


async def whole_answers(
    streams: "Sequence[AsyncAnswerStream]", request: Request, complete: Callable[[Sequence[Answer]], BaseModel]
) -> Response:
    """Wait for the answers and reply with `complete(answers)`, or cancel them if the client disconnects first."""
    answers = await unless_left(_read_all(streams), request)
    return left() if answers is None else JSONResponse(complete(answers).model_dump())


async def unless_left(working: Awaitable[T], request: Request) -> T | None:
    """Return the result, or cancel the work and return None if the client disconnects first. Raises as `working`.

    Precondition: the request's body was read.
    """
    work, leaving = asyncio.ensure_future(working), asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return None
    finally:
        work.cancel()
        leaving.cancel()


def left() -> Response:
    """The reply for a client that has disconnected, which only the log sees."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class Cancellable(Protocol):
    """A stream, or a question that has none yet."""

    @property
    def request_id(self) -> str: ...

    def cancel(self) -> None: ...


def cancel(streams: Sequence[Cancellable]) -> None:
    for stream in streams:
        stream.cancel()


async def _read_all(streams: "Sequence[AsyncAnswerStream]") -> list[Answer]:
    try:
        return await asyncio.gather(*(_read_to_end(stream) for stream in streams))
    finally:
        cancel(streams)


async def _read_to_end(stream: "AsyncAnswerStream") -> Answer:
    async for _ in stream:
        pass
    return stream.answer


async def disconnected(request: Request) -> None:
    """Wait until the client disconnects. Precondition: the request's body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage_of(answers: Sequence[Answer], num_samples: int) -> Usage:
    """Add up tokens. A prompt counts once, whatever the number of its answers.

    Args:
        answers: grouped by prompt.
        num_samples: answers to each prompt.
    """
    prompts = [answer.reuse for answer in answers[::num_samples]]
    num_prompt = sum(prompt.num_prompt_tokens for prompt in prompts)
    num_generated = sum(answer.num_generated_tokens for answer in answers)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(prompt.num_cached_tokens for prompt in prompts)),
    )


def slowest(answers: Sequence[Answer]) -> Answer:
    """Return the answer that took longest; its timing is reported."""
    return max(answers, key=lambda answer: answer.timing.total_seconds)


class AnswerEvents(StreamingResponse):
    """Server-sent events of answers. When the response ends, its requests are cancelled."""

    def __init__(
        self,
        streams: Sequence[Cancellable],
        events: AsyncIterator[str],
        as_error: Callable[[JsonObject], str] | None = None,
    ) -> None:
        """
        Args:
            as_error: formats the body of an error reply as the last event; None: the body is its data.
        """
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._with_errors(events), headers=headers, media_type="text/event-stream")
        self._streams = streams
        self._as_error = as_error or as_event
        self._status: int | None = CLIENT_CLOSED_REQUEST
        """See `STREAM_ERROR_STATUS`; None once all events were sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            scope["state"][STREAM_ERROR_STATUS] = self._status
            cancel(self._streams)

    async def _with_errors(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for event in events:
                yield event
            self._status = None
        except ENDINGS:
            raise
        except BaseException as error:  # the status was sent already, so the error becomes an event
            self._status, body = describe(error)
            if not isinstance(error, StillroomError):
                logger.exception("streaming %s failed", self._streams[0].request_id)
            yield self._as_error(body)


async def merged(streams: "Sequence[AsyncAnswerStream]") -> AsyncIterator[tuple[int, str | None]]:
    """Yield pieces of all streams as they arrive, each with its stream's index; None ends that stream."""
    if len(streams) == 1:  # the usual case, without tasks
        async for piece in streams[0]:
            yield 0, piece
        yield 0, None
        return
    arrived: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        async for piece in streams[index]:
            arrived.put_nowait((index, piece))

    def end(index: int, task: asyncio.Task[None]) -> None:
        arrived.put_nowait((index, None))

    tasks = [asyncio.create_task(read(index)) for index in range(len(streams))]
    for index, task in enumerate(tasks):
        task.add_done_callback(partial(end, index))
    try:
        num_open = len(tasks)
        while num_open:
            index, text = await arrived.get()
            if text is None:
                num_open -= 1
                tasks[index].result()  # raises the stream's exception
            yield index, text
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chunk_event(content: BaseModel, *, includes_usage: bool, more: JsonObject | None = None) -> str:
    """Format one chunk of a stream, without empty fields except those that clients expect to be null.

    Args:
        more: further fields.
    """
    chunk = content.model_dump(exclude_none=True) | (more or {})
    for choice in chunk["choices"]:
        choice.setdefault("finish_reason", None)
    if includes_usage:
        chunk.setdefault("usage", None)
    return as_event(chunk)


def as_event(content: JsonObject) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"

"""`/v1/chat/completions`: the last user message is the question, and its answers come whole or as a stream of events.

A client that goes away takes its request with it: the stream is cancelled, and its KV blocks are free after the
current step.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stillroom.errors import StillroomError, UsageError
from stillroom.rag.answer import Answer, AskOptions, TokenScore
from stillroom.server.errors import CLIENT_CLOSED_REQUEST, describe
from stillroom.server.payloads import Payload, source_payload
from stillroom.server.protocol import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    GenerationRequest,
    PromptTokensDetails,
    SearchOptions,
    TokenLogprob,
    TopLogprob,
    Usage,
)

if TYPE_CHECKING:
    from stillroom.rag.stream import AsyncAnswerStream

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI's word for it."""

logger = logging.getLogger(__name__)


def generation_options(body: GenerationRequest) -> AskOptions:
    """What a request of either route sets; the rest is left to the configuration."""
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
        logit_bias=body.logit_bias or {},
        stop=body.stop or (),
    )


def ask_options(body: ChatCompletionRequest) -> AskOptions:
    """What the request sets; the rest is left to the configuration.

    Raises:
        UsageError: fields contradict each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs: true")
    extension = body.stillroom or SearchOptions()
    return replace(
        generation_options(body),
        mode=extension.mode,
        top_k=extension.top_k,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        json_schema=body.response_format.schema_to_enforce if body.response_format else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


async def whole_answers(
    streams: "Sequence[AsyncAnswerStream]", request: Request, complete: Callable[[Sequence[Answer]], BaseModel]
) -> Response:
    """Wait for the complete answers, unless the client goes away first; `complete` makes the response of them."""
    reading = asyncio.ensure_future(_read_all(streams))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            _cancel(streams)
            await asyncio.gather(reading, return_exceptions=True)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(complete(reading.result()).model_dump())
    finally:
        _cancel(streams)
        reading.cancel()
        leaving.cancel()


def _cancel(streams: "Sequence[AsyncAnswerStream]") -> None:
    for stream in streams:
        stream.cancel()


async def _read_all(streams: "Sequence[AsyncAnswerStream]") -> list[Answer]:
    return await asyncio.gather(*(_read_to_end(stream) for stream in streams))


async def _read_to_end(stream: "AsyncAnswerStream") -> Answer:
    async for _ in stream:
        pass
    return stream.answer


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def whole_completion(answers: Sequence[Answer], model: str) -> ChatCompletion:
    """The whole response."""
    first = answers[0]
    return ChatCompletion(
        id=completion_id(first.request_id),
        created=int(time.time()),
        model=model,
        choices=[
            Choice(
                index=index,
                message=AssistantMessage(content=answer.text),
                logprobs=None if answer.logprobs is None else choice_logprobs(answer.logprobs),
                finish_reason=answer.finish_reason,
            )
            for index, answer in enumerate(answers)
        ],
        usage=usage_of(answers),
        stillroom={
            "request_id": first.request_id,
            "sources": [source_payload(source) for source in first.sources],
            **costs(max(answers, key=lambda answer: answer.timing.total_seconds)),
        },
    )


def choice_logprobs(scores: Sequence[TokenScore]) -> ChoiceLogprobs:
    """In OpenAI's form."""

    def one(score: TokenScore) -> TopLogprob:
        return TopLogprob(token=score.text, logprob=max(score.logprob, LEAST_LOGPROB), bytes=list(score.utf8))

    return ChoiceLogprobs(
        content=[
            TokenLogprob(**one(score).model_dump(), top_logprobs=[one(top) for top in score.top]) for score in scores
        ]
    )


def completion_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


def usage_of(answers: Sequence[Answer]) -> Usage:
    """The prompt is counted once, however many answers it has."""
    prompt = answers[0].reuse
    num_generated = sum(answer.num_generated_tokens for answer in answers)
    return Usage(
        prompt_tokens=prompt.num_prompt_tokens,
        completion_tokens=num_generated,
        total_tokens=prompt.num_prompt_tokens + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=prompt.num_cached_tokens),
    )


def costs(answer: Answer) -> Payload:
    """Timing, reuse and speculation, in our field of a response."""
    return {
        "timing": asdict(answer.timing),
        "reuse": asdict(answer.reuse),
        "speculation": asdict(answer.speculation),
    }


class AnswerEvents(StreamingResponse):
    """The answers as server-sent events. However the response ends, no request outlives it."""

    def __init__(self, streams: "Sequence[AsyncAnswerStream]", events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._streams)


async def chat_events(streams: "Sequence[AsyncAnswerStream]", model: str, *, include_usage: bool) -> AsyncIterator[str]:
    """The response as server-sent events."""
    first = streams[0]
    chunks = _Chunks(first.request_id, model)
    try:
        sources = [source_payload(source) for source in first.sources]
        for index in range(len(streams)):
            stillroom = {"request_id": first.request_id, "sources": sources} if index == 0 else None
            yield chunks.event(index, Delta(role="assistant", content=""), stillroom=stillroom)
        async for index, piece in _merged(streams):
            stream = streams[index]
            scores = stream.take_logprobs()
            if piece is not None:
                yield chunks.event(index, Delta(content=piece), scores)
                continue
            yield chunks.event(
                index,
                Delta(),
                scores,
                finish_reason=stream.answer.finish_reason,
                stillroom={"request_id": stream.request_id, **costs(stream.answer)},
            )
        if include_usage:
            yield chunks.usage_event(usage_of([stream.answer for stream in streams]))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status line is out already: the error is one more event
        if not isinstance(error, StillroomError):
            logger.exception("streaming %s failed", first.request_id)
        yield as_event(describe(error)[1])


async def _merged(streams: "Sequence[AsyncAnswerStream]") -> AsyncIterator[tuple[int, str | None]]:
    """The pieces of all streams as they come, each with its stream's index; None is the end of that stream."""
    if len(streams) == 1:  # the usual case needs no tasks
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
                tasks[index].result()  # raises what the stream raised
            yield index, text
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Chunks:
    """The chunks of one response, with what they have in common."""

    def __init__(self, request_id: str, model: str) -> None:
        self._id = completion_id(request_id)
        self._model = model
        self._created = int(time.time())

    def event(
        self,
        index: int,
        delta: Delta,
        scores: Sequence[TokenScore] = (),
        *,
        finish_reason: str | None = None,
        stillroom: Payload | None = None,
    ) -> str:
        choice = ChunkChoice(
            index=index,
            delta=delta,
            logprobs=choice_logprobs(scores) if scores else None,
            finish_reason=finish_reason,
        )
        chunk = ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=[choice], stillroom=stillroom
        )
        content = chunk.model_dump(exclude_none=True)
        content["choices"][0].setdefault("finish_reason", None)  # null until the end, but never absent
        return as_event(content)

    def usage_event(self, usage: Usage) -> str:
        chunk = ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)
        return as_event(chunk.model_dump(exclude_none=True))


def as_event(content: Payload) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"

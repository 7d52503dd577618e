"""`POST /v1/completions`: continues prompts as given, without a search. Other Stillrooms use it as their engine.

Choices are numbered prompt by prompt: those of the first prompt, then those of the second.
"""

import codecs
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stillroom.rag.answer import Answer, AskOptions, TokenScore
from stillroom.rag.as_json import details_as_json
from stillroom.server.privacy import served_name
from stillroom.server.routes.answer_events import (
    DONE,
    LEAST_LOGPROB,
    cancel,
    chunk_event,
    generation_options,
    merged,
    slowest,
    usage_of,
)
from stillroom.server.schemas.replies import (
    AnswerDetails,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
)
from stillroom.server.schemas.requests import CompletionRequest

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom
    from stillroom.rag.stream import AsyncAnswerStream


def completion_options(body: CompletionRequest) -> AskOptions:
    """Return the options that a request sets; the configuration sets the others."""
    return replace(generation_options(body), logprobs=body.logprobs)


class Completions:
    """The continuations of one request's prompts, and their replies."""

    def __init__(self, streams: "Sequence[AsyncAnswerStream]", model: str, num_samples: int, echoes: list[str]) -> None:
        """
        Args:
            echoes: text put before the continuations of each prompt.
        """
        self.streams = streams
        self._num_samples = num_samples
        self._echoes = echoes
        request_id = streams[0].request_id
        self._common: dict[str, Any] = {"id": f"cmpl-{request_id}", "created": int(time.time()), "model": model}

    @classmethod
    async def begin(cls, stillroom: "Stillroom", body: CompletionRequest) -> "Completions":
        """Submit all prompts, or none."""
        num_samples, options = body.n or 1, completion_options(body)
        echoes = [await _echo(stillroom, prompt) if body.echo else "" for prompt in body.prompts]
        streams: list[AsyncAnswerStream] = []
        try:
            for prompt in body.prompts:
                streams += await stillroom.acontinue(prompt, options, n=num_samples)
        except BaseException:
            cancel(streams)
            raise
        return cls(streams, served_name(stillroom.model_name), num_samples, echoes)

    def whole(self, answers: Sequence[Answer]) -> Completion:
        return Completion(
            **self._common,
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=usage_of(answers, self._num_samples),
            stillroom=AnswerDetails(request_id=answers[0].request_id, **details_as_json(slowest(answers))),
        )

    async def events(self, *, includes_usage: bool) -> AsyncIterator[str]:
        """Yield the response as server-sent events."""

        def event(choices: list[CompletionChoice], **fields: Any) -> str:
            chunk = CompletionChunk(**self._common, choices=choices, **fields)
            return chunk_event(chunk, includes_usage=includes_usage)

        offsets = [_Offsets() for _ in self.streams]
        for index in range(len(self.streams)):
            if echo := self._echo_of(index):
                yield event([CompletionChoice(index=index, text=echo)])
        async for index, piece in merged(self.streams):
            stream = self.streams[index]
            logprobs = _logprobs(stream.take_logprobs(), offsets[index])
            reason = stream.answer.finish_reason if piece is None else None
            yield event([CompletionChoice(index=index, text=piece or "", logprobs=logprobs, finish_reason=reason)])
        if includes_usage:
            usage = usage_of([stream.answer for stream in self.streams], self._num_samples)
            yield event([], usage=usage)
        yield DONE

    def _choice(self, index: int, answer: Answer) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echo_of(index) + answer.text,
            logprobs=_logprobs(answer.logprobs or (), _Offsets()),
            finish_reason=answer.finish_reason,
        )

    def _echo_of(self, index: int) -> str:
        return self._echoes[index // self._num_samples]


async def _echo(stillroom: "Stillroom", prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else await stillroom.atext_of(prompt)


class _Offsets:
    """Counts at which character of the text each token begins."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, scores: Sequence[TokenScore]) -> Iterator[int]:
        for score in scores:
            yield self._num_chars
            self._num_chars += len(self._decoder.decode(bytes(score.utf8)))


def _logprobs(scores: Sequence[TokenScore], offsets: _Offsets) -> CompletionLogprobs | None:
    if not scores:
        return None
    return CompletionLogprobs(
        tokens=[score.text for score in scores],
        token_logprobs=[max(score.logprob, LEAST_LOGPROB) for score in scores],
        top_logprobs=[{top.text: max(top.logprob, LEAST_LOGPROB) for top in reversed(score.top)} for score in scores],
        text_offset=list(offsets.of(scores)),
    )

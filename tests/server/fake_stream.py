"""The stream of an answer of `FakeStillroom`: the question's words, one token each."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from stillroom.core.ids import RequestId
from stillroom.errors import EngineClosedError, RequestAbortedError, UsageError
from stillroom.rag.answer import Answer, AskOptions, ReuseReport, Source, Timing, TokenScore

if TYPE_CHECKING:
    from tests.server.fakes import FakeStillroom


class FakeStream:
    """A stream of an answer, to iterate with `for` or `async for`."""

    def __init__(
        self, stillroom: "FakeStillroom", question: str, options: AskOptions, sources: tuple[Source, ...]
    ) -> None:
        self._stillroom = stillroom
        self._words = question.split()[: options.max_tokens]
        self._is_cut = len(self._words) < len(question.split())
        self._is_cancelled = False
        self._is_done = False
        wanted = options.logprobs
        tops = (TokenScore(7, "\u00e4", (195, 164), -0.25), TokenScore(8, "\ufffd", (195,), float("-inf")))
        self._scores = [
            TokenScore(index, word, tuple(word.encode()), -0.5, tops[:wanted])
            for index, word in enumerate([] if wanted is None else self._words)
        ]
        self._num_read = self._num_scores_taken = 0
        self.call_format = None
        self.request_id = RequestId(f"req-{stillroom.next_number()}")
        self.sources = sources
        stillroom.acquire(self)

    @property
    def answer(self) -> Answer:
        if not self._is_done:
            raise UsageError("the answer is not complete; read the stream to its end first")
        return Answer(
            request_id=self.request_id,
            text=" ".join(self._words),
            token_ids=tuple(range(len(self._words))),
            finish_reason="length" if self._is_cut else "stop",
            sources=self.sources,
            timing=Timing(0.01, 0.02, 0.001, 0.05),
            reuse=ReuseReport(num_prompt_tokens=100, num_cached_tokens=40, num_recomputed_tokens=0),
            num_generated_tokens=len(self._words),
            logprobs=tuple(self._scores) or None,
            citations=self._stillroom.citations,
            confidence=self._stillroom.confidence,
            hops=self._stillroom.answered_hops,
        )

    def take_logprobs(self) -> list[TokenScore]:
        first, self._num_scores_taken = self._num_scores_taken, self._num_read
        return self._scores[first : self._num_read]

    def cancel(self) -> None:
        self._is_cancelled = True
        self._stillroom.release(self)

    def __iter__(self) -> Iterator[str]:
        try:
            for index, word in enumerate(self._words):
                self._stillroom.gate.wait()
                yield self._piece(index, word)
            self._is_done = True
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            for index, word in enumerate(self._words):
                while not self._stillroom.gate.is_set() and not self._is_cancelled:
                    await asyncio.sleep(0.001)
                yield self._piece(index, word)
            self._is_done = True
        finally:
            self.cancel()

    def _piece(self, index: int, word: str) -> str:
        if self._stillroom.is_stopped:
            raise EngineClosedError("the engine was closed before the answer was complete")
        if self._is_cancelled:
            raise RequestAbortedError(f"{self.request_id} was cancelled")
        self._num_read = index + 1
        if word == self._stillroom.fails_at:
            raise self._stillroom.failure
        return word if index == 0 else f" {word}"

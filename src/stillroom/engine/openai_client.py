"""A server with OpenAI's routes, as its client sees it: connections, repetitions, and errors that say what to do.

A request is repeated only while nothing of its answer has come, and only where that can help: no connection, HTTP 429
and 5xx. The API key is in the header of each request and in no message.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from stillroom.config.settings import EngineConfig
from stillroom.core.clock import Clock
from stillroom.engine.openai_protocol import DONE, EventDelta, SseDecoder, read_event, read_models, refusal
from stillroom.errors import EngineRefusedError, EngineUnavailableError, StillroomError

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.5
"""Mean wait before the first repetition; it doubles with each one."""

Sleep = Callable[[float], Awaitable[None]]
Random = Callable[[], float]
"""A number in [0, 1)."""


class OpenAIClient:
    """One server. All its methods belong to one event loop."""

    def __init__(
        self, config: EngineConfig, clock: Clock, *, sleep: Sleep = asyncio.sleep, uniform: Random = random.random
    ) -> None:
        self.url = base_url(config.base_url)
        self.has_extra_sampling = config.extra_sampling
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {config.api_key}"} if config.api_key else {},
            timeout=httpx.Timeout(config.read_timeout_s, connect=config.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    async def first_model(self) -> str:
        """The first model that the server lists.

        Raises:
            EngineUnavailableError: it cannot be reached.
            EngineRefusedError: it refuses the key, or lists no model.
        """
        num_failed = 0
        while True:
            try:
                names = await self._models()
            except _NotYetError as failure:
                await self._pause(failure, num_failed)
                num_failed += 1
                continue
            if not names:
                raise EngineRefusedError(f"{self.url} lists no model; name one with --engine-model")
            return names[0]

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[EventDelta, None]:
        """The events of one answer.

        Raises:
            EngineError: the server cannot be reached, refuses, or breaks off.
            PromptTooLongError: the server has no room for the prompt.
        """
        num_failed, num_characters = 0, 0
        while True:
            try:
                async with contextlib.aclosing(self._events(path, body)) as events:
                    async for progress in events:
                        num_characters += len(progress.text)
                        yield progress
                return
            except _NotYetError as failure:
                if num_characters:
                    raise EngineUnavailableError(
                        f"{self.url} broke off after {num_characters} characters of the answer; ask again"
                    ) from failure.__cause__
                await self._pause(failure, num_failed)
                num_failed += 1

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _models(self) -> list[str]:
        with self._connection_errors():
            response = await self._client.get(f"{self.url}/models")
        if response.status_code != 200:
            raise self._refusal(response, response.content, model="")
        return read_models(response.content, self.url)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[EventDelta, None]:
        """One attempt."""
        decoder, has_begun, is_finished = SseDecoder(), False, False
        try:
            with self._connection_errors():
                async with self._client.stream("POST", f"{self.url}/{path}", json=body) as response:
                    await self._check(response, str(body["model"]))
                    async for received in response.aiter_bytes():
                        for data in decoder.push(received):
                            has_begun = True
                            if data == DONE:
                                return
                            progress = read_event(data)
                            is_finished = is_finished or progress.finish_reason is not None
                            yield progress
        except (_NotYetError, EngineUnavailableError):
            if not is_finished:
                raise
        if not has_begun:  # llama-cpp-python answers so when the prompt is too long
            raise EngineUnavailableError(
                f"{self.url} ended its stream without an answer; its log may say why. "
                "If the prompt is too long, lower search.top_k"
            )
        if not is_finished:
            raise _NotYetError(EngineUnavailableError(f"{self.url} closed the connection before its answer"))

    async def _check(self, response: httpx.Response, model: str) -> None:
        if response.status_code != 200:
            raise self._refusal(response, await response.aread(), model)
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise EngineRefusedError(
                f"{self.url} answers with {kind or 'something'} instead of a stream of events; "
                "is engine.base_url right? It usually ends in /v1"
            )

    @contextlib.contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ReadTimeout as error:
            silence = f"{self.url} was silent for {self._config.read_timeout_s:g} s"
            raise EngineUnavailableError(f"{silence}; if that is its speed, raise engine.read_timeout_s") from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            unreachable = (
                f"{self.url} cannot be reached ({reason}); is the server running, and is engine.base_url right?"
            )
            raise _NotYetError(EngineUnavailableError(unreachable)) from error

    def _refusal(self, response: httpx.Response, content: bytes, model: str) -> Exception:
        key = self._config.api_key.encode()  # a server may quote it
        error = refusal(response.status_code, content.replace(key, b"***") if key else content, self.url, model)
        if isinstance(error, EngineUnavailableError) and response.headers.get("x-should-retry") != "false":
            return _NotYetError(error, self._retry_after_s(response.headers.get("retry-after", "")))
        return error

    def _retry_after_s(self, text: str) -> float:
        """Seconds, or a date in HTTP's form; 0 where the server does not say."""
        with contextlib.suppress(ValueError):
            return max(0.0, float(text))
        with contextlib.suppress(ValueError):
            return max(0.0, parsedate_to_datetime(text).timestamp() - self._clock.unix())
        return 0.0

    async def _pause(self, failure: "_NotYetError", num_failed: int) -> None:
        """Wait before the next attempt, or raise why there is none."""
        longest = self._config.max_retry_wait_s
        if num_failed == self._config.max_retries or failure.retry_after_s > longest:
            raise failure.error from failure.__cause__
        # jitter: those who failed together do not come back together
        wait_s = FIRST_WAIT_S * 2**num_failed * (0.5 + self._uniform())
        wait_s = min(max(wait_s, failure.retry_after_s), longest)
        logger.warning("%s; trying again in %.1f s", failure.error, wait_s)
        await self._sleep(wait_s)


class _NotYetError(Exception):
    """An attempt failed, and another may succeed. Never leaves this module."""

    def __init__(self, error: StillroomError, retry_after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


def base_url(url: str) -> str:
    """Without a slash at the end; with OpenAI's path where there is none."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"

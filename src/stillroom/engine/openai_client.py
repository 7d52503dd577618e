"""HTTP client of an OpenAI-compatible server: connections, retries, and errors that say what to do.

A request is retried only before the first text of its answer, and only after a failed connection, HTTP 429 or 5xx. The
API key is in the header of each request and in no message.
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
from stillroom.engine.openai_protocol import DONE, EventDelta, SseDecoder, read_event, read_models, status_error
from stillroom.errors import EngineRefusedError, EngineUnavailableError, StillroomError

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.5
"""Mean wait before the first retry; doubled for each further one."""

Sleep = Callable[[float], Awaitable[None]]
Random = Callable[[], float]
"""A number in [0, 1)."""


class OpenAIClient:
    """Client of one server. All calls must come from one event loop."""

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
        """Return the first model that the server lists.

        Raises:
            EngineUnavailableError: the server cannot be reached.
            EngineRefusedError: the server refuses the key, or lists no model.
        """
        num_failed = 0
        while True:
            try:
                names = await self._models()
            except _RetryableError as failure:
                await self._pause(failure, num_failed)
                num_failed += 1
                continue
            if not names:
                raise EngineRefusedError(f"{self.url} lists no model; name one with --engine-model")
            return names[0]

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[EventDelta, None]:
        """Yield the events of one answer.

        Raises:
            EngineError: the server cannot be reached, refuses the request, or breaks off.
            PromptTooLongError: the prompt exceeds the server's context.
        """
        num_failed, num_characters = 0, 0
        while True:
            try:
                async with contextlib.aclosing(self._events(path, body)) as events:
                    async for progress in events:
                        num_characters += len(progress.text)
                        yield progress
                return
            except _RetryableError as failure:
                if num_characters:
                    raise EngineUnavailableError(
                        f"{self.url} broke off after {num_characters} characters of the answer; ask again"
                    ) from failure.__cause__
                await self._pause(failure, num_failed)
                num_failed += 1

    async def close(self) -> None:
        await self._client.aclose()

    async def _models(self) -> list[str]:
        with self._connection_errors():
            response = await self._client.get(f"{self.url}/models")
        if response.status_code != 200:
            raise self._refusal(response, response.content, model="")
        return read_models(response.content, self.url)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[EventDelta, None]:
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
        except (_RetryableError, EngineUnavailableError):
            if not is_finished:
                raise
        if not has_begun:  # llama-cpp-python answers so when the prompt is too long
            raise EngineUnavailableError(
                f"{self.url} ended its stream without an answer; its log may say why. "
                "If the prompt is too long, lower search.top_k"
            )
        if not is_finished:
            raise _RetryableError(EngineUnavailableError(f"{self.url} closed the connection before its answer"))

    async def _check(self, response: httpx.Response, model: str) -> None:
        if response.status_code != 200:
            raise self._refusal(response, await response.aread(), model)
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise EngineRefusedError(
                f"{self.url} answers with {kind or 'no content type'} instead of a stream of events; "
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
            raise _RetryableError(EngineUnavailableError(unreachable)) from error

    def _refusal(self, response: httpx.Response, content: bytes, model: str) -> Exception:
        key = self._config.api_key.encode()  # a server may quote it
        error = status_error(response.status_code, content.replace(key, b"***") if key else content, self.url, model)
        if isinstance(error, EngineUnavailableError) and response.headers.get("x-should-retry") != "false":
            return _RetryableError(error, self._retry_after_s(response.headers.get("retry-after", "")))
        return error

    def _retry_after_s(self, text: str) -> float:
        """Parse a Retry-After header, seconds or an HTTP date; 0 if it is empty or invalid."""
        with contextlib.suppress(ValueError):
            return max(0.0, float(text))
        with contextlib.suppress(ValueError):
            return max(0.0, parsedate_to_datetime(text).timestamp() - self._clock.unix())
        return 0.0

    async def _pause(self, failure: "_RetryableError", num_failed: int) -> None:
        """Wait before the next attempt; raises the failure's error if there is none."""
        longest = self._config.max_retry_wait_s
        if num_failed == self._config.max_retries or failure.retry_after_s > longest:
            raise failure.error from failure.__cause__
        # jitter spreads the retries of requests that failed together
        wait_s = FIRST_WAIT_S * 2**num_failed * (0.5 + self._uniform())
        wait_s = min(max(wait_s, failure.retry_after_s), longest)
        logger.warning("%s; trying again in %.1f s", failure.error, wait_s)
        await self._sleep(wait_s)


class _RetryableError(Exception):
    """An attempt failed, and another one may succeed. Raised and caught in this module only."""

    def __init__(self, error: StillroomError, retry_after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


def base_url(url: str) -> str:
    """Return a URL without trailing slashes, with the path /v1 if it has no path."""
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"

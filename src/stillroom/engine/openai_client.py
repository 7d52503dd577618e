"""HTTP client of an OpenAI-compatible server: connections, and errors that say what to do.

The API key is in the header of each request and in no message. Retries: `server_pool`.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from stillroom.config.settings import EngineConfig
from stillroom.core.clock import Clock
from stillroom.engine.openai_protocol import (
    DONE,
    BadEventError,
    EventDelta,
    SseDecoder,
    read_event,
    read_models,
    status_error,
)
from stillroom.errors import EngineError, EngineUnavailableError, PromptTooLongError, StillroomError

_MAX_RETRY_AFTER_S = 86400.0


class OpenAIClient:
    """Client of one server. Makes one attempt for each call. All calls must come from one event loop."""

    def __init__(self, url: str, config: EngineConfig, clock: Clock) -> None:
        """
        Args:
            url: one of `config.base_urls`.
        """
        self.url = url
        self._config = config
        self._clock = clock
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {config.api_key}"} if config.api_key else {},
            timeout=httpx.Timeout(config.read_timeout_s, connect=config.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self) -> list[str]:
        """Return the models that the server lists.

        Raises:
            ServerFailure: it failed, and may answer later.
            EngineRefusedError: it refuses the key, or does not list its models.
        """
        with self._connection_errors():
            response = await self._client.get(f"{self.url}/models")
        if response.status_code != 200:
            raise self._refusal(response, response.content, model="")
        return read_models(response.content, self.url)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[EventDelta, None]:
        """Yield the events of one answer.

        Raises:
            ServerFailure: the server failed; another attempt may succeed if there was no text yet.
            EngineRefusedError: it refuses the request.
            PromptTooLongError: the prompt exceeds its context.
        """
        has_begun, is_finished, model = False, False, str(body["model"])
        try:
            with self._event_errors():
                async with contextlib.aclosing(self._data(path, body, model)) as found:
                    async for data in found:
                        if data == DONE:
                            is_finished = has_begun
                            break
                        has_begun = True
                        progress = read_event(data, self.url, model)
                        is_finished = is_finished or progress.finish_reason is not None
                        yield progress
        except ServerFailure:
            if not is_finished:
                raise
        if not has_begun:  # llama-cpp-python answers so when the prompt is too long
            empty = EngineUnavailableError(
                f"{self.url} ended its stream without an answer; its log may say why. "
                "If the prompt is too long, lower search.top_k"
            )
            raise ServerFailure(empty, is_passing=False, may_be_request=True)
        if not is_finished:
            closed = EngineUnavailableError(f"{self.url} closed the connection before its answer")
            raise ServerFailure(closed, is_lost=True)

    async def _data(self, path: str, body: dict[str, Any], model: str) -> AsyncGenerator[str, None]:
        """Yield the data of the events of one reply."""
        decoder = SseDecoder(self.url)
        with self._connection_errors():
            async with self._client.stream("POST", f"{self.url}/{path}", json=body) as response:
                await self._check(response, model)
                async for received in response.aiter_bytes():
                    for data in decoder.push(received):
                        yield data

    async def _check(self, response: httpx.Response, model: str) -> None:
        if response.status_code != 200:
            raise self._refusal(response, await response.aread(), model)
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise BadEventError(
                f"{self.url} answers with {kind or 'no content type'} instead of a stream of events; "
                "is engine.base_url right? It usually ends in /v1"
            )

    @contextlib.contextmanager
    def _event_errors(self) -> Iterator[None]:
        """Turn errors of the server within its reply into failures; no error shows the key."""
        try:
            yield
        except (EngineError, PromptTooLongError) as error:
            key = self._config.api_key
            shown = type(error)(str(error).replace(key, "***")) if key else error
            if isinstance(error, BadEventError | EngineUnavailableError):
                raise ServerFailure(shown, is_passing=not isinstance(error, BadEventError)) from None
            raise shown from None

    @contextlib.contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ReadTimeout as error:
            silence = f"{self.url} was silent for {self._config.read_timeout_s:g} s"
            silent = EngineUnavailableError(f"{silence}; if that is its speed, raise engine.read_timeout_s")
            raise ServerFailure(silent, may_retry=False) from error
        except httpx.RequestError as error:
            reason = str(error) or type(error).__name__
            unreachable = (
                f"{self.url} cannot be reached ({reason}); is the server running, and is engine.base_url right?"
            )
            raise ServerFailure(EngineUnavailableError(unreachable), is_lost=True) from error

    def _refusal(self, response: httpx.Response, content: bytes, model: str) -> Exception:
        key = self._config.api_key.encode()  # a server may quote it
        error = status_error(response.status_code, content.replace(key, b"***") if key else content, self.url, model)
        if not isinstance(error, EngineUnavailableError):
            return error
        retry_after_s = self._retry_after_s(response.headers.get("retry-after", ""))
        return ServerFailure(error, retry_after_s, may_retry=response.headers.get("x-should-retry") != "false")

    def _retry_after_s(self, text: str) -> float:
        """Parse a Retry-After header, seconds or an HTTP date; 0 if it is empty or invalid, a day if it is longer."""
        seconds = 0.0
        with contextlib.suppress(ValueError):
            seconds = parsedate_to_datetime(text).timestamp() - self._clock.unix()
        with contextlib.suppress(ValueError):
            seconds = float(text)
        return min(max(0.0, seconds), _MAX_RETRY_AFTER_S)


class ServerFailure(Exception):
    """An attempt failed for a reason of the server's, not of the request's."""

    def __init__(
        self,
        error: StillroomError,
        retry_after_s: float = 0.0,
        *,
        is_lost: bool = False,
        may_retry: bool = True,
        is_passing: bool = True,
        may_be_request: bool = False,
    ) -> None:
        """
        Args:
            error: what the caller gets if there is no other attempt.
            retry_after_s: when the server wants the next attempt; 0: it did not say.
            is_lost: there is no connection, so the server may have been restarted.
            may_retry: whether another attempt is worth its time.
            is_passing: whether this server may answer a moment later, so that waiting for it is worth its time.
            may_be_request: whether the request may be the reason after all.
        """
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s
        self.is_lost = is_lost
        self.may_retry = may_retry
        self.is_passing = is_passing
        self.may_be_request = may_be_request
        self.is_repeated = False
        """Whether the server had failed before and not answered since."""

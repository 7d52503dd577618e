"""HTTP client of engines in other processes: their information, their state, and streams of answers.

Errors say what a front may do: send the request to another engine (`EngineUnreachedError`, `EngineBusyError`,
`EngineLostError`), or tell the caller. Messages for callers hold no address.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import httpx

from stillroom.cluster.wire import (
    MAX_BODY_BYTES,
    MEDIA_TYPE,
    PREFIX,
    AnswerRequest,
    WireEvent,
    events_from_json,
)
from stillroom.cluster.wire_reading import dump, parse
from stillroom.cluster.wire_state import EngineInfo, EngineState
from stillroom.errors import (
    DeviceLostError,
    EngineClosedError,
    EngineError,
    EngineRefusedError,
    EngineUnavailableError,
    PromptTooLongError,
    QueueFullError,
    UsageError,
    WireError,
)

_MAX_LINE_BYTES = 32 * 2**20
_STATE_SECONDS = 2.0
"""Longest wait for an engine's information or state."""
_KEEP_CONNECTION_SECONDS = 2.0
"""An engine closes an idle connection after 5 s; a request that is sent at that moment would be lost."""
_SECRET = "STILLROOM_CLUSTER__SECRET"


class EngineUnreachedError(EngineUnavailableError):
    """There is no connection to the engine."""


class EngineLostError(EngineUnavailableError):
    """The connection broke, the engine was silent, or it failed: what it has done of the request is unknown."""


class EngineBusyError(EngineError):
    """The engine took nothing of the request; another one may. `error` is what the caller is told if none does."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(str(error))
        self.error = error


class ClusterClient:
    """Client of all engines of a front. All calls must come from one event loop."""

    def __init__(self, secret: str, *, connect_timeout_s: float, silence_s: float) -> None:
        """
        Args:
            secret: of the cluster; empty: none.
            silence_s: longest silence of a stream before it counts as broken.
        """
        self._silence_s = silence_s
        self._short = httpx.Timeout(_STATE_SECONDS, connect=min(connect_timeout_s, _STATE_SECONDS), pool=None)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
            timeout=httpx.Timeout(silence_s, connect=connect_timeout_s, pool=None),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_CONNECTION_SECONDS
            ),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def info(self, address: str) -> EngineInfo:
        """Ask an engine what it is. Raises as `state`."""
        return EngineInfo.from_json(await self._get(address, "info", {}))

    async def state(self, address: str, run: str, since: int, engines: Sequence[str] = ()) -> EngineState:
        """Ask an engine what it holds and does.

        Args:
            run, since: of the last state.
            engines: addresses of the engines that share the documents, so that this one knows its share.

        Raises:
            EngineUnreachedError, EngineLostError: it cannot be reached, or does not answer in 2 s.
            EngineBusyError: it is not ready.
            EngineRefusedError, WireError: it refuses the secret, has another version, or is no engine.
        """
        asked = {"run": run, "since": str(since)}
        if engines:
            asked |= {"engines": ",".join(engines), "me": address}
        return EngineState.from_json(await self._get(address, "state", asked))

    async def answers(self, address: str, request: AnswerRequest) -> AsyncGenerator[tuple[WireEvent, ...], None]:
        """Yield the lines of a stream of answers, without empty ones. Closing it cancels the request.

        Raises:
            EngineBusyError: the engine did not take the request.
            EngineUnreachedError: the engine cannot be reached.
            EngineLostError: the connection broke, or the stream was silent.
            UsageError, EngineRefusedError: no other engine would take the request either.
            WireError: the stream cannot be read.
        """
        body = dump(request.to_json())
        if len(body) > MAX_BODY_BYTES:
            raise PromptTooLongError(
                f"the prompt has {request.prompt.num_tokens} tokens, too many to send to an engine"
            )
        with _connection_errors(self._silence_s):
            async with self._client.stream(
                "POST",
                f"{address}{PREFIX}/answers",
                content=body,
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            ) as response:
                if response.status_code != 200:
                    raise _refusal(response, await response.aread())
                if not response.headers.get("content-type", "").startswith(MEDIA_TYPE):
                    raise EngineRefusedError("what answers at an engine's address is no engine of Stillroom")
                async with contextlib.aclosing(_lines(response)) as lines:
                    async for line in lines:
                        yield events_from_json(parse(line, "a line of the engine's reply"))

    async def _get(self, address: str, path: str, asked: dict[str, str]) -> Any:
        with _connection_errors(_STATE_SECONDS):
            response = await self._client.get(f"{address}{PREFIX}/{path}", params=asked, timeout=self._short)
        if response.status_code != 200:
            raise _refusal(response, response.content)
        return parse(response.content, f"the engine's {path}")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield whole lines, without empty ones. A last line without its end is lost: its engine died."""
    rest = b""
    async for received in response.aiter_raw():
        *lines, rest = (rest + received).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise WireError(f"the engine sent a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line:
                yield line


@contextlib.contextmanager
def _connection_errors(silence_s: float) -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise EngineUnreachedError(f"the engine cannot be reached ({_reason(error)})") from error
    except httpx.ReadTimeout as error:
        raise EngineLostError(f"the engine was silent for {silence_s:g} s") from error
    except httpx.TransportError as error:
        raise EngineLostError(f"the connection to the engine broke ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refusal(response: httpx.Response, content: bytes) -> Exception:
    """Return the error of a status other than 200, from the body that all routes of Stillroom use for errors."""
    status, (message, code) = response.status_code, _error_of(content)
    if status in (401, 403):
        return EngineRefusedError(f"the engine refuses the secret; set {_SECRET} to the same value for both")
    if status == 429:
        seconds = _seconds(response.headers.get("retry-after", ""))
        return EngineBusyError(QueueFullError(message or "the engine is full; ask again later", seconds))
    if status == 503:
        known = {"device_lost": DeviceLostError, "shutting_down": EngineClosedError}.get(code, EngineUnavailableError)
        return EngineBusyError(known(message or "the engine takes no requests now; ask again later"))
    if code == "context_length_exceeded" or status == 413:
        return PromptTooLongError(message or "the prompt is too long for the engine")
    if status == 400 and code:
        return UsageError(message)
    if status >= 500:
        return EngineLostError(f"the engine failed (HTTP {status}); its log has the details")
    return EngineRefusedError(f"the engine refuses the request (HTTP {status})" + (f": {message}" if message else ""))


def _error_of(content: bytes) -> tuple[str, str]:
    """Return message and code of an error's body; empty for another body."""
    with contextlib.suppress(WireError, KeyError, TypeError):
        error = parse(content, "the error")["error"]
        return str(error["message"]), str(error["code"] or "")
    return "", ""


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        return max(1.0, float(text))
    return 1.0

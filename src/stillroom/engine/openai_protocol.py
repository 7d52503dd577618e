"""OpenAI's protocol on the client's side: bodies of requests, events of streams, errors of statuses. No I/O.

Servers differ in details; each detail read here is sent by vLLM, SGLang, llama.cpp or Stillroom.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from stillroom.cluster.routed_request import RoutedRequest
from stillroom.core.request import FinishReason, SamplingParams
from stillroom.engine.events import RemoteUsage, Route
from stillroom.errors import EngineRefusedError, EngineUnavailableError, PromptTooLongError, StillroomError, UsageError

DONE = "[DONE]"
"""The data of the event that ends a stream."""

_MAX_EVENT_BYTES = 4 * 1024**2
_MAX_SHOWN = 300
_CONTEXT = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)
_OPENAI_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
_EXTRA_SAMPLING = ("top_k", "min_p", "repetition_penalty", "min_tokens")
"""Names in vLLM and SGLang, and in llama.cpp except for the penalty."""
_NEUTRAL: dict[str, Any] = {"top_k": 2**20, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values without effect on any server. For top_k, some servers take 0 and some -1; all take a number above the size of
the vocabulary."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, which the server renders with its model's chat template."""

    system: str
    """Empty: none."""
    user: str
    earlier: tuple[tuple[str, str], ...] = ()
    """Earlier turns: the user's text and the answer."""

    @property
    def messages(self) -> list[dict[str, str]]:
        turns = ((("user", user), ("assistant", answer)) for user, answer in self.earlier)
        system = [("system", self.system)] if self.system else []
        messages = [*system, *(one for turn in turns for one in turn), ("user", self.user)]
        return [{"role": role, "content": text} for role, text in messages]


class BadEventError(EngineRefusedError):
    """The server sent something else than events in OpenAI's format."""


NO_PIECES = RoutedRequest(0, ())

RemotePrompt = ChatPrompt | str | tuple[int, ...]
"""Messages, a rendered prompt, or its tokens."""


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Where a request should go, and what decides it again if it cannot go there."""

    server: str = ""
    """Address of the server that was chosen; empty: none yet."""
    request: RoutedRequest = NO_PIECES
    """Names of its prompt's pieces. Its number is set when it is sent."""
    cache_salt: str = ""
    """The server shares cached KV among requests of the same salt only; empty: none is sent."""


def path_of(prompt: RemotePrompt) -> str:
    """Return the route for a prompt, relative to the base URL."""
    return "chat/completions" if isinstance(prompt, ChatPrompt) else "completions"


def body_of(prompt: RemotePrompt, sampling: SamplingParams, model: str, *, has_extra_sampling: bool) -> dict[str, Any]:
    """The JSON of a streamed request.

    Raises:
        UsageError: a sampling parameter cannot be sent.
    """
    prompt_field: dict[str, Any]
    if isinstance(prompt, ChatPrompt):
        prompt_field = {"messages": prompt.messages}
    else:
        prompt_field = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **prompt_field, **sampling_fields(sampling, has_extra=has_extra_sampling), **stream}


def sampling_fields(params: SamplingParams, *, has_extra: bool) -> dict[str, Any]:
    """Return sampling parameters by their names in the protocol.

    Neutral values are sent too, because servers have defaults of their own: llama-cpp-python penalises repetition.

    Args:
        has_extra: whether the server takes parameters that OpenAI does not have.

    Raises:
        UsageError: a parameter is set that cannot be sent.
    """
    default = SamplingParams()
    known = (*_OPENAI_SAMPLING, *(_EXTRA_SAMPLING if has_extra else ()))
    wire = dict(_NEUTRAL) if has_extra else {}
    for name in (field.name for field in fields(SamplingParams)):
        value = getattr(params, name)
        if name in _OPENAI_SAMPLING or (name in known and value != getattr(default, name)):
            wire[name] = value
        elif value != getattr(default, name):
            raise UsageError(f"{name} cannot be sent to this engine; leave it out, or set engine.kind to builtin")
    if has_extra:
        wire["repeat_penalty"] = wire["repetition_penalty"]  # llama.cpp's name
    return wire


class SseDecoder:
    """Decodes `text/event-stream`: bytes in, the data of whole events out.

    Lines end at CR, LF or both, as the format says; other line separators of Unicode are text.
    """

    def __init__(self, url: str) -> None:
        """
        Args:
            url: the server's address, for errors.
        """
        self._url = url
        self._buffer = b""
        self._data: list[bytes] = []

    def push(self, received: bytes) -> Iterator[str]:
        """Yield the data of the events that are complete now.

        Raises:
            BadEventError: an event exceeds 4 MiB.
        """
        self._buffer += received
        # a CR at the very end may be the first half of CR LF
        end = len(self._buffer) - self._buffer.endswith(b"\r")
        lines = self._buffer[:end].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = lines.pop() + self._buffer[end:]
        if len(self._buffer) > _MAX_EVENT_BYTES:
            raise BadEventError(f"{self._url} sent an event of more than {_MAX_EVENT_BYTES} bytes")
        for line in lines:
            if not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data.decode("utf-8", errors="replace")
            elif line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))


@dataclass(frozen=True, slots=True)
class EventDelta:
    """Content of one event."""

    text: str = ""
    finish_reason: FinishReason | None = None
    usage: RemoteUsage | None = None
    route: Route | None = None
    """The server that sent it."""


def read_event(data: str, url: str, model: str) -> EventDelta:
    """Parse the data of an event.

    Args:
        url: the server's address, for errors.
        model: the requested model, for errors.

    Raises:
        EngineUnavailableError: the event holds an error of the server.
        EngineRefusedError, PromptTooLongError: the event holds an error of the request.
        BadEventError: the event is not in OpenAI's format.
    """
    try:
        event = json.loads(data)
        if problem := _error_text(event):
            raise _event_error(event, problem, url, model)
        usage = _usage(event.get("usage"))
        if not event["choices"]:
            return EventDelta(usage=usage)
        choice = event["choices"][0]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        reason = choice.get("finish_reason")
        if not isinstance(text, str | None) or not isinstance(reason, str | None):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise BadEventError(f"{url} sent an event that is not in OpenAI's format: {_shortened(data)}") from None
    if reason in ("abort", "error"):
        raise EngineUnavailableError(f"{url} ended the answer with an error; ask again")
    return EventDelta(text or "", None if reason is None else _finish_reason(reason), usage)


def _event_error(event: dict[str, Any], problem: str, url: str, model: str) -> StillroomError:
    """Return the error for an event that holds one: of the request if its code or type says so, else of the server."""
    error = event.get("error")
    details = error if isinstance(error, dict) else event
    code = details.get("code")
    status = code if isinstance(code, int) else 400 if details.get("type") == "invalid_request_error" else 500
    if _CONTEXT.search(problem) or (400 <= status < 500 and status not in (408, 429)):
        return status_error(status, json.dumps(event).encode(), url, model)
    return EngineUnavailableError(f"{url} ended the answer with an error: {problem}")


def _finish_reason(reason: str) -> FinishReason:
    return FinishReason.LENGTH if reason == "length" else FinishReason.STOP


def _usage(usage: Any) -> RemoteUsage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return RemoteUsage(
        num_prompt_tokens=int(usage["prompt_tokens"]),
        num_cached_tokens=int(details.get("cached_tokens") or 0),
        num_generated_tokens=int(usage.get("completion_tokens") or 0),
    )


def status_error(status: int, content: bytes, url: str, model: str) -> StillroomError:
    """Return the error for a status other than 200."""
    problem = _problem(content)
    reason = f": {problem}" if problem else ""
    if status in (401, 403):
        return EngineRefusedError(
            f"{url} refuses the API key (HTTP {status}){reason}; set STILLROOM_ENGINE__API_KEY to a valid key"
        )
    if _CONTEXT.search(content.decode("utf-8", errors="replace")):  # in the message, or in the error's code
        return PromptTooLongError(f"{url} has no room for the prompt{reason}; lower search.top_k or max_tokens")
    if status == 404 and _is_openai_error(content):
        return EngineRefusedError(f"{url} does not serve the model {model!r}{reason}; name another with --engine-model")
    if status == 404 or 300 <= status < 400:
        return EngineRefusedError(f"{url} answers HTTP {status}; is engine.base_url right? It usually ends in /v1")
    if status == 429:
        return EngineUnavailableError(f"{url} has too many requests (HTTP 429){reason}; ask again later")
    if status >= 500:
        return EngineUnavailableError(f"{url} failed (HTTP {status}){reason}; its log may say more")
    if status == 409 and b'"knowledge_base_empty"' in content:
        reason += "; it is a Stillroom that answers from documents of its own: set engine.prompt = 'tokens' and --model"
    return EngineRefusedError(f"{url} refuses the request (HTTP {status}){reason}")


def read_models(content: bytes, url: str) -> list[str]:
    """Return the names in a response to `GET /v1/models`.

    Raises:
        EngineRefusedError: the response has another format.
    """
    try:
        return [str(model["id"]) for model in json.loads(content)["data"]]
    except (ValueError, KeyError, TypeError):
        raise EngineRefusedError(f"{url} does not list its models; name one with --engine-model") from None


def _problem(content: bytes) -> str:
    try:
        return _error_text(json.loads(content))
    except ValueError:
        return ""


def _is_openai_error(content: bytes) -> bool:
    try:
        found = json.loads(content)
    except ValueError:
        return False
    return isinstance(found, dict) and ("error" in found or found.get("object") == "error")


def _error_text(found: Any) -> str:
    """Return the message of an error object; empty for other values."""
    if not isinstance(found, dict):
        return ""
    error = found.get("error") or (found if found.get("object") == "error" else None)
    if error is None:
        return _shortened(found.get("detail", "")) if "choices" not in found else ""
    return _shortened(error.get("message") or error if isinstance(error, dict) else error)


def _shortened(value: object) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."

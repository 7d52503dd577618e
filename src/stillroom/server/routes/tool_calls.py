"""Tools of a chat request: messages and tools for the model, and calls in replies and streams."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stillroom.backends.tool_chat import NO_PARAMETERS, CallFormat, ToolCall, ToolChat
from stillroom.errors import UsageError
from stillroom.rag.answer import Answer
from stillroom.rag.stop_matcher import StopMatcher
from stillroom.server.routes.annotations import annotations_of
from stillroom.server.schemas.replies import (
    AssistantMessage,
    CalledFunction,
    CallingMessage,
    DeltaToolCall,
    MessageToolCall,
)
from stillroom.server.schemas.requests import ChatCompletionRequest, ChatMessage

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FORM = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def has_tools(body: ChatCompletionRequest) -> bool:
    """Whether a request offers tools, or speaks of calls that were made."""
    return bool(body.tools) or any(message.role == "tool" or message.tool_calls for message in body.messages)


def tool_chat_of(body: ChatCompletionRequest) -> ToolChat:
    """Return the conversation with the tools that may be called now.

    Raises:
        UsageError: a tool, a call or `tool_choice` has another form than OpenAI's.
    """
    if body.response_format is not None and body.response_format.schema_to_enforce is not None:
        raise UsageError(
            "response_format cannot be combined with tools or their calls; leave one of them out",
            param="response_format",
        )
    tools = _tools(body.tools or ())
    choice = body.tool_choice
    if isinstance(choice, dict):
        name = _named(choice)
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        if not tools:
            raise UsageError(
                f"tool_choice names {str(name)[:60]!r}, which is not in tools; add it, or name another",
                param="tool_choice",
            )
    elif choice == "none":
        tools = ()
    elif choice == "required" and not tools:
        raise UsageError("tool_choice: 'required' needs tools; send some", param="tool_choice")
    _check_results(body.messages)
    messages = tuple(_message(one) for one in body.messages)
    return ToolChat(messages, tools, is_call_demanded=bool(tools) and body.needs_tool_call)


def _tools(given: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    tools = tuple(_tool(one) for one in given)
    name, number = Counter(tool["function"]["name"] for tool in tools).most_common(1)[0] if tools else ("", 0)
    if number > 1:
        raise UsageError(f"tools: {number} have the name {name!r}; give each its own", param="tools")
    return tools


def _tool(given: Any) -> Mapping[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise UsageError(f"tools: each must be {_FORM}", param="tools")
    if not _TOOL_NAME.fullmatch(name):
        raise UsageError(f"tools: the name {name[:80]!r} must have 1 to 64 letters, digits, '_' or '-'", param="tools")
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        parameters = NO_PARAMETERS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise UsageError(
            f'tools: the parameters of {name!r} must be a JSON schema with "type": "object"', param="tools"
        )
    about = function.get("description")
    shown = {"name": name, "description": about if isinstance(about, str) else ""}
    return {"type": "function", "function": {**shown, "parameters": {"type": "object", **parameters}}}


def _check_results(messages: Sequence[ChatMessage]) -> None:
    """Raises UsageError: a result is of no call before it."""
    known: set[str] = set()
    for message in messages:
        known.update(str(one.get("id", "")) for one in message.tool_calls or () if isinstance(one, dict))
        called = message.tool_call_id or ""
        if message.role == "tool" and called not in known:
            raise UsageError(
                f"messages: no call before the result has the id {called[:60]!r}; send the assistant message with the "
                "call too, and its id as tool_call_id",
                param="messages",
            )


def _named(choice: Mapping[str, Any]) -> Any:
    function = choice.get("function")
    if not isinstance(function, dict):
        raise UsageError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return function.get("name")


def _message(message: ChatMessage) -> Mapping[str, Any]:
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        found["tool_calls"] = [_call(one) for one in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _call(given: Any) -> Mapping[str, Any]:
    """Return a call as templates read it, with arguments as an object."""
    try:
        function = given["function"]
        arguments = json.loads(function["arguments"])
        named = {"name": str(function["name"]), "arguments": arguments}
        if not isinstance(arguments, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            'messages: a tool call must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": '
            '"{...}"}}, as it was returned',
            param="messages",
        ) from None
    return {"type": "function", "id": str(given.get("id", "")), "function": named}


class CallReader:
    """Separates the text of one answer from the call behind it, piece by piece."""

    def __init__(self, form: CallFormat | None) -> None:
        self._form = form
        self._matcher = StopMatcher(() if form is None else [form.opening or "{"])
        self._num_shown = 0

    def push(self, piece: str) -> str:
        """Return the text that is certain not to belong to a call."""
        if self._form is not None and self._form.is_demanded:
            return ""
        shown = self._matcher.push(piece)
        self._num_shown += len(shown)
        return shown

    def rest(self, answer: Answer) -> tuple[str, list[MessageToolCall] | None]:
        """Return the text of a complete answer that was not returned yet, and its calls."""
        text, calls = text_and_calls(answer, self._form)
        return text[self._num_shown :], calls


def text_and_calls(answer: Answer, form: CallFormat | None) -> tuple[str, list[MessageToolCall] | None]:
    text, call = (answer.text, None) if form is None else form.read(answer.text)
    return text, None if call is None else [_reply(call, answer.request_id)]


def _reply(call: ToolCall, request_id: str) -> MessageToolCall:
    return MessageToolCall(id=f"call_{request_id}", function=CalledFunction(name=call.name, arguments=call.arguments))


def answer_message(answer: Answer, form: CallFormat | None) -> tuple[AssistantMessage | CallingMessage, str]:
    """Return the message of a complete answer and its finish reason."""
    text, calls = text_and_calls(answer, form)
    if calls is None:
        return AssistantMessage(content=text, annotations=annotations_of(answer)), answer.finish_reason
    return CallingMessage(content=text or None, tool_calls=calls), "tool_calls"


def deltas_of(calls: Sequence[MessageToolCall] | None) -> list[DeltaToolCall] | None:
    """Return calls as a stream has them."""
    if calls is None:
        return None
    return [DeltaToolCall(index=index, **call.model_dump()) for index, call in enumerate(calls)]

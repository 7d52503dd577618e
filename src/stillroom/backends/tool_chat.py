"""Chats with tools: how a checkpoint's template writes a call, prompts with tools, and the grammar of an answer.

The template is rendered with a sentinel call, as `prompt_builder` renders it with sentinel messages. It is supported if
it writes a call as one JSON object with `name` and `arguments` or `parameters` (Qwen2.5, Llama 3.1).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.errors import ModelError, UsageError
from stillroom.models.tokenizer import Tokenizer

_NAME, _KEY, _VALUE, _SAID = "stillroom_name", "stillroom_key", "stillroom_value", "@@STILLROOM-SAID@@"
_SLOT = "@@STILLROOM-"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""JSON schema of the arguments of a tool that states none."""
_CALL = re.compile(
    rf'\{{\s*"name":\s*"{_NAME}",\s*"(arguments|parameters)":\s*\{{\s*"{_KEY}":\s*"{_VALUE}"\s*\}}\s*\}}'
)


@dataclass(frozen=True, slots=True)
class ToolChat:
    """A conversation in which the model may call tools."""

    messages: tuple[Mapping[str, Any], ...]
    """In the form that chat templates read: `role`, `content`, and `tool_calls` whose arguments are objects."""
    tools: tuple[Mapping[str, Any], ...]
    """OpenAI's definitions; empty if none may be called now."""
    is_call_demanded: bool = False
    """Whether the answer must be a call."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON of the tool's schema."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call: `opening`, a JSON object, `closing`."""

    opening: str
    closing: str
    arguments_key: str
    is_demanded: bool = False
    """Whether the prompt ends with `opening`, so that the answer is the JSON object alone."""

    def read(self, text: str) -> tuple[str, ToolCall | None]:
        """Split an answer into its text and its call, if it has a complete one."""
        if self.is_demanded or not self.opening:
            before, after = "", text
        else:
            before, _, after = text.partition(self.opening)
        call = _parsed(after, self.arguments_key)
        return (text, None) if call is None else (before, call)


def _parsed(text: str, arguments_key: str) -> ToolCall | None:
    try:
        found, _ = json.JSONDecoder().raw_decode(text.strip())
        return ToolCall(found["name"], json.dumps(found[arguments_key], ensure_ascii=False))
    except (ValueError, KeyError, TypeError):
        return None


def call_format(tokenizer: Tokenizer) -> CallFormat | None:
    """Return how the checkpoint's template writes calls; None if it knows no tools or writes them otherwise."""
    if not tokenizer.has_chat_template:
        return None
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
    call = {"type": "function", "id": "call_0", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    asked = {"role": "user", "content": "?"}
    try:
        said = tokenizer.render_chat([asked, {"role": "assistant", "content": _SAID}], [tool])
        called = tokenizer.render_chat([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool])
    except ModelError:
        return None
    before, _, _ = said.partition(_SAID)
    found = _CALL.search(called, len(before)) if called.startswith(before) and _NAME in before else None
    if found is None:
        return None
    opening = called[len(before) : found.start()]
    closing = re.split("|".join(map(re.escape, tokenizer.special_tokens)) or "$", called[found.end() :])[0]
    is_readable = tokenizer.decode(tokenizer.encode_template(opening)) == opening
    return CallFormat(opening, closing, found[1]) if is_readable else None


def call_grammar(tokenizer: Tokenizer, form: CallFormat, json_rule: str) -> str:
    """Return the grammar, in llguidance's Lark, of an answer: a call, or text with or without a call behind it.

    Args:
        json_rule: the call's JSON object.
    """
    call = f"call: {json_rule}\n"
    if form.is_demanded:
        return f"start: call\n{call}"
    closing = _sequence(tokenizer, form.closing.rstrip())
    if not form.opening:
        return f"start: PLAIN | call {closing}\nPLAIN: /[^{{](?s:.)*/\n{call}"
    opening = _sequence(tokenizer, form.opening)
    if opening.startswith("<["):  # a token of its own, which text does not contain
        return f"start: TEXT | TEXT? {opening} call {closing}\nTEXT: /(?s:.)+/\n{call}"
    marker = form.opening.rstrip()
    rest = _sequence(tokenizer, form.opening[len(marker) :])
    return (
        f"start: PLAIN | before {rest} call {closing}\n"
        f"PLAIN: /(?s:.)*/ & ~/(?s:.)*{re.escape(marker).replace('/', '[/]')}(?s:.)*/\n"
        f"before[suffix={json.dumps(marker)}]: /(?s:.)*/\n{call}"
    )


def _sequence(tokenizer: Tokenizer, text: str) -> str:
    """Return text of the template as grammar: added tokens by their ids, the rest as it is spelled."""
    parts: list[str] = []
    rest = text
    for token_id, name in tokenizer.added_tokens_in(text):
        before, _, rest = rest.partition(name)
        parts += [json.dumps(before)] * bool(before) + [f"<[{token_id}]>"]
    return " ".join(parts + [json.dumps(rest)] * bool(rest))


def call_schema(form: CallFormat, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                form.arguments_key: tool["function"].get("parameters") or NO_PARAMETERS,
            },
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def tool_prompt(tokenizer: Tokenizer, chat: ToolChat, ending: str = "") -> SegmentedPrompt:
    """Build the prompt of a chat with tools. What is said is encoded as plain text.

    Args:
        ending: template text at which the answer begins.

    Raises:
        UsageError: tools or calls hold text that the template would read as its own.
        ModelError: the template fails, or leaves out a message.
    """
    _check_harmless(tokenizer, chat)
    said: list[str] = []
    messages = []
    for message in chat.messages:
        text = message.get("content") or ""
        messages.append({**message, "content": f"{_SLOT}{len(said)}@@" if text else ""})
        said += [text] if text else []
    rest = tokenizer.render_chat(messages, list(chat.tools) or None)
    parts = list(_parts(tokenizer, rest, said))
    parts[-1] += tokenizer.encode_template(ending)
    kinds = [SegmentKind.SYSTEM, *[SegmentKind.TURN] * (len(parts) - 2), SegmentKind.QUESTION]
    return SegmentedPrompt(tuple(Segment(kind, tuple(ids)) for kind, ids in zip(kinds, parts, strict=True) if ids))


def _parts(tokenizer: Tokenizer, rendered: str, said: Sequence[str]) -> Iterator[list[int]]:
    """Yield the tokens of the template before the first text, then of each text with the template behind it."""
    ids: list[int] = []
    for number, text in enumerate(said):
        before, found, rendered = rendered.partition(f"{_SLOT}{number}@@")
        if not found:
            raise ModelError(
                "the checkpoint's chat template leaves out a message; correct it or use another checkpoint"
            )
        yield ids + tokenizer.encode_template(before)
        ids = tokenizer.encode_text(text)
    yield ids + tokenizer.encode_template(rendered)


def _check_harmless(tokenizer: Tokenizer, chat: ToolChat) -> None:
    calls = [message["tool_calls"] for message in chat.messages if message.get("tool_calls")]
    text = json.dumps([list(chat.tools), calls], ensure_ascii=False)
    bad = next((token for token in (*tokenizer.special_tokens, _SLOT) if token and token in text), None)
    if bad is not None:
        raise UsageError(f"tools and tool_calls must not hold {bad!r}, which the model's template uses; remove it")

"""Messages of a chat as a conversation."""

from typing import Any

import httpx
import pytest

from stillroom.backends.conversation import Exchange
from stillroom.server.routes.chat import Conversation, read_messages
from stillroom.server.schemas.requests import ChatMessage
from tests.server.fakes import FakeStillroom


def said(*messages: tuple[str, str | None]) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=content) for role, content in messages]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("user", "a")], Conversation("a", (), "")),
        ([("user", "a"), ("user", "b")], Conversation("a\nb", (), "")),
        ([("user", "a"), ("assistant", "A"), ("user", "b")], Conversation("b", (Exchange("a", "A"),), "")),
        (
            [("user", "a"), ("assistant", "A"), ("assistant", "B"), ("user", "b")],
            Conversation("b", (Exchange("a", "A\nB"),), ""),
        ),
        ([("assistant", "hello"), ("user", "a")], Conversation("a", (), "")),
        ([("user", "a"), ("assistant", None), ("user", "b")], Conversation("b", (Exchange("a", ""),), "")),
        ([("user", "a"), ("assistant", "begun")], Conversation("a", (), "", "begun")),
        ([("user", "a"), ("assistant", "")], Conversation("a", (), "")),
        ([("assistant", "hello")], Conversation("", (), "")),
        ([("system", "s"), ("user", "a"), ("developer", "t")], Conversation("a", (), "s\n\nt")),
        ([("tool", "x"), ("user", "a"), ("function", "y")], Conversation("a", (), "")),
        ([("system", " ")], Conversation("", (), "")),
        ([("user", " "), ("assistant", "A"), ("user", "b")], Conversation("b", (), "")),
        (
            [("user", "a"), ("assistant", "A"), ("user", ""), ("assistant", "B"), ("user", "b")],
            Conversation("b", (Exchange("a", "A"),), ""),
        ),
    ],
)
def test_messages(messages: list[tuple[str, str | None]], expected: Conversation) -> None:
    assert read_messages(said(*messages)) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_history_and_system_reach_the_stillroom(client: httpx.Client, stillroom: FakeStillroom, stream: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "first"}]},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ]

    client.post("/v1/chat/completions", json={"messages": messages, "stream": stream})

    [(question, options)] = stillroom.asked
    assert (question, options.system, options.history) == ("second", "Be brief.", (Exchange("first", "answer"),))


PREFILLED = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}]}


@pytest.mark.parametrize(
    "flags", [{}, {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}]
)
def test_last_assistant_message_is_continued(
    client: httpx.Client, stillroom: FakeStillroom, flags: dict[str, bool]
) -> None:
    assert client.post("/v1/chat/completions", json=PREFILLED | flags).status_code == 200
    [(question, options)] = stillroom.asked
    assert (question, options.answer_start, options.history) == ("a", "The answer is", ())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (PREFILLED | {"add_generation_prompt": True}, "continue_final_message to true"),
        (PREFILLED | {"continue_final_message": False}, "end with a user message"),
        (PREFILLED | {"response_format": {"type": "json_object"}}, "response_format: a JSON schema is of"),
        (
            {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
            "must have role 'assistant'",
        ),
    ],
)
def test_contradicting_continuation_flags_are_refused(
    any_client: httpx.Client, body: dict[str, Any], named: str
) -> None:
    response = any_client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and named in response.json()["error"]["message"]

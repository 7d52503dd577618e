"""Messages as a conversation, and how they reach the room."""

from typing import Any

import httpx
import pytest

from stillroom.rag.conversation import Exchange
from stillroom.server.conversation import Conversation, read_messages
from stillroom.server.protocol import ChatMessage
from tests.server.fakes import FakeRoom


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
        ([("user", "a"), ("assistant", "prefilled")], Conversation("a", (), "")),
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
def test_history_and_system_reach_the_room(client: httpx.Client, room: FakeRoom, stream: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "first"}]},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ]

    client.post("/v1/chat/completions", json={"messages": messages, "stream": stream})

    [(question, options)] = room.asked
    assert (question, options.system, options.history) == ("second", "Be brief.", (Exchange("first", "answer"),))

"""The messages of a chat as a conversation: what is asked, what was asked and answered before, what the system says."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.backends.conversation import Exchange
from stillroom.server.schemas.requests import ChatMessage

_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What stands in the messages of a request."""

    question: str
    """What the user said last; empty if that was nothing."""
    history: tuple[Exchange, ...]
    system: str
    answer_start: str = ""
    """What the assistant says behind the question: the beginning of the answer, to be continued."""


def read_messages(messages: Sequence[ChatMessage]) -> Conversation:
    """What the user says before the assistant speaks is one question, what the assistant says before the user does one
    answer. What the assistant says behind the last user message is how the answer begins. Other roles are not read."""
    system = [message.text for message in messages if message.role in _SYSTEM]
    turns: list[tuple[list[str], list[str]]] = [([], [])]
    for message in messages:
        asked, answered = turns[-1]
        if message.role == "user" and answered:
            turns.append(([message.text], []))
        elif message.role == "user":
            asked.append(message.text)
        elif message.role == "assistant":
            answered.append(message.text)
    *earlier, (last, begun) = turns
    return Conversation(
        question="\n".join(last),
        history=tuple(
            Exchange("\n".join(asked), "\n".join(answered)) for asked, answered in earlier if "".join(asked).strip()
        ),
        system="\n\n".join(text for text in system if text.strip()),
        answer_start="\n".join(begun) if last else "",
    )

"""`POST /v1/chat/completions`: messages to question, answers to a complete reply or a stream of events."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from stillroom.backends.conversation import Exchange
from stillroom.backends.tool_chat import CallFormat, ToolChat
from stillroom.config.settings import ServerConfig
from stillroom.errors import UsageError
from stillroom.rag.answer import Answer, AskOptions, TokenScore
from stillroom.rag.as_json import JsonObject, details_as_json, source_as_json
from stillroom.rag.hops import Hop
from stillroom.server.routes.annotations import annotations_of, public_answer, public_hop, public_sources
from stillroom.server.routes.answer_events import (
    DONE,
    LEAST_LOGPROB,
    chunk_event,
    generation_options,
    merged,
    slowest,
    usage_of,
)
from stillroom.server.routes.source_events import source_event
from stillroom.server.routes.tool_calls import CallReader, answer_message, deltas_of
from stillroom.server.schemas.replies import (
    AnswerDetails,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from stillroom.server.schemas.requests import ChatCompletionRequest, ChatExtension, ChatMessage
from stillroom.server.schemas.tokens import TokenizeRequest

if TYPE_CHECKING:
    from stillroom.rag.stream import AsyncAnswerStream


CHAT_ALIAS = "stillroom-chat"
"""Model name of the served model without a search, for clients that can set no `stillroom.search`."""
_SYSTEM = ("system", "developer")
_NO_TOOLS = "no tools are called: {reason}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat request, split by role."""

    question: str
    """The last user message; empty if there is none."""
    history: tuple[Exchange, ...]
    system: str
    answer_start: str = ""
    """Assistant message after the question: the beginning of the answer, to be continued."""


def read_messages(messages: Sequence[ChatMessage]) -> Conversation:
    """Split messages into question, earlier exchanges, system text and the beginning of the answer.

    Consecutive messages of one role are joined. Assistant messages after the last user message begin the answer. Roles
    other than user, assistant, system and developer are ignored.
    """
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


def read_question(messages: Sequence[ChatMessage], field: str = "messages") -> Conversation:
    """Split messages as `read_messages` does.

    Args:
        field: of the request, that holds them.

    Raises:
        UsageError: they hold no question.
    """
    conversation = read_messages(messages)
    if not conversation.question.strip():
        raise UsageError(
            f"{field}: there is no question; the last message of the role 'user' is the question", param=field
        )
    return conversation


def searches(body: ChatCompletionRequest) -> bool:
    """Whether the documents are searched. The model `CHAT_ALIAS` never searches."""
    return (body.stillroom or ChatExtension()).search and body.model != CHAT_ALIAS


def _why_no_tools(body: ChatCompletionRequest, *, calls_tools: bool) -> str:
    """Return why a request that asks for tools gets none.

    Args:
        calls_tools: whether its route calls tools.
    """
    if not calls_tools:
        return "this route calls none; send the tools to /v1/chat/completions, in a chat without a search"
    if searches(body):
        return "the answer comes from the documents alone"
    if not body.tools:
        return "the request has no tools; older clients' functions are sent as tools"
    return "this model has no chat template here that knows tools"


def ask_options(
    body: ChatCompletionRequest,
    conversation: Conversation,
    tool_chat: ToolChat | None = None,
    *,
    calls_tools: bool = True,
) -> AskOptions:
    """Return the options that a request sets; the configuration sets the others.

    Args:
        tool_chat: the conversation with its tools, if any are called.
        calls_tools: whether the route of the request calls tools.

    Raises:
        UsageError: fields contradict each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.needs_tool_call and tool_chat is None:
        raise _no_tools_error(body, calls_tools=calls_tools)
    if tool_chat is not None:
        conversation = _without_continuation(body, conversation)
    check_continuation(body, conversation)
    if conversation.answer_start and body.response_format is not None and body.response_format.schema_to_enforce:
        raise UsageError(
            "response_format: a JSON schema is of a whole answer, and the last message has role 'assistant', so it "
            "would be continued; end with a user message, or leave response_format out",
            param="response_format",
        )
    extension = body.stillroom or ChatExtension()
    return replace(
        generation_options(body),
        history=conversation.history,
        system=conversation.system,
        answer_start=conversation.answer_start,
        tool_chat=tool_chat,
        search=searches(body),
        mode=extension.mode,
        hops=extension.hops,
        where=extension.where or "",
        top_k=extension.top_k,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _no_tools_error(body: ChatCompletionRequest, *, calls_tools: bool) -> UsageError:
    name = "function_call" if body.tool_choice is None else "tool_choice"
    reason = _why_no_tools(body, calls_tools=calls_tools)
    elsewhere = ". A model whose chat template knows tools calls them in a chat without a search"
    return UsageError(
        f"{name}: {_NO_TOOLS.format(reason=reason)}; leave it out, or set it to 'auto' or 'none'"
        f"{elsewhere if calls_tools and searches(body) else ''}",
        param=name,
    )


def _without_continuation(body: ChatCompletionRequest, conversation: Conversation) -> Conversation:
    """Return a conversation with tools without what stands before a call, which is in the messages of the tool chat.

    Raises:
        UsageError: the last message would be continued.
    """
    if conversation.answer_start and body.messages[-1].role == "assistant":
        raise UsageError(
            "messages: the last one has role 'assistant', so it would be continued, which cannot be combined with "
            "tools or their calls; end with a user message or a result, or leave the tools out",
            param="messages",
        )
    return replace(conversation, answer_start="")


def conversation_options(conversation: Conversation) -> AskOptions:
    """Return the options that the messages alone set."""
    return AskOptions(history=conversation.history, system=conversation.system, answer_start=conversation.answer_start)


def check_continuation(body: ChatCompletionRequest | TokenizeRequest, conversation: Conversation) -> None:
    """Check the fields that ask to continue a last assistant message.

    Raises:
        UsageError: they contradict each other or the messages.
    """
    is_refused = body.continue_final_message is False or body.add_generation_prompt is True
    if conversation.answer_start and is_refused:
        raise UsageError(
            "messages: the last one has role 'assistant', so it is continued; set continue_final_message to true and "
            "add_generation_prompt to false, or end with a user message",
            param="messages",
        )
    if body.continue_final_message and not conversation.answer_start:
        raise UsageError(
            "continue_final_message: the last message must have role 'assistant' and text; add one, or leave it out",
            param="continue_final_message",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise UsageError("continue_final_message and add_generation_prompt exclude each other; set only one to true")


def events_link_to(body: ChatCompletionRequest, config: ServerConfig, address: str) -> str | None:
    """Return the address that events of sources link to; None: no such events.

    Args:
        address: that the request was sent to.
    """
    wanted = (body.stillroom or ChatExtension()).source_events
    is_wanted = config.source_events if wanted is None else wanted
    return config.public_url or address if is_wanted else None


def as_sent(
    answer: Answer, body: ChatCompletionRequest, form: CallFormat | None = None, *, calls_tools: bool = True
) -> Answer:
    """Return the answer with the document ids that clients see, and a warning of what the request asked in vain.

    Args:
        form: how it writes calls; None: no tool may be called.
        calls_tools: whether the route of the request calls tools.
    """
    warnings = answer.warnings
    if (body.tools or body.functions) and form is None and body.tool_choice != "none":
        warnings = (*warnings, _NO_TOOLS.format(reason=_why_no_tools(body, calls_tools=calls_tools)))
    return replace(public_answer(answer), warnings=warnings)


def whole_completion(
    answers: Sequence[Answer], model: str, body: ChatCompletionRequest, form: CallFormat | None = None
) -> ChatCompletion:
    answers = [as_sent(answer, body, form) for answer in answers]
    first = answers[0]
    messages = [answer_message(answer, form) for answer in answers]
    details = details_as_json(replace(slowest(answers), citations=first.citations))
    return ChatCompletion(
        id=completion_id(first.request_id),
        created=int(time.time()),
        model=model,
        choices=[
            Choice(
                index=index,
                message=message,
                logprobs=None if answer.logprobs is None else choice_logprobs(answer.logprobs),
                finish_reason=reason,
            )
            for index, (answer, (message, reason)) in enumerate(zip(answers, messages, strict=True))
        ],
        usage=usage_of(answers, len(answers)),
        stillroom=AnswerDetails(request_id=first.request_id, sources=public_sources(first.sources), **details),
    )


def choice_logprobs(scores: Sequence[TokenScore]) -> ChoiceLogprobs:
    def one(score: TokenScore) -> TopLogprob:
        return TopLogprob(token=score.text, logprob=max(score.logprob, LEAST_LOGPROB), bytes=list(score.utf8))

    return ChoiceLogprobs(
        content=[
            TokenLogprob(**one(score).model_dump(), top_logprobs=[one(top) for top in score.top]) for score in scores
        ]
    )


def completion_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


async def chat_events(
    streams: "Sequence[AsyncAnswerStream]",
    model: str,
    body: ChatCompletionRequest,
    *,
    events_link_to: str | None = None,
) -> AsyncIterator[str]:
    """Yield the response as server-sent events.

    Args:
        events_link_to: send the sources as events too, with links to this address, and no annotations, which
            open-webui would take for further sources.
    """
    first = streams[0]
    chunks = _Chunks(first.request_id, model, body.includes_usage)
    sources = public_sources(first.sources)
    shown = [source_as_json(source) for source in sources]
    for index in range(len(streams)):
        ours = {"request_id": first.request_id, "sources": shown} if index == 0 else None
        yield chunks.event(index, Delta(role="assistant", content=""), ours=ours)
    if events_link_to is not None:
        for source in sources:
            yield chunks.source(source_event(source, events_link_to))
    readers = [CallReader(stream.call_format) for stream in streams]
    async for index, piece in merged(streams):
        stream = streams[index]
        if piece is not None:
            said = readers[index].push(piece)
            if said or stream.call_format is None:
                yield chunks.event(index, Delta(content=said), stream.take_logprobs())
            continue
        answer = as_sent(stream.answer, body, stream.call_format)
        rest, calls = readers[index].rest(answer)
        if rest or calls:
            yield chunks.event(index, Delta(content=rest or None, tool_calls=deltas_of(calls)))
        ours = {"request_id": stream.request_id, **details_as_json(answer)}
        delta = Delta(annotations=annotations_of(answer) or None if events_link_to is None else None)
        reason = "tool_calls" if calls else answer.finish_reason
        yield chunks.event(index, delta, stream.take_logprobs(), finish_reason=reason, ours=ours)
    if body.includes_usage:
        yield chunks.usage_event(usage_of([stream.answer for stream in streams], len(streams)))
    yield DONE


def hop_event(hop: Hop, model: str, body: ChatCompletionRequest) -> str:
    """Return the event of one search of several; its delta is empty."""
    ours = {"request_id": hop.request_id, "hop": asdict(public_hop(hop))}
    return _Chunks(hop.request_id, model, body.includes_usage).event(0, Delta(), ours=ours)


class _Chunks:
    """Formats the chunks of one streamed response, which share id, time and model."""

    def __init__(self, request_id: str, model: str, includes_usage: bool) -> None:
        self._common: dict[str, Any] = {"id": completion_id(request_id), "created": int(time.time()), "model": model}
        self._includes_usage = includes_usage

    def event(
        self,
        index: int,
        delta: Delta,
        scores: Sequence[TokenScore] = (),
        *,
        finish_reason: str | None = None,
        ours: JsonObject | None = None,
    ) -> str:
        logprobs = choice_logprobs(scores) if scores else None
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._written(ChatCompletionChunk(**self._common, choices=[choice]), ours)

    def source(self, event: JsonObject) -> str:
        """An empty delta, because clients read the first choice of every chunk."""
        chunk = ChatCompletionChunk(**self._common, choices=[ChunkChoice(delta=Delta())])
        return chunk_event(chunk, includes_usage=self._includes_usage, more={"event": event})

    def usage_event(self, usage: Usage) -> str:
        return self._written(ChatCompletionChunk(**self._common, choices=[], usage=usage))

    def _written(self, chunk: ChatCompletionChunk, ours: JsonObject | None = None) -> str:
        return chunk_event(chunk, includes_usage=self._includes_usage, more={} if ours is None else {"stillroom": ours})

"""`OpenAIBackend`: writes prompts for a server elsewhere, with documents in an order that suits its prefix cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.chat_prompt import chat_prompt, chat_text
from stillroom.backends.conversation import NO_HISTORY, History, new_chunks
from stillroom.backends.document_order import PrefixOrder
from stillroom.backends.prompt_builder import (
    INSTRUCTIONS,
    PromptBuilder,
    ask_for_citations,
    format_for,
    raw_tokens,
    render,
    user_messages,
)
from stillroom.backends.tool_chat import ToolChat
from stillroom.config.settings import EngineConfig, EnginePrompt
from stillroom.core.clock import Clock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import SampleRequest
from stillroom.engine.corpora import CorpusView
from stillroom.engine.events import Listener
from stillroom.engine.openai_client import OpenAIClient
from stillroom.engine.openai_engine import OpenAIEngine
from stillroom.engine.openai_protocol import ChatPrompt, RemotePrompt
from stillroom.engine.reader_engine import ReaderPrompt
from stillroom.errors import ConfigError, UsageError
from stillroom.models.checkpoint import resolve
from stillroom.models.tokenizer import Tokenizer
from stillroom.telemetry.catalogue import Readings

WrittenPrompt = tuple[RemotePrompt, tuple[ChunkId, ...]]
"""A prompt, and the ids of its chunks, in order."""
PromptWriter = Callable[[Sequence[Chunk], str, History, int | None], WrittenPrompt]
"""(chunks in order, question, history, most tokens) -> prompt. Without a tokenizer the limit is ignored."""
ChatWriter = Callable[[str, History, int | None], RemotePrompt]
"""The same without documents."""


class OpenAIBackend:
    """Writes prompts for a server and submits them."""

    tokenizer = None
    max_model_len = None

    def __init__(
        self,
        engine: OpenAIEngine,
        write: PromptWriter,
        write_chat: ChatWriter,
        order: PrefixOrder[ChunkId] | None,
        tokenize: Callable[[str], RemotePrompt] | None = None,
        *,
        asks_for_citations: bool = False,
    ) -> None:
        """
        Args:
            order: orders documents; None leaves them by rank.
            tokenize: for a server that takes tokens, encodes a raw prompt; None sends text.
            asks_for_citations: ask for numbers of sources; they are checked when the answer is complete.
        """
        self._asks_for_citations = asks_for_citations
        self._engine = engine
        self._write = write
        self._write_chat = write_chat
        self._order = order
        self._tokenize = tokenize

    @property
    def name(self) -> str:
        return self._engine.model

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    @property
    def device_problem(self) -> None:
        return None

    @property
    def load(self) -> Load:
        return Load(self._engine.num_waiting, self._engine.num_running)

    @property
    def may_speculate(self) -> bool:
        return False

    @property
    def writes_json(self) -> bool:
        return False

    @property
    def quotes(self) -> bool:
        return False

    @property
    def document_windows(self) -> None:
        return None

    def expect_question(self) -> None:
        """Nothing is prepared that it could interrupt."""

    def prepare_prompt(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        """As `Backend.prepare_prompt`. Without `max_tokens` every chunk is sent; the server may refuse."""
        _refuse(schema)
        question = ask_for_citations(question) if self._asks_for_citations else question
        if max_tokens is not None:  # drop the lowest ranks before the order changes
            _, kept = self._write(chunks, question, history, max_tokens)
            chunks = [chunk for chunk in chunks if chunk.chunk_id in kept]
        if self._order is not None:
            by_id = {chunk.chunk_id: chunk for chunk in chunks}
            chunks = [by_id[chunk_id] for chunk_id in self._order.arrange(list(by_id))]
        prompt, chunk_ids = self._write(chunks, question, history, max_tokens)
        return _prepared(chunk_ids, prompt)

    def prepare_chat(
        self,
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        """As `Backend.prepare_chat`. Without a tokenizer `max_tokens` is ignored; the server may refuse."""
        _refuse(schema)
        return _prepared((), self._write_chat(question, history, max_tokens))

    @property
    def call_format(self) -> None:
        return None

    def prepare_tool_chat(self, chat: ToolChat) -> PreparedPrompt:
        raise UsageError(f"{self.name} calls no tools; leave tools out")

    def prepare_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> PreparedPrompt:
        _refuse(schema)
        if not prompt:
            raise UsageError("the prompt is empty")
        if isinstance(prompt, str):
            return _prepared((), prompt if self._tokenize is None else self._tokenize(prompt))
        return _prepared((), tuple(prompt))

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        prompt = prepared.prompt
        assert not isinstance(prompt, SegmentedPrompt | ReaderPrompt), "another backend prepared this prompt"
        for sample, listener in zip(samples, listeners, strict=True):
            self._engine.submit(prompt, sample, listener)

    def documents_changed(self, corpus: CorpusView) -> None:
        """Nothing to drop: the server evicts its own cache."""

    def readings(self) -> Readings:
        return {}

    def for_tenant(self, salt: str, tenant: str) -> "OpenAIBackend":
        raise ConfigError(
            "engine.kind = 'openai' serves one tenant only: response times would tell a tenant which prompts of others "
            "the server has cached; use the builtin engine, or one server for each tenant"
        )

    def cancel(self, request_id: RequestId) -> None:
        self._engine.cancel(request_id)

    def stop(self) -> None:
        self._engine.close()

    def close(self) -> None:
        self._engine.close()


def _prepared(chunk_ids: tuple[ChunkId, ...], prompt: RemotePrompt) -> PreparedPrompt:
    return PreparedPrompt(prompt, chunk_ids, len(prompt) if isinstance(prompt, tuple) else None)


def _refuse(schema: Mapping[str, Any] | None) -> None:
    if schema is not None:
        raise UsageError("a server elsewhere cannot enforce a JSON schema; leave it out or set engine.kind = 'builtin'")


def connect(config: EngineConfig, model: str, clock: Clock, *, asks_for_citations: bool = False) -> OpenAIBackend:
    """Connect to a server.

    Args:
        model: checkpoint whose format and tokenizer write the prompts, unless the server takes chat messages.
        asks_for_citations: see `generation.ask_for_citations`.

    Raises:
        EngineUnavailableError: the server cannot be reached.
        EngineRefusedError: the server refuses the key, or lists no model.
        ModelError: the checkpoint has no tokenizer.
    """
    write, write_chat, tokenize = _writers(config.prompt, model)
    engine = OpenAIEngine(OpenAIClient(config, clock), config.model, clock)
    try:
        engine.find_model()
    except BaseException:
        engine.close()
        raise
    order: PrefixOrder[ChunkId] | None = PrefixOrder() if config.document_order == "prefix" else None
    return OpenAIBackend(engine, write, write_chat, order, tokenize, asks_for_citations=asks_for_citations)


def _writers(kind: EnginePrompt, model: str) -> tuple[PromptWriter, ChatWriter, Callable[[str], RemotePrompt] | None]:
    """The writers of prompts, and the encoder of raw prompts for a server that takes tokens."""
    if kind == "chat":
        return _chat, _chat_alone, None
    tokenizer = Tokenizer.load(resolve(model))
    prompt_format = format_for(tokenizer)
    if kind == "text":  # the server adds the begin token
        begin = tokenizer.bos_token

        def write_text(
            chunks: Sequence[Chunk], question: str, history: History, max_tokens: int | None
        ) -> WrittenPrompt:
            return render(prompt_format, chunks, question, history).removeprefix(begin), _in_order(chunks, history)

        def write_chat_text(question: str, history: History, max_tokens: int | None) -> RemotePrompt:
            return chat_text(tokenizer, question, history).removeprefix(begin)

        return write_text, write_chat_text, None
    builder = PromptBuilder(tokenizer, prompt_format)

    def write_tokens(chunks: Sequence[Chunk], question: str, history: History, max_tokens: int | None) -> WrittenPrompt:
        prompt = builder.build(chunks, question, max_tokens, history)
        return prompt.token_ids, prompt.chunk_ids

    def write_chat_tokens(question: str, history: History, max_tokens: int | None) -> RemotePrompt:
        return chat_prompt(tokenizer, question, max_tokens, history).token_ids

    return write_tokens, write_chat_tokens, lambda text: raw_tokens(tokenizer, text)


def _in_order(chunks: Sequence[Chunk], history: History) -> tuple[ChunkId, ...]:
    return tuple(chunk.chunk_id for added in new_chunks(history.turns, chunks) for chunk in added)


def _refuse_answer_start(history: History) -> None:
    if history.answer_start:
        raise UsageError(
            "a server that is sent chat messages cannot continue an answer; end with a message of the user, or set "
            "engine.prompt = 'text' or 'tokens'"
        )


def _chat_alone(question: str, history: History, max_tokens: int | None) -> RemotePrompt:
    _refuse_answer_start(history)
    exchanges = (turn.exchange for turn in history.turns)
    return ChatPrompt(history.system, question, tuple((one.question, one.answer) for one in exchanges))


def _chat(chunks: Sequence[Chunk], question: str, history: History, max_tokens: int | None) -> WrittenPrompt:
    _refuse_answer_start(history)
    system = f"{INSTRUCTIONS}\n\n{history.system}" if history.system else INSTRUCTIONS
    *earlier, last = user_messages(chunks, question, history)
    answers = (turn.exchange.answer for turn in history.turns)
    return ChatPrompt(system, last, tuple(zip(earlier, answers, strict=True))), _in_order(chunks, history)

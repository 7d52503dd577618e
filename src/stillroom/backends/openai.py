"""`OpenAIBackend`: writes prompts for servers elsewhere, with documents in an order that suits their prefix caches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.chat_prompt import chat_prompt, chat_text
from stillroom.backends.conversation import NO_HISTORY, History, new_chunks
from stillroom.backends.document_order import PrefixOrder
from stillroom.backends.engine_readings import engine_readings
from stillroom.backends.prompt_builder import (
    INSTRUCTIONS,
    PromptBuilder,
    ask_for_citations,
    format_for,
    raw_tokens,
    render,
    user_messages,
)
from stillroom.backends.prompt_names import Part, parts_of_question, parts_of_raw, request_of
from stillroom.backends.tool_chat import ToolChat
from stillroom.config.generation_settings import ONE_TENANT_ONLY
from stillroom.config.settings import EnginePrompt, StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import cache_salt_of, salt_of
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import SampleRequest
from stillroom.engine.corpora import CorpusView
from stillroom.engine.events import Listener
from stillroom.engine.openai_engine import OpenAIEngine
from stillroom.engine.openai_protocol import ChatPrompt, RemotePrompt, ServerChoice
from stillroom.engine.reader_engine import ReaderPrompt
from stillroom.engine.server_pool import ServerPool
from stillroom.errors import ConfigError, TenantNotServedError, UsageError
from stillroom.models.bundled_models import reader_folder
from stillroom.models.checkpoint import resolve
from stillroom.models.tokenizer import Tokenizer
from stillroom.telemetry.catalogue import Readings

WrittenPrompt = tuple[RemotePrompt, tuple[ChunkId, ...]]
"""A prompt, and the ids of its chunks, in order."""
PromptWriter = Callable[[Sequence[Chunk], str, History, int | None], WrittenPrompt]
"""(chunks in order, question, history, most tokens) -> prompt. Without a tokenizer the limit is ignored."""
ChatWriter = Callable[[str, History, int | None], RemotePrompt]
"""The same without documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """How prompts are written and named."""

    orders_documents: bool = True
    """Whether documents that begin an earlier prompt of a server come first; otherwise they stand by rank."""
    asks_for_citations: bool = False
    """Ask for numbers of sources; they are checked when the answer is complete."""
    sends_salt: bool = False
    """Send `cache_salt`."""
    salt: str = ""
    """The tenant's salt."""


class OpenAIBackend:
    """Chooses a server for each prompt, writes the prompt and submits it."""

    tokenizer = None
    max_model_len = None

    def __init__(
        self,
        engine: OpenAIEngine,
        write: PromptWriter,
        write_chat: ChatWriter,
        tokenize: Callable[[str], RemotePrompt] | None = None,
        *,
        options: RemoteOptions,
        owns_engine: bool = True,
    ) -> None:
        """
        Args:
            tokenize: for a server that takes tokens, encodes a raw prompt; None sends text.
            owns_engine: whether closing this closes the engine.
        """
        self._engine = engine
        self._write = write
        self._write_chat = write_chat
        self._tokenize = tokenize
        self._options = options
        self._owns_engine = owns_engine
        self._cache_salt = cache_salt_of(options.salt) if options.sends_salt else ""
        self._orders: dict[str, PrefixOrder[ChunkId]] = {}
        if options.orders_documents:
            self._orders = {url: PrefixOrder() for url in engine.servers.urls}

    @property
    def name(self) -> str:
        return self._engine.model

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    @property
    def device_problem(self) -> str | None:
        """Why no server takes requests now; None if one does."""
        return self._engine.problem

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
        question = ask_for_citations(question) if self._options.asks_for_citations else question
        if max_tokens is not None:  # drop the lowest ranks before the order changes
            _, kept = self._write(chunks, question, history, max_tokens)
            chunks = [chunk for chunk in chunks if chunk.chunk_id in kept]
        chunks, history, choice = self._routed(chunks, question, history)
        prompt, chunk_ids = self._write(chunks, question, history, max_tokens)
        return _prepared(chunk_ids, prompt, choice)

    def prepare_chat(
        self,
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        """As `Backend.prepare_chat`. Without a tokenizer `max_tokens` is ignored; the server may refuse."""
        _refuse(schema)
        choice = self._choice(parts_of_question((), question, history))
        return _prepared((), self._write_chat(question, history, max_tokens), choice)

    @property
    def call_format(self) -> None:
        return None

    def prepare_tool_chat(self, chat: ToolChat) -> PreparedPrompt:
        raise UsageError(f"{self.name} calls no tools; leave tools out")

    def prepare_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> PreparedPrompt:
        _refuse(schema)
        if not prompt:
            raise UsageError("the prompt is empty")
        choice = self._choice(parts_of_raw(prompt))
        if isinstance(prompt, str):
            return _prepared((), prompt if self._tokenize is None else self._tokenize(prompt), choice)
        return _prepared((), tuple(prompt), choice)

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        prompt = prepared.prompt
        assert not isinstance(prompt, SegmentedPrompt | ReaderPrompt), "another backend prepared this prompt"
        for sample, listener in zip(samples, listeners, strict=True):
            self._engine.submit(prompt, sample, listener, prepared.server_choice)

    def documents_changed(self, corpus: CorpusView) -> None:
        """Nothing to drop: the server evicts its own cache."""

    def readings(self) -> Readings:
        """Return the requests of each server, and whether it gets any now."""
        states = {one.url: one for one in self._engine.servers.states()}
        return engine_readings(states, {url: one.is_alive for url, one in states.items()})

    def for_tenant(self, salt: str, tenant: str) -> "OpenAIBackend":
        if not self._options.sends_salt:
            raise TenantNotServedError(ONE_TENANT_ONLY)
        options = replace(self._options, salt=salt)
        return OpenAIBackend(
            self._engine, self._write, self._write_chat, self._tokenize, options=options, owns_engine=False
        )

    def cancel(self, request_id: RequestId) -> None:
        self._engine.cancel(request_id)

    def stop(self) -> None:
        self._engine.close()

    def close(self) -> None:
        if self._owns_engine:
            self._engine.close()

    def _routed(
        self, chunks: Sequence[Chunk], question: str, history: History
    ) -> tuple[Sequence[Chunk], History, ServerChoice]:
        """Choose the server for a question, together with the order of documents that suits the server. Returns the
        documents and the history in that order."""
        suited = {url: self._suited(url, chunks, history) for url in self._engine.servers.urls}
        requests = {
            url: request_of(parts_of_question(ordered, question, turns), self._options.salt)
            for url, (ordered, turns) in suited.items()
        }
        url = self._engine.servers.choose(requests)
        ordered, turns = suited[url]
        if self._orders:
            self._orders[url].remember(tuple(chunk.chunk_id for chunk in ordered))
        return ordered, turns, ServerChoice(url, requests[url], self._cache_salt)

    def _suited(self, url: str, chunks: Sequence[Chunk], history: History) -> tuple[Sequence[Chunk], History]:
        """Return documents in the order that suits a server, those of earlier turns as they were sent to it."""
        if not self._orders:
            return chunks, history
        arrange, by_id, turns = self._orders[url].arrange, {chunk.chunk_id: chunk for chunk in chunks}, []
        for turn in history.turns:
            found = {scored.chunk.chunk_id: scored for scored in turn.found}
            turns.append(replace(turn, found=tuple(found[one] for one in arrange(tuple(found)))))
        return [by_id[one] for one in arrange(tuple(by_id))], replace(history, turns=tuple(turns))

    def _choice(self, parts: Sequence[Part]) -> ServerChoice:
        request = request_of(parts, self._options.salt)
        servers = self._engine.servers
        return ServerChoice(servers.choose(dict.fromkeys(servers.urls, request)), request, self._cache_salt)


def _prepared(chunk_ids: tuple[ChunkId, ...], prompt: RemotePrompt, choice: ServerChoice) -> PreparedPrompt:
    return PreparedPrompt(prompt, chunk_ids, len(prompt) if isinstance(prompt, tuple) else None, server_choice=choice)


def _refuse(schema: Mapping[str, Any] | None) -> None:
    if schema is not None:
        raise UsageError("a server elsewhere cannot enforce a JSON schema; leave it out or set engine.kind = 'builtin'")


def connect(config: StillroomConfig, clock: Clock, knowledge_base: str) -> OpenAIBackend:
    """Connect to the servers of `engine.base_url`.

    Args:
        knowledge_base: id of the default tenant's knowledge base.

    Raises:
        EngineUnavailableError: no server can be reached.
        EngineRefusedError: a server refuses the key, lists no model, or lacks the model that another one serves.
        ModelError: the checkpoint whose tokenizer writes the prompts has none.
        ConfigError: no such checkpoint is named.
    """
    engine_config = config.engine
    write, write_chat, tokenize = _writers(engine_config.prompt, config.runtime.model)
    engine = OpenAIEngine(ServerPool(engine_config, clock), engine_config.model, clock)
    try:
        engine.find_model()
        engine.watch()
    except BaseException:
        engine.close()
        raise
    options = RemoteOptions(
        orders_documents=engine_config.document_order == "prefix",
        asks_for_citations=config.generation.ask_for_citations,
        sends_salt=engine_config.cache_salt,
        salt=salt_of("", knowledge_base),
    )
    return OpenAIBackend(engine, write, write_chat, tokenize, options=options)


def _writers(kind: EnginePrompt, model: str) -> tuple[PromptWriter, ChatWriter, Callable[[str], RemotePrompt] | None]:
    """The writers of prompts, and the encoder of raw prompts for a server that takes tokens."""
    if kind == "chat":
        return _chat, _chat_alone, None
    if reader_folder(model) is not None:
        raise ConfigError(
            f"engine.prompt = {kind!r} writes prompts with the tokenizer of the server's model: name its checkpoint "
            "with --model (runtime.model); no weights are loaded"
        )
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

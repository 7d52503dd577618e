"""A server elsewhere as the backend: prompts as text, documents in an order that its prefix cache likes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stillroom.config.settings import EngineConfig, EnginePrompt
from stillroom.core.clock import Clock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.engine.openai_engine import OpenAIEngine
from stillroom.engine.openai_protocol import ChatPrompt, RemotePrompt, RemoteRequest
from stillroom.engine.openai_server import OpenAIServer
from stillroom.errors import ConfigError, UsageError
from stillroom.models.checkpoint import resolve
from stillroom.models.tokenizer import Tokenizer
from stillroom.rag.backend import Draft, Load, Sample
from stillroom.rag.conversation import NOTHING, History, new_chunks
from stillroom.rag.document_order import PrefixOrder
from stillroom.rag.prompt import INSTRUCTIONS, PromptBuilder, format_for, render, user_messages

Writer = Callable[[Sequence[Chunk], str, History], RemotePrompt]
"""Chunks in order, a question and what was said before, as a prompt."""


class RemoteGenerator:
    """Writes prompts for a server and hands them to its engine."""

    tokenizer = None
    max_model_len = None

    def __init__(self, engine: OpenAIEngine, write: Writer, order: PrefixOrder[ChunkId] | None) -> None:
        """Without an order, documents stand by rank."""
        self._engine = engine
        self._write = write
        self._order = order

    @property
    def name(self) -> str:
        return self._engine.model

    @property
    def load(self) -> Load:
        return Load(self._engine.num_waiting, self._engine.num_running)

    @property
    def may_speculate(self) -> bool:
        return False

    def draft(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NOTHING,
    ) -> Draft:
        """Every chunk is sent: what the server has room for, it says itself."""
        _refuse(schema)
        if self._order is not None:
            by_id = {chunk.chunk_id: chunk for chunk in chunks}
            chunks = [by_id[chunk_id] for chunk_id in self._order.arrange(list(by_id))]
        in_order = [chunk for added in new_chunks(history.turns, chunks) for chunk in added]
        return self._draft(tuple(chunk.chunk_id for chunk in in_order), self._write(chunks, question, history))

    def draft_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> Draft:
        _refuse(schema)
        if not prompt:
            raise UsageError("the prompt is empty")
        return self._draft((), prompt if isinstance(prompt, str) else tuple(prompt))

    def documents_changed(self, existing: Callable[[set[ChunkId]], set[ChunkId]]) -> None:
        """The server forgets by itself what is not asked for any more."""

    @property
    def cache_figures(self) -> None:
        return None

    def beside(self, salt: str) -> "RemoteGenerator":
        raise ConfigError(
            "engine.kind = 'openai' serves one tenant only: what an engine elsewhere keeps of one tenant's prompts "
            "would show in the times of another; use the builtin engine, or one server for each tenant"
        )

    def cancel(self, request_id: RequestId) -> None:
        self._engine.cancel(request_id)

    def stop(self) -> None:
        self._engine.close()

    def close(self) -> None:
        self._engine.close()

    def _draft(self, chunk_ids: tuple[ChunkId, ...], prompt: RemotePrompt) -> Draft:
        def start(samples: Sequence[Sample]) -> None:
            for sample in samples:
                request = RemoteRequest(sample.request_id, prompt, sample.sampling, sample.deadline)
                self._engine.submit(request, sample.listener)

        return Draft(chunk_ids, len(prompt) if isinstance(prompt, tuple) else None, start)


def _refuse(schema: Mapping[str, Any] | None) -> None:
    if schema is not None:
        raise UsageError("an engine elsewhere is not asked for JSON of a schema; set engine.kind to builtin")


def connect(config: EngineConfig, model: str, clock: Clock) -> RemoteGenerator:
    """The backend for a server. `model` names the checkpoint whose format and tokenizer write the prompts, where the
    server does not do it.

    Raises:
        EngineUnavailableError: the server cannot be reached to ask for its model.
        EngineRefusedError: it refuses the key, or lists no model.
        ModelError: the checkpoint has no tokenizer.
    """
    write = _writer(config.prompt, model)
    engine = OpenAIEngine(OpenAIServer(config, clock), config.model, clock)
    try:
        engine.find_model()
    except BaseException:
        engine.close()
        raise
    return RemoteGenerator(engine, write, PrefixOrder() if config.document_order == "prefix" else None)


def _writer(kind: EnginePrompt, model: str) -> Writer:
    if kind == "chat":
        return _chat
    tokenizer = Tokenizer.load(resolve(model))
    prompt_format = format_for(tokenizer)
    if kind == "text":  # the server puts the begin token in front
        begin = tokenizer.bos_token
        return lambda chunks, question, history: render(prompt_format, chunks, question, history).removeprefix(begin)
    builder = PromptBuilder(tokenizer, prompt_format)
    return lambda chunks, question, history: builder.build(chunks, question, None, history).token_ids


def _chat(chunks: Sequence[Chunk], question: str, history: History) -> ChatPrompt:
    system = f"{INSTRUCTIONS}\n\n{history.system}" if history.system else INSTRUCTIONS
    *earlier, last = user_messages(chunks, question, history)
    answers = (turn.exchange.answer for turn in history.turns)
    return ChatPrompt(system, last, tuple(zip(earlier, answers, strict=True)))

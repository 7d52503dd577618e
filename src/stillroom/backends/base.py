"""The `Backend` protocol: prepares prompts and generates answers.

`LocalBackend` (local.py, imports torch), `ReaderBackend` (reader/reader_backend.py, imports torch), `ClusterBackend`
(cluster_backend.py) and `OpenAIBackend` (openai.py) implement it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stillroom.backends.conversation import NO_HISTORY, History
from stillroom.backends.tool_chat import CallFormat, ToolChat
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import SampleRequest, TokenConstraint
from stillroom.engine.corpora import CorpusView
from stillroom.engine.events import Listener
from stillroom.engine.openai_protocol import RemotePrompt, ServerChoice
from stillroom.engine.reader_engine import ReaderPrompt
from stillroom.models.tokenizer import Tokenizer
from stillroom.telemetry.catalogue import Readings

if TYPE_CHECKING:  # it imports torch
    from stillroom.backends.document_windows import DocumentWindows


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that is ready to be continued by the backend that prepared it."""

    prompt: SegmentedPrompt | RemotePrompt | ReaderPrompt
    chunk_ids: tuple[ChunkId, ...]
    """The chunks in it, in order."""
    num_tokens: int | None
    """None: only the server knows."""
    max_answer_tokens: int | None = None
    """Most tokens that model and KV pool leave for an answer, at least 1. None: only the server knows."""
    continues: tuple[int, ...] = ()
    """The last tokens of the text that the answer continues; the text of its first token may depend on them. Empty
    unless the answer continues a text."""
    constraint: TokenConstraint | None = None
    """Restricts the answer's tokens, for example to JSON of a schema."""
    call_format: CallFormat | None = None
    """How the answer writes a call of a tool; None if it has none."""
    server_choice: ServerChoice | None = None
    """Which of several servers elsewhere gets it; None for other backends."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and KV blocks of a backend."""

    num_waiting: int
    num_running: int
    num_blocks: int = 0
    """KV blocks in total; 0 for a server elsewhere."""
    num_free_blocks: int = 0
    num_prefilling: int = 0
    """Running requests that have no first token yet."""

    @property
    def num_pending(self) -> int:
        """Requests whose prompt is not computed yet."""
        return self.num_waiting + self.num_prefilling


class Backend(Protocol):
    """Generates answers with one model. Thread-safe."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Decodes the tokens of events; None if events hold text."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Prompt plus answer, in tokens; None: only the server knows."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it takes no more requests in this process."""
        ...

    @property
    def device_problem(self) -> str | None:
        """Why it cannot compute now, in words that a caller without a key may read; None if it can."""
        ...

    @property
    def load(self) -> Load: ...

    @property
    def may_speculate(self) -> bool:
        """Whether speculative prompts are allowed. A server elsewhere may charge by the token, and the reader keeps
        nothing of a wrong prompt."""
        ...

    @property
    def writes_json(self) -> bool:
        """Whether answers can be held to a JSON schema: not by the reader, a server elsewhere, and models whose tokens
        cannot spell it."""
        ...

    @property
    def quotes(self) -> bool:
        """Whether an answer is the quote of one sentence, as the reader's, so that facts must be asked for one by
        one."""
        ...

    def expect_question(self) -> None:
        """A question has arrived whose prompt comes after its search: work that a question interrupts stops now."""
        ...

    def prepare_prompt(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        """Build the prompt for a question, its chunks (best first) and its history. Leaves out the oldest turns and the
        last chunks if it would exceed `max_tokens`. With a schema the answer is JSON.

        Raises:
            UsageError: the schema cannot be enforced.
        """
        ...

    def prepare_chat(
        self,
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        """Build the prompt of a conversation without documents. Leaves out the oldest turns if it would exceed
        `max_tokens`. With a schema the answer is JSON.

        Raises:
            UsageError: the schema cannot be enforced, or the backend answers from documents only.
        """
        ...

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls of tools; None if it, or this backend, knows no tools."""
        ...

    def prepare_tool_chat(self, chat: ToolChat) -> PreparedPrompt:
        """Build the prompt of a conversation with tools, without documents. A call is JSON of its tool's schema.

        Raises:
            UsageError: a schema cannot be enforced, a text would imitate the template, or no tools are known.
        """
        ...

    def prepare_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> PreparedPrompt:
        """Prepare a prompt to be continued unchanged: tokens, or text, in which special tokens are recognised. With a
        schema the continuation is JSON.

        Raises:
            UsageError: it is empty, the model lacks a token, the schema cannot be enforced, or the backend continues no
                prompts.
        """
        ...

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        """Continue a prompt, once for each sample; the events of each sample go to its listener.

        Raises: as `AsyncEngine.submit`, `ClusterBackend.start`, `OpenAIEngine.submit` and `ReaderBackend.start`.
        """
        ...

    def documents_changed(self, corpus: CorpusView) -> bytes | None:
        """Drop KV of removed chunks; check again until `close`, as another process may change documents.

        Args:
            corpus: the knowledge base's chunks; called from any thread.

        Returns:
            The fingerprint of the model whose records on disk are handled here; None if there are none.
        """
        ...

    @property
    def document_windows(self) -> "DocumentWindows | None":
        """Prepares documents' KV; None if none is kept: by the reader, by a server elsewhere, and without reuse."""
        ...

    def readings(self) -> Readings:
        """Return the metrics of its KV cache and its engine; none if the engine is elsewhere, or a reader."""
        ...

    def for_tenant(self, salt: str, tenant: str) -> "Backend":
        """The same model for another tenant, without shared KV. Closing it does not close the engine.

        Args:
            salt: of the tenant's KV.
            tenant: its name, for an engine in another process that opens the tenant's documents itself.

        Raises:
            ConfigError: the engine is a server elsewhere that is sent no `cache_salt`, so it cannot keep tenants apart.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request; its last event says `aborted`. No effect if it has ended."""
        ...

    def stop(self) -> None:
        """Abort all requests, of all tenants, and accept no more."""
        ...

    def close(self) -> None:
        """Abort all requests and free resources. Idempotent."""
        ...

"""What turns a question and its documents into a stream of text: our own runtime, or a server elsewhere.

The pipeline knows this face only. `generator` and `remote` implement it, and only `generator` imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stillroom.backends.conversation import NOTHING, History
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import SampleRequest, TokenConstraint
from stillroom.engine.corpora import CorpusView
from stillroom.engine.events import Listener
from stillroom.engine.openai_protocol import RemotePrompt
from stillroom.models.tokenizer import Tokenizer
from stillroom.telemetry.catalogue import Readings


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that is ready to be continued by the backend that prepared it."""

    prompt: SegmentedPrompt | RemotePrompt
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


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a backend is."""

    num_waiting: int
    num_running: int
    num_blocks: int = 0
    """KV blocks in all; 0 where they are not ours."""
    num_free_blocks: int = 0
    num_prefilling: int = 0
    """Of those that run: still without a first token."""

    @property
    def num_pending(self) -> int:
        """Whose prompt is still to be read."""
        return self.num_waiting + self.num_prefilling


class Backend(Protocol):
    """Thread-safe."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What reads the tokens of its events; None if they are text already."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Prompt plus answer, in tokens; None: only the server knows."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once nothing can be asked of it any more, in this process."""
        ...

    @property
    def device_problem(self) -> str | None:
        """Why it computes nothing for now, fit for callers without a key; None if it can, and if the engine is
        elsewhere."""
        ...

    @property
    def load(self) -> Load: ...

    @property
    def may_speculate(self) -> bool:
        """Whether a prompt may be submitted and cancelled again; an engine elsewhere may be paid for by the token."""
        ...

    def prepare_prompt(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NOTHING,
    ) -> PreparedPrompt:
        """The prompt for a question and its chunks, best first, behind what was said before; the oldest turns and the
        last chunks are left out where it would have more than `max_tokens`. With a schema the answer is JSON.

        Raises:
            UsageError: the schema cannot be enforced.
        """
        ...

    def prepare_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> PreparedPrompt:
        """A prompt that is continued as it is: text, in which special tokens count as such, or tokens. With a schema
        the continuation is JSON.

        Raises:
            UsageError: it is empty, or a token is none of the model's, or the schema cannot be enforced.
        """
        ...

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        """Continue a prompt, once for each sample; the events of each sample go to its listener.

        Raises: as `AsyncEngine.submit` and `OpenAIEngine.submit`.
        """
        ...

    def documents_changed(self, corpus: CorpusView) -> bytes | None:
        """Documents were added or removed: nothing is kept of chunks that are no more, now or after a later change that
        nobody tells of, until `close`.

        Args:
            corpus: of the knowledge base; asked from any thread.

        Returns:
            The fingerprint of the model whose records on disk this takes care of; None if of none.
        """
        ...

    def readings(self) -> Readings:
        """Return the metrics of its KV cache and its engine; none if the engine is elsewhere."""
        ...

    def for_tenant(self, salt: str) -> "Backend":
        """The same model for another tenant, who shares no kept KV with this one. Closing it closes nothing.

        Raises:
            ConfigError: the engine is elsewhere, and tenants cannot be kept apart there.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Stop a request; its last event says `aborted`. Harmless if it has ended."""
        ...

    def stop(self) -> None:
        """Abort what runs, whoever asked for it; nothing can be started any more."""
        ...

    def close(self) -> None:
        """Abort what runs. Idempotent."""
        ...

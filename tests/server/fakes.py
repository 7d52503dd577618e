"""A `Stillroom` without models or indexes, for tests of the server and the commands.

An answer is the question's words, one token each. Streams wait while `gate` is not set. Indexes and the ingest are
imported where they are used: many tests run a command over it in a process of its own.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stillroom.backends.conversation import NO_HISTORY
from stillroom.config.settings import SearchMode, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.document import Chunk, DocumentInfo, Paragraph, ScoredChunk, SearchResult
from stillroom.core.document_content import DocumentContent
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import (
    EmptyKnowledgeBaseError,
    NothingFoundError,
    StillroomError,
    UnknownDocumentError,
    UsageError,
)
from stillroom.rag.answer import Answer, AskOptions, Citation
from stillroom.rag.hops import Hop
from stillroom.rag.prompt_tokens import PromptTokens
from stillroom.rag.question import sources_of
from stillroom.rag.records import Records
from stillroom.retrieval.filters.language import parse_filter
from stillroom.retrieval.store.corpus import CopyState
from stillroom.retrieval.uploaded_files import checked_name
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TRACE_FILE, TraceLog
from tests.server.fake_documents import FakeOriginals, FakeUploads
from tests.server.fake_stream import FakeStream

if TYPE_CHECKING:
    from stillroom.retrieval.embedder import Embedder
    from stillroom.retrieval.ingest import AddProgress, RemoveReport
    from stillroom.retrieval.tiers.hot_lists import ListFigures
    from stillroom.retrieval.uploads import UploadResult

NUM_BLOCKS = 64
DIMENSION = 4


class FakePromptTokenizer:
    """Encodes bytes."""

    def tokens_of_prompt(self, prompt: str, *, adds_special: bool) -> PromptTokens:
        ids = tuple(f"^{prompt}".encode() if adds_special else prompt.encode())
        return PromptTokens(ids, tuple(map(chr, ids)), 4096)

    def tokens_of_chat(self, question: str, options: AskOptions) -> PromptTokens:
        said = [f"{one.question} {one.answer}" for one in options.history]
        return self.tokens_of_prompt(" ".join([options.system, *said, question]), adds_special=True)

    def text_of(self, token_ids: Sequence[int], *, keeps_special: bool) -> str:
        if max(token_ids, default=0) > 255:
            raise UsageError("the prompt holds a token that the model does not have; it has 0 to 255")
        return bytes(token_ids).decode(errors="replace")


class FakeStillroom:
    """Implements the facade with a dictionary of texts."""

    def __init__(self, texts: dict[str, str] | None = None, config: StillroomConfig | None = None) -> None:
        self.config = config or StillroomConfig()
        self.metrics = Metrics()
        self.model_name = "fake-model"
        self.embedder_name = self.config.embedder.model
        self.num_blocks = NUM_BLOCKS
        self.warnings: tuple[str, ...] = ()
        self.confidence: float | None = None
        self.list_figures: ListFigures | None = None
        self.texts = {"docs/keys.md": "Rotate keys with care.\nTwice a year."} if texts is None else texts
        self.uploads = FakeUploads(self)
        self.originals = FakeOriginals(self)
        self.asked: list[tuple[str, AskOptions]] = []
        self.filters: list[str] = []
        self.citations: tuple[Citation, ...] = ()
        """Of every answer."""
        self.answered_hops: tuple[Hop, ...] = ()
        """Of every answer."""
        self.gate = threading.Event()
        self.gate.set()
        self.fails_at = ""
        self.failure: BaseException = StillroomError("the fake failed on purpose")
        self.records = Records(TraceLog(Path("nowhere") / TRACE_FILE, keep=0), lambda chunk_ids: {})
        self.is_closed = self.is_stopped = self.is_removed = self.is_shared = False
        self.is_warm = self.expects_few_questions = False
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._count = 0

    @cached_property
    def embedder(self) -> "Embedder":
        """Of which only the tokenizer is used."""
        from stillroom.retrieval.embedder import Embedder

        return Embedder(self.config.embedder)

    def hide_folders(self) -> None:
        pass

    def avoid_torch(self) -> None:
        pass

    def expect_few_questions(self) -> None:
        self.expects_few_questions = True

    # used by the streams

    def next_number(self) -> int:
        with self._lock:
            self._count += 1
            return self._count

    def acquire(self, stream: FakeStream) -> None:
        with self._lock:
            self._running.add(id(stream))

    def release(self, stream: FakeStream) -> None:
        with self._lock:
            self._running.discard(id(stream))

    # the facade

    @property
    def num_free_blocks(self) -> int:
        with self._lock:
            return NUM_BLOCKS - len(self._running)

    @property
    def num_documents(self) -> int:
        return len(self.texts)

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        found = [
            DocumentInfo(DocumentId(name), name.removesuffix(".md"), 1, len(text.encode()), 1_700_000_000.0)
            for name, text in sorted(self.texts.items())
        ]
        return [info for info in found if info.document_id > after][:limit]

    public_documents = documents

    def begin_reembedding(self) -> None:
        pass

    def complete_uploads(self, stop: Cancellation | None = None) -> int:
        return 0

    def chunks_of(self, document_id: str, offset: int = 0, limit: int | None = None) -> list[Chunk]:
        return [_chunk(document_id, self.texts[document_id])][offset:][:limit]

    def document_content(self, document: str, stop: Cancellation | None = None) -> DocumentContent:
        info = self.uploads.one(document)
        lines = self.texts[info.document_id].split("\n")
        paragraphs = tuple(Paragraph(text, ("Rotation",), at, at) for at, text in enumerate(lines, start=1))
        return DocumentContent(info.document_id, info.title, paragraphs, "file", num_lines=len(lines))

    def documents_like(self, name: str) -> list[DocumentId]:
        return [DocumentId(one) for one in sorted(self.texts) if one.endswith(name)]

    def upload(
        self,
        files: Iterable[tuple[str, BinaryIO]],
        progress: "Callable[[AddProgress], None] | None" = None,
        metadata: Mapping[str, object] | None = None,
        stop: Cancellation | None = None,
    ) -> "list[UploadResult]":
        return [self.uploads.add(checked_name(name), stream.read(), progress) for name, stream in files]

    def discard(self, name: str) -> "RemoveReport":
        from stillroom.retrieval.ingest import RemoveReport

        found = self.uploads.find(name)
        if not found:
            raise UnknownDocumentError(f"there is no document {name!r}")
        for info in found:
            del self.texts[info.document_id]
        return RemoveReport(len(found), len(found))

    def search(
        self, query: str, *, mode: SearchMode | None = None, top_k: int | None = None, where: str = ""
    ) -> SearchResult:
        self.filters.append(where)
        if where:
            parse_filter(where)
        if not query.strip():
            raise UsageError("the query is empty")
        chunks = [_chunk(name, text) for name, text in sorted(self.texts.items())]
        scored = [
            ScoredChunk(chunk, score=1 / rank, scores={"dense": 0.5, "sparse": 2.0})
            for rank, chunk in enumerate(chunks, start=1)
        ]
        return SearchResult(tuple(scored[: top_k or self.config.search.top_k]), 0.002, 0.001)

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score by the share of the query's words that a text has."""
        if not self.config.search.reranker:
            raise UsageError("no reranker is configured; set search.reranker to a cross-encoder")
        words = set(query.lower().split())
        return [len(words & set(text.lower().split())) / len(words) for text in texts]

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([_vector(text) for text in texts])

    def stream(self, question: str, options: AskOptions | None = None) -> FakeStream:
        options = options or AskOptions()
        self.asked.append((question, options))
        if not question.strip():
            raise UsageError("the question is empty")
        if not self.texts:
            raise EmptyKnowledgeBaseError("the knowledge base is empty; add documents first: stillroom add PATH")
        if "nothing" in options.where:
            raise NothingFoundError("no document was found for the question")
        found = self.search(question, mode=options.mode, top_k=options.top_k).results
        sources = sources_of([scored.chunk.chunk_id for scored in found], found, NO_HISTORY)
        return FakeStream(self, question, options, sources)

    async def astreams(self, question: str, options: AskOptions | None = None, *, n: int = 1) -> list[FakeStream]:
        first = self.stream(question, options)
        return [first, *(FakeStream(self, question, options or AskOptions(), first.sources) for _ in range(n - 1))]

    async def astream(self, question: str, options: AskOptions | None = None) -> FakeStream:
        return (await self.astreams(question, options))[0]

    async def acontinue(
        self, prompt: str | Sequence[int], options: AskOptions | None = None, *, n: int = 1
    ) -> list[FakeStream]:
        text = prompt if isinstance(prompt, str) else await self.atext_of(prompt)
        options = options or AskOptions()
        self.asked.append((text, options))
        return [FakeStream(self, text, options, ()) for _ in range(n)]

    async def aknows_tools(self) -> bool:
        return False

    async def aprompt_tokenizer(self) -> "FakePromptTokenizer":
        return FakePromptTokenizer()

    async def atext_of(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def ask(self, question: str, options: AskOptions | None = None) -> Answer:
        stream = self.stream(question, options)
        for _ in stream:
            pass
        return stream.answer

    def warm_up(self) -> None:
        self.is_warm = True

    @property
    def device_problem(self) -> None:
        return None

    @property
    def is_ready(self) -> bool:
        return not self.is_closed and self.is_there

    @property
    def copy_state(self) -> CopyState | None:
        return CopyState(answers=False, age_s=12.34) if self.is_shared else None

    @property
    def is_there(self) -> bool:
        return not self.is_removed

    def stop_generating(self) -> None:
        self.is_stopped = True
        self.gate.set()

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> "FakeStillroom":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_stillroom(fake: FakeStillroom) -> Any:
    """Return the fake as the type that `Stillroom` parameters accept."""
    return fake


def until(holds: Callable[[], bool], deadline_s: float = 20.0) -> None:
    """Wait for a condition; fail when the deadline passes."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < end, "the condition did not become true in time"
        pause.wait(0.005)


def _chunk(name: str, text: str) -> Chunk:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return Chunk(
        ChunkId(number),
        DocumentId(str(Path(name))),
        0,
        text,
        title=Path(name).stem.title(),
        heading_path=("Rotation",),
        start_line=3,
        end_line=4,
    )


def _vector(text: str) -> NDArray[np.float32]:
    numbers = np.frombuffer(hashlib.sha256(text.encode()).digest()[:DIMENSION], dtype=np.uint8).astype(np.float32)
    unit: NDArray[np.float32] = (numbers + 1) / np.linalg.norm(numbers + 1)
    return unit

"""`Stillroom`: the facade for Python programs, the command line and the server. Adds documents, searches and answers.

Opening is cheap: the embedder loads with the first search or add, the model with the first question. Thread-safe.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import SearchMode, StillroomConfig
from stillroom.core.arguments import text
from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.document import Chunk, DocumentInfo, SearchResult
from stillroom.core.document_content import DocumentContent
from stillroom.core.ids import DocumentId, public_id
from stillroom.core.kv import salt_of
from stillroom.engine.deadlines import deadline_error
from stillroom.errors import UsageError
from stillroom.kvstore.owners import OwnerNote
from stillroom.models.bundled_models import model_warnings
from stillroom.rag.answer import Answer, AskOptions, checked_options, checked_query
from stillroom.rag.pipeline_loader import Closing, PipelineLoader, SharedBackend
from stillroom.rag.preparing import DocumentPreparer, PrepareProgress, PrepareReport
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.records import Records
from stillroom.retrieval.digest import IndexDigest
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.ingest import AddProgress, AddReport, RemoveReport
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.originals import Originals
from stillroom.retrieval.reembedding import ReembedProgress, ReembedReport
from stillroom.retrieval.store.corpus import CopyState
from stillroom.retrieval.store.document_names import documents_like
from stillroom.retrieval.tiers.hot_lists import ListFigures
from stillroom.retrieval.uploads import UploadResult, Uploads
from stillroom.retrieval.vector_index import NUM_STAGES
from stillroom.retrieval.verify.verify_report import OnProgress, VerifyReport
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TRACE_FILE, TraceLog

if TYPE_CHECKING:  # they import torch, which listing and removing documents can do without
    from stillroom.backends.base import Backend
    from stillroom.rag.prompt_tokens import PromptTokenizer
    from stillroom.rag.stream import AnswerStream, AsyncAnswerStream

S = TypeVar("S", "AnswerStream", "AsyncAnswerStream")


class Stillroom:
    """A knowledge base and the model that answers from it.

    Example:
        >>> with Stillroom.open("kb") as stillroom:  # doctest: +SKIP
        ...     stillroom.add("docs/")
        ...     print(stillroom.ask("How do I rotate keys?").text)
    """

    def __init__(
        self,
        kb: KnowledgeBase,
        config: StillroomConfig,
        metrics: Metrics,
        clock: Clock,
        shared: SharedBackend | None = None,
    ) -> None:
        """Use `open` or `for_tenant`.

        Args:
            shared: the backend of another `Stillroom`; None loads an own one.
        """
        self.config = config
        self.metrics = metrics
        self._opened_kb = kb
        self._search = QueryCache(kb, config.query_cache)
        self.uploads = Uploads(kb)
        self.originals = Originals(kb.corpus, config.documents)
        """Texts, files and pages of the indexed documents."""
        self._clock = clock
        self._traces = TraceLog(kb.path / TRACE_FILE, config.trace.keep)
        self._loader = loader = PipelineLoader(kb, self._search, config, metrics, self._traces, clock, shared)
        self.records = Records(self._traces, kb.chunks)
        """The request log: past questions and their answers."""
        self.preparing = DocumentPreparer(kb, loader.document_windows, self._search.demand, clock)
        """Computes documents' KV before a question asks for it (docs/prepared.md)."""
        if shared is None:
            metrics.watch(lambda: loader.backend.readings() if loader.backend else {})
            metrics.watch(lambda: {} if (figures := kb.indexes.list_figures) is None else figures.readings())
            metrics.watch(lambda: {} if (state := kb.corpus.copy_state) is None else state.readings())
        metrics.watch_corpora(str(kb.path), lambda: {str(kb.path): (kb.num_documents, kb.num_chunks)})
        self._closing = Closing(self, loader, metrics, (self._traces.close, kb.close), kb.path, self.preparing.end)
        self._owner: Stillroom | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: str | Path | None = None,
        config: StillroomConfig | None = None,
        create: bool = True,
    ) -> "Stillroom":
        """Open the knowledge base at `path`, or create one there.

        Args:
            path: a folder, or a URL such as `postgresql://user@host/database?kb=name` (docs/postgresql.md).
            model: `bundled:reader` (the default), `bundled:microworld`, a checkpoint's folder, a GGUF file or a hub
                name; overrides `config.runtime.model`.
            create: create a knowledge base if there is none.

        Raises:
            KnowledgeBaseError: there is none and `create` is false, or it cannot be used as it is.
        """
        config = config or StillroomConfig()
        if model is not None:
            config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, model=str(model)))
        clock = SystemClock()
        kb = KnowledgeBase.open(path, config, create=create, clock=clock)
        return cls(kb, config, Metrics(), clock)

    def for_tenant(self, path: str | Path, tenant: str, *, create: bool = True) -> "Stillroom":
        """Open another knowledge base that this object's model and engine answer from: one process, several tenants.

        The two share weights, memory and metrics. They share no document, search result, stored vector or KV: a
        question in one changes no cached token and no reuse report of the other. Close the tenant's before this one.

        Args:
            tenant: the tenant's name; with the identity of the knowledge base it salts the names of all KV.

        Raises:
            KnowledgeBaseError: there is none and `create` is false, or it cannot be used as it is.
            ConfigError: with the first question, if the engine is a server elsewhere.
        """
        kb = KnowledgeBase.open(path, self.config, create=create, clock=self._clock, weights_of=self._kb)
        shared = SharedBackend(self._loader, salt_of(tenant, kb.identity), OwnerNote(tenant, kb.path))
        stillroom = Stillroom(kb, self.config, self.metrics, self._clock, shared)
        stillroom._owner = self  # keeps the owner open
        if self._kb.hides_folders:
            stillroom.hide_folders()
        return stillroom

    def hide_folders(self) -> None:
        """From now on, use public document ids in names and filters, so that they reveal no folder of this machine. The
        server does this. Tenants' knowledge bases opened later inherit it."""
        self._kb.hide_folders()

    def avoid_torch(self) -> None:
        """Search without torch from now on, where the embedder allows it: for a process that searches a few times and
        ends. Importing torch takes longer than such a search."""
        self._kb.avoid_torch()

    def expect_few_questions(self) -> None:
        """Let a reader compute with one thread, unless the settings say how many, instead of finding the fastest number
        when it is loaded: for a process that asks once and ends. Finding it takes longer than an answer."""
        self._loader.expects_few_questions = True

    # Documents

    def add(
        self,
        *paths: str | Path,
        progress: Callable[[AddProgress], None] | None = None,
        metadata: Mapping[str, object] | None = None,
        exclude: Sequence[str] = (),
    ) -> AddReport:
        """Index files and folders. Files that have not changed since they were indexed are skipped.

        Files that cannot be read are listed in the report and do not stop the others. After an interruption, adding
        the same paths again indexes the rest.

        Args:
            metadata: of every file that is added, for filters. It overrides the file's own metadata and holds until the
                file is removed; None as a value removes an earlier override.
            exclude: files and folders to skip, as patterns of .gitignore: `["drafts/", "*.csv"]`.

        Raises:
            KnowledgeBaseBusyError: another process is writing to this knowledge base.
            UsageError: a path is empty or does not exist, or a pattern is invalid.
        """
        with self._changing():
            return self._kb.add(paths, progress=progress, metadata=metadata, exclude=exclude)

    def remove(self, *targets: str) -> RemoveReport:
        """Remove documents from the index: by document id, by file, or all under a folder.

        Targets that match nothing are in the report and do not stop the others. An uploaded file is deleted with its
        last document; other files stay. After an interruption, removing the same targets again removes the rest.

        Raises:
            UnknownDocumentError: no target matches anything.
        """
        with self._changing():
            return self.uploads.remove_all(targets)

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """Indexed documents, ordered by document id; those after `after`, at most `limit`."""
        return self._kb.documents(after, limit)

    def public_documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """Like `documents`, but ordered by public id (`core.ids.public_id`) and with uploaded files that are not
        indexed."""
        not_indexed = [info for info in self.uploads.not_indexed() if info.document_id > after]
        documents = [*self._kb.corpus.public_documents(after, limit), *not_indexed]
        return sorted(documents, key=lambda info: public_id(info.document_id))[:limit]

    def upload(
        self,
        files: Iterable[tuple[str, BinaryIO]],
        progress: Callable[[AddProgress], None] | None = None,
        metadata: Mapping[str, object] | None = None,
        stop: Cancellation | None = None,
    ) -> list[UploadResult]:
        """Store files under their names in the knowledge base's folder, and index them there.

        Files that cannot be read are in the results with their reasons and are not stored.

        Args:
            metadata: as in `add`.
            stop: cancels the upload from another thread; a new file that is not completely indexed by then is removed.

        Raises:
            ChangeCancelledError: `stop` was cancelled.
            UsageError: a name is not a relative path such as `notes/keys.md`; nothing was stored.
            KnowledgeBaseBusyError: another process is writing to this knowledge base; nothing was stored.

        Example:
            >>> stillroom.upload([("notes/keys.md", io.BytesIO(b"# Keys"))])  # doctest: +SKIP
        """
        with self._changing():
            return self.uploads.add(files, progress, metadata, stop)

    def discard(self, name: str) -> RemoveReport:
        """Remove one document by its id, or those of one file by its path or upload name. An uploaded file is deleted
        with its last document; other files stay.

        Raises:
            UnknownDocumentError: nothing has that name.
        """
        with self._changing():
            return self.uploads.remove(name)

    def complete_uploads(self, stop: Cancellation | None = None) -> int:
        """Index the files of interrupted uploads (see `Uploads.complete`). Returns their number."""
        if not self.uploads.are_incomplete:
            return 0
        with self._changing():
            return self.uploads.complete(stop)

    def document_content(self, document: str, stop: Cancellation | None = None) -> DocumentContent:
        """The text of a document, by its id, public id or upload name: from its file if that still holds what was
        indexed, else from the index.

        Args:
            stop: cancels the reading from another thread.

        Raises:
            UnknownDocumentError: nothing indexed has that name.
            SeveralDocumentsError: several documents have it.
            ChangeCancelledError: `stop` was cancelled.
        """
        self._loader.check_open()
        return self.originals.content(self.uploads.one(document).document_id, stop)

    def documents_like(self, name: str) -> list[DocumentId]:
        """The indexed documents that a short name may mean, such as `guide.md` for `/srv/docs/guide.md`; several if it
        is not clear which one. After `hide_folders`, only parts of public ids mean a document."""
        known = [info.document_id for info in self._kb.documents()]
        found = documents_like(name, known, self._kb.corpus.names)
        if self._kb.hides_folders:
            found = [one for one in found if name.casefold() in public_id(one).casefold()]
        return found

    def chunks_of(self, document_id: DocumentId, offset: int = 0, limit: int | None = None) -> list[Chunk]:
        """A document's indexed chunks in order, from `offset`, at most `limit`."""
        return self._kb.chunks_of(document_id, offset, limit)

    def digest(self) -> IndexDigest:
        """A hash of all that determines rankings: equal digests give equal rankings.

        Raises:
            KnowledgeBaseBusyError: another process is writing.
        """
        return self._kb.digest()

    def verify(self, *, repair: bool = False, progress: OnProgress | None = None) -> VerifyReport:
        """Check that SQLite, vectors and postings are complete and agree; with `repair`, make them agree. See
        `KnowledgeBase.verify`."""
        with self._changing():
            return self._kb.verify(repair=repair, progress=progress)

    def reembed(
        self,
        model: str | None = None,
        *,
        progress: Callable[[ReembedProgress], None] | None = None,
        stop: Cancellation | None = None,
    ) -> ReembedReport:
        """Embed all documents again with another embedder, and search with it from then on; see
        `KnowledgeBase.reembed`. Searches and changes of documents go on meanwhile, also in other processes."""
        try:
            return self._kb.reembed(model, progress=progress, stop=stop)
        finally:
            if self._loader.is_open:
                self._search.drop_stale()

    def begin_reembedding(self) -> None:
        """Change the embedder in a thread, if the settings name another one than that of the documents' vectors."""
        self._kb.begin_reembedding()

    def prepare(
        self, *targets: str, progress: Callable[[PrepareProgress], None] | None = None, stop: Cancellation | None = None
    ) -> PrepareReport:
        """Compute the KV of documents before a question asks for it, as far as the budget goes (docs/prepared.md).

        What is kept already is not computed again, so that an interrupted call can be repeated. Questions come first.

        Args:
            targets: ids or file names of documents; none: all documents.
            stop: ends the call from another thread.

        Raises:
            UsageError: the model keeps no KV: the reader, a server elsewhere, or `reuse.mode = "off"`.
            KnowledgeBaseBusyError: another process keeps KV in this knowledge base, so that nothing could be stored.
            UnknownDocumentError: a target matches nothing.
            ChangeCancelledError: `stop` was cancelled.
        """
        documents = {self.uploads.one(target).document_id for target in targets} if targets else None
        return self.preparing.run(documents, progress or (lambda _: None), stop)

    # Search

    def search(
        self, query: str, *, mode: SearchMode | None = None, top_k: int | None = None, where: str = ""
    ) -> SearchResult:
        """The best matching chunks, best first. None takes the configured default.

        A repeated query is answered from the query cache until a document changes.

        Args:
            where: a filter such as `year >= 2020 and team = legal` (docs/filters.md); blank allows every document.

        Raises:
            UsageError: the query is blank, `top_k` is less than 1, or the filter is invalid.
        """
        self._loader.check_open()
        return self._search.search(*checked_query(query, mode, top_k, self.config.search), where=text("where", where))

    def search_staged(
        self,
        query: str,
        *,
        mode: SearchMode | None = None,
        top_k: int | None = None,
        num_stages: int = NUM_STAGES,
        where: str = "",
    ) -> Iterator[SearchResult]:
        """`search` in stages: provisional results first, and last the result of `search`.

        The caller may stop iterating at any stage. A cached result is the only one.

        Args:
            num_stages: most results; 1 gives the final one only.

        Example:
            >>> for result in stillroom.search_staged("How do I rotate keys?"):  # doctest: +SKIP
            ...     print([scored.chunk.title for scored in result.results])
        """
        self._loader.check_open()
        checked = checked_query(query, mode, top_k, self.config.search)
        return self._search.search_staged(*checked, num_stages, text("where", where))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings [len(texts), dimension] of length 1, by the knowledge base's embedder."""
        if isinstance(texts, str):
            raise UsageError("embed takes a list of texts; put this one into a list")
        return self._kb.embed([text("a text", one) for one in texts])

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score each text for a query with the cross-encoder of `search.reranker`; higher is better.

        Raises:
            UsageError: no reranker is configured.
            ModelError: it cannot be loaded.
        """
        if isinstance(texts, str):
            raise UsageError("rerank takes a list of texts; put this one into a list")
        return self._kb.rerank(text("the query", query), [text("a text", one) for one in texts])

    @property
    def embedder(self) -> Embedder:
        """The knowledge base's embedder, with its tokenizer."""
        return self._kb.embedder

    # Answers

    def ask(self, question: str, options: AskOptions | None = None) -> Answer:
        """Answer a question from the documents.

        Raises:
            UsageError: the question is empty, an option is out of range, or the prompt does not fit the model.
            EmptyKnowledgeBaseError: there is nothing to search.
            NothingFoundError: no document was found; nothing is generated.
            ModelError: the model cannot be loaded.
            EngineError: generation failed, or the server that generates cannot be reached or refuses.
        """
        return self.stream(question, options).read_to_end()

    def stream(self, question: str, options: AskOptions | None = None) -> "AnswerStream":
        """Answer piece by piece; the sources are known at once. Raises as `ask`."""
        return self.streams(question, options)[0]

    def ask_several(self, question: str, n: int, options: AskOptions | None = None) -> list[Answer]:
        """`n` answers to one question: one search, one prefill, a different seed for each answer.

        The first is the answer of `ask`. Raises as `ask`.
        """
        streams = self.streams(question, options, n=n)
        # in threads: each stream is cancelled at its stop string, whichever is read first
        with ThreadPoolExecutor(len(streams), thread_name_prefix="stillroom-answer") as pool:
            try:
                return list(pool.map(lambda stream: stream.read_to_end(), streams))
            finally:
                for stream in streams:
                    stream.cancel()

    def streams(self, question: str, options: AskOptions | None = None, *, n: int = 1) -> "list[AnswerStream]":
        """`n` answers to one question, piece by piece; each can be cancelled on its own. Raises as `ask`."""
        options = checked_options(question, options, n)
        return self._holding_open(self._loader.pipeline().streams(question, options, n))

    async def astream(self, question: str, options: AskOptions | None = None) -> "AsyncAnswerStream":
        """`stream` for an event loop, without blocking it."""
        return (await self.astreams(question, options))[0]

    async def astreams(
        self, question: str, options: AskOptions | None = None, *, n: int = 1
    ) -> "list[AsyncAnswerStream]":
        """`streams` for an event loop, without blocking it."""
        arrival, options = self._clock.monotonic(), checked_options(question, options, n)
        async with _deadline(options.deadline_seconds):
            pipeline = await self._loader.apipeline()
            return self._holding_open(await pipeline.astreams(question, options, n, arrival))

    async def acontinue(
        self, prompt: str | Sequence[int], options: AskOptions | None = None, *, n: int = 1
    ) -> "list[AsyncAnswerStream]":
        """`n` continuations of a prompt, text or tokens, without a search, sources or a prompt format.

        Raises:
            UsageError: the prompt is empty or does not fit the model, or an option is out of range.
            ModelError: the model cannot be loaded.
        """
        arrival = self._clock.monotonic()
        options = checked_options(prompt if isinstance(prompt, str) else "", options, n)
        async with _deadline(options.deadline_seconds):
            pipeline = await self._loader.apipeline()
            return self._holding_open(await pipeline.acontinue(prompt, options, n, arrival))

    async def atext_of(self, token_ids: Sequence[int]) -> str:
        """Decode tokens of the model. Raises UsageError: the model has no such token."""
        return (await self.aprompt_tokenizer()).text_of(token_ids)

    async def aprompt_tokenizer(self) -> "PromptTokenizer":
        """Encodes prompts and decodes tokens as the model does. Raises ModelError: the model cannot be loaded."""
        return (await self._loader.apipeline()).tokens

    async def aknows_tools(self) -> bool:
        """Whether the model calls tools, in a chat without a search. Raises ModelError: the model cannot be loaded."""
        return (await self._loader.apipeline()).knows_tools

    # State and closing

    @property
    def model_name(self) -> str:
        """The model's name, as it was given; `bundled` as the name of the default model."""
        return self._loader.model_name

    @property
    def embedder_name(self) -> str:
        """The embedder of the last search; another process may have changed it since. No file is read."""
        return self._opened_kb.embedder_name

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the model's answers must know; `Answer.warnings` repeats it."""
        return model_warnings(self.model_name)

    @property
    def identity(self) -> str:
        """Id of the knowledge base and its copies; a new one in the same folder has another."""
        return self._opened_kb.identity

    @property
    def num_documents(self) -> int:
        """Files, and records of JSONL files, that are indexed."""
        return self._kb.num_documents

    @property
    def list_figures(self) -> ListFigures | None:
        """Figures of an index with lists in RAM and on disk; None without `index.hot_bytes`, and before the first
        search."""
        return self._kb.indexes.list_figures

    @property
    def num_blocks(self) -> int:
        """KV blocks in total; 0 before the model is loaded, and if it is a reader or on a server elsewhere."""
        return backend.load.num_blocks if (backend := self._loader.backend) else 0

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no running request uses."""
        return backend.load.num_free_blocks if (backend := self._loader.backend) else 0

    def load_backend(self) -> "Backend":
        """Load the model alone, without the embedder and the indexes, and return it as it answers for this knowledge
        base. Only for processes that generate from prompts of others (docs/wire.md).

        Raises:
            ModelError: the model cannot be loaded.
        """
        self._loader.pipeline()
        assert self._loader.backend is not None
        return self._loader.backend

    def warm_up(self) -> None:
        """Load the model, the embedder, the reranker and the indexes now instead of with the first question."""
        self._loader.pipeline()
        self._kb.embed(["warm up"])  # the search does not embed if the knowledge base is empty
        if self.config.search.reranker:
            self._kb.rerank("warm up", ["warm up"])
        for _ in self._kb.search_staged("warm up"):  # compiles the kernels of a staged search too
            pass

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and the knowledge base is open."""
        return self._loader.is_ready and self.is_there

    @property
    def is_there(self) -> bool:
        """Whether the knowledge base is the one that was opened: neither removed nor replaced."""
        return self._opened_kb.is_there

    @property
    def copy_state(self) -> CopyState | None:
        """How this machine's copy of a database stands; None if the documents are in a folder."""
        return self._opened_kb.corpus.copy_state

    @property
    def device_problem(self) -> str | None:
        """Why the model, or every server elsewhere, cannot compute now. None if it can, and before it is loaded."""
        return backend.device_problem if (backend := self._loader.backend) else None

    def stop_generating(self) -> None:
        """End every answer of this object and its tenants with an EngineClosedError, now and later. Search works on."""
        if self._loader.backend is not None:
            self._loader.backend.stop()

    def close(self) -> None:
        """Stop generating and close the files. Idempotent. Garbage collection closes too, with a ResourceWarning."""
        self._closing.close()

    def __enter__(self) -> "Stillroom":
        self._loader.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _kb(self) -> KnowledgeBase:
        """Raises EngineClosedError: this object was closed, or opened in another process."""
        self._loader.check_open()
        return self._opened_kb

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Context in which documents may change; drops KV and cached results of removed ones afterwards. Raises as
        `_kb`."""
        self._loader.check_open()
        try:
            yield
        finally:
            if self._loader.is_open:
                self._loader.documents_changed()
                self._search.drop_stale()

    def _holding_open(self, streams: "list[S]") -> "list[S]":
        """Let each stream refer to this object, which is then not collected, and so not closed, before it."""
        for stream in streams:
            stream.stillroom = self
        return streams


@asynccontextmanager
async def _deadline(seconds: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceededError: the body takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise deadline_error() from None
        raise

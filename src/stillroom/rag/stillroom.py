"""`Stillroom`: the one class a Python program needs. Documents in; searches, answers and streams out.

Opening is cheap: the embedder loads with the first search or add, the model with the first question. Thread-safe.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import SearchMode, StillroomConfig
from stillroom.core.arguments import text
from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.document import Chunk, DocumentInfo, SearchResult
from stillroom.core.ids import DocumentId, public_id
from stillroom.core.kv import salt_of
from stillroom.errors import UsageError
from stillroom.kvstore.owners import OwnerNote
from stillroom.rag.answer import Answer, AskOptions, checked_options, checked_query
from stillroom.rag.answering import Answering, SharedBackend, keeping, pipeline_over, read_all, read_to_end, within
from stillroom.rag.closing import Closing
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.records import Records
from stillroom.retrieval.digest import IndexDigest
from stillroom.retrieval.ingest import AddProgress, AddReport, RemoveReport
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.tiers.hot_lists import ListFigures
from stillroom.retrieval.uploads import UploadResult, Uploads
from stillroom.retrieval.vector_index import NUM_STAGES
from stillroom.retrieval.verify.report import Tell, VerifyReport
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TRACE_FILE, TraceLog

if TYPE_CHECKING:  # they import torch, which listing and removing documents can do without
    from stillroom.rag.stream import AnswerStream, AsyncAnswerStream


class Stillroom:
    """A knowledge base and the model that answers from it.

    Example:
        >>> with Stillroom.open("kb") as room:  # doctest: +SKIP
        ...     room.add("docs/")
        ...     print(room.ask("How do I rotate keys?").text)
    """

    def __init__(
        self,
        kb: KnowledgeBase,
        config: StillroomConfig,
        metrics: Metrics,
        clock: Clock,
        guest: SharedBackend | None = None,
    ) -> None:
        """Use `open`, or `for_tenant`.

        Args:
            guest: says whose backend answers in a room that has none of its own.
        """
        self.config = config
        self.metrics = metrics
        self._opened_kb = kb
        self._search = QueryCache(
            search=lambda query, mode, top_k, num_stages, where: kb.search_staged(
                query, mode=mode, top_k=top_k, num_stages=num_stages, where=where
            ),
            generation=lambda: kb.generation,
            embed=lambda query: kb.embed_question(query),
            config=config.query_cache,
        )
        self.uploads = Uploads(kb)
        self._clock = clock
        self._traces = TraceLog(kb.path / TRACE_FILE, config.trace.keep)
        over = partial(pipeline_over, kb, self._search, config, metrics, self._traces, clock)
        self._answering = answering = Answering(kb, config, clock, guest, over)
        self.records = Records(self._traces, kb.chunks)
        """What was asked before."""
        if guest is None:
            metrics.watch(lambda: answering.backend.readings() if answering.backend else {})
            metrics.watch(lambda: {} if (figures := kb.list_figures) is None else figures.readings())
        metrics.watch_corpora(str(kb.path), lambda: {str(kb.path): (kb.num_documents, kb.num_chunks)})
        self._closing = Closing(self, answering, metrics, (self._traces.close, kb.close), kb.path)
        self._host: Stillroom | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: str | Path | None = None,
        config: StillroomConfig | None = None,
        create: bool = True,
    ) -> "Stillroom":
        """Open the knowledge base at `path`, or make one there.

        Args:
            model: `bundled`, a checkpoint's folder or a hub name; overrides `config.runtime.model`.
            create: make a new knowledge base where there is none.

        Raises:
            KnowledgeBaseError: there is none (and `create` is false), or it cannot be used as it is.
        """
        config = config or StillroomConfig()
        if model is not None:
            config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, model=str(model)))
        clock = SystemClock()
        kb = KnowledgeBase.open(Path(path), config, create=create, clock=clock)
        return cls(kb, config, Metrics(), clock)

    def for_tenant(self, path: str | Path, tenant: str, *, create: bool = True) -> "Stillroom":
        """Another knowledge base, answered by this room's model and engine: one process, several tenants.

        The rooms share weights, memory and metrics. They share no document, no search result, no kept vector and no
        KV: what was asked in one changes no cached token and no reuse report of the other. Close it before this one.

        Args:
            tenant: whose KV it is; with the identity of the knowledge base it salts the names of all KV.

        Raises:
            KnowledgeBaseError: there is none (and `create` is false), or it cannot be used as it is.
            ConfigError: with the first question, where the engine is elsewhere.
        """
        kb = KnowledgeBase.open(Path(path), self.config, create=create, clock=self._clock, like=self._kb)
        guest = SharedBackend(self._answering, salt_of(tenant, kb.identity), OwnerNote(tenant, kb.path))
        stillroom = Stillroom(kb, self.config, self.metrics, self._clock, guest)
        stillroom._host = self  # stays open as long as this one
        if self._kb.hides_folders:
            stillroom.hide_folders()
        return stillroom

    def hide_folders(self) -> None:
        """From now on, names and filters know documents by their public ids, and tell no folder of this machine. A
        server does this; it holds for rooms that are opened beside this one later."""
        self._kb.hide_folders()

    # Documents

    def add(
        self,
        *paths: str | Path,
        progress: Callable[[AddProgress], None] | None = None,
        metadata: Mapping[str, object] | None = None,
        exclude: Sequence[str] = (),
    ) -> AddReport:
        """Index files and folders; what has not changed since the last time costs nothing.

        Files that cannot be read are listed in the report and do not stop the others. Interrupting loses nothing that
        was finished; adding the same paths again does the rest.

        Args:
            metadata: of every file that is added, for filters. It goes before what the file says itself and holds until
                the file is removed; None as a value takes back what was said before.
            exclude: files and folders to pass over, as patterns in .gitignore: `["drafts/", "*.csv"]`.

        Raises:
            KnowledgeBaseBusyError: another process is writing to this knowledge base.
            UsageError: a path is empty or does not exist, or a pattern is none.
        """
        with self._changing():
            return self._kb.add(paths, progress=progress, metadata=metadata, exclude=exclude)

    def remove(self, *targets: str) -> RemoveReport:
        """Forget documents: by document id, by file, or all under a folder. Targets that match nothing are in the
        report and do not stop the others; if it is interrupted, the same again does the rest. An uploaded file is
        deleted with its last document; others stay. Raises UnknownDocumentError: no target matches anything.
        """
        with self._changing():
            return self.uploads.remove_all(targets)

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """What is indexed, by document id; those behind `after`, and at most `limit`."""
        return self._kb.documents(after, limit)

    def public_documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """`documents`, by the ids that clients of a server see (`core.ids.public_id`), and uploaded files that are not
        indexed."""
        lone = [info for info in self.uploads.not_indexed() if info.document_id > after]
        both = [*self._kb.public_documents(after, limit), *lone]
        return sorted(both, key=lambda info: public_id(info.document_id))[:limit]

    def upload(
        self,
        files: Iterable[tuple[str, BinaryIO]],
        progress: Callable[[AddProgress], None] | None = None,
        metadata: Mapping[str, object] | None = None,
        stop: Cancellation | None = None,
    ) -> list[UploadResult]:
        """Keep files under their names in the knowledge base's folder, and index them there.

        Files that cannot be read are in the results with their reasons and leave nothing behind. Metadata as of `add`.

        Args:
            stop: cancels it from another thread: a new file that was not wholly indexed until then is removed.

        Raises:
            ChangeCancelledError: `stop` was cancelled.
            UsageError: a name is no path like `notes/keys.md`; nothing was done.
            KnowledgeBaseBusyError: another process is writing to this knowledge base; nothing was done.

        Example:
            >>> room.upload([("notes/keys.md", io.BytesIO(b"# Keys"))])  # doctest: +SKIP
        """
        with self._changing():
            return self.uploads.add(files, progress, metadata, stop)

    def discard(self, name: str) -> RemoveReport:
        """Forget one document by its id, or those of one file by its path or the name it was uploaded under. An
        uploaded file is deleted with its last document; other files stay where they are.

        Raises:
            UnknownDocumentError: there is nothing of that name.
        """
        with self._changing():
            return self.uploads.remove(name)

    def complete_uploads(self, stop: Cancellation | None = None) -> int:
        """Index files of uploads that were killed (see `Uploads.complete`). Returns how many."""
        if not self.uploads.are_incomplete:
            return 0
        with self._changing():
            return self.uploads.complete(stop)

    def chunks_of(self, document_id: DocumentId, offset: int = 0, limit: int | None = None) -> list[Chunk]:
        """A document's chunks in order, as they are indexed; without the first `offset`, and at most `limit`."""
        return self._kb.chunks_of(document_id, offset, limit)

    def digest(self) -> IndexDigest:
        """A hash of everything that decides rankings: equal digests give equal rankings.

        Raises:
            KnowledgeBaseBusyError: another process is writing.
        """
        return self._kb.digest()

    def verify(self, *, repair: bool = False, progress: Tell | None = None) -> VerifyReport:
        """Check that SQLite, vectors and postings are whole and agree, and make them so; see `KnowledgeBase.verify`."""
        with self._changing():
            return self._kb.verify(repair=repair, progress=progress)

    # Search

    def search(
        self, query: str, *, mode: SearchMode | None = None, top_k: int | None = None, where: str = ""
    ) -> SearchResult:
        """The chunks that match best, best first. None takes the configuration's default.

        A question that was asked before is answered from the query cache, as long as no document has changed.

        Args:
            where: a filter such as `year >= 2020 and team = legal` (docs/filters.md); blank allows every document.

        Raises:
            UsageError: the query is blank, top_k less than 1, or the filter is none.
        """
        self._answering.check_open()
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
        """`search` in stages: provisional results as soon as there are any, and in the end what `search` gives.

        Whoever iterates may stop at any stage. What is in the query cache comes at once.

        Args:
            num_stages: at most so many results; 1 gives the last only.

        Example:
            >>> for result in room.search_staged("How do I rotate keys?"):  # doctest: +SKIP
            ...     print([scored.chunk.title for scored in result.results])
        """
        self._answering.check_open()
        asked = checked_query(query, mode, top_k, self.config.search)
        return self._search.search_staged(*asked, num_stages, text("where", where))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings [len(texts), dimension] by the knowledge base's embedder, each of length 1."""
        if isinstance(texts, str):
            raise UsageError("embed takes a list of texts; put this one into a list")
        return self._kb.embed([text("a text", one) for one in texts])

    # Answers

    def ask(self, question: str, options: AskOptions | None = None) -> Answer:
        """Answer a question from the documents.

        Raises:
            UsageError: the question is empty, an option is out of range, or the prompt does not fit the model.
            EmptyKnowledgeBaseError: there is nothing to search.
            NothingFoundError: nothing was found, so nothing is generated.
            ModelError: the model cannot be loaded.
            EngineError: generation failed, or the engine elsewhere cannot be reached or refuses.
        """
        return read_to_end(self.stream(question, options))

    def stream(self, question: str, options: AskOptions | None = None) -> "AnswerStream":
        """The answer piece by piece; its sources are known at once. Raises as `ask`."""
        return self.streams(question, options)[0]

    def ask_several(self, question: str, n: int, options: AskOptions | None = None) -> list[Answer]:
        """`n` answers to one question: searched and read once, then answered with a seed of its own each.

        The first is the answer that `ask` gives. Raises as `ask`.
        """
        return read_all(self.streams(question, options, n=n))

    def streams(self, question: str, options: AskOptions | None = None, *, n: int = 1) -> "list[AnswerStream]":
        """`n` answers to one question, piece by piece; each can be cancelled by itself. Raises as `ask`."""
        options = checked_options(question, options, n)
        return keeping(self, self._answering.pipeline().streams(question, options, n))

    async def astream(self, question: str, options: AskOptions | None = None) -> "AsyncAnswerStream":
        """`stream` for an event loop: nothing blocks it."""
        return (await self.astreams(question, options))[0]

    async def astreams(
        self, question: str, options: AskOptions | None = None, *, n: int = 1
    ) -> "list[AsyncAnswerStream]":
        """`streams` for an event loop: nothing blocks it."""
        arrival, options = self._clock.monotonic(), checked_options(question, options, n)
        async with within(options.deadline_seconds):
            pipeline = await self._answering.apipeline()
            return keeping(self, await pipeline.astreams(question, options, n, arrival))

    async def acontinue(
        self, prompt: str | Sequence[int], options: AskOptions | None = None, *, n: int = 1
    ) -> "list[AsyncAnswerStream]":
        """`n` continuations of a prompt, text or tokens, as it is: without a search, sources or a prompt format.

        Raises:
            UsageError: the prompt is empty or does not fit the model, or an option is out of range.
            ModelError: the model cannot be loaded.
        """
        arrival = self._clock.monotonic()
        options = checked_options(prompt if isinstance(prompt, str) else "", options, n)
        async with within(options.deadline_seconds):
            pipeline = await self._answering.apipeline()
            return keeping(self, await pipeline.acontinue(prompt, options, n, arrival))

    async def atext_of(self, token_ids: Sequence[int]) -> str:
        """What tokens of the model read as. Raises UsageError for those that are none."""
        return (await self._answering.apipeline()).text_of(token_ids)

    # Life

    @property
    def model_name(self) -> str:
        """The model's name, as it was given."""
        return self._answering.model_name

    @property
    def num_documents(self) -> int:
        """Files, and records of JSONL files."""
        return self._kb.num_documents

    @property
    def list_figures(self) -> ListFigures | None:
        """Of an index with lists in RAM and on disk; None without `index.hot_bytes`, and before the first search."""
        return self._kb.list_figures

    @property
    def num_blocks(self) -> int:
        """KV blocks in all; 0 before the model is loaded, and with an engine elsewhere."""
        return backend.load.num_blocks if (backend := self._answering.backend) else 0

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no running request uses."""
        return backend.load.num_free_blocks if (backend := self._answering.backend) else 0

    def warm_up(self) -> None:
        """Load the model, the embedder and the indexes now instead of with the first question."""
        self._answering.pipeline()
        self._kb.embed(["warm up"])  # an empty knowledge base would not
        for _ in self._kb.search_staged("warm up"):  # compiles what a plain search does not need
            pass

    @property
    def is_ready(self) -> bool:
        """Whether a question finds the model loaded and everything open."""
        return self._answering.is_ready and self.is_there

    @property
    def is_there(self) -> bool:
        """Whether the knowledge base's folder is still the one that was opened: not removed, and not replaced."""
        return self._opened_kb.is_there

    @property
    def device_problem(self) -> str | None:
        """Why the model computes nothing for now; None if it can, before it is loaded, and with an engine elsewhere."""
        return backend.device_problem if (backend := self._answering.backend) else None

    def stop_generating(self) -> None:
        """Every answer under way, of this room and those beside it, ends with an EngineClosedError; so does every new
        one. The room still searches."""
        if self._answering.backend is not None:
            self._answering.backend.stop()

    def close(self) -> None:
        """Stop generating and close the files. Idempotent. A forgotten room is closed too, with a ResourceWarning."""
        self._closing.close()

    def __enter__(self) -> "Stillroom":
        self._answering.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _kb(self) -> KnowledgeBase:
        """Raises EngineClosedError: the room was closed, or opened in another process."""
        self._answering.check_open()
        return self._opened_kb

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Documents may change in here. Raises as `_kb`."""
        self._answering.check_open()
        try:
            yield
        finally:
            if self._answering.is_open:
                self._answering.documents_changed()
                self._search.drop_stale()

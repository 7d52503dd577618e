"""Loads the backend and the pipeline of a `Stillroom` with its first question, and closes them."""

import asyncio
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.kv import NO_TENANT, owner_of
from stillroom.errors import ConfigError, EngineClosedError, UsageError
from stillroom.kvstore.files import KV_FOLDER, forget_chunks
from stillroom.kvstore.owners import OwnerNote, note_owner
from stillroom.models.bundled_models import full_name, reader_folder
from stillroom.rag.query_cache import QueryCache
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TraceLog

if TYPE_CHECKING:  # they import torch, which listing and removing documents can do without
    from stillroom.backends.base import Backend
    from stillroom.backends.document_windows import DocumentWindows
    from stillroom.rag.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class SharedBackend:
    """The backend of another `Stillroom`, used for a tenant."""

    owner: "PipelineLoader"
    """Of the `Stillroom` that owns the backend."""
    salt: str
    """Salts the tenant's KV names."""
    note: OwnerNote
    """Where the tenant's documents are."""

    @property
    def loaded(self) -> "Backend | None":
        """The tenant's backend; None before the owner has loaded it, and where it does not serve tenants."""
        with suppress(ConfigError):
            backend = self.owner.backend
            return None if backend is None else backend.for_tenant(self.salt, self.note.tenant)
        return None


class PipelineLoader:
    """Loads the pipeline once, on first use. Thread-safe."""

    def __init__(  # noqa: PLR0913  the pipeline's parts
        self,
        kb: KnowledgeBase,
        search: QueryCache,
        config: StillroomConfig,
        metrics: Metrics,
        traces: TraceLog,
        clock: Clock,
        shared: SharedBackend | None,
    ) -> None:
        """
        Args:
            shared: the backend to use; None opens an own one.
        """
        self._kb = kb
        self._search = search
        self._config = config
        self._metrics = metrics
        self._traces = traces
        self._clock = clock
        self._shared = shared
        self._loading = Lock()
        self._process = os.getpid()
        self.backend: Backend | None = None
        """None until the first question."""
        self.expects_few_questions = False
        """See `Stillroom.expect_few_questions`."""
        self._pipeline: Pipeline | None = None
        self._is_closed = False

    @property
    def model_name(self) -> str:
        """The model's name, as it was given; `bundled` as the name of the default model."""
        if self.backend:
            return self.backend.name
        engine = self._config.engine
        return engine.model or engine.base_url if engine.kind == "openai" else full_name(self._config.runtime.model)

    @property
    def is_ready(self) -> bool:
        """Whether everything is loaded, open and able to compute."""
        backend = self.backend
        if self._pipeline is None or self._is_closed or backend is None:
            return False
        return backend.is_alive and backend.device_problem is None

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a fork of the process that opened it."""
        return not self._is_closed and not self.is_foreign

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that opened it: its threads do not exist here."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raises EngineClosedError: after `close`, and in a fork of the process that opened it."""
        if self.is_foreign:
            raise EngineClosedError("this Stillroom was opened in another process; open it after the fork")
        if self._is_closed:
            raise EngineClosedError("this Stillroom was closed; open it again")

    def pipeline(self) -> "Pipeline":
        """Return the pipeline; load the model first if that was not done.

        Raises:
            ModelError: the model cannot be loaded.
            EngineClosedError: as `check_open`.
        """
        self.check_open()  # before the lock: a fork may have copied it locked
        with self._loading:
            self.check_open()
            if self._pipeline is None:
                from stillroom.rag.pipeline import Pipeline

                self.backend = self._open_backend()
                self._pipeline = Pipeline(
                    self._kb, self._search, self.backend, self._config, self._metrics, self._traces, self._clock
                )
            return self._pipeline

    async def apipeline(self) -> "Pipeline":
        """`pipeline` for an event loop; takes no thread once it is loaded. Raises as `pipeline`."""
        self.check_open()
        if self._pipeline is not None:
            return self._pipeline
        return await asyncio.to_thread(self.pipeline)

    def for_tenant(self, salt: str, tenant: str) -> "Backend":
        """The same model and engine for another knowledge base, whose KV names are salted. Raises as `pipeline`."""
        self.pipeline()
        assert self.backend is not None
        return self.backend.for_tenant(salt, tenant)

    def document_windows(self) -> "DocumentWindows":
        """What prepares documents with the model. Raises as `pipeline`.

        Raises:
            UsageError: the model keeps no KV.
        """
        self.pipeline()
        assert self.backend is not None
        windows = self.backend.document_windows
        if windows is None:
            if not self._config.reuse.keeps_kv:
                raise UsageError(
                    "with reuse.mode = off no KV is kept, so there is nothing to prepare; use --reuse exact"
                )
            if self._config.engine.kind == "cluster":
                raise UsageError("a front prepares no documents; its engines do by themselves (prepare.when_idle)")
            raise UsageError(
                f"{self.backend.name} keeps no KV of documents, so there is nothing to prepare; choose a model that "
                "generates text with --model"
            )
        return windows

    def documents_changed(self) -> None:
        """Drop KV of removed chunks: in memory, and on disk for every model."""
        backend = self._loaded
        handled = None if backend is None else backend.documents_changed(self._kb)
        owner = NO_TENANT if self._shared is None else owner_of(self._shared.salt)
        forget_chunks(
            self.kv_folder, lambda chunk_id: bool(self._kb.existing_chunks({chunk_id})), owner, except_for=handled
        )

    @property
    def kv_folder(self) -> Path:
        """Where KV is kept on disk."""
        return self._kb.path / KV_FOLDER if self._shared is None else self._shared.owner.kv_folder

    def close(self) -> bool:
        """Stop generating. Returns False if that was done before, and in a fork, where the parent process does it."""
        if self.is_foreign:
            return False
        with self._loading:
            if self._is_closed:
                return False
            self._is_closed = True
        backend = self._loaded
        if backend is not None:
            backend.close()
        return True

    @property
    def _loaded(self) -> "Backend | None":
        """The backend that may hold KV of these documents now. A shared one may hold it from an earlier session, before
        this one's first question."""
        return self.backend or (None if self._shared is None else self._shared.loaded)

    def _open_backend(self) -> "Backend":
        shared = self._shared
        if shared is None:
            backend = self._own_backend()
        else:
            backend = shared.owner.for_tenant(shared.salt, shared.note.tenant)
            note_owner(self.kv_folder, owner_of(shared.salt), shared.note)
        backend.documents_changed(self._kb)  # another process may have changed them
        return backend

    def _own_backend(self) -> "Backend":
        from stillroom.rag.kv_sweep import sweep_kv

        config, swept = self._config, sweep_kv(self._kb.path)
        if config.engine.kind == "openai":
            from stillroom.backends.openai import connect

            return connect(config, self._clock, self._kb.identity)
        if config.engine.kind == "cluster":
            from stillroom.backends import cluster_backend

            return cluster_backend.connect(config, self._clock, self._kb.identity)
        if folder := reader_folder(config.runtime.model):
            from stillroom.backends.reader.reader_backend import build_reader_backend

            return build_reader_backend(config, self._clock, folder, measures_threads=not self.expects_few_questions)
        from stillroom.backends.local import build_backend

        backend = build_backend(config, self._clock, self._kb.path)
        backend.forget_shared(swept.gone)
        for salt, corpus in swept.tenants.items():
            backend.for_tenant(salt, "").documents_changed(corpus)
        return backend


class Closing:
    """Closes the parts of a `Stillroom`, also if it is garbage-collected without `close`.

    It holds no reference to the `Stillroom`, and the parts hold none; otherwise the `Stillroom` would never be
    collected.
    """

    def __init__(
        self,
        stillroom: object,
        loader: PipelineLoader,
        metrics: Metrics,
        parts: Sequence[Callable[[], None]],
        path: Path,
        begin: Callable[[], None],
    ) -> None:
        """
        Args:
            parts: closed in this order, after generation has stopped.
            path: of the knowledge base.
            begin: called first, while the model still works.
        """
        self._loader, self._metrics, self._parts, self._path, self._begin = loader, metrics, parts, path, begin
        self._finalizer = weakref.finalize(stillroom, self._collected)
        self._finalizer.atexit = False  # the end of the process frees everything

    def close(self) -> None:
        """Idempotent."""
        self._finalizer.detach()
        if not self._loader.is_foreign:
            self._begin()
        if not self._loader.close():
            return
        self._metrics.forget_corpora(str(self._path))
        for close in self._parts:
            close()

    def _collected(self) -> None:
        if self._loader.is_open:
            # the garbage collector runs in any thread, which may hold locks that `close` takes
            threading.Thread(target=self.close, name="stillroom-close", daemon=True).start()
            warnings.warn(f"a Stillroom on {self._path} was not closed", ResourceWarning, stacklevel=2)

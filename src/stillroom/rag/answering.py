"""What answers the questions of a room: its backend and the pipeline in front of it, loaded with the first question."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.kv import NO_TENANT, owner_of
from stillroom.engine.deadlines import deadline_error
from stillroom.errors import ConfigError, EngineClosedError
from stillroom.kvstore.files import KV_FOLDER, forget_chunks
from stillroom.kvstore.owners import OwnerNote, note_owner
from stillroom.rag.answer import Answer
from stillroom.rag.kv_sweep import sweep_kv
from stillroom.rag.query_cache import QueryCache
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TraceLog

if TYPE_CHECKING:  # they import torch, which listing and removing documents can do without
    from stillroom.backends.base import Backend
    from stillroom.rag.pipeline import Pipeline
    from stillroom.rag.stream import AnswerStream, AsyncAnswerStream

S = TypeVar("S", "AnswerStream", "AsyncAnswerStream")


def read_to_end(stream: "AnswerStream") -> Answer:
    """The whole answer, when it is there."""
    for _ in stream:
        pass
    return stream.answer


def read_all(streams: "Sequence[AnswerStream]") -> list[Answer]:
    """Each in a thread: an answer that ends at a stop string must not be generated on until others have been read."""
    with ThreadPoolExecutor(len(streams), thread_name_prefix="stillroom-answer") as pool:
        try:
            return list(pool.map(read_to_end, streams))
        finally:
            for stream in streams:
                stream.cancel()


def keeping(stillroom: object, streams: "list[S]") -> "list[S]":
    """The streams; who has one keeps the room open."""
    for stream in streams:
        stream.stillroom = stillroom
    return streams


@asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceededError if what is inside takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise deadline_error() from None
        raise


def pipeline_over(  # noqa: PLR0913  its parts
    kb: KnowledgeBase,
    search: QueryCache,
    config: StillroomConfig,
    metrics: Metrics,
    traces: TraceLog,
    clock: Clock,
    backend: "Backend",
) -> "Pipeline":
    """The pipeline of a room; the modules it needs are imported with the first question."""
    from stillroom.rag.pipeline import Pipeline
    from stillroom.rag.speculation import Speculator

    speculator = Speculator(backend, config.speculation, clock, metrics)
    return Pipeline(kb, search, backend, speculator, config, metrics, traces, clock)


@dataclass(frozen=True, slots=True)
class SharedBackend:
    """A room that has no backend of its own."""

    host: "Answering"
    """Of the room whose backend it uses."""
    salt: str
    """Of the guest's requests."""
    note: OwnerNote
    """Where the guest's documents are."""

    @property
    def loaded(self) -> "Backend | None":
        """The guest's backend; None as long as the host has none, or has one that takes no guests."""
        with suppress(ConfigError):
            return None if self.host.backend is None else self.host.backend.for_tenant(self.salt)
        return None


class Answering:
    """Thread-safe."""

    def __init__(
        self,
        kb: KnowledgeBase,
        config: StillroomConfig,
        clock: Clock,
        guest: SharedBackend | None,
        pipeline_over: "Callable[[Backend], Pipeline]",
    ) -> None:
        """
        Args:
            guest: says whose backend answers, if it is not the room's own.
            pipeline_over: makes the room's pipeline.
        """
        self._kb, self._config, self._clock, self._guest, self._pipeline_over = kb, config, clock, guest, pipeline_over
        self._loading = Lock()
        self._process = os.getpid()
        self.backend: Backend | None = None
        """None until the first question."""
        self._pipeline: Pipeline | None = None
        self._is_closed = False

    @property
    def model_name(self) -> str:
        """The model's name, as it was given."""
        if self.backend:
            return self.backend.name
        engine = self._config.engine
        return self._config.runtime.model if engine.kind == "builtin" else engine.model or engine.base_url

    @property
    def is_ready(self) -> bool:
        """Whether a question finds everything loaded, open and at work."""
        backend = self.backend
        if self._pipeline is None or self._is_closed or backend is None:
            return False
        return backend.is_alive and backend.device_problem is None

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet, here or anywhere."""
        return not self._is_closed and not self.is_foreign

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that opened the room: threads did not come along."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raises EngineClosedError: after `close`, and in a fork of the process that opened the room."""
        if self.is_foreign:
            raise EngineClosedError("this Stillroom was opened in another process; open it after the fork")
        if self._is_closed:
            raise EngineClosedError("this Stillroom was closed; open it again")

    def pipeline(self) -> "Pipeline":
        """Loads the model, if nobody has.

        Raises:
            ModelError: it cannot be loaded.
            EngineClosedError: as of `check_open`.
        """
        self.check_open()  # before the lock: where a fork copied it held, nobody lets it go
        with self._loading:
            self.check_open()
            if self._pipeline is None:
                self.backend = self._open_backend()
                self._pipeline = self._pipeline_over(self.backend)
            return self._pipeline

    async def apipeline(self) -> "Pipeline":
        """`pipeline` for an event loop: needs no thread once it is loaded. Raises as `pipeline`."""
        self.check_open()
        if self._pipeline is not None:
            return self._pipeline
        return await asyncio.to_thread(self.pipeline)

    def for_tenant(self, salt: str) -> "Backend":
        """For another knowledge base: the same model and engine. KV has names of its own, by `salt`."""
        self.pipeline()
        assert self.backend is not None
        return self.backend.for_tenant(salt)

    def documents_changed(self) -> None:
        """Nothing is kept of chunks that are no more: not in memory, and not on disk of whatever model."""
        backend = self._loaded
        cared_for = None if backend is None else backend.documents_changed(self._kb)
        owner = NO_TENANT if self._guest is None else owner_of(self._guest.salt)
        forget_chunks(self.kv_folder, lambda one: bool(self._kb.existing_chunks({one})), owner, but=cared_for)

    @property
    def kv_folder(self) -> Path:
        """Where KV is kept on disk."""
        return self._kb.path / KV_FOLDER if self._guest is None else self._guest.host.kv_folder

    def close(self) -> bool:
        """Stop generating; False if that was done before, or is for the process to do that this one is a fork of."""
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
        """What may keep KV of the room's documents now. A guest's may do so from earlier, before the first question."""
        return self.backend or (None if self._guest is None else self._guest.loaded)

    def _open_backend(self) -> "Backend":
        guest = self._guest
        backend = self._own_backend() if guest is None else guest.host.for_tenant(guest.salt)
        if guest is not None:
            note_owner(self.kv_folder, owner_of(guest.salt), guest.note)
        backend.documents_changed(self._kb)  # another process may have changed them
        return backend

    def _own_backend(self) -> "Backend":
        config, swept = self._config, sweep_kv(self._kb.path)
        if config.engine.kind == "openai":
            from stillroom.backends.openai import connect

            return connect(config.engine, config.runtime.model, self._clock)
        from stillroom.backends.local import build_generator

        backend = build_generator(config, self._clock, self._kb.path)
        for salt, corpus in swept.tenants.items():
            backend.for_tenant(salt).documents_changed(corpus)
        return backend

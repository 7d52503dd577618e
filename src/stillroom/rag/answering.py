"""What answers the questions of a room: its backend and the pipeline in front of it, loaded with the first question."""

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.errors import EngineClosedError
from stillroom.retrieval.knowledge_base import KnowledgeBase

if TYPE_CHECKING:  # they import torch, which listing and removing documents can do without
    from stillroom.rag.backend import Backend
    from stillroom.rag.pipeline import Pipeline


class Answering:
    """Thread-safe."""

    def __init__(
        self,
        kb: KnowledgeBase,
        config: StillroomConfig,
        clock: Clock,
        host: "Callable[[], Backend] | None",
        pipeline_over: "Callable[[Backend], Pipeline]",
    ) -> None:
        """
        Args:
            host: gives the backend of a room that has none of its own.
            pipeline_over: makes the room's pipeline.
        """
        self._kb, self._config, self._clock, self._host, self._pipeline_over = kb, config, clock, host, pipeline_over
        self._loading = Lock()
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
        """Whether a question finds everything loaded and open."""
        return self._pipeline is not None and not self._is_closed

    def pipeline(self) -> "Pipeline":
        """Loads the model, if nobody has.

        Raises:
            ModelError: it cannot be loaded.
            EngineClosedError: after `close`.
        """
        with self._loading:
            if self._is_closed:
                raise EngineClosedError("this Stillroom was closed; open it again")
            if self._pipeline is None:
                self.backend = self._open_backend()
                self._pipeline = self._pipeline_over(self.backend)
            return self._pipeline

    def beside(self, salt: str) -> "Backend":
        """For another knowledge base: the same model and engine. KV has names of its own, by `salt`."""
        self.pipeline()
        assert self.backend is not None
        return self.backend.beside(salt)

    def close(self) -> bool:
        """Stop generating; False if that was done before."""
        with self._loading:
            if self._is_closed:
                return False
            self._is_closed = True
        if self.backend is not None:
            self.backend.close()
        return True

    def _open_backend(self) -> "Backend":
        backend = self._host() if self._host is not None else self._own_backend()
        backend.documents_changed(self._kb.existing_chunks)  # another process may have changed them
        return backend

    def _own_backend(self) -> "Backend":
        config = self._config
        if config.engine.kind == "openai":
            from stillroom.rag.remote import connect

            return connect(config.engine, config.runtime.model, self._clock)
        from stillroom.rag.generator import build_generator

        return build_generator(config, self._clock, self._kb.path)

"""The Qdrant collection of one knowledge base: on a server, or in Qdrant's embedded mode. Nothing but points here.

A point is a chunk: its id and its vector, no payload. One more point, without a vector and so never found, is the
collection's mark: of which corpus it is, and at which generation. Putting and dropping are idempotent, and a mark is
set after what it says is there.
"""

import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from filelock import Timeout
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, QdrantConfig
from stillroom.core.folder_lock import FolderLock
from stillroom.core.private_files import make_folder
from stillroom.errors import ConfigError, IndexUnavailableError, KnowledgeBaseBusyError

EMBEDDED = "embedded"

_MARK = "5371696c-6c72-4f6f-8d00-000000000000"
"""Point id; chunks have numbers, so none has this one."""

_VECTOR = "dense"
"""Vectors have a name, because only then may a point have none."""

_PAGE = 1000
"""Points asked for at a time, where all are."""

_WORDS_ALONE = "--mode sparse searches by words alone"


class QdrantCollection:
    """Thread-safe. Connects when it is first used; every method but `close` raises as `_reporting`."""

    def __init__(self, config: QdrantConfig, index: IndexConfig, folder: Path, corpus_id: str, dimension: int) -> None:
        """`folder`: of the embedded mode."""
        self.name = f"{config.prefix}-{corpus_id}"
        self._config = config
        self._index = index
        self._folder = folder
        self._corpus_id = corpus_id
        self._dimension = dimension
        self._is_embedded = config.url == EMBEDDED
        self._folder_lock = FolderLock(folder.with_suffix(".lock"))
        self._lock = RLock()
        self._client: Any = None

    @property
    def where(self) -> str:
        """For messages."""
        return f"the Qdrant collection {self.name} ({self._folder if self._is_embedded else self._config.url})"

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._folder_lock.release()

    # What there is

    def shown(self) -> tuple[int, str] | None:
        """Generation of the corpus that it shows, and the name of its commit; None where there is no such collection,
        or it is of another corpus."""
        with self._reporting() as client:
            try:
                found = client.retrieve(self.name, [_MARK], with_payload=True)
            except Exception as error:
                if _is_missing(error):
                    return None
                raise
        if not found or found[0].payload.get("corpus_id") != self._corpus_id:
            return None
        return int(found[0].payload["generation"]), str(found[0].payload.get("commit_id", ""))

    def count(self) -> int:
        """Chunks in it."""
        with self._reporting() as client:
            return int(client.count(self.name, exact=True).count) - 1

    def points(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Ids [n] and vectors [n, d] of all chunks in it, some at a time."""
        offset: Any = None
        while True:
            with self._reporting() as client:
                found, offset = client.scroll(self.name, limit=_PAGE, offset=offset, with_vectors=True)
            chunks = [point for point in found if isinstance(point.id, int)]
            if chunks:
                vectors = np.array([point.vector[_VECTOR] for point in chunks], dtype=np.float32)
                yield np.array([point.id for point in chunks], dtype=np.int64), vectors
            if offset is None:
                return

    def nearest(
        self,
        query: NDArray[np.float32],
        num: int,
        ef: int,
        hidden: Sequence[int],
        wanted: Sequence[int] | None = None,
    ) -> list[int]:
        """Ids of about the `num` nearest to a query [d], none of those that are hidden.

        Args:
            ef: candidates of the walk through the server's graph.
            wanted: only these; None is all.
        """
        from qdrant_client import models

        without = models.HasIdCondition(has_id=list(hidden)) if hidden else None
        among = models.HasIdCondition(has_id=list(wanted)) if wanted is not None else None
        conditions = models.Filter(must=among, must_not=without) if among or without else None
        # the embedded mode is always exact, and warns of parameters
        parameters = None if self._is_embedded else models.SearchParams(hnsw_ef=ef, exact=self._config.exact)
        with self._reporting() as client:
            found = client.query_points(
                self.name,
                query=query.tolist(),
                using=_VECTOR,
                limit=num,
                query_filter=conditions,
                search_params=parameters,
                with_payload=False,
            )
        return [int(point.id) for point in found.points]

    # Changing it; only under the write lock

    def delete(self) -> None:
        """The collection and what is in it; nothing where there is none."""
        with self._reporting() as client:
            if self._is_embedded:
                # the folder is this collection's alone; the embedded mode would leave its file open
                client.close()
                self._client = None
                shutil.rmtree(self._folder)
            elif client.collection_exists(self.name):
                client.delete_collection(self.name)

    def clear(self) -> None:
        """An empty collection at generation 0, in place of whatever there is."""
        from qdrant_client import models

        self.delete()
        with self._reporting() as client:
            client.create_collection(
                self.name,
                vectors_config={_VECTOR: models.VectorParams(size=self._dimension, distance=models.Distance.DOT)},
                hnsw_config=models.HnswConfigDiff(m=self._index.m, ef_construct=self._index.ef_construction),
            )
        self.mark(0)

    def put(self, ids: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Add vectors [n, d], or replace those of the same ids."""
        from qdrant_client import models

        points = models.Batch(ids=list(ids), vectors={_VECTOR: vectors.tolist()})
        with self._reporting() as client:
            client.upsert(self.name, points=points, wait=True)

    def drop(self, ids: Sequence[int]) -> None:
        """Remove what there is of these."""
        from qdrant_client import models

        with self._reporting() as client:
            client.delete(self.name, points_selector=models.PointIdsList(points=list(ids)), wait=True)

    def mark(self, generation: int, commit_id: str = "") -> None:
        """Say that the collection shows this generation of the corpus, which a commit of that name led to."""
        from qdrant_client import models

        payload = {"corpus_id": self._corpus_id, "generation": generation, "commit_id": commit_id}
        with self._reporting() as client:
            client.upsert(self.name, points=[models.PointStruct(id=_MARK, vector={}, payload=payload)], wait=True)

    # Inside

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[Any]:
        """The client, and its errors in our words.

        Raises:
            ConfigError: the package is not installed.
            KnowledgeBaseBusyError: another process has the embedded collection open.
            IndexUnavailableError: the server cannot be reached, or does not do what it is asked for.
        """
        with self._lock if self._is_embedded else contextlib.nullcontext():
            with self._lock:
                client = self._connected()
            try:
                yield client
            except Exception as error:
                raise self._explained(error) from error

    def _connected(self) -> Any:
        if self._client is None:
            try:
                from qdrant_client import QdrantClient
            except ImportError as error:
                raise ConfigError(
                    "index.kind = 'qdrant' needs the package qdrant-client: pip install 'stillroom[qdrant]'"
                ) from error
            if self._is_embedded:
                self._take_folder()
                make_folder(self._folder)
                self._client = QdrantClient(path=str(self._folder), force_disable_check_same_thread=True)
            else:
                self._client = QdrantClient(
                    url=self._config.url,
                    api_key=self._config.api_key or None,
                    timeout=math.ceil(self._config.timeout_s),
                    check_compatibility=False,  # it would ask the server in a thread of its own, and only warn
                )
        return self._client

    def _take_folder(self) -> None:
        """The embedded mode has its folder in memory, so a second process would not see what the first writes."""
        if self._folder_lock.is_held:  # by an earlier connection
            return
        self._folder_lock.release()
        try:
            self._folder_lock.acquire()
        except Timeout as error:
            raise KnowledgeBaseBusyError(
                f"{self._folder} is open elsewhere, and an embedded Qdrant collection serves one process at a time, "
                "for searching too; end the other, or run a Qdrant server and set qdrant.url to its address. "
                f"{_WORDS_ALONE}"
            ) from error

    def _explained(self, error: Exception) -> Exception:
        status = getattr(error, "status_code", None)
        if _is_missing(error):
            return IndexUnavailableError(
                f"{self.where} is gone; the next `stillroom add` makes it again from the documents already read. "
                f"{_WORDS_ALONE}"
            )
        if status in (401, 403):
            return IndexUnavailableError(
                f"{self._config.url} refuses the key (HTTP {status}); give it in STILLROOM_QDRANT__API_KEY"
            )
        text = str(getattr(error, "source", None) or error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        said = f"{self.where} cannot be used: {reason}"
        if self._config.api_key:
            said = said.replace(self._config.api_key, "...")  # a server may quote it
        advice = "to the disk and its free space" if self._is_embedded else "that the server runs, and qdrant.url"
        return IndexUnavailableError(f"{said}; see {advice}. {_WORDS_ALONE}")


def _is_missing(error: Exception) -> bool:
    """Whether it says that there is no such collection, as a server or as the embedded mode does."""
    return getattr(error, "status_code", None) == 404 or (isinstance(error, ValueError) and "not found" in str(error))

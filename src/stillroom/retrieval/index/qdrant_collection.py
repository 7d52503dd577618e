"""Client of the Qdrant collection of one knowledge base, on a server or in Qdrant's embedded mode.

A point is a chunk: its id and vector, no payload. One more point without a vector, which no search finds, is the mark:
corpus and generation of the collection. `put` and `drop` are idempotent, and the mark is set after the points that it
covers.
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
"""Id of the mark; chunk ids are integers."""

_VECTOR = "dense"
"""Name of the vectors: with named vectors, a point may have none."""

_PAGE = 1000
"""Points per request when reading all."""

_SPARSE_HINT = "--mode sparse searches by words alone"


class QdrantCollection:
    """Thread-safe. Connects at first use; every method except `close` raises as `_translating_errors`."""

    def __init__(self, config: QdrantConfig, index: IndexConfig, folder: Path, corpus_id: str, dimension: int) -> None:
        """`folder`: folder of the embedded mode."""
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
        """Name and place, for messages."""
        return f"the Qdrant collection {self.name} ({self._folder if self._is_embedded else self._config.url})"

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._folder_lock.release()

    # Reading

    def read_mark(self) -> tuple[int, str] | None:
        """Return generation and commit id of the mark; None if the collection is missing or of another corpus."""
        with self._translating_errors() as client:
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
        """Return the number of chunks."""
        with self._translating_errors() as client:
            return int(client.count(self.name, exact=True).count) - 1

    def points(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield ids [n] and vectors [n, d] of all chunks in batches."""
        offset: Any = None
        while True:
            with self._translating_errors() as client:
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
        """Return ids of about the `num` nearest to a query [d].

        Args:
            ef: `hnsw_ef` of the server.
            hidden: ids to leave out.
            wanted: the only ids to return; None allows all.
        """
        from qdrant_client import models

        without = models.HasIdCondition(has_id=list(hidden)) if hidden else None
        among = models.HasIdCondition(has_id=list(wanted)) if wanted is not None else None
        conditions = models.Filter(must=among, must_not=without) if among or without else None
        # the embedded mode is always exact, and warns of parameters
        parameters = None if self._is_embedded else models.SearchParams(hnsw_ef=ef, exact=self._config.exact)
        with self._translating_errors() as client:
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

    # Changes; need the write lock

    def delete(self) -> None:
        """Delete the collection if it exists."""
        with self._translating_errors() as client:
            if self._is_embedded:
                # remove the whole folder: the embedded mode would leave its file open
                client.close()
                self._client = None
                shutil.rmtree(self._folder)
            elif client.collection_exists(self.name):
                client.delete_collection(self.name)

    def clear(self) -> None:
        """Replace the collection by an empty one at generation 0."""
        from qdrant_client import models

        self.delete()
        with self._translating_errors() as client:
            client.create_collection(
                self.name,
                vectors_config={_VECTOR: models.VectorParams(size=self._dimension, distance=models.Distance.DOT)},
                hnsw_config=models.HnswConfigDiff(m=self._index.m, ef_construct=self._index.ef_construction),
            )
        self.mark(0)

    def put(self, ids: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Add or replace vectors [n, d] of ids [n]."""
        from qdrant_client import models

        points = models.Batch(ids=list(ids), vectors={_VECTOR: vectors.tolist()})
        with self._translating_errors() as client:
            client.upsert(self.name, points=points, wait=True)

    def drop(self, ids: Sequence[int]) -> None:
        """Remove those of these ids that exist."""
        from qdrant_client import models

        with self._translating_errors() as client:
            client.delete(self.name, points_selector=models.PointIdsList(points=list(ids)), wait=True)

    def mark(self, generation: int, commit_id: str = "") -> None:
        """Set the mark: the collection shows this generation, made by the commit `commit_id`."""
        from qdrant_client import models

        payload = {"corpus_id": self._corpus_id, "generation": generation, "commit_id": commit_id}
        with self._translating_errors() as client:
            client.upsert(self.name, points=[models.PointStruct(id=_MARK, vector={}, payload=payload)], wait=True)

    # Inside

    @contextlib.contextmanager
    def _translating_errors(self) -> Iterator[Any]:
        """Yield the client and translate its errors.

        Raises:
            ConfigError: the package is not installed.
            KnowledgeBaseBusyError: another process has the embedded collection open.
            IndexUnavailableError: the server cannot be reached, or reports an error.
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
                    check_compatibility=False,  # the check runs in a thread and only warns
                )
        return self._client

    def _take_folder(self) -> None:
        """Lock the folder: the embedded mode keeps it in memory, so a second process would not see changes."""
        if self._folder_lock.is_held:  # by an earlier connection
            return
        self._folder_lock.release()
        try:
            self._folder_lock.acquire()
        except Timeout as error:
            raise KnowledgeBaseBusyError(
                f"{self._folder} is open in another process, and an embedded Qdrant collection serves one process at a "
                "time, for searching too; end the other process, or run a Qdrant server and set qdrant.url to its "
                f"address. {_SPARSE_HINT}"
            ) from error

    def _explained(self, error: Exception) -> Exception:
        status = getattr(error, "status_code", None)
        if _is_missing(error):
            return IndexUnavailableError(
                f"{self.where} does not exist; the next `stillroom add` creates it again from the stored documents. "
                f"{_SPARSE_HINT}"
            )
        if status in (401, 403):
            return IndexUnavailableError(
                f"{self._config.url} refuses the key (HTTP {status}); give it in STILLROOM_QDRANT__API_KEY"
            )
        text = str(getattr(error, "source", None) or error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        said = f"{self.where} cannot be used: {reason}"
        if self._config.api_key:
            said = said.replace(self._config.api_key, "...")  # the server may repeat it
        advice = "the disk and its free space" if self._is_embedded else "that the server runs, and qdrant.url"
        return IndexUnavailableError(f"{said}; check {advice}. {_SPARSE_HINT}")


def _is_missing(error: Exception) -> bool:
    """Whether an error of the server or the embedded mode means that the collection does not exist."""
    return getattr(error, "status_code", None) == 404 or (isinstance(error, ValueError) and "not found" in str(error))

"""Documents with random vectors, and settings of a small dense index for them."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.core.document import Chunk
from stillroom.core.ids import DocumentId, chunk_id_of
from stillroom.retrieval.store.sql_rows import StoredDocument

D = 16
RAM = IndexConfig(kind="ivf_pq", nbits=1, num_subquantizers=4, nprobe=2, refine=3, seed=3, nlist=8)
"""Trains on 78 vectors and again at 312."""
TIERED = dataclasses.replace(RAM, hot_bytes=1000)


def run_now(job: Callable[[], None]) -> None:
    job()


def vectors(count: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    found = np.random.default_rng(99).standard_normal((6, D))[rng.integers(6, size=count)]
    found = found + 0.5 * rng.standard_normal((count, D))
    unit: NDArray[np.float32] = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)
    return unit


def document(name: str, count: int, seed: int) -> StoredDocument:
    document_id = DocumentId(name)
    chunks = tuple(
        Chunk(
            chunk_id=chunk_id_of(document_id, ordinal, f"{name} {ordinal}"),
            document_id=document_id,
            ordinal=ordinal,
            text=f"{name} {ordinal}",
            title=name,
            heading_path=(),
            num_tokens=2,
            start_line=ordinal,
            end_line=ordinal,
        )
        for ordinal in range(count)
    )
    return StoredDocument(document_id, name, None, name, "hash", 10, 5.0, chunks, vectors(count, seed))

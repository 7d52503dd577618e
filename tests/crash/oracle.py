"""Reads a knowledge base from its files without Stillroom's code."""

import json
import sqlite3
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss as _faiss
import numpy as np
import tantivy

faiss: Any = _faiss

Documents = dict[str, Any]
"""All columns of each document in SQLite except the time of adding, by document id."""


def documents(kb: Path) -> Documents:
    """Read the corpus; empty if there is none yet."""
    if not (kb / "corpus.sqlite3").exists():
        return {}
    database = sqlite3.connect(kb / "corpus.sqlite3")
    try:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'documents'").fetchone():
            return {}
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return _documents(database)
    finally:
        database.close()


def _documents(database: sqlite3.Connection) -> Documents:
    found: Documents = {}
    for document_id, title, content_hash, num_chunks in database.execute(
        "SELECT document_id, title, content_hash, num_chunks FROM documents"
    ):
        found[document_id] = [title, content_hash, num_chunks]
    chunks: dict[str, list[Any]] = {document_id: [] for document_id in found}
    for document_id, *rest in database.execute(
        """SELECT c.document_id, c.ordinal, c.chunk_id, c.text, c.start_line, v.vector FROM chunks c
            LEFT JOIN vectors v USING (chunk_id) ORDER BY c.document_id, c.ordinal"""
    ):
        chunks[document_id].append(rest)  # a KeyError is a chunk without its document
    lone = database.execute("SELECT count(*) FROM vectors WHERE chunk_id NOT IN (SELECT chunk_id FROM chunks)")
    assert lone.fetchone() == (0,)
    return {document_id: (*about, chunks[document_id]) for document_id, about in found.items()}


def vectors(found: Documents) -> dict[int, bytes]:
    """Return the embedding of each chunk."""
    return {chunk_id: vector for *_, chunks in found.values() for _, chunk_id, _, _, vector in chunks}


def set_folder(kb: Path) -> Path:
    """Return the folder of the dense index: that of the active vectors."""
    database = sqlite3.connect(kb / "corpus.sqlite3")
    try:
        active = database.execute("SELECT number FROM vector_sets WHERE role = 'active'").fetchone()
    finally:
        database.close()
    return kb / f"vectors-{active[0]}" if active and active[0] else kb


@dataclass(frozen=True)
class Dense:
    ids: set[int]
    vectors: dict[int, bytes]
    """Empty if the index keeps none."""


def dense(kb: Path) -> Dense:
    """Read the dense index of any kind."""
    kb = set_folder(kb)
    if (kb / "qdrant").exists():
        return _collection(kb / "qdrant")
    if (kb / "dense.lists").exists():
        return _lists(kb / "dense.lists")
    with np.load(kb / "dense.npz") as arrays:
        if "hnsw" in arrays:
            return _graph(arrays)
        exact = faiss.deserialize_index(arrays["flat"])
        found = _paired(faiss.vector_to_array(exact.id_map), exact.index.reconstruct_n(0, exact.ntotal))
        if len(arrays["ivf_pq"]) if "ivf_pq" in arrays else 0:
            index = faiss.deserialize_index(arrays["ivf_pq"])  # the name keeps it alive
            lists = index.invlists
            sizes = [lists.list_size(number) for number in range(lists.nlist)]
            held = [faiss.rev_swig_ptr(lists.get_ids(n), size).tolist() for n, size in enumerate(sizes) if size]
            listed = [chunk_id for one in held for chunk_id in one]
            assert len(listed) == len(set(listed)) and set(listed) == found.ids
        return found


def _paired(ids: Any, rows: Any) -> Dense:
    assert len(set(ids.tolist())) == len(ids) == len(rows)
    return Dense(
        set(ids.tolist()), {int(one): row.astype(np.float32).tobytes() for one, row in zip(ids, rows, strict=True)}
    )


def _graph(arrays: Any) -> Dense:
    graph, dead = faiss.deserialize_index(arrays["hnsw"]), set(arrays["dead"].tolist())
    alive = [at for at in range(graph.ntotal) if at not in dead]
    return _paired(arrays["ids"][alive], np.array([graph.reconstruct(at) for at in alive]).reshape(len(alive), -1))


def _lists(path: Path) -> Dense:
    content = path.read_bytes()
    size, _, magic = struct.unpack("<QI4s", content[-16:])
    assert magic == b"SRL1"
    parts = json.loads(content[-16 - size : -16])["parts"]

    def part(name: str, dtype: Any) -> Any:
        return np.frombuffer(content, dtype, parts[name][1] // np.dtype(dtype).itemsize, parts[name][0])

    ids = part("ids", np.int64)
    assert part("sizes", np.int64).sum() == len(ids)
    return _paired(ids, part("vectors", np.float32).reshape(len(ids), -1))


def _collection(folder: Path) -> Dense:
    from qdrant_client import QdrantClient

    client = QdrantClient(path=str(folder))
    try:
        (name,) = [one.name for one in client.get_collections().collections]
        points = client.scroll(name, limit=100_000, with_vectors=True)[0]
        mine = [point for point in points if isinstance(point.id, int)]
        return _paired(
            np.array([point.id for point in mine]),
            np.array([point.vector["dense"] for point in mine]),  # type: ignore[index,call-overload]
        )
    finally:
        client.close()


def sparse(kb: Path) -> set[int]:
    """Return the chunks in the postings."""
    index = tantivy.Index.open(str(kb / "sparse"))
    searcher = index.searcher()
    hits = searcher.search(tantivy.Query.all_query(), max(1, searcher.num_docs)).hits
    ids = searcher.fast_field_values("chunk_id", [address for _, address in hits])
    assert len(ids) == len(set(ids))
    return {int(one) for one in ids}  # type: ignore[arg-type]


def check_projections(kb: Path) -> None:
    """Check that vectors and postings hold exactly the chunks of SQLite."""
    truth = vectors(documents(kb))
    if not truth and not (kb / "sparse").exists():
        return  # nothing was ever added, so there is nothing to show
    assert sparse(kb) == set(truth)
    found = dense(kb)
    assert found.ids == set(truth)
    for chunk_id, vector in found.vectors.items():
        np.testing.assert_allclose(
            np.frombuffer(vector, np.float32), np.frombuffer(truth[chunk_id], np.float32), atol=1e-6
        )

"""The vector set of a knowledge base in PostgreSQL, if its embedder was ever changed: `vectors` of its manifest."""

import dataclasses
import json

from stillroom.retrieval.store.vector_sets import VectorSetRecord


def published(manifest: str) -> VectorSetRecord | None:
    """Return the active set; None if it is set 0, whose embedder is the manifest's."""
    found = json.loads(manifest).get("vectors")
    return None if found is None else VectorSetRecord(**found)


def with_published(manifest: str, record: VectorSetRecord) -> str:
    """Return the manifest with another active set."""
    return json.dumps({**json.loads(manifest), "vectors": dataclasses.asdict(record)}, indent=2) + "\n"

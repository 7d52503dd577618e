"""The parts of a knowledge base that are read when it is opened."""

from dataclasses import dataclass
from pathlib import Path

from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class OpenedFolder:
    path: Path
    """Absolute."""
    manifest: Manifest
    corpus: Corpus

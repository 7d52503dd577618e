"""Opens a knowledge base of a data set in BEIR layout, cached between runs."""

import hashlib
from pathlib import Path

from stillroom.config.settings import StillroomConfig
from stillroom.errors import DocumentError
from stillroom.retrieval.knowledge_base import KnowledgeBase


def open_knowledge_base(dataset: Path, work_dir: Path, config: StillroomConfig) -> KnowledgeBase:
    """Open the knowledge base of the data set's corpus, and build it if missing.

    Its folder name is a hash of the content and the settings, so later runs embed nothing.

    Raises:
        DocumentError: a line of the corpus cannot be read.
    """
    corpus = dataset / "corpus.jsonl"
    kb = KnowledgeBase.open(work_dir / f"{dataset.name}-{_key(corpus, config)}", config, create=True)
    try:
        report = kb.add([corpus])
        if report.failures:
            raise DocumentError(report.failures[0][1])
    except BaseException:
        kb.close()
        raise
    return kb


def _key(corpus: Path, config: StillroomConfig) -> str:
    """Return a hash of the corpus' path and content, and of the settings that a knowledge base fixes."""
    fixed = (config.chunker, config.embedder.model, config.index)
    with corpus.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{corpus.absolute()}\0{content}\0{fixed!r}".encode()).hexdigest()[:12]

"""A knowledge base of a data set in BEIR layout, kept between runs."""

import hashlib
from pathlib import Path

from stillroom.config.settings import StillroomConfig
from stillroom.errors import DocumentError
from stillroom.retrieval.knowledge_base import KnowledgeBase


def open_knowledge_base(dataset: Path, work_dir: Path, config: StillroomConfig) -> KnowledgeBase:
    """A knowledge base of the set's corpus. Its folder depends on content and settings: the second time nothing is
    embedded.

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
    """What a knowledge base depends on: the corpus' place and content, and the settings that are fixed in it."""
    fixed = (config.chunker, config.embedder.model, config.index)
    with corpus.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{corpus.absolute()}\0{content}\0{fixed!r}".encode()).hexdigest()[:12]

"""Do uploaded files and what was indexed of them agree? Compared by their paths and bytes; nothing is changed.

No repair: whether the file or the index is right is for whoever uploaded it to say, and what was said of a file that
was never indexed (`metadata`) is not known here.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.errors import DocumentError
from stillroom.retrieval.intake.reading import source_of
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.uploaded_files import uploaded_files
from stillroom.retrieval.verify.report import Finding, finding


def check_uploads(folder: Path, corpus: Corpus, config: DocumentsConfig) -> Iterator[Finding]:
    """Of the knowledge base in `folder`. A file that is gone is no finding: its text is in SQLite."""
    sources, paths = corpus.sources(), corpus.paths()
    unknown, changed = [], []
    for path in uploaded_files(Path(os.path.abspath(folder))):
        name = corpus.names.name_of(str(path))
        source = sources.get(name)
        if source is None or (not source.content_hash and name not in paths):
            unknown.append(path)
        elif source.content_hash and _hash(path, config) != source.content_hash:
            changed.append(path)  # without a hash, some of its records were removed
    if unknown:
        yield finding(
            "uploads",
            "uploaded files that nothing was indexed of",
            "searches do not find them: an upload or a removal was killed. A server indexes those of uploads when it "
            "starts. Upload them again, index them as they are (stillroom add FILE), or delete them",
            unknown,
            is_repairable=False,
        )
    if changed:
        yield finding(
            "uploads",
            "uploaded files that are not as they were indexed",
            "searches find what they said before. Upload them again, or index them as they are: stillroom add FILE",
            changed,
            is_repairable=False,
        )


def _hash(path: Path, config: DocumentsConfig) -> str:
    try:
        return source_of(path, None, config).content_hash
    except DocumentError:
        return ""

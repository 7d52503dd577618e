"""Tests with the shared real documents, if present."""

from pathlib import Path

import pytest

from stillroom.core.ids import DocumentId
from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.intake.discovery import discover
from stillroom.retrieval.loaders.load_file import load
from tests.retrieval.conftest import SHARED, OpenKb

PEPS = SHARED / "data" / "docs-peps" / "peps"
RUST_BOOK = SHARED / "data" / "docs-rustbook"

pytestmark = pytest.mark.shared


@pytest.mark.slow
@pytest.mark.parametrize("folder", [PEPS, RUST_BOOK])
def test_every_shared_document_is_read_and_cut(folder: Path, embedder: Embedder) -> None:
    if not folder.is_dir():
        pytest.skip("needs the shared data")
    chunker = Chunker(embedder.tokenizer, 200, embedder.max_seq_length)
    found = discover([folder])
    assert len(found.files) > 100
    for path in found.files:
        for document in load(path):
            lines = path.read_text().count("\n") + 1
            chunks = chunker.chunks(document)
            assert chunks and document.title and document.document_id == DocumentId(str(path))
            for chunk in chunks:
                assert 0 < chunk.num_tokens <= 200 and 1 <= chunk.start_line <= chunk.end_line <= lines


@pytest.mark.slow
def test_style_guide_is_found_by_its_purpose(open_kb: OpenKb) -> None:
    if not PEPS.is_dir():
        pytest.skip("needs the shared data")
    kb = open_kb()
    kb.add([PEPS / f"pep-{number:04}.rst" for number in (7, 8, 20, 257)])
    best = kb.search("style guide for Python code").results[0].chunk
    assert Path(best.document_id).name == "pep-0008.rst"
    assert best.title == "PEP 8: Style Guide for Python Code"

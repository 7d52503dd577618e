"""Fixtures: the real embedder, loaded once, small folders of documents, and knowledge bases."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from stillroom.config.settings import EmbedderConfig, SearchMode, StillroomConfig
from stillroom.core.document import SearchResult
from stillroom.retrieval import knowledge_base
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.knowledge_base import KnowledgeBase

SHARED = Path(__file__).resolve().parents[3] / "shared"

KEYS = "# Key rotation\n\nRotate the keys of the vault every thirty days.\n"
CATS = "# Cats\n\nCats sleep most of the day, and hunt at night.\n"
BREAD = "# Bread\n\nBake the bread at two hundred degrees for forty minutes.\n"
UNSHARED = StillroomConfig(embedder=EmbedderConfig(batch_size=8))
"""Makes a knowledge base with its own embedder, not yet loaded."""

MODES: tuple[SearchMode, ...] = ("hybrid", "dense", "sparse")

MakeFile = Callable[[str, str], Path]
OpenKb = Callable[..., KnowledgeBase]


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    """The packaged model."""
    return Embedder(EmbedderConfig())


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """An empty folder for documents."""
    folder = tmp_path / "docs"
    folder.mkdir()
    return folder


@pytest.fixture
def make_file(docs: Path) -> MakeFile:
    """Writes a file under `docs` and returns its path."""

    def make(name: str, text: str) -> Path:
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return make


@pytest.fixture
def open_kb(tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenKb]:
    """Opens knowledge bases below `tmp_path` that share the loaded model; closes them at the end."""
    monkeypatch.setattr(knowledge_base, "Embedder", lambda config, _=None: _shared(config, embedder))
    opened: list[KnowledgeBase] = []

    def open_one(config: StillroomConfig | None = None, *, name: str = "kb", create: bool = True) -> KnowledgeBase:
        kb = KnowledgeBase.open(tmp_path / name, config or StillroomConfig(), create=create)
        opened.append(kb)
        return kb

    yield open_one
    for kb in opened:
        kb.close()


@pytest.fixture
def refuse_to_embed(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After the returned function is called, embedding a document fails the test."""

    def refuse(texts: Sequence[str], *_: object) -> NoReturn:
        raise AssertionError(f"embedded again: {texts}")

    return lambda: monkeypatch.setattr(embedder, "embed_documents", refuse)


def _shared(config: EmbedderConfig, embedder: Embedder) -> Embedder:
    return embedder if config == EmbedderConfig() else Embedder(config)


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """Drop root's capability to access all files, in this thread; no effect for other users."""
    if os.geteuid():
        yield
        return
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of 32 capabilities each, twice
    assert libc.capget(header, before) == 0
    without = (ctypes.c_uint32 * 6)(*before)
    without[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


class Spy:
    """Counts the texts that are embedded."""

    def __init__(self, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        real = embedder.embed_documents

        def embed(texts: Sequence[str], on_batch: object = None) -> object:
            self.texts += texts
            return real(texts, on_batch)  # type: ignore[arg-type]

        monkeypatch.setattr(embedder, "embed_documents", embed)


@pytest.fixture
def spy(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(embedder, monkeypatch)


@pytest.fixture
def three(make_file: MakeFile, docs: Path) -> Path:
    """A folder with three documents."""
    make_file("keys.md", KEYS)
    make_file("cats.md", CATS)
    make_file("sub/bread.md", BREAD)
    return docs


def first_name(result: SearchResult) -> str:
    return Path(result.results[0].chunk.document_id).name


def names(result: SearchResult) -> set[str]:
    return {Path(scored.chunk.document_id).name for scored in result.results}

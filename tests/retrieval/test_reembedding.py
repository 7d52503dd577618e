"""Changing the embedder: searches and edits go on, an interrupted change continues, and the result is that of a new
knowledge base."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.config.settings import EmbedderConfig, IndexConfig, QdrantConfig, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.errors import (
    ChangeCancelledError,
    ConfigError,
    KnowledgeBaseBusyError,
)
from stillroom.retrieval import knowledge_base
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.reembedding import ReembedProgress
from stillroom.retrieval.store import folder
from tests.crash import oracle
from tests.crash.worker import INDEXES, OTHER_MODEL, D, SmallEmbedder

KINDS = ("flat", "hnsw", "ivf_pq", "tiered", "qdrant")
WORDS = ("vault", "key", "thirty", "days", "cat", "sleep", "bread", "bake", "degrees", "oven", "door", "stone", "river")


@pytest.fixture(autouse=True)
def small_embedders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    monkeypatch.setattr(folder, "_OPENING_TIMEOUT_S", 0.0)  # one thread tries to write during the switch


def config(kind: str = "flat", model: str = EmbedderConfig().model) -> StillroomConfig:
    return StillroomConfig(
        index=INDEXES[kind], qdrant=QdrantConfig(url="embedded"), embedder=EmbedderConfig(model=model)
    )


def write(docs: Path, number: int, version: int = 0) -> Path:
    docs.mkdir(exist_ok=True)
    path = docs / f"file{number:02}.md"
    parts = [f"The {WORDS[(number * 3 + part + version) % len(WORDS)]} number {number}." for part in range(3)]
    path.write_text("# About\n\n" + "".join(f"## Part {part}\n\n{text}\n\n" for part, text in enumerate(parts)))
    return path


def contents(kb: Path) -> oracle.Documents:
    """Return texts and vectors, and check that the indexes hold them."""
    oracle.check_projections(kb)
    return oracle.documents(kb)


def fresh(tmp_path: Path, docs: Path, settings: StillroomConfig) -> oracle.Documents:
    """Return the content of a knowledge base that was made with these settings."""
    place = tmp_path / "fresh"
    shutil.rmtree(place, ignore_errors=True)
    with KnowledgeBase.open(place, settings, create=True) as kb:
        kb.add([docs])
    return contents(place)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for number in range(12):
        write(tmp_path / "docs", number)
    return tmp_path / "docs"


@pytest.fixture
def made(tmp_path: Path, docs: Path) -> Callable[[str], KnowledgeBase]:
    def make(kind: str = "flat") -> KnowledgeBase:
        kb = KnowledgeBase.open(tmp_path / "kb", config(kind), create=True)
        kb.add([docs])
        return kb

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_result_is_that_of_a_new_knowledge_base(
    made: Callable[[str], KnowledgeBase], kind: str, tmp_path: Path, docs: Path
) -> None:
    seen: list[ReembedProgress] = []
    with made(kind) as kb:
        before = kb.search("vault", mode="dense")
        report = kb.reembed(OTHER_MODEL, progress=seen.append, num_together=10)
        assert (report.is_changed, report.num_chunks, report.num_embedded) == (True, 36, 36)
        assert (report.model, report.dimension, kb.model) == (OTHER_MODEL, D + 8, OTHER_MODEL)
        assert (seen[0].num_done, seen[-1].num_done) == (0, 36)
        after = kb.search("vault", mode="dense")
        assert after.results[0].score != before.results[0].score
        if kind != "qdrant":
            kb.digest()
    assert contents(tmp_path / "kb") == fresh(tmp_path, docs, config(kind, OTHER_MODEL))
    left = {path.name for path in (tmp_path / "kb").iterdir()}
    assert not left & {"dense.npz", "dense.lists", "qdrant"} and "vectors-1" in left
    with sqlite3.connect(tmp_path / "kb" / "corpus.sqlite3") as database:
        tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    database.close()
    assert not tables & {"next_vectors", "old_vectors"}


class TenAtOnce(SmallEmbedder):
    """Reports each batch of ten texts, as a real embedder does."""

    def _embed(self, texts: Sequence[str], kind: str, on_batch: Callable[[int], None] | None) -> NDArray[np.float32]:
        for start in range(0, len(texts), 10):
            if on_batch is not None:
                on_batch(len(texts[start : start + 10]))
        return super()._embed(texts, kind, None)


def test_progress_is_reported_within_a_commit(
    made: Callable[[], KnowledgeBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knowledge_base, "Embedder", TenAtOnce)
    seen: list[ReembedProgress] = []
    with made() as kb:
        kb.reembed(OTHER_MODEL, progress=seen.append)
    assert [one.num_done for one in seen][:7] == [0, 10, 20, 30, 32, 32, 36], "the first commit has 32 chunks"


def test_digest_is_that_of_a_new_knowledge_base(made: Callable[[], KnowledgeBase], tmp_path: Path, docs: Path) -> None:
    with made() as kb, KnowledgeBase.open(tmp_path / "fresh", config(model=OTHER_MODEL), create=True) as other:
        other.add([docs])
        kb.reembed(OTHER_MODEL)
        assert kb.digest() == other.digest()


class _Interruption(Exception):
    """Stands for Ctrl-C."""


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edits=st.lists(st.tuples(st.sampled_from(["add", "edit", "remove", "interrupt"]), st.integers(0, 7)), max_size=12),
    num_together=st.integers(1, 5),
)
def test_any_interleaving_of_edits_ends_as_a_new_knowledge_base(
    edits: list[tuple[str, int]], num_together: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("edits")
    docs, rest = place / "docs", list(edits)
    for number in range(4):
        write(docs, number)
    with (
        KnowledgeBase.open(place / "kb", config(), create=True) as kb,
        KnowledgeBase.open(place / "kb", config(), create=True) as other,
    ):
        kb.add([docs])

        def change(done: ReembedProgress) -> None:
            if not rest:
                return
            what, number = rest.pop(0)
            if what == "interrupt":
                raise _Interruption
            if what == "remove":
                (docs / f"file{number:02}.md").unlink(missing_ok=True)
            else:
                write(docs, number, version=len(rest) if what == "edit" else 0)
            with contextlib.suppress(KnowledgeBaseBusyError):  # at the switch; the last `add` does it
                other.add([docs])

        while True:
            try:
                kb.reembed(OTHER_MODEL, progress=change, num_together=num_together)
                break
            except _Interruption:
                pass
        other.add([docs])
        found = other.search("vault", mode="dense", top_k=50).results
        assert [one.chunk.chunk_id for one in found] == [
            one.chunk.chunk_id for one in kb.search("vault", mode="dense", top_k=50).results
        ]
    assert contents(place / "kb") == fresh(place, docs, config(model=OTHER_MODEL))


def test_searches_use_the_old_vectors_until_the_switch(made: Callable[[], KnowledgeBase], tmp_path: Path) -> None:
    with made() as kb, KnowledgeBase.open(tmp_path / "kb", config()) as other:
        before = [one.search("vault key", mode="dense").results for one in (kb, other)]
        assert before[0] == before[1]

        def search(done: ReembedProgress) -> None:
            assert [one.search("vault key", mode="dense").results for one in (kb, other)] == before

        generation = other.generation
        staged = other.search_staged("vault key", num_stages=4)
        first = next(staged)
        kb.reembed(OTHER_MODEL, progress=search, num_together=10)
        *_, last = staged
        after = kb.search("vault key")
        assert other.generation != generation, "results of the old model leave the query cache"
        assert last.results == after.results, "a search that began before the switch ends with the new model"
        assert first.results != after.results
        assert [one.search("vault key", mode="dense").results for one in (kb, other)] != before
        assert other.embed(["vault"]).shape == (1, D + 8)


def test_documents_are_added_with_the_new_model_after_the_switch(
    made: Callable[[], KnowledgeBase], tmp_path: Path, docs: Path
) -> None:
    with made() as kb, KnowledgeBase.open(tmp_path / "kb", config()) as other:
        kb.reembed(OTHER_MODEL)
        write(docs, 30)
        write(docs, 3, version=1)
        other.add([docs])
    assert contents(tmp_path / "kb") == fresh(tmp_path, docs, config(model=OTHER_MODEL))


def test_model_can_be_changed_repeatedly_and_back(
    made: Callable[[], KnowledgeBase], tmp_path: Path, docs: Path
) -> None:
    with made() as kb:
        for model in (OTHER_MODEL, "third", EmbedderConfig().model):
            assert kb.reembed(model).is_changed
            assert contents(tmp_path / "kb") == fresh(tmp_path, docs, config(model=model))
        assert not kb.reembed(EmbedderConfig().model).is_changed
    assert [path.name for path in (tmp_path / "kb").glob("vectors-*")] == ["vectors-3"]


def cancelled_after(num: int) -> tuple[Cancellation, Callable[[ReembedProgress], None]]:
    stop = Cancellation()
    return stop, lambda done: stop.cancel() if done.num_done >= num else None


def test_interrupted_change_continues_and_another_model_replaces_it(
    made: Callable[[], KnowledgeBase], tmp_path: Path, docs: Path
) -> None:
    with made() as kb:
        stop, progress = cancelled_after(20)
        with pytest.raises(ChangeCancelledError):
            kb.reembed(OTHER_MODEL, progress=progress, stop=stop, num_together=10)
        assert kb.model == EmbedderConfig().model
        assert kb.reembed(OTHER_MODEL, num_together=10).num_embedded == 16, "20 were kept"
        stop, progress = cancelled_after(20)
        with pytest.raises(ChangeCancelledError):
            kb.reembed("third", progress=progress, stop=stop, num_together=10)
        assert kb.reembed("fourth").num_embedded == 36
        stop, progress = cancelled_after(20)
        with pytest.raises(ChangeCancelledError):
            kb.reembed("fifth", progress=progress, stop=stop, num_together=10)
        assert not kb.reembed("fourth").is_changed, "the present model ends the change"
    assert contents(tmp_path / "kb") == fresh(tmp_path, docs, config(model="fourth"))
    assert [path.name for path in (tmp_path / "kb").glob("vectors-*")] == ["vectors-2"]


def test_only_one_process_changes_the_model_and_it_waits_for_writers(
    made: Callable[[], KnowledgeBase], tmp_path: Path
) -> None:
    with made() as kb, KnowledgeBase.open(tmp_path / "kb", config()) as other:
        refused: list[str] = []

        def again(done: ReembedProgress) -> None:
            with pytest.raises(KnowledgeBaseBusyError, match="embedding the documents"):
                other.reembed(OTHER_MODEL)
            refused.append("yes")

        class Waiting(Cancellation):
            def wait(self, seconds: float) -> None:
                writing.close()

        writing = contextlib.ExitStack()
        writing.enter_context(other.writing("add"))
        assert kb.reembed(OTHER_MODEL, progress=again, stop=Waiting()).is_changed and refused


def test_interruptions_around_the_switch_are_completed_by_the_next_writer(
    made: Callable[[], KnowledgeBase], tmp_path: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made() as kb:
        with monkeypatch.context() as patched:
            patched.setattr("stillroom.retrieval.reembedding.delete_old_vectors", lambda *_: None)
            kb.reembed(OTHER_MODEL)
        assert (tmp_path / "kb" / "dense.npz").exists()
        assert kb.verify().is_clean
        kb.add([write(docs, 5, version=3)])
        assert not (tmp_path / "kb" / "dense.npz").exists()
        assert kb.verify().is_clean
    assert contents(tmp_path / "kb") == fresh(tmp_path, docs, config(model=OTHER_MODEL))


def test_backup_of_before_the_change_is_restored(made: Callable[[], KnowledgeBase], tmp_path: Path) -> None:
    with made() as kb:
        with sqlite3.connect(tmp_path / "kb" / "corpus.sqlite3") as database:
            database.execute(f"VACUUM INTO '{tmp_path / 'copy'}'")
        database.close()
        before = contents(tmp_path / "kb")
        kb.reembed(OTHER_MODEL)
    for name in ("corpus.sqlite3-wal", "corpus.sqlite3-shm"):
        (tmp_path / "kb" / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy", tmp_path / "kb" / "corpus.sqlite3")
    with KnowledgeBase.open(tmp_path / "kb", config()) as kb:
        kb.search("vault")
        assert contents(tmp_path / "kb") == before
        kb.reembed("third")  # set 1 again, of another model
        found = kb.search("vault", mode="dense").results
    (tmp_path / "kb" / "vectors-1" / "dense.npz").unlink()
    with KnowledgeBase.open(tmp_path / "kb", config()) as kb:
        assert kb.search("vault", mode="dense").results == found


def test_configured_model_is_used_after_the_change_only(
    made: Callable[[], KnowledgeBase], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made().close()
    with KnowledgeBase.open(tmp_path / "kb", config(model=OTHER_MODEL)) as kb:
        assert kb.model == EmbedderConfig().model and kb.search("vault").results
        assert f"stillroom reembed --model {OTHER_MODEL}" in caplog.text
        kb.begin_reembedding()
        assert kb._reembedding._thread is not None
        kb._reembedding._thread.join()
        assert kb.model == OTHER_MODEL
    caplog.clear()
    with KnowledgeBase.open(tmp_path / "kb", config(model=OTHER_MODEL)) as kb:
        kb.begin_reembedding()
        assert kb._reembedding._thread is None and not caplog.messages


def test_index_that_does_not_fit_the_model_is_refused_and_searches_go_on(tmp_path: Path, docs: Path) -> None:
    index = IndexConfig(kind="ivf_pq", num_subquantizers=16)
    with KnowledgeBase.open(tmp_path / "kb", StillroomConfig(index=index), create=True) as kb:
        kb.add([docs])
        with pytest.raises(ConfigError, match="num_subquantizers = 16 does not divide the 24 dimensions"):
            kb.reembed(OTHER_MODEL)
        assert kb.model == EmbedderConfig().model and kb.search("vault", mode="dense").results
        assert not kb.reembed().is_changed


def test_verify_tells_of_an_unfinished_change_and_repairs_its_vectors(
    made: Callable[[], KnowledgeBase], tmp_path: Path, docs: Path
) -> None:
    with made() as kb:
        stop, progress = cancelled_after(20)
        with pytest.raises(ChangeCancelledError):
            kb.reembed(OTHER_MODEL, progress=progress, stop=stop, num_together=10)
        report = kb.verify()
        assert report.is_clean and report.reembedding is not None
        assert (report.reembedding.model, report.reembedding.num_done, report.reembedding.num_total) == (
            OTHER_MODEL,
            20,
            36,
        )
        with sqlite3.connect(tmp_path / "kb" / "corpus.sqlite3") as database:
            short, *_ = database.execute("SELECT chunk_id FROM next_vectors").fetchone()
            database.execute("UPDATE next_vectors SET vector = x'00' WHERE chunk_id = ?", (short,))
        database.close()
        (finding,) = kb.verify().findings
        assert (finding.part, finding.num) == ("vectors", 1) and "next embedder" in finding.problem
        (finding,) = kb.verify(repair=True).findings
        assert finding.is_repaired and kb.verify().is_clean
        assert kb.reembed(OTHER_MODEL).num_embedded == 17
        assert kb.verify().reembedding is None
    assert contents(tmp_path / "kb") == fresh(tmp_path, docs, config(model=OTHER_MODEL))

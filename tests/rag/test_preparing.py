"""Documents are prepared before a question, through the facade: what is computed, kept, used, dropped and refused."""

import dataclasses
from pathlib import Path

import pytest

from stillroom.config.settings import ChunkerConfig, PrepareConfig, ReuseConfig, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.errors import ChangeCancelledError, KnowledgeBaseBusyError, UnknownDocumentError, UsageError
from stillroom.rag.preparing import PrepareProgress
from stillroom.rag.stillroom import Stillroom
from stillroom.server.routes.document_routes import begin_preparing
from tests.server.fakes import until

pytestmark = pytest.mark.microworld

PREPARED = StillroomConfig(
    chunker=ChunkerConfig(max_tokens=32),
    reuse=ReuseConfig(mode="prepared", load="always"),
    prepare=PrepareConfig(idle_s=0.0),
)
LINES = {
    "vomira": (
        "Vomira Nosric bought the ship Jolindra . The mentor of her was Kelo Jurlow . She worked as a singer .",
        "She studied grammar . She later moved to Tilham . She took a post at Coltis Works in her own town .",
        "She was born in the year 1872 . This is well documented . Few people remember it today .",
    ),
    "pevin": (
        "Pevin Jimlow was born in Velwick . He became the owner of the ship Berix . He worked as a judge .",
        "He was taught by Rana Gevdt . He studied history . He later moved to Junford and the records are incomplete .",
    ),
}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, paragraphs in LINES.items():
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder


def reasons(stillroom: Stillroom, question: str) -> set[str]:
    return {part.reason for part in stillroom.ask(question).reuse.segments if part.kind == "chunk"}


def test_first_question_finds_the_prepared_documents_also_in_the_next_process(docs: Path, tmp_path: Path) -> None:
    steps: list[PrepareProgress] = []
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        stillroom.add(docs)
        report = stillroom.prepare(progress=steps.append)
        again = stillroom.prepare()
    assert report.num_documents == 2 and not report.is_full
    assert report.num_chunks == report.num_chunks_total == report.num_computed > 4
    assert (again.num_computed, again.num_chunks, again.num_bytes) == (0, report.num_chunks, report.num_bytes)
    assert steps[-1] == PrepareProgress(report.num_chunks, report.num_chunks)
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        answer = stillroom.ask("Who taught Pevin Jimlow ?")
        chunks = [part for part in answer.reuse.segments if part.kind == "chunk"]
        assert {(part.reason, part.source) for part in chunks} == {("prepared", "disk")}
        assert answer.reuse.num_prompt_tokens - answer.reuse.num_cached_tokens == answer.reuse.segments[-1].num_tokens
        shown = stillroom.metrics.render().decode()
    assert f"stillroom_kv_cache_prepared_tokens_total {float(sum(part.num_tokens for part in chunks))}" in shown


def test_answers_are_audited_with_their_prompt_and_their_documents(docs: Path, tmp_path: Path) -> None:
    audited = dataclasses.replace(PREPARED, reuse=dataclasses.replace(PREPARED.reuse, audit_share=1.0))
    with Stillroom.open(tmp_path / "kb", config=audited) as stillroom:
        stillroom.add(docs)
        stillroom.prepare()
        assert reasons(stillroom, "Who taught Pevin Jimlow ?") == {"prepared"}
        until(lambda: 'stillroom_audits_total{result="agreed"} 1.0' in stillroom.metrics.render().decode())
        shown = stillroom.metrics.render().decode()
    assert 'stillroom_audit_agreements_total{reference="documents"} 1.0' in shown
    assert "stillroom_audits_without_documents_total 0.0" in shown and "stillroom_placing_suspended 0.0" in shown


def test_exact_mode_prepares_the_best_chunk_and_changes_no_token(docs: Path, tmp_path: Path) -> None:
    exact = dataclasses.replace(PREPARED, reuse=ReuseConfig(load="always"))
    with Stillroom.open(tmp_path / "plain", config=exact) as stillroom:
        stillroom.add(docs)
        expected = stillroom.ask("Who taught Pevin Jimlow ?")
    with Stillroom.open(tmp_path / "kb", config=exact) as stillroom:
        stillroom.add(docs)
        report = stillroom.prepare()
        found = stillroom.ask("Who taught Pevin Jimlow ?")
    assert report.num_computed == report.num_chunks_total and found.token_ids == expected.token_ids
    assert [part.reason for part in found.reuse.segments[:3]] == ["hit", "hit", "order differs"]


def test_removed_and_changed_documents_lose_their_prepared_kv(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        stillroom.add(docs)
        whole = stillroom.prepare()
        (docs / "vomira.txt").unlink()
        (docs / "pevin.txt").write_text("\n\n".join(("Pevin Jimlow bought the ship Perill .", *LINES["pevin"])))
        stillroom.add(docs)
        assert stillroom.prepare().num_computed > 0
        assert reasons(stillroom, "Who taught Pevin Jimlow ?") == {"prepared"}
    records = list((tmp_path / "kb" / "kv").rglob("*.kv"))
    assert 0 < len(records) < whole.num_chunks + 1 + 4
    assert not any(b"Vomira" in path.read_bytes() for path in records)


def test_named_documents_only(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        stillroom.add(docs)
        name = next(info.document_id for info in stillroom.documents() if "pevin" in info.document_id)
        assert stillroom.prepare(name).num_documents == 1
        assert reasons(stillroom, "Who taught Pevin Jimlow ?") == {"prepared", "never seen"}
        with pytest.raises(UnknownDocumentError):
            stillroom.prepare("nothing.txt")


def test_full_budget_stops_with_the_documents_that_are_asked_for(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        stillroom.add(docs)
        num_bytes = stillroom.prepare().num_bytes
    budget = dataclasses.replace(PREPARED.prepare, disk_bytes=3 * num_bytes // 4, host_bytes=0)
    with Stillroom.open(tmp_path / "small", config=dataclasses.replace(PREPARED, prepare=budget)) as stillroom:
        stillroom.add(docs)
        for _ in range(3):
            stillroom.search("the mentor of Vomira Nosric", top_k=1)
        report = stillroom.prepare()
        assert report.is_full and 0 < report.num_chunks < report.num_chunks_total
        assert report.num_bytes <= budget.disk_bytes
        assert stillroom.ask("What did Vomira Nosric study ?").reuse.segments[1].reason == "prepared"


def test_beginning_of_a_document_is_prepared_where_the_whole_has_no_room(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        stillroom.add(docs)
        (vomira,) = [one.document_id for one in stillroom.documents() if "vomira" in one.document_id]
        whole = stillroom.prepare(vomira)
    budget = dataclasses.replace(PREPARED.prepare, disk_bytes=whole.num_bytes - 1, host_bytes=0)
    with Stillroom.open(tmp_path / "small", config=dataclasses.replace(PREPARED, prepare=budget)) as stillroom:
        stillroom.add(docs)
        report, again = stillroom.prepare(vomira), stillroom.prepare(vomira)
        assert whole.num_chunks == 3 and report.is_full and report.num_documents == 0
        assert (report.num_chunks, report.num_computed, again.num_chunks, again.num_computed) == (2, 2, 2, 0)
        (docs / "short.txt").write_text("The Berix sank .", encoding="utf-8")
        stillroom.add(docs / "short.txt")
        report = stillroom.prepare()  # takes less than the chunk without room
        assert (report.num_documents, report.is_full) == (1, True)
        assert report.num_chunks == 3 and report.num_bytes <= budget.disk_bytes
        assert reasons(stillroom, "Who was the mentor of Vomira Nosric ?") > {"prepared"}


def test_cancelled_run_keeps_what_is_computed(docs: Path, tmp_path: Path) -> None:
    stop = Cancellation()
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        stillroom.add(docs)
        with pytest.raises(ChangeCancelledError):
            stillroom.prepare(progress=lambda progress: stop.cancel(), stop=stop)
        rest = stillroom.prepare()
    assert 0 < rest.num_computed < rest.num_chunks


def test_model_without_kv_is_refused_with_what_to_do(docs: Path, tmp_path: Path) -> None:
    off = dataclasses.replace(PREPARED, reuse=ReuseConfig(mode="off"))
    with Stillroom.open(tmp_path / "kb", config=off) as stillroom:
        stillroom.add(docs)
        with pytest.raises(UsageError, match=r"no KV is kept.* --reuse exact"):
            stillroom.prepare()
    with (
        Stillroom.open(tmp_path / "kb", model="bundled:reader") as stillroom,
        pytest.raises(UsageError, match="--model"),
    ):
        stillroom.prepare()


def test_process_that_cannot_store_kv_says_so(docs: Path, tmp_path: Path) -> None:
    with (
        Stillroom.open(tmp_path / "kb", config=PREPARED) as first,
        Stillroom.open(tmp_path / "kb", config=PREPARED) as two,
    ):
        first.add(docs)
        assert first.prepare().num_computed > 0
        with pytest.raises(KnowledgeBaseBusyError, match="another process keeps KV"):
            two.prepare()


def test_server_prepares_in_the_background_and_again_after_a_change(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb", config=PREPARED) as stillroom:
        begin_preparing(stillroom)
        stillroom.add(docs / "pevin.txt")
        stillroom.preparing.wake()
        until(lambda: (report := stillroom.preparing.report) is not None and report.num_documents == 1)
        stillroom.add(docs / "vomira.txt")
        stillroom.preparing.wake()
        until(lambda: (report := stillroom.preparing.report) is not None and report.num_documents == 2)
        assert reasons(stillroom, "What did Vomira Nosric study ?") == {"prepared"}


@pytest.mark.parametrize(
    ("mode", "when", "begins"),
    [("prepared", "auto", True), ("prepared", "off", False), ("exact", "auto", False), ("exact", "on", True)],
)
def test_settings_decide_whether_a_server_prepares(tmp_path: Path, mode: str, when: str, *, begins: bool) -> None:
    config = StillroomConfig(
        reuse=ReuseConfig(mode=mode),  # type: ignore[arg-type]
        prepare=PrepareConfig(when_idle=when),  # type: ignore[arg-type]
    )
    with Stillroom.open(tmp_path / "kb", config=config) as stillroom:
        begin_preparing(stillroom)
        assert stillroom.preparing.is_running is begins

"""`stillroom add`, `remove` and `list` with a fake Stillroom."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from stillroom.cli.progress import BarListener, CountLines, LineListener
from stillroom.core.ids import DocumentId
from stillroom.errors import (
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    StorageError,
    UnknownDocumentError,
    UsageError,
)
from stillroom.retrieval.ingest import AddProgress, AddReport, RemoveReport
from stillroom.retrieval.intake import watching
from stillroom.retrieval.intake.discovery import Skipped
from tests.cli.harness import Opened, Run, use_fake
from tests.fakes import ManualClock
from tests.server.fakes import FakeStillroom


class EditableStillroom(FakeStillroom):
    """A Stillroom that records additions and removals without doing them."""

    def __init__(self, failures: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__()
        self.failures = failures
        self.added: list[str | Path] = []
        self.metadata: Mapping[str, object] | None = None
        self.reports_progress = False
        self.exclude: Sequence[str] = ()
        self.skipped = Skipped()
        self.unknown: tuple[str, ...] = ()

    def add(
        self,
        *paths: str | Path,
        progress: Callable[[AddProgress], None] | None = None,
        metadata: Mapping[str, object] | None = None,
        exclude: Sequence[str] = (),
    ) -> AddReport:
        self.added += paths
        self.metadata = metadata
        self.exclude = exclude
        self.reports_progress = progress is not None
        return AddReport(3, 1, 10, 2, num_chunks=57, failures=self.failures, skipped=self.skipped, seconds=4.2)

    def remove(self, *targets: str) -> RemoveReport:
        if "nowhere.md" in targets:
            raise UnknownDocumentError("nowhere.md is not in the knowledge base; see: stillroom list")
        return RemoveReport(len(targets), 5, self.unknown)


@pytest.fixture
def stillroom() -> EditableStillroom:
    return EditableStillroom()


@pytest.fixture(autouse=True)
def editable(monkeypatch: pytest.MonkeyPatch, stillroom: EditableStillroom) -> Opened:
    Path("docs").mkdir()
    return use_fake(monkeypatch, stillroom)


def test_add_creates_the_knowledge_base_and_prints_a_summary(
    run: Run, editable: Opened, stillroom: EditableStillroom
) -> None:
    result = run("add", "docs")

    assert result.code == 0
    assert result.out == "added 3, updated 1, unchanged 10, removed 2: 57 chunks in 4.2 s\n"
    assert stillroom.added == ["docs"]
    assert stillroom.reports_progress
    [(kb, _, create)] = editable.calls
    assert (kb, create) == (Path("kb"), True)


def test_add_lists_failures_and_exits_1(run: Run, stillroom: EditableStillroom) -> None:
    stillroom.failures = (("/x/bad.html", "it is not UTF-8"), ("/x/huge.md", "it is too big"))

    result = run("add", "docs")

    assert result.code == 1
    assert result.out.startswith("added 3,")
    expected = "2 files could not be read:\n  /x/bad.html: it is not UTF-8\n  /x/huge.md: it is too big\n"
    assert result.err == expected


def test_add_as_json(run: Run, stillroom: EditableStillroom) -> None:
    stillroom.failures = (("/x/bad.html", "it is not UTF-8"),)

    result = run("add", "docs", "--json")

    assert (result.code, result.err) == (1, "")
    assert result.json == {
        "num_added": 3,
        "num_updated": 1,
        "num_unchanged": 10,
        "num_removed": 2,
        "num_chunks": 57,
        "seconds": 4.2,
        "failures": [{"path": "/x/bad.html", "reason": "it is not UTF-8"}],
        "skipped": {"hidden": 0, "ignored": 0, "other": 0, "other_files": []},
    }
    assert not stillroom.reports_progress


def test_add_reports_skipped_files(run: Run, stillroom: EditableStillroom) -> None:
    stillroom.skipped = Skipped(num_hidden=2, num_other=1000, others=[Path("/x/a.FAQ"), Path("/x/b\x1b[1m.dat")])

    result = run("add", "docs", "--exclude", "drafts/", "--exclude", "*.csv")

    skipped, hint = result.err.splitlines()
    assert skipped == "skipped: 2 hidden, 1,000 of an unsupported format"
    assert hint.startswith("  /x/a.FAQ, /x/b") and "\x1b" not in hint and hint.endswith("whatever its format")
    assert "..." in hint
    assert stillroom.exclude == ["drafts/", "*.csv"]


def test_watch_prints_new_reports_only_and_retries_while_another_process_writes(
    run: Run, stillroom: EditableStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    reports: Iterator[AddReport | Exception] = iter(
        [
            AddReport(num_added=1, failures=(("/x/bad.html", "it is damaged"),)),
            KnowledgeBaseBusyError("another process is writing"),
            AddReport(num_unchanged=1, failures=(("/x/bad.html", "it is damaged"),)),
            UsageError("docs does not exist"),
            StorageError("the disk is full"),
            IndexUnavailableError("no answer"),
            AddReport(num_unchanged=1),
            AddReport(num_unchanged=1, is_worth_repeating=True),
        ]
    )

    def add(*_: object, **__: object) -> AddReport:
        report = next(reports)
        if isinstance(report, Exception):
            raise report
        return report

    def watch_folders(folders: list[Path], follow: Callable[[], bool], stop: object, ignored: Path) -> None:
        assert (folders, ignored) == ([Path("docs").resolve()], Path("kb").resolve())
        answers.extend(follow() for _ in range(8))
        raise KeyboardInterrupt

    monkeypatch.setattr(stillroom, "add", add)
    monkeypatch.setattr(watching, "watch_folders", watch_folders)
    result = run("add", "docs", "--watch", "--json")

    assert answers == [True, False, True, True, False, False, True, False]
    first, second = map(json.loads, result.out.splitlines())
    assert (first["num_added"], len(first["failures"]), second["failures"]) == (1, 1, [])
    assert result.err.splitlines() == [
        "docs does not exist; still watching",
        "the disk is full; still watching, and trying again until it succeeds",
        "indexing works again",
    ]
    assert result.code == 0


def test_quiet_add_prints_failures_only(run: Run, stillroom: EditableStillroom) -> None:
    quiet = run("add", "docs", "-q")
    stillroom.failures = (("bad.html", "it is not UTF-8"),)
    failing = run("add", "docs", "-q")

    assert (quiet.out, quiet.err, quiet.code) == ("", "", 0)
    assert (failing.out, failing.code) == ("", 1)
    assert "bad.html" in failing.err
    assert not stillroom.reports_progress


def test_remove_prints_numbers_of_documents_and_chunks(run: Run) -> None:
    assert run("remove", "a.md", "b.md").out == "removed 2 documents (5 chunks)\n"
    assert run("remove", "a.md", "--json").json == {"num_documents": 1, "num_chunks": 5, "unknown": []}


def test_remove_reports_targets_without_documents(run: Run, stillroom: EditableStillroom) -> None:
    stillroom.unknown = ("gone.md",)

    result, quiet, as_json = run("remove", "a.md"), run("remove", "a.md", "-q"), run("remove", "a.md", "--json")

    assert (result.code, result.out) == (0, "removed 1 document (5 chunks)\n")
    assert result.err == quiet.err == "no documents for 1 target:\n  gone.md\n"
    assert as_json.json["unknown"] == ["gone.md"] and as_json.err == quiet.out == ""


def test_remove_of_an_unknown_document_exits_2(run: Run) -> None:
    result = run("remove", "nowhere.md")

    assert result.code == 2
    assert result.err.startswith("error: nowhere.md is not in")


def test_list_is_a_table(run: Run, stillroom: EditableStillroom, tmp_path: Path) -> None:
    stillroom.texts = {str(tmp_path / "docs" / "a.md"): "x" * 3000, "/b.md": "y"}

    header, *rows = run("list").out.splitlines()

    assert header.split() == ["chunks", "size", "added", "document"]
    assert [row.split()[0:3] + row.split()[-1:] for row in rows] == [
        ["1", "1", "B", "/b.md"],
        ["1", "2.9", "KiB", "docs/a.md"],
    ]


def test_names_are_shown_without_line_ends_and_direction_marks(run: Run, stillroom: EditableStillroom) -> None:
    stillroom.texts = {"/a\n\u202ecod.md": "x"}
    stillroom.failures = (("/b\n\x1b\u2067.md", "cannot\nbe read"),)

    listed, found, added = run("list"), run("search", "x"), run("add", "docs")

    assert [line.split()[-1] for line in listed.out.splitlines()] == ["document", "/a\ufffd\ufffdcod.md"]
    assert "1. /a\ufffd\ufffdcod.md" in found.out
    assert added.err.splitlines()[1:] == ["  /b\ufffd\ufffd\ufffd.md: cannot\ufffdbe read"]
    assert list(run("list", "--json").json["documents"][0].values())[0] == "/a\n\u202ecod.md"


def test_meta_values_get_their_types(run: Run, stillroom: EditableStillroom) -> None:
    flags = ["team=legal", "year=2024", "score=0.5", "code=007", "is_draft=true", "tag=a", "tag=b", "old=", "x=a=b"]
    assert run("add", "docs", *(part for flag in flags for part in ("--meta", flag))).code == 0
    assert stillroom.metadata == {
        "team": "legal",
        "year": 2024,
        "score": 0.5,
        "code": "007",
        "is_draft": True,
        "tag": ["a", "b"],
        "old": None,
        "x": "a=b",
    }


@pytest.mark.parametrize("flag", ["team", "=legal"])
def test_meta_without_name_and_value_is_refused(run: Run, stillroom: EditableStillroom, flag: str) -> None:
    result = run("add", "docs", "--meta", flag)
    assert result.code == 2 and "NAME=VALUE" in result.err
    assert stillroom.added == []


def test_list_as_json(run: Run, stillroom: EditableStillroom) -> None:
    assert run("list", "--json").json == {
        "documents": [
            {
                "document": DocumentId("docs/keys.md"),
                "title": "docs/keys",
                "num_chunks": 1,
                "num_bytes": 36,
                "added_at": 1_700_000_000.0,
                "metadata": {},
            }
        ]
    }


def test_list_of_an_empty_knowledge_base_suggests_add(run: Run, stillroom: EditableStillroom) -> None:
    stillroom.texts = {}

    result = run("list")

    assert (result.code, result.out) == (0, "")
    assert "stillroom add" in result.err


def progress(num_bytes_done: int, num_chunks: int) -> AddProgress:
    return AddProgress(
        num_files_done=num_bytes_done // 10,
        num_files_total=100,
        num_bytes_done=num_bytes_done,
        num_bytes_total=1000,
        num_chunks=num_chunks,
        current="a.md",
    )


def test_progress_without_a_terminal_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    listen = LineListener(clock.monotonic)

    clock.advance(6)  # the embedder loads
    listen(progress(50, 100))
    clock.advance(1)
    listen(progress(60, 110))
    clock.advance(9)
    listen(progress(250, 500))
    clock.advance(10)
    listen(progress(1000, 2100))

    assert capsys.readouterr().err.splitlines() == [
        "5 of 100 files, 100 chunks",
        "25 of 100 files, 500 chunks, 40 chunks/s, about 38 s left",
        "100 of 100 files, 2,100 chunks, 100 chunks/s",
    ]


def test_no_rate_is_printed_before_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    listen = LineListener(clock.monotonic)

    listen(progress(0, 2))
    clock.advance(6)
    listen(progress(0, 2))

    assert capsys.readouterr().err == "0 of 100 files, 2 chunks\n"


def test_counts_without_a_terminal_have_a_rate_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    listen = CountLines("embedding chunks", clock.monotonic)

    listen(40, 125)  # an interrupted run before this one
    clock.advance(20)  # the model loads
    listen(41, 125)
    clock.advance(10)
    listen(61, 125)
    clock.advance(32)
    listen(125, 125)

    assert capsys.readouterr().err.splitlines() == [
        "embedding chunks: 41 of 125",
        "embedding chunks: 61 of 125, 2/s, about 32 s left",
        "embedding chunks: 125 of 125",
    ]


def test_bar_shows_files_chunks_and_rate() -> None:
    clock, screen = ManualClock(), io.StringIO()
    with Progress(TextColumn("{task.percentage} {task.fields[counts]}"), console=Console(file=screen)) as bar:
        listen = BarListener(bar, clock.monotonic)
        listen(progress(50, 100))
        clock.advance(10)
        listen(progress(250, 500))

    assert "25.0 25 of 100 files, 500 chunks, 40 chunks/s" in screen.getvalue()

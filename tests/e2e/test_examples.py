"""The sample documents and the questions of `make demo`: well formed, stated in the documents, found by a search."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stillroom import Stillroom
from stillroom.core.document import Document
from stillroom.retrieval.loaders.load_file import load

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Row:
    question: str
    answers: tuple[str, ...]
    document: str


def rows() -> list[Row]:
    lines = (EXAMPLES / "demo_questions.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [Row(one["question"], tuple(one["answers"]), one.get("document", "")) for one in found]


ANSWERED = [row for row in rows() if row.answers]


def read(path: Path) -> Document:
    (document,) = load(path)
    return document


def text_of(path: Path) -> str:
    """Return the text as Stillroom reads it, on one line."""
    return " ".join(" ".join(paragraph.text for paragraph in read(path).paragraphs).split())


def test_demo_asks_ten_questions_half_of_them_about_the_documentation_and_one_without_an_answer() -> None:
    questions = rows()

    assert len({row.question for row in questions}) == len(questions)
    assert len(ANSWERED) >= 10
    assert sum(row.document.startswith("docs/") for row in ANSWERED) >= len(ANSWERED) / 2
    assert [row.document for row in questions if not row.answers] == [""]


def test_text_file_has_the_same_questions() -> None:
    lines = (EXAMPLES / "demo_questions.txt").read_text(encoding="utf-8").splitlines()

    assert lines == [row.question for row in rows()]


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row.question)
def test_expected_fact_stands_in_its_document(row: Row) -> None:
    assert row.answers[0] in text_of(ROOT / row.document)


def test_passage_that_the_demo_opens_answers_its_first_question() -> None:
    script = (EXAMPLES / "demo.sh").read_text(encoding="utf-8")
    (path, first, last) = re.findall(r"^passage=(\S+):(\d+)-(\d+)$", script, re.MULTILINE)[0]
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()[int(first) - 1 : int(last)]
    opened = " ".join(lines)

    assert path == ANSWERED[0].document
    assert all(answer in opened for answer in ANSWERED[0].answers)
    assert opened.endswith("."), "the passage ends with a sentence"


def test_household_chapters_are_clean_markdown() -> None:
    chapters = sorted(set((EXAMPLES / "household").glob("*.md")) - {EXAMPLES / "household" / "README.md"})

    assert len(chapters) == 10
    for path in chapters:
        text = path.read_text(encoding="utf-8")
        document = read(path)
        assert text.startswith("# ") and text.endswith("\n") and "\t" not in text, path.name
        assert not re.search(r"_\w|\[Illustration|\[Footnote|Gutenberg", text), path.name
        assert all(paragraph.heading_path for paragraph in document.paragraphs), path.name


@pytest.fixture(scope="module")
def stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    """Yield a knowledge base of the documents that the questions need."""
    with Stillroom.open(tmp_path_factory.mktemp("examples") / "kb", model="bundled:microworld") as stillroom:
        report = stillroom.add(*(ROOT / name for name in sorted({row.document for row in ANSWERED})))
        assert report.failures == ()
        yield stillroom


@pytest.mark.slow  # embeds a book; tests/e2e/test_demo.py asks questions to a smaller corpus
@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row.question)
def test_search_finds_the_document_among_the_first_five(stillroom: Stillroom, row: Row) -> None:
    found = stillroom.search(row.question, top_k=5).results

    assert any(str(one.chunk.document_id).endswith(row.document) for one in found)


def reply_to(row: Row) -> str:
    """Return the line of `stillroom ask --json` for an answer that is right, as far as the demo reads it."""
    where = {"document": str(ROOT / row.document), "heading": "Part", "start_line": 2, "end_line": 4, "start_page": 0}
    text = f"It is {row.answers[0]}. [1]" if row.answers else "The documents do not say."
    unsupported = {**where, "source": 0, "document": "", "start_line": 0, "end_line": 0}
    citations = [{**where, "source": 1}] if row.answers else [unsupported]
    return json.dumps({"question": row.question, "text": text, "citations": citations, "highlight": None})


def run_demo(folder: Path, *, fails_at: str = "", replies: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the demo with a `stillroom` that only logs its arguments, and fails if one of them is `fails_at`."""
    (folder / "replies").write_text("".join(f"{reply}\n" for reply in replies or map(reply_to, rows())))
    script = f"""#!/bin/sh
        echo "$1" >> {folder}/log
        for each in "$@"; do
            if [ "$each" = "{fails_at}" ]; then exit 3; fi
            if [ "$each" = --json ]; then cat {folder}/replies; fi
        done
    """
    for name, text in {"stillroom": script, "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "BIN": str(folder), "DEMO": str(folder / "demo")}
    return subprocess.run(
        ["bash", "examples/demo.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_demo_runs_its_commands_in_order_and_prints_answers_with_their_places(tmp_path: Path) -> None:
    found = run_demo(tmp_path)

    assert found.returncode == 0, found.stderr
    commands = ["add", "add", "ask", "ask", "show", "add", "ask", "ask", "explain"]
    assert (tmp_path / "log").read_text().split() == commands
    assert "  It is sixty shillings a pound. [1]\n  [1] examples/household/beverages.md:2-4  Part\n" in found.stdout
    assert f"{len(rows())} of {len(rows())} are as examples/demo_questions.jsonl expects." in found.stdout
    assert re.search(r"The demo took \d+ s", found.stdout)


def test_demo_counts_wrong_answers_and_citations_of_what_is_not_said(tmp_path: Path) -> None:
    replies = [json.loads(reply_to(row)) for row in rows()]
    replies[0]["text"] = "Horses. [1]"
    replies[-1]["citations"] = [{**replies[0]["citations"][0], "end_line": 2}]

    found = run_demo(tmp_path, replies=map(json.dumps, replies))

    assert f"{len(rows()) - 2} of {len(rows())} are as" in found.stdout
    assert "  (expected: sweet-flavoured waters)" in found.stdout
    place = "[1] examples/household/housekeeper.md:2  Part"
    assert f"  The documents do not say.\n  {place}\n  (expected: the documents do not say)" in found.stdout


@pytest.mark.parametrize("step", ["docs", "--json", "show", "explain"])
def test_demo_ends_with_an_error_that_names_the_failed_step(tmp_path: Path, step: str) -> None:
    found = run_demo(tmp_path, fails_at=step)

    assert found.returncode != 0
    assert re.search(rf"The demo failed at: stillroom .*{step}", found.stderr)
    assert "The demo took" not in found.stdout


def test_demo_ends_with_an_error_if_an_answer_is_missing(tmp_path: Path) -> None:
    found = run_demo(tmp_path, replies=[reply_to(row) for row in rows()[:-1]])

    assert found.returncode != 0
    assert "questions, but" in found.stderr

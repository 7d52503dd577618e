"""`stillroom bench answers` end to end, with the bundled generator on documents in its vocabulary."""

import json
from pathlib import Path

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.errors import UsageError
from stillroom.rag.stillroom import Stillroom
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.quality.end_to_end_answers import ALL, GOLD, UNANSWERABLE, WITHOUT, run_answers
from stillroom_bench.quality.quality_options import EndToEndOptions
from tests.cli.harness import Run, runner
from tests.server.knowledge import ANSWER, PEOPLE, QUESTION

MODEL = "bundled:microworld"
OTHER = "The birthplace of Kala Broster was Glanwick . By trade she was a clerk ."


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets") / 'people "1"'
    folder.mkdir()
    records = [{"_id": "people", "text": PEOPLE}, {"_id": "other", "text": OTHER}]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": QUESTION, "answers": [ANSWER]}))
    (folder / "qrels.tsv").write_text("q\tpeople\t1\n")
    return folder


@pytest.fixture(scope="module")
def result(data_set: Path, tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    options = EndToEndOptions((data_set,), models=(MODEL,), has_gold=True, has_without_gold=True)
    return run_answers(options, tmp_path_factory.mktemp("work"), StillroomConfig())


def test_answers_are_judged_with_all_documents_and_the_gold_passage(result: BenchResult) -> None:
    rows = {row["documents"]: row for row in result.tables["Answers"]}

    for mode in (ALL, GOLD):
        assert rows[mode]["exact match"] == rows[mode]["quoted"] == rows[mode]["retrieved"] == "1 [1, 1]"
        assert rows[mode]["model"] == MODEL and rows[mode]["questions"] == 1
    assert result.samples.of(f'people "1", {ALL}/{MODEL}', "answer_seconds")[0] > 0


def test_nothing_of_the_gold_passage_is_read_without_it(result: BenchResult) -> None:
    measured = result.samples.values[f'people "1", {WITHOUT}/{MODEL}']

    assert "exact_match" not in measured and measured["is_answered"] == [1.0]  # the generator never abstains
    [row] = result.tables["Abstention"]
    assert (row["refused without"], row["answered with the passage"]) == ("0 [0, 0]", "1 [1, 1]")


def test_file_of_questions_is_asked_of_a_knowledge_base(tmp_path: Path) -> None:
    (tmp_path / "people.md").write_text(PEOPLE)
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(tmp_path / "people.md")
    rows = [{"question": QUESTION, "answers": [ANSWER], "document": "people.md"}, {"question": QUESTION, "answers": []}]
    path = tmp_path / "eval.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    found = run_answers(
        EndToEndOptions((path,), tmp_path / "kb", (MODEL,), has_without_gold=True), tmp_path, StillroomConfig()
    )

    by_mode = {row["documents"]: row for row in found.tables["Answers"]}
    assert by_mode[ALL]["exact match"] == "1 [1, 1]" and by_mode[UNANSWERABLE]["answered"] == "1 [1, 1]"
    assert by_mode[WITHOUT]["answered"] == "0 [0, 0]", "no other document is left, so the question is refused"
    assert found.tables["Abstention"][0]["questions"] == 2
    path.write_text(json.dumps(rows[0] | {"document": "nowhere.md"}))
    with pytest.raises(UsageError, match="'nowhere.md' of a question names 0 documents"):
        run_answers(EndToEndOptions((path,), tmp_path / "kb", (MODEL,)), tmp_path, StillroomConfig())


def test_command_explains_what_a_file_needs(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run: Run = runner(capfd)
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"question": "Who?", "answers": ["x"]}))

    without_kb = run("bench", "answers", "--questions", path)
    without_gold = run("bench", "answers", "--questions", path, "--kb", tmp_path, "--gold")

    assert without_kb.code == 2 and "name the knowledge base that answers them with --kb" in without_kb.err
    assert without_gold.code == 2 and "names its `document`" in without_gold.err

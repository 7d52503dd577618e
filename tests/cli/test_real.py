"""Commands with a real knowledge base and the bundled model, some in their own process."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from stillroom.models.bundled_models import MICROWORLD, model_warnings
from stillroom.rag.stillroom import Stillroom
from tests.cli.harness import Run
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

WARNINGS = [f"warning: {text}" for text in model_warnings(MICROWORLD)]
PROGRAM = [sys.executable, "-m", "stillroom.cli.main"]


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_knowledge(tmp_path_factory.mktemp("real") / "docs")


@pytest.fixture(scope="module")
def kb(docs: Path) -> Path:
    """A knowledge base that tests only read."""
    folder = docs.parent / "kb"
    with Stillroom.open(folder) as stillroom:
        stillroom.add(docs)
    return folder


def test_adding_again_changes_nothing(run: Run, docs: Path, kb: Path) -> None:
    report = run("add", docs, "--kb", kb, "--json").json

    assert (report["num_added"], report["num_unchanged"], report["failures"]) == (0, 2, [])


def test_list_and_search(run: Run, docs: Path, kb: Path) -> None:
    documents = run("list", "--kb", kb, "--json").json["documents"]
    found = run("search", "Tunstead", "--kb", kb, "-k", 1, "--json").json

    assert [Path(row["document"]).name for row in documents] == ["notes.txt", "people.md"]
    assert found["results"][0]["document"] == str(docs / "people.md")


def test_short_commands_import_nothing_heavy(kb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import os, sys
from stillroom.cli.main import main

HEAVY = {"torch", "numba", "scipy", "transformers", "sentence_transformers", "fastapi", "httpx", "rich", "tomlkit"}

def check(command, forbidden):
    sys.argv = ["stillroom", *command]
    try:
        main()
    except SystemExit as ending:
        assert not ending.code, command
    assert not forbidden & set(sys.modules), (command, forbidden & set(sys.modules))

check(["list"], {*HEAVY, "faiss", "stillroom_bench"})
check(["show", "people.md"], {*HEAVY, "faiss", "stillroom_bench"})
check(["search", "Dola Kenric"], {*HEAVY, "stillroom_bench"})
assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
"""
    monkeypatch.setenv("STILLROOM_KB", str(kb))
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_search_without_torch_ranks_as_with_torch(kb: Path) -> None:
    with Stillroom.open(kb) as with_torch, Stillroom.open(kb) as without_torch:
        without_torch.avoid_torch()
        expected, found = (opened.search(QUESTION).results for opened in (with_torch, without_torch))
    assert [scored.chunk for scored in found] == [scored.chunk for scored in expected]
    assert [scored.score for scored in found] == pytest.approx([scored.score for scored in expected], abs=1e-5)


def test_equal_documents_have_equal_digests(run: Run, docs: Path, kb: Path, tmp_path: Path) -> None:
    shown = run("digest", "--kb", kb)
    parts = run("digest", "--kb", kb, "--json").json
    assert shown.out.splitlines()[0] == parts["digest"] and "vectors" in shown.out

    run("add", docs, "--kb", tmp_path / "other", "--quiet")
    assert run("digest", "--kb", tmp_path / "other", "--json").json == parts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--search-budget", "2"), "give one with its unit"),
        (("--search-budget", "0ms"), "give one with its unit"),
        (("--search-budget", "2ms", "--ann-recall", "0.9"), "exclude each other"),
    ],
)
def test_invalid_search_goals_exit_2(run: Run, kb: Path, flags: tuple[str, ...], message: str) -> None:
    result = run("search", "Tunstead", "--kb", kb, *flags)
    assert result.code == 2 and message in result.err


def test_an_exact_index_meets_every_recall(run: Run, kb: Path) -> None:
    assert run("search", "Tunstead", "--kb", kb, "--ann-recall", "0.99", "--search-budget", "1s").code == 2
    assert run("search", "Tunstead", "--kb", kb, "--ann-recall", "0.99", "--json").json["results"]


def test_quiet_ask_prints_only_the_answer(run: Run, kb: Path) -> None:
    done = run("ask", QUESTION, "--kb", kb, "--quiet")

    assert (done.code, done.out) == (0, f"{ANSWER}\n")
    assert done.err.splitlines() == WARNINGS


def test_several_questions_from_stdin(run: Run, kb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [QUESTION, "In which year was Jatha Jurlow born ?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions)))

    result = run("ask", "-", "--kb", kb, "--json")

    answers = [json.loads(line) for line in result.out.splitlines()]
    assert [answer["question"] for answer in answers] == questions
    assert answers[0]["text"] == ANSWER
    assert answers[0]["sources"][0]["start_line"] == 5


def test_answer_too_long_for_the_model_exits_2(run: Run, kb: Path) -> None:
    result = run("ask", QUESTION, "--kb", kb, "--max-tokens", 100_000)

    assert (result.code, result.out) == (2, "")
    *warnings, error = result.err.splitlines()
    assert warnings == WARNINGS and error.startswith("error: ")


@pytest.mark.parametrize("command", ["list", "search x", "ask x", "remove x"])
def test_missing_knowledge_base_exits_2_and_is_not_created(run: Run, tmp_path: Path, command: str) -> None:
    result = run(*command.split(), "--kb", tmp_path / "none")

    assert (result.code, result.out) == (2, "")
    assert "error: " in result.err
    assert not (tmp_path / "none").exists()


def test_missing_model_exits_2(run: Run, kb: Path) -> None:
    result = run("ask", QUESTION, "--kb", kb, "--model", "./no-such-model")

    assert result.code == 2
    assert "no-such-model" in result.err


def test_unreadable_file_is_listed_and_the_others_are_added_and_removed(run: Run, tmp_path: Path) -> None:
    docs, kb = write_knowledge(tmp_path / "docs"), tmp_path / "kb"
    (docs / "bad.jsonl").write_text('{"_id": "1", "text": "fine"}\n{broken\n')

    adding = run("add", docs, "--kb", kb, "--json")
    removing = run("remove", docs / "notes.txt", "--kb", kb)
    again = run("remove", docs / "notes.txt", "--kb", kb)
    [left] = run("list", "--kb", kb, "--json").json["documents"]

    assert (adding.code, adding.json["num_added"]) == (1, 2)
    [failure] = adding.json["failures"]
    assert failure["path"] == str(docs / "bad.jsonl")
    assert failure["reason"]
    assert removing.out == "removed 1 document (1 chunk)\n"
    assert again.code == 2
    assert (docs / "notes.txt").exists()
    assert left["document"] == str(docs / "people.md")


def test_bench_measures_a_data_set(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "tiny"
    data.mkdir()
    texts = {"a": "Rotate keys twice a year.", "b": "Bread needs water and flour.", "c": "The ship sailed north."}
    records = [json.dumps({"_id": name, "text": text}) for name, text in texts.items()]
    (data / "corpus.jsonl").write_text("\n".join(records))
    (data / "queries.jsonl").write_text('{"_id": "q", "text": "how often are keys rotated"}\n')
    (data / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")

    tables = run("bench", "retrieval", "--dataset", data, "--work-dir", tmp_path, "--json").json["tables"]

    assert {row["tiny"] for row in tables["recall_at_5 per set"]} == {1.0}


def test_serve_answers_and_stops(kb: Path) -> None:
    command = [*PROGRAM, "serve", "--kb", str(kb), "--port", "0", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout and process.stderr
            url = json.loads(process.stdout.readline())["url"]
            request = {"messages": [{"role": "user", "content": QUESTION}]}
            answer = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60).json()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            records = [json.loads(line) for line in process.stderr.read().splitlines()]
            assert [record["logger"] for record in records] == ["stillroom.server.app", "stillroom.server.access"]
            assert QUESTION not in str(records)
        finally:
            process.kill()
    assert answer["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.slow
def test_watch_indexes_changes_until_ctrl_c(tmp_path: Path) -> None:
    docs = write_knowledge(tmp_path / "docs")
    command = [*PROGRAM, "add", str(docs), "--kb", str(docs / "kb"), "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            first = json.loads(process.stdout.readline())
            (docs / "new.md").write_text("# Keys\n\nRotate them.\n")
            second = json.loads(process.stdout.readline())
            (docs / "new.md").unlink()
            third = json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGINT)
        assert (first["num_added"], second["num_added"], third["num_removed"]) == (2, 1, 1)
        assert process.wait(60) == 0

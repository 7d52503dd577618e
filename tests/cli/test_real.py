"""The command line over the real thing, as processes of their own: from `add` to `serve`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.knowledge import ANSWER, QUESTION, write_knowledge


def stillroom(*args: object, text: str | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stillroom.cli.main", *map(str, args)],
        input=text,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    docs = write_knowledge(folder / "docs")
    done = stillroom("add", docs, "--kb", folder / "kb")
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "added 2, updated 0, unchanged 0, removed 0")
    assert done.stderr == ""
    return folder


@pytest.fixture
def kb(folder: Path) -> Path:
    return folder / "kb"


def parse(done: "subprocess.CompletedProcess[str]") -> Any:
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_adding_again_changes_nothing(folder: Path, kb: Path) -> None:
    report = parse(stillroom("add", folder / "docs", "--kb", kb, "--json"))

    assert (report["num_added"], report["num_unchanged"], report["failures"]) == (0, 2, [])


def test_list_and_search(folder: Path, kb: Path) -> None:
    documents = parse(stillroom("list", "--kb", kb, "--json"))["documents"]
    found = parse(stillroom("search", "Tunstead", "--kb", kb, "-k", 1, "--json"))

    assert [Path(row["document"]).name for row in documents] == ["notes.txt", "people.md"]
    assert found["results"][0]["document"] == str(folder / "docs" / "people.md")


def test_ask_prints_nothing_but_the_answer_to_a_pipe(kb: Path) -> None:
    done = stillroom("ask", QUESTION, "--kb", kb, "--quiet")

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ANSWER}\n", "")


def test_several_questions_from_stdin(kb: Path) -> None:
    questions = [QUESTION, "In which year was Jatha Jurlow born ?"]

    done = stillroom("ask", "-", "--kb", kb, "--json", text="\n".join(questions))

    assert done.stderr == ""
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["question"] for answer in answers] == questions
    assert answers[0]["text"] == ANSWER
    assert answers[0]["sources"][0]["start_line"] == 5


def test_answer_that_cannot_fit_the_model_is_a_wrong_call(kb: Path) -> None:
    done = stillroom("ask", QUESTION, "--kb", kb, "--max-tokens", 100_000)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["list", "search x", "ask x", "remove x", "serve --port 0"])
def test_missing_knowledge_base_is_a_wrong_call_and_is_not_made(tmp_path: Path, command: str) -> None:
    done = stillroom(*command.split(), "--kb", tmp_path / "none")

    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "none").exists()


def test_missing_model_is_a_wrong_call(kb: Path) -> None:
    done = stillroom("ask", QUESTION, "--kb", kb, "--model", "./no-such-model")

    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_unreadable_file_is_listed_and_the_others_are_added(tmp_path: Path) -> None:
    docs = write_knowledge(tmp_path / "docs")
    (docs / "bad.jsonl").write_text('{"_id": "1", "text": "fine"}\n{broken\n')

    done = stillroom("add", docs, "--kb", tmp_path / "kb", "--json")

    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["num_added"] == 2
    [failure] = report["failures"]
    assert failure["path"] == str(docs / "bad.jsonl")
    assert failure["reason"]


def test_remove_forgets_a_document(tmp_path: Path) -> None:
    docs = write_knowledge(tmp_path / "docs")
    stillroom("add", docs, "--kb", tmp_path / "kb")

    done = stillroom("remove", docs / "notes.txt", "--kb", tmp_path / "kb")
    again = stillroom("remove", docs / "notes.txt", "--kb", tmp_path / "kb")

    assert done.stdout == "removed 1 document (1 chunk)\n"
    assert again.returncode == 2
    assert (docs / "notes.txt").exists()
    assert len(parse(stillroom("list", "--kb", tmp_path / "kb", "--json"))["documents"]) == 1


def test_serve_answers_and_stops(kb: Path) -> None:
    command = [sys.executable, "-m", "stillroom.cli.main", "serve", "--kb", str(kb), "--port", "0", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout and process.stderr
            url = json.loads(process.stdout.readline())["url"]
            request = {"messages": [{"role": "user", "content": QUESTION}]}
            answer = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60).json()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
    assert answer["choices"][0]["message"]["content"] == ANSWER

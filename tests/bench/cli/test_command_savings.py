"""Tests the command `stillroom bench savings`."""

import json
from pathlib import Path

from tests.cli.harness import Run


def test_trace_is_measured_and_saved(run: Run) -> None:
    Path("rag.json").write_text(json.dumps({"retrieved_docs": [["a b", "c"], ["c", "a b"]]}))
    result = run("bench", "savings", "--trace", "rag.json", "--ratio", "0", "--capacity", "0.5", "-o", "out.json")
    assert "| rag | all | anywhere, 0% computed again |" in result.out
    assert "rag, room for 50%" in result.err and Path("out.json").is_file()
    again = run("bench", "savings", "--trace", "rag.json", "--json", "--quiet")
    assert again.err == "" and len(again.json["tables"]["Tokens computed"]) == 1 + 4 * 5


def test_invalid_traces_are_refused(run: Run) -> None:
    Path("rag.json").write_text("{}")
    for flags, words in ((["rag.json"], "is not a trace: it needs"), (["none.json"], "does not exist")):
        result = run("bench", "savings", "--trace", *flags)
        assert result.code == 2 and words in result.err

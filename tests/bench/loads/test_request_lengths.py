"""Tests the reader of recorded request lengths, and the row that compares prompts with answers."""

from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.loads.request_lengths import length_row, read_lengths


def test_both_forms_of_traces_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n2023-11-16,3,109\n")
    (tmp_path / "b.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 0}\n')

    assert read_lengths(tmp_path / "a.csv") == [(374, 44), (3, 109)]
    assert read_lengths(tmp_path / "b.jsonl") == [(9, 0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP\n1\n", "row 1 has no ContextTokens"),
        ("a.csv", "ContextTokens,GeneratedTokens\n1,2\n3,-1\n", "row 2 has a negative length"),
        ("a.csv", "ContextTokens,GeneratedTokens\n1,x\n", "is not a trace of lengths"),
        ("a.csv", "ContextTokens,GeneratedTokens\n", "has no requests"),
        ("b.jsonl", "[1]\n", "is not a trace of lengths"),
        ("b.jsonl", "{\n", "is not a trace of lengths"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        read_lengths(tmp_path / name)


def test_a_row_has_percentiles_and_the_ratio_of_the_sums() -> None:
    row = length_row("chat", [(100, 10), (300, 10), (20, 40)])

    assert (row["requests"], row["prompt tokens, p50"], row["answer tokens, p50"]) == (3, 100, 10)
    assert row["prompt / answer tokens"].startswith("7 [")
    assert row["prompts longer than their answer"].startswith("0.667 [")

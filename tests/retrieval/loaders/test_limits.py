"""Limits on the paragraphs and text made of one file, checked while they are made."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders import table
from stillroom.retrieval.loaders.load_file import load
from tests.retrieval.loaders.make import epub, parsed, word, workbook

ROWS: list[list[object]] = [["Name", "Days"], *([f"cellar {number}", number] for number in range(40))]
CELLS = [{"cell_type": "code", "source": f"print({number})", "outputs": []} for number in range(40)]
REPEATING: dict[str, bytes | str] = {
    "a.csv": "\n".join(",".join(map(str, row)) for row in ROWS),
    "a.xlsx": workbook({"Keys": ROWS}),
    "a.html": "<table>" + "".join(f"<tr><td>a{number}<td>b" for number in range(40)) + "</table>",
    "a.epub": epub({"a.xhtml": "<p>x</p>" * 40}),
    "a.ipynb": json.dumps({"cells": CELLS}),
    "a.docx": word(lambda document: [document.add_paragraph("x") for _ in range(40)]),
    "a.md": "x\n\n" * 40,
    "a.txt": "x\n\n" * 40,
    "a.py": "x = 1\n\n" * 40,
}


@pytest.mark.parametrize("name", REPEATING)
def test_paragraph_limit_applies_to_every_format(name: str) -> None:
    assert len(parsed(name, REPEATING[name], max_paragraphs=42).paragraphs) >= 40
    with pytest.raises(DocumentError, match=r"documents\.max_paragraphs \(30\); split it, .* or raise the limit"):
        parsed(name, REPEATING[name], max_paragraphs=30)


def test_jsonl_records_have_the_same_limits(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x\n\n" * 40}))
    with pytest.raises(DocumentError, match=r"a\.jsonl:1: .*documents\.max_paragraphs \(30\)"):
        list(load(path, DocumentsConfig(max_paragraphs=30)))


def test_wide_table_stops_at_the_row_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """60,000 column names label every row: the loader stops at the row beyond the limit."""
    made: list[Any] = []
    labelled = table.labelled

    def counted(rows: Any) -> Iterator[Any]:
        for row in labelled(rows):
            made.append(row)
            yield row

    monkeypatch.setattr(table, "labelled", counted)
    wide = ",".join(f"column {number}" for number in range(60_000)) + "\n" + f"{'1,' * 59_999}1\n" * 15
    with pytest.raises(DocumentError, match=r"a\.csv: more text than documents\.max_text_bytes \(4 MiB\)"):
        parsed("a.csv", wide, max_text_bytes=4 << 20)
    assert len(made) == 5


def test_headings_count_once_per_paragraph_below() -> None:
    page = f"<h1>{'long ' * 1000}</h1><h1>other</h1><h2>{'long ' * 1000}</h2>" + "<p>x</p>" * 100
    assert len(parsed("a.html", page).paragraphs) > 100
    with pytest.raises(DocumentError, match=r"documents\.max_expanded_bytes \(0\.1 MiB\); shorten its headings"):
        parsed("a.html", page, max_expanded_bytes=int(0.1 * 2**20))

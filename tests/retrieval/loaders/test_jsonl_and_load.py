"""JSONL corpora, and files whose names do not tell their format."""

import json
from pathlib import Path

import pytest

from stillroom.core.document import Paragraph
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.load_file import load


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_each_jsonl_line_is_a_document(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "corpus.jsonl", {"_id": "a", "title": "A", "text": "one\n\ntwo"}, {"_id": 7, "text": "x"}
    )
    first, second = load(path)
    assert (first.document_id, first.record_id, first.title) == (f"{path}#a", "a", "A")
    assert first.paragraphs == (Paragraph("one", (), 1, 1), Paragraph("two", (), 1, 1))
    assert (second.record_id, second.title, second.paragraphs) == ("7", "", (Paragraph("x", (), 2, 2),))


def test_record_with_only_a_title_is_found_by_it(tmp_path: Path) -> None:
    (document,) = load(write_jsonl(tmp_path / "c.jsonl", {"_id": "a", "title": "Only this", "text": ""}))
    assert document.paragraphs == (Paragraph("Only this", (), 1, 1),)


def test_unstorable_characters_of_an_id_are_replaced(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", {"_id": "\ud800", "text": "x"}, {"_id": "a\0b", "text": "y"})
    assert [document.document_id for document in load(path)] == [f"{path}#?", f"{path}#ab"]
    write_jsonl(path, {"_id": "\ud800", "text": "x"}, {"_id": "\udfff", "text": "y"})
    with pytest.raises(DocumentError, match="occurs twice"):
        list(load(path))


@pytest.mark.parametrize("line", ["{not json}", '{"_id": "b"}', "[1]", '{"_id": "a", "text": "again"}'])
def test_malformed_line_error_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DocumentError, match=r"corpus\.jsonl:3: "):
        list(load(path))


def test_named_file_of_unknown_format_is_text_if_it_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "terms.unknown"
    path.write_text("Do as you like.")
    assert [document.paragraphs[0].text for document in load(path)] == ["Do as you like."]
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(DocumentError):
        list(load(path))


def test_unreadable_file_is_a_document_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"gone\.md: cannot be read"):
        list(load(tmp_path / "gone.md"))

"""Metadata of documents, sidecars and callers."""

import json
from pathlib import Path

import pytest

from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.intake.discovery import discover
from stillroom.retrieval.loaders.document_metadata import front_matter, given_metadata, sidecar_metadata
from stillroom.retrieval.loaders.html import parse_html
from stillroom.retrieval.loaders.load_file import load
from stillroom.retrieval.loaders.markdown import parse_markdown
from stillroom.retrieval.loaders.rst import parse_rst


def test_front_matter_is_metadata_and_its_title_the_title() -> None:
    text = """---
title: Lease "Main St"
year: 2021
signed: 2021-03-04
team: legal
tags: [lease, 7]
author:
  name: Ada
draft: no
---
# Lease

Text.
"""
    document = parse_markdown(Path("/x/lease.md"), text)
    assert document.title == 'Lease "Main St"'
    assert document.metadata == {
        "author.name": "Ada",
        "draft": False,
        "signed": "2021-03-04",
        "tags": ("lease", 7),
        "team": "legal",
        "year": 2021,
    }
    assert document.paragraphs[-1].start_line == 13


@pytest.mark.parametrize(
    "block",
    [
        "title: Kept\nteam: [unclosed",
        "title: Kept\nwhen: 2021-99-99",
        "title: Kept\nx: !!python/object/apply:os.system ['true']",
        "title: Kept\n" + "y: 1\n" * 20_000,
    ],
)
def test_invalid_yaml_front_matter_loses_only_metadata(block: str) -> None:
    assert front_matter(block) == ("Kept", {})


def test_front_matter_with_many_references_is_read_in_time() -> None:
    lines = ["a0: &a0 {}"] + [
        f"a{level}: &a{level} {{{', '.join(f'k{key}: *a{level - 1}' for key in range(12))}}}" for level in range(1, 12)
    ]
    assert front_matter("\n".join(lines)) == ("", {})


def test_meta_elements_are_metadata() -> None:
    page = """<html><head><title>T</title><meta charset="utf-8"><meta name="viewport" content="width=1">
    <meta name="Author" content="Ada"><meta name="Author" content="Grace"><meta name="year" content="2021">
    <meta name="keywords" content="a, b c,"><meta property="article:published_time" content="2021-03-04T10:00:00Z">
    </head><body>Text.</body></html>"""
    assert parse_html(Path("/x/p.html"), page).metadata == {
        "article:published_time": "2021-03-04T10:00:00Z",
        "author": ("Ada", "Grace"),
        "keywords": ("a", "b c"),
        "year": 2021,
    }


def test_rst_header_is_metadata() -> None:
    document = parse_rst(Path("/x/pep.rst"), "PEP: 8\nTitle: Style\nStatus: Active\nCreated: 05-Jul-2001\n\nText.\n")
    assert document.metadata == {"created": "05-Jul-2001", "pep": 8, "status": "Active"}


def test_record_has_its_own_metadata(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": "x", "metadata": {"year": 2020}}\n{"_id": "b", "text": "y", "metadata": 3}\n')
    assert [document.metadata for document in load(path)] == [{"year": 2020}, {}]


def test_sidecar_file_gives_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    assert sidecar_metadata(path) == {}
    beside = tmp_path / "a.txt.metadata.json"
    for content in ({"team": "legal"}, {"metadataAttributes": {"team": "legal"}}):
        beside.write_text(json.dumps(content))
        assert sidecar_metadata(path) == {"team": "legal"}
    assert [file.name for file in discover([tmp_path]).files] == ["a.txt"]
    for wrong in ("{", "[1]", "[" * 100_000):
        beside.write_text(wrong)
        with pytest.raises(DocumentError, match="repair or remove"):
            sidecar_metadata(path)


def test_given_metadata_is_checked() -> None:
    assert given_metadata({"team": "legal", "old": None}) == {"team": "legal", "old": None}
    for wrong in ({"x": object()}, {"": 1}, {'a"b': 1}, {"nested": {"a": 1}}):
        with pytest.raises(UsageError, match="metadata"):
            given_metadata(wrong)


def test_title_of_malformed_front_matter_is_found_in_long_lines() -> None:
    document = parse_markdown(Path("/x/a.md"), "---\ntitle: 'a" + " " * 50_000 + "b\nteam: [unclosed\n---\ntext")
    assert document.title.split() == ["'a", "b"]

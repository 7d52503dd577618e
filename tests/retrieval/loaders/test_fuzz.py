"""Loaders on malformed input. Each fault found is a case below."""

import functools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.loaders import formats
from tests.retrieval.loaders.make import parsed
from tests.retrieval.loaders.mutations import check, mutated, seeds

_SEEDS = functools.cache(seeds)
NAMES = sorted(name for name in _SEEDS() if name != "a.jsonl")
TEXTS = [name for name in NAMES if name.rpartition(".")[2] in ("md", "rst", "html", "csv", "py", "rs", "ipynb", "txt")]
_MARKUP = (
    "# |## |    |- |1. |> |</p>|<|>|<h1>|<table>|<tr>|<td>|<pre>|<!--|&lt;|&#0;|&#xD800;|*|_|`|[|](|]: |.. |::|:a:`"
)
_CODE = 'def a(|class A:|fn b() {|}|"|\'|"""|;|,|word '
_LINES = [
    "\n",
    "\n\n",
    "\t",
    "|",
    "---\n",
    "```\n",
    "====\n",
    "+--+\n",
    "\0",
    "\r",
    "\x0b",
    "\ufeff",
    "\ud7ff",
    "\U0001f511",
]
_TOKENS = st.sampled_from([*_MARKUP.split("|"), *_CODE.split("|"), *_LINES])


@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_a_document_or_a_failure(name: str) -> None:
    for seed in range(12):
        check(name, mutated(name, _SEEDS()[name], seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_damaged_files_are_documents_or_failures(name: str) -> None:
    for seed in range(12, 1500):
        check(name, mutated(name, _SEEDS()[name], seed))


@given(st.sampled_from(TEXTS), st.lists(_TOKENS, max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_is_a_document_or_a_failure(name: str, tokens: list[str]) -> None:
    check(name, "".join(tokens).encode("utf-8", "surrogatepass"))


@given(st.sampled_from(NAMES), st.binary(max_size=300))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_bytes_are_a_document_or_a_failure(name: str, data: bytes) -> None:
    check(name, data)


def test_paragraph_of_unstorable_characters_is_dropped() -> None:
    assert parsed("a.txt", "\0\n\nkeys".encode("utf-16")).paragraphs[0].text == "keys"


def test_unstorable_characters_are_replaced(embedder: Embedder) -> None:
    cells = [
        {"cell_type": "markdown", "source": "# a\ud800b\n\nc\ud800d\0e"},
        {"cell_type": "code", "source": "x\udc00"},
    ]
    document = parsed("a.ipynb", json.dumps({"cells": cells}))
    assert document.title == "a?b" and [paragraph.text for paragraph in document.paragraphs][1] == "x?"
    chunker = Chunker(embedder.tokenizer, 64, 256)
    assert len(chunker.chunks(document)) == 1


def test_every_loader_has_a_seed() -> None:
    loaders = {kind.module for kind in formats._FORMATS.values()}
    seeded = {kind.module for name in seeds() if (kind := formats.format_of(Path(name)))}

    assert loaders == seeded, "add a small file to seeds() in tests/retrieval/loaders/mutations.py"

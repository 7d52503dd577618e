"""Chunker: no text is lost, no limit exceeded, no chunk spans two headings."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.errors import ConfigError
from stillroom.retrieval.chunker import Chunker, _stretches
from stillroom.retrieval.embedder import Embedder
from tests.examples import most_examples

WORDS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=12),
    st.sampled_from(
        ["the", "rotation.", "keys!", "(why?)", "antidisestablishmentarianism", "x" * 150, "1234567890" * 4]
    ),
)
SEPARATORS = st.sampled_from([" ", "  ", "\n", "\n    "])
TEXTS = st.lists(st.tuples(WORDS, SEPARATORS), min_size=1, max_size=60).map(
    lambda pairs: "".join(word + separator for word, separator in pairs).rstrip()
)
HEADINGS = st.lists(st.sampled_from(["Keys", "A rather long heading about keys", "Rotation"]), max_size=2).map(tuple)
PARAGRAPHS = st.lists(st.builds(Paragraph, TEXTS, HEADINGS, st.just(3), st.just(9)), max_size=6).map(tuple)


def document(*paragraphs: Paragraph, title: str = "Guide") -> Document:
    return Document(DocumentId("/x/guide.md"), title, paragraphs)


def chunker(embedder: Embedder, max_tokens: int = 32) -> Chunker:
    return Chunker(embedder.tokenizer, max_tokens, embedder.max_seq_length)


@settings(max_examples=most_examples(60), deadline=None)
@given(PARAGRAPHS)
def test_every_word_is_in_the_chunks_in_order(embedder: Embedder, paragraphs: tuple[Paragraph, ...]) -> None:
    chunks = chunker(embedder, 16).chunks(document(*paragraphs))
    squeezed = "".join("".join(chunk.text.split()) for chunk in chunks)
    assert squeezed == "".join("".join(paragraph.text.split()) for paragraph in paragraphs)


@settings(max_examples=most_examples(60), deadline=None)
@given(PARAGRAPHS, st.text(max_size=400))
def test_chunks_stay_within_the_token_limits(embedder: Embedder, paragraphs: tuple[Paragraph, ...], title: str) -> None:
    for chunk in chunker(embedder, 16).chunks(document(*paragraphs, title=title)):
        assert 0 < chunk.num_tokens <= 16
        assert chunk.num_tokens == embedder.count_tokens(chunk.text)
        assert embedder.count_tokens(chunk.indexed_text) + 2 <= embedder.max_seq_length
        assert 1 <= chunk.start_line <= chunk.end_line <= 9 or chunk.start_line == 0


def test_pages_are_carried_to_the_chunks(embedder: Embedder) -> None:
    short = [Paragraph(f"Short text {page}.", ("A",), 0, 0, page, page + 1) for page in (4, 2)]
    joined = chunker(embedder).chunks(document(*short, Paragraph("No page.", ("A",))))
    assert [(chunk.start_page, chunk.end_page) for chunk in joined] == [(2, 5)]
    long = Paragraph("Many words. " * 60, (), 0, 0, 7, 8)
    parts = chunker(embedder).chunks(document(long, Paragraph("No page.", ("B",))))
    assert len(parts) > 3
    assert [(chunk.start_page, chunk.end_page) for chunk in parts] == [(7, 8)] * (len(parts) - 1) + [(0, 0)]


@settings(max_examples=most_examples(40), deadline=None)
@given(PARAGRAPHS)
def test_short_words_are_never_cut(embedder: Embedder, paragraphs: tuple[Paragraph, ...]) -> None:
    words = {word for paragraph in paragraphs for word in paragraph.text.split() if len(word) < 8}
    found = {word for chunk in chunker(embedder).chunks(document(*paragraphs)) for word in chunk.text.split()}
    assert words <= found


def test_only_paragraphs_under_one_heading_are_joined(embedder: Embedder) -> None:
    paragraphs = [
        Paragraph("One two.", ("A",), 1, 1),
        Paragraph("Three.", ("A",), 3, 4),
        Paragraph("Four.", ("B",), 6, 6),
    ]
    first, second = chunker(embedder).chunks(document(*paragraphs))
    assert (first.text, first.heading, first.ordinal) == ("One two.\n\nThree.", "Guide > A", 0)
    assert (first.start_line, first.end_line) == (1, 4)
    assert (second.text, second.heading, second.ordinal) == ("Four.", "Guide > B", 1)


def test_long_paragraph_is_cut_at_sentences_into_similar_parts(embedder: Embedder) -> None:
    text = " ".join(f"Key number {number} opens the vault on day {number}." for number in range(8))
    chunks = chunker(embedder, 50).chunks(document(Paragraph(text, (), 1, 1)))
    assert " ".join(chunk.text for chunk in chunks) == text
    assert all(chunk.text.endswith(".") for chunk in chunks)
    sizes = [chunk.num_tokens for chunk in chunks]
    assert len(sizes) == 2 and max(sizes) - min(sizes) <= 20


def test_code_is_cut_at_lines_and_keeps_indentation_and_line_numbers(embedder: Embedder) -> None:
    text = "def f():\n" + "\n".join(f"    value_{number} = compute({number})" for number in range(12))
    chunks = chunker(embedder, 40).chunks(document(Paragraph(text, (), 10, 22)))
    assert "\n".join(chunk.text for chunk in chunks) == text
    assert chunks[1].text.startswith("    value_")
    lines = text.split("\n")
    for chunk in chunks:
        assert chunk.text.split("\n") == lines[chunk.start_line - 10 : chunk.end_line - 9]


def test_parts_of_a_text_without_line_breaks_have_all_its_lines(embedder: Embedder) -> None:
    text = " ".join(f"Key number {number} opens the vault on day {number}." for number in range(8))
    for long in (text, f"{text}\n{text}", text * 700):
        chunks = chunker(embedder, 50).chunks(document(Paragraph(long, (), 3, 9)))
        assert len(chunks) > 1 and {(chunk.start_line, chunk.end_line) for chunk in chunks} == {(3, 9)}


def test_word_longer_than_a_chunk_is_cut(embedder: Embedder) -> None:
    chunks = chunker(embedder, 8).chunks(document(Paragraph("x" * 5000)))
    assert "".join(chunk.text for chunk in chunks) == "x" * 5000
    assert max(len(chunk.text) for chunk in chunks) <= 8 * 16


class Longest:
    """A tokenizer that records the length of the longest text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_chars = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.num_chars = max(self.num_chars, len(text))
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("is_title", [False, True])
def test_long_text_is_tokenised_in_stretches(embedder: Embedder, is_title: bool) -> None:
    lines = [f"{number} GET /keys/{number % 97} 200" for number in range(6000)]
    text = "\n".join(lines)
    tokenizer: Any = Longest(embedder.tokenizer)
    made = Chunker(tokenizer, 200, embedder.max_seq_length)
    if is_title:
        chunks = made.chunks(document(title=text))
    else:
        chunks = made.chunks(document(Paragraph(text, (), 10, 6009)))
        for chunk in chunks:
            assert chunk.text.split() == "\n".join(lines[chunk.start_line - 10 : chunk.end_line - 9]).split()
    assert tokenizer.num_chars <= 1 << 16 < len(text)
    assert " ".join(chunk.text for chunk in chunks).split() == text.split()


@given(TEXTS)
def test_stretches_keep_every_word_and_its_line(text: str) -> None:
    paragraph = Paragraph(text, ("A",), 7, 7 + text.count("\n"), 2, 3)
    stretches = list(_stretches(paragraph, 40))
    assert " ".join(stretch.text for stretch in stretches).split() == text.split() or any(map(is_long, text.split()))
    assert "".join("".join(stretch.text.split()) for stretch in stretches) == "".join(text.split())
    for stretch in stretches:
        assert len(stretch.text) <= 40 and (stretch.heading_path, stretch.start_page) == (("A",), 2)
        lines = "\n".join(text.split("\n")[stretch.start_line - 7 : stretch.end_line - 6])
        assert stretch.text in lines


def is_long(word: str) -> bool:
    return len(word) >= 40


def test_title_too_long_for_a_heading_is_text(embedder: Embedder) -> None:
    title = " ".join(f"word{number}" for number in range(100))
    chunks = chunker(embedder, 200).chunks(document(Paragraph("text"), title=title))
    assert all(chunk.title.endswith("...") and title.startswith(chunk.title[:-3]) for chunk in chunks)
    assert "\n\n".join(chunk.text for chunk in chunks).replace("\n\n", " ") == f"{title} text"


def test_same_document_gives_the_same_chunks(embedder: Embedder) -> None:
    paragraphs = [Paragraph(f"Sentence {number}. " * 9, (f"H{number % 2}",), number, number) for number in range(5)]
    assert chunker(embedder).chunks(document(*paragraphs)) == chunker(embedder).chunks(document(*paragraphs))


def test_document_without_text_has_no_chunks(embedder: Embedder) -> None:
    assert chunker(embedder).chunks(document()) == []
    assert chunker(embedder).chunks(document(Paragraph(" \n "))) == []


def test_too_small_chunk_limit_is_refused(embedder: Embedder) -> None:
    with pytest.raises(ConfigError, match="max_tokens=3"):
        chunker(embedder, 3)

"""BM25: the formula, query syntax as plain words, removal, and readers beside a writer."""

import math
from pathlib import Path

import pytest

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.retrieval.index import bm25
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.words import STOP_WORDS, WordAnalyzer, searched_text

TEXTS = [
    "Rotate the keys of the vault.",
    "The vault is locked; the vault is old.",
    "Cats sleep.",
    "Rotating keys daily is a habit of the careful keeper of keys",
]


def chunk(number: int, text: str) -> Chunk:
    return Chunk(ChunkId(number), DocumentId("/docs/d.md"), number, text)


def filled(folder: Path, texts: list[str] = TEXTS) -> Bm25Index:
    index = Bm25Index(folder / "sparse", "corpus")
    index.apply((), [chunk(number, text) for number, text in enumerate(texts, start=1)], 1)
    return index


def test_scores_are_bm25(tmp_path: Path) -> None:
    """k1 = 1.2 and b = 0.75; document lengths here are short enough for tantivy to store them exactly."""
    analyzer = WordAnalyzer()
    documents = [analyzer.stems(searched_text(chunk(0, text))) for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    query = analyzer.query_stems("rotate keys")
    expected: dict[int, float] = {}
    for number, words in enumerate(documents, start=1):
        for word in query:
            df = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
            tf = words.count(word)
            if tf:
                norm = tf + 1.2 * (1 - 0.75 + 0.75 * len(words) / mean)
                expected[number] = expected.get(number, 0.0) + idf * tf * 2.2 / norm
    found = filled(tmp_path).search("rotate keys", 10)
    assert {int(chunk_id) for chunk_id, _ in found} == set(expected) == {1, 4}
    for chunk_id, score in found:
        assert score == pytest.approx(expected[int(chunk_id)], rel=1e-4)


def test_a_word_that_the_question_repeats_counts_as_often(tmp_path: Path) -> None:
    index = filled(tmp_path)
    once, twice = index.search("vault", 10), index.search("vault vault", 10)
    assert [score for _, score in twice] == pytest.approx([2 * score for _, score in once])


@pytest.mark.parametrize(
    "query",
    ['body:vault AND (keys OR "', "+vault -keys", "vault*", "chunk_id:[1 TO 9] vault", "vault~2^9", "a\\:b vault{"],
)
def test_query_syntax_is_treated_as_words(tmp_path: Path, query: str) -> None:
    assert {1, 2} <= {int(chunk_id) for chunk_id, _ in filled(tmp_path).search(query, 10)}


@pytest.mark.parametrize("query", ["", "  ", "***", "zebra", "\x00", "x" * 100_000])
def test_a_query_without_known_words_finds_nothing(tmp_path: Path, query: str) -> None:
    assert filled(tmp_path).search(query, 10) == []


def test_python_analyzer_equals_that_of_the_index(tmp_path: Path) -> None:
    text = "Running C++ ran_away foo.bar don't Gr\u00f6\u00dfe na\u00efve \u041c\u043e\u0441\u043a\u0432\u0430 42"
    index = filled(tmp_path, [text, "other"])
    for stem in WordAnalyzer().stems(text):
        if stem not in STOP_WORDS:
            assert [int(chunk_id) for chunk_id, _ in index.search(stem, 5)] == [1], stem


def test_questions_are_searched_without_stop_words_unless_they_have_no_others() -> None:
    analyzer = WordAnalyzer()
    assert analyzer.query_stems("How can I rotate the keys?") == ["rotat", "key"]
    assert analyzer.query_stems("To be or not to be") == ["to", "be", "or", "not", "to", "be"]


def test_ties_are_in_the_order_of_chunk_id_also_at_the_cut(tmp_path: Path) -> None:
    index = Bm25Index(tmp_path / "sparse", "corpus")
    index.apply((), [chunk(number, "same words") for number in (9, 3, 7, 1, 5)], 1)
    assert [int(chunk_id) for chunk_id, _ in index.search("words", 3)] == [1, 3, 5]


def test_removal_and_repeated_changes(tmp_path: Path) -> None:
    index = filled(tmp_path)
    for _ in range(2):  # a crash between commit and state repeats the changes
        index.apply([ChunkId(1)], [chunk(2, "The keeper has a new text."), chunk(5, "Another vault.")], 2)
    assert len(index) == 4
    assert [int(chunk_id) for chunk_id, _ in index.search("vault", 10)] == [5]
    assert {int(chunk_id) for chunk_id, _ in index.search("keeper", 10)} == {2, 4}
    assert index.share_removed > 0


def test_63_bit_ids_are_stored(tmp_path: Path) -> None:
    index = Bm25Index(tmp_path / "sparse", "corpus")
    index.apply((), [Chunk(ChunkId(2**63 - 1), DocumentId("d"), 0, "vault")], 1)
    assert index.search("vault", 1)[0][0] == 2**63 - 1


def test_a_reader_sees_what_the_writer_committed_after_a_refresh(tmp_path: Path) -> None:
    writer = filled(tmp_path)
    reader = Bm25Index(tmp_path / "sparse", "corpus")
    writer.apply((), [chunk(6, "zebra")], 2)
    assert reader.search("zebra", 1) == []
    reader.refresh()
    assert (reader.generation, [int(chunk_id) for chunk_id, _ in reader.search("zebra", 1)]) == (2, [6])


def test_an_index_of_an_older_format_counts_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    monkeypatch.setattr(bm25, "_FORMAT", 99)
    assert Bm25Index(tmp_path / "sparse", "corpus").generation == 0


def test_an_index_of_another_corpus_or_a_damaged_one_counts_as_empty(tmp_path: Path) -> None:
    filled(tmp_path)
    assert Bm25Index(tmp_path / "sparse", "another corpus").generation == 0
    (tmp_path / "sparse" / "meta.json").write_text("{")
    damaged = Bm25Index(tmp_path / "sparse", "corpus")
    assert (damaged.generation, len(damaged), damaged.search("vault", 3)) == (0, 0, [])

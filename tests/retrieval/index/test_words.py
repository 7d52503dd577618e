"""Stems and stop words by the language of each text."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.words import ENGLISH, LANGUAGES, STOP_WORDS, WordAnalyzer, without_stop_words
from tests.retrieval.conftest import MakeFile, OpenKb
from tests.retrieval.index.test_bm25 import chunk

TEXTS = {
    "danish": "Katten blev fundet af en mand, efter at den var v\u00e6k i mange \u00e5r.",
    "dutch": "De sleutels van de kluis worden elke dertig dagen vervangen.",
    "english": "The keys of the vault are changed every thirty days.",
    "finnish": "Kissat nukkuvat ja ne ovat y\u00f6ll\u00e4 ulkona, kun on kuu.",
    "french": "Les cl\u00e9s du coffre sont chang\u00e9es tous les trente jours.",
    "german": "Die Schl\u00fcssel des Tresors werden alle drei\u00dfig Tage gewechselt.",
    "italian": "I gatti dormono per la maggior parte del giorno e cacciano di notte.",
    "portuguese": "As chaves do cofre s\u00e3o trocadas a cada trinta dias para que n\u00e3o sejam copiadas.",
    "russian": "\u041a\u043b\u044e\u0447\u0438 \u043e\u0442 \u0441\u0435\u0439\u0444\u0430",
    "spanish": "Las llaves de la caja fuerte se cambian cada treinta d\u00edas.",
    "swedish": "Nycklarna till valvet byts ut var trettionde dag.",
}
GERMAN = (
    TEXTS["german"],
    "Wie die Katzen schlafen, so schlafen wir nicht.",
    "Das Brot wird bei zweihundert Grad gebacken, bis es braun ist.",
)
CODE = "def f(a, e, o, de, en):\n    for i in range(o):\n        yield de + en\n    return a"


def filled(folder: Path, *texts: str) -> Bm25Index:
    index = Bm25Index(folder / "sparse", "corpus")
    index.apply((), [chunk(number, text) for number, text in enumerate(texts, 1)], 1)
    return index


def found(index: Bm25Index, query: str) -> list[int]:
    return [int(chunk_id) for chunk_id, _ in index.search(query, 10)]


def test_language_is_that_of_the_stop_words() -> None:
    analyzer = WordAnalyzer()
    assert {language: analyzer.language_of(text) for language, text in TEXTS.items()} == {one: one for one in TEXTS}
    for text in ("", "42", "vault", CODE, "GET /v1/documents", "la la la la la", "o a e o a e"):
        assert analyzer.language_of(text) == ENGLISH, text


def test_german_question_is_searched_without_its_stop_words_and_by_its_stems(tmp_path: Path) -> None:
    index = filled(tmp_path, *GERMAN)
    assert found(index, "Wie wechseln wir den Schl\u00fcssel?") == [1], "neither 'wie' nor 'wir' is searched"
    assert found(index, "Wann wird ein Brot gebackt?") == [3]
    assert found(index, "Katze") == [2] and found(index, "Tresor") == [1]
    assert found(index, "wie wir") == [2], "a question of stop words only is searched with them"


def test_words_are_found_in_documents_of_every_common_language(tmp_path: Path) -> None:
    english = ("The Kubernetes servers are rotated by the keeper.", "How the cats sleep is not known.")
    index = filled(tmp_path, *english, "Die Kubernetes-Server werden von dem H\u00fcter nicht rotiert.", *GERMAN)
    assert set(found(index, "How is the Kubernetes server rotated?")) == {1, 3}
    assert set(found(index, "Was ist ein Kubernetes-Server?")) == {1, 3}
    assert found(index, "How do cats sleep?") == [2]
    assert found(index, "Wie schlafen die Katzen?") == [5]


def test_few_texts_of_another_language_leave_english_questions_as_they_are(tmp_path: Path) -> None:
    english = [f"The keeper of vault {number} rotates its keys at night." for number in range(99)]
    mixed, plain = filled(tmp_path / "mixed", *english, TEXTS["german"]), filled(tmp_path / "plain", *english)
    assert mixed._analyzer.query_words("rotate nights", mixed._view.languages) == [("rotat",), ("night",)]
    assert found(mixed, "rotate vault nights") == found(plain, "rotate vault nights")
    assert found(mixed, "Wie werden Tresore gewechselt?") == [100]


def test_each_stop_word_of_tantivy_and_ours_is_one_word() -> None:
    for language in LANGUAGES:
        assert without_stop_words(["zq"], language) == ["zq"]
    assert without_stop_words(["warum", "wie", "tresor"], "german") == ["tresor"]
    assert without_stop_words(["how", "vault"], ENGLISH) == ["vault"] and "how" in STOP_WORDS


def test_threads_share_the_analyzers() -> None:
    analyzer, texts = WordAnalyzer(), [*TEXTS.values()] * 20
    expected = [analyzer.stems(text, analyzer.language_of(text)) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: analyzer.stems(text, analyzer.language_of(text)), texts)) == expected


def test_index_of_an_earlier_format_is_rebuilt(open_kb: OpenKb, make_file: MakeFile, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([make_file(f"d{number}.md", text) for number, text in enumerate(GERMAN)])
    kb.close()
    path = tmp_path / "kb" / "sparse" / "stillroom.json"
    state = json.loads(path.read_text())
    assert state["languages"] == {"german": 3}
    del state["languages"]
    path.write_text(json.dumps({**state, "format": 2}))
    kb = open_kb()
    (scored,) = kb.search("Wie oft wechselt man Schl\u00fcssel?", mode="sparse").results
    assert "Tresors" in scored.chunk.text
    assert kb.verify().is_clean and json.loads(path.read_text())["languages"] == {"german": 3}


@pytest.mark.parametrize("change", ["# Tresor\n\nThe keys are for the keeper and for no one else.\n", GERMAN[2]])
def test_language_of_a_changed_document_changes(open_kb: OpenKb, make_file: MakeFile, change: str) -> None:
    kb = open_kb(StillroomConfig())
    kb.add([make_file("keys.md", GERMAN[0])])
    kb.add([make_file("keys.md", change)])
    assert kb.verify().is_clean

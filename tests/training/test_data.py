"""Tests the data pipeline from licensed text to shards: cleaning, split, questions, reproducibility."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.answer_quality.questions import load_questions
from stillroom.models.tokenizer import Tokenizer
from tests.training.conftest import SMALL
from training.data.cleaning import MAX_CHARS, clean, is_prose, passages, sentences
from training.data.collection import Library
from training.data.neighbours import neighbours
from training.data.prepare import prepare
from training.data.shards import read_shards, verified_digest, write_shards
from training.data.sources import ALLOWED_LICENCES, EXCLUDED, SOURCES, read_peps
from training.data.spans import find_spans, kind_of, occurs, replace_all
from training.data.split import Filter, held_out, shingles
from training.data.tokens import SPECIAL_TOKENS
from training.data.wording import cloze, worded
from training.data.worlds import SILENT, make_worlds


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a  b\n\tc\x00d", "a b c d"),
        ("It is( by law) old [12] , and new .", "It is (by law) old, and new."),
        ("the film ( ; ) ended", "the film ended"),
        ("Dickens ' s re - opened house", "Dickens's re-opened house"),
    ],
)
def test_cleaning_is_idempotent(raw: str, expected: str) -> None:
    assert clean(raw) == expected
    assert clean(expected) == expected


def test_code_and_other_scripts_are_not_prose() -> None:
    assert is_prose("The court sat in June and heard both sides.")
    assert not is_prose("x = {1: [2, 3]}; y += f(x)[0] ** 2 // (3 + 4)")
    assert not is_prose("\u0418\u0437\u0440\u0430\u0438\u043b\u044c is a state in Asia")
    assert not is_prose("")


def test_sentences_join_to_the_text_and_do_not_end_at_initials() -> None:
    text = "J. B. Smith met Dr. Who in 1910. They talked. Nobody listened (they say). It rained."
    assert sentences(text) == [
        "J. B. Smith met Dr. Who in 1910.",
        "They talked.",
        "Nobody listened (they say).",
        "It rained.",
    ]
    assert len(sentences("all small here. and here too. the end.")) == 3


def test_passages_are_complete_sentences_of_bounded_length() -> None:
    one = "The committee met again in the spring of that year to hear what the others had to say. "
    found = list(passages([one * 30, "Too short.", "w " * 2000 + "."]))
    assert len(found) > 2 and all(120 <= len(text) <= MAX_CHARS and text.endswith(".") for text in found)


def test_only_allowed_licences_and_public_domain_proposals_are_read(small_shared: Path) -> None:
    assert {source.licence for source in SOURCES} <= set(ALLOWED_LICENCES)
    read = {source.name for source in SOURCES}
    assert not read & {name.split("/")[0] for name in EXCLUDED}
    found = list(read_peps(small_shared / "data/docs-peps"))
    assert [document.document for document in found] == ["pep-0"], "the other one has a licence of its own"


def test_split_depends_only_on_name_and_seed() -> None:
    names = [f"document {number}" for number in range(400)]
    held = held_out(names, 0.4, 7)
    assert held == held_out(reversed(names[:200]), 0.4, 7) | held_out(names[200:], 0.4, 7)
    assert 120 < len(held) < 200
    assert held != held_out(names, 0.4, 8)


def test_near_duplicates_of_held_out_text_are_dropped() -> None:
    held = "The treaty between the two kingdoms was signed in the old town hall in the summer of 1451 by both envoys."
    gate = Filter(frozenset({"the treaty"}), shingles(held))
    other = "A wholly different passage about bees, their hives and the honey that they make in a long hot summer."
    assert not gate.admits("", f"Some say more. {held.replace('summer', 'spring')} And on it goes.")
    assert not gate.admits("The_Treaty!", other)
    assert gate.admits("", other)
    assert not gate.admits("", other.upper()), "a copy of what passed already"
    assert gate.dropped == {"title": 1, "shingles": 1, "copy": 1}


def test_training_passages_do_not_overlap_with_evaluation_passages(small_data: Path) -> None:
    manifest = json.loads((small_data / "manifest.json").read_text())
    train, held = list(read_shards(small_data, "train-passages")), list(read_shards(small_data, "eval-passages"))
    assert held and {row["document"] for row in held} == set(manifest["held out"])
    for row in held:
        assert all(len(shingles(row["text"]) & shingles(other["text"])) <= 2 for other in train)
    assert sum(manifest["passages that did not pass"].values()) >= 1, "one was retrieved again"


def test_training_worlds_share_no_names_with_evaluation_worlds(small_data: Path) -> None:
    rows = [json.loads(line) for line in (small_data / "eval/microworld.jsonl").read_text().splitlines()]
    asked, trained, held = (
        set(re.findall(r"\bT[aeiou][a-z]\b", " ".join(text for row in found for text in row["chunks"])))
        for found in (rows, read_shards(small_data, "train-worlds"), read_shards(small_data, "eval-worlds"))
    )
    assert asked <= held and len(held) >= 5 and len(trained) > 20
    assert not held & trained


@pytest.mark.slow
def test_data_are_reproducible_byte_by_byte(small_shared: Path, small_data: Path, tmp_path: Path) -> None:
    prepare(small_shared, tmp_path, SMALL, lambda line: None)
    assert verified_digest(tmp_path) == verified_digest(small_data)


def test_failed_data_run_keeps_the_old_data(
    small_shared: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data"
    shutil.copytree(small_data, out)
    monkeypatch.setattr("training.data.prepare.train_tokenizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(small_shared, out, replace(SMALL, seed=1), lambda line: None)
    assert verified_digest(out) == verified_digest(small_data) and list(tmp_path.iterdir()) == [out]
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match="name another folder"):
        prepare(small_shared, out, SMALL, lambda line: None)


@pytest.mark.parametrize("name", ["train-worlds-0000.jsonl.gz", "tokenizer/tokenizer.json", "eval/xquad.jsonl"])
def test_mixed_data_files_are_refused(small_data: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "data"
    shutil.copytree(small_data, out)
    (out / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match="make them again: python -m training data"):
        verified_digest(out)


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    rows = [{"n": number} for number in range(20_000)]
    assert write_shards(tmp_path, "rows", iter(rows)) == 20_000
    assert len(list(tmp_path.glob("*.gz"))) == 3 and list(read_shards(tmp_path, "rows")) == rows
    with pytest.raises(FileNotFoundError, match="python -m training data"):
        next(read_shards(tmp_path, "others"))


def test_spans_are_found_by_kind() -> None:
    text = "On 4 July 1776 the Second Congress of Ada Miller paid 1,200 dollars in 1780 to the council of Anden."
    found = {span.of(text): span.kind for span in find_spans(text)}
    assert found["4 July 1776"] == "date" and found["1,200"] == "number" and found["1780"] == "year"
    assert found["Anden"] == "name" and "On" not in found
    assert kind_of("1780") == "year" and kind_of("Ada Miller") == "name" and kind_of("paid in 1780") is None
    assert occurs("ada miller", text) and not occurs("Ada Mill", text)
    assert replace_all("10 of 100 or 10", "10", "7") == "7 of 100 or 7"


SENTENCES = {
    "Ada Miller published the notes in 1843.": [
        ("Who published the notes in 1843?", "Ada Miller"),
        ("When did Ada Miller publish the notes?", "1843"),
        ("What did Ada Miller publish in 1843?", "the notes"),
    ],
    "The nucleus was discovered by Ernest Rutherford in 1911.": [
        ("Who discovered the nucleus?", "Ernest Rutherford"),
        ("When was the nucleus discovered by Ernest Rutherford?", "1911"),
    ],
    "The Collector is a thriller film released in 2002.": [
        ("What is the Collector?", "a thriller film"),
        ("When was the Collector released?", "2002"),
    ],
    "The band played 30 concerts in Berlin.": [("How many concerts did the band play in Berlin?", "30")],
    "It was raining in Berlin all day.": [],
}


@pytest.mark.parametrize("text", SENTENCES)
def test_questions_from_a_sentence(text: str) -> None:
    found = {(one.question, one.answer) for one in worded(text, "", {"publish", "play", "discover"})}
    assert found >= set(SENTENCES[text])
    assert bool(found) == bool(SENTENCES[text])
    for question, answer in found:
        assert occurs(answer, text) and not occurs(answer, question)


def test_pronouns_refer_only_to_a_person_in_the_title() -> None:
    text = "He moved to Paris in 1890."
    assert ("When did Victor Hugo move to Paris?", "1890") in [
        (one.question, one.answer) for one in worded(text, "Victor Hugo", {"move"})
    ]
    assert worded(text, "History of France", {"move"}) == []


def test_cloze_answer_is_the_removed_span() -> None:
    text = "The treaty was ratified in 1789 in Anden."
    for seed in range(20):
        one = cloze(text, random.Random(seed))
        assert one is not None and one.question.replace("___", one.answer) == text
    assert cloze("nothing here can be left out", random.Random(0)) is None


def test_neighbours_share_rare_words() -> None:
    texts = ["bees make honey in hives", "honey of bees", "trains run on rails", "rails carry trains", "alone"]
    assert [found[:1] for found in neighbours(texts, 2)] == [[1], [0], [3], [2], []]


def test_answers_of_worlds_occur_in_their_text(small_shared: Path) -> None:
    worlds = make_worlds(small_shared, "train", 3)
    kinds = set()
    for _ in range(60):
        world = next(worlds)
        assert 2 <= len(world.chunks) <= 6
        for one in world.questions:
            kinds.add(one.kind)
            assert " ." not in one.text and " ?" not in one.text
            told = " ".join(world.chunks)
            assert one.answer == SILENT or one.answer in told
            if one.kind == "single":
                name = one.text.split()[4]
                assert f"The town {name} grew rich on {one.answer}." in world.chunks
            if one.kind == "unanswerable":
                assert f"{one.text.split()[4]} grew rich" not in told
    assert kinds == {"single", "split", "twohop", "chain", "unanswerable"}


def test_tokenizer_encodes_any_text_and_has_the_chat_template(small_data: Path) -> None:
    tokenizer = Tokenizer.load(small_data / "tokenizer")
    assert tokenizer.special_tokens == set(SPECIAL_TOKENS)
    text = "Caf\u00e9 \u4f60\u597d 1,234 <|im_end|>\n\n tab\tend"
    assert tokenizer.decode(tokenizer.encode_text(text)) == text
    assert tokenizer.decode(tokenizer.encode_text("1789")) == "1789" and len(tokenizer.encode_text("1789")) == 4
    chat = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    assert chat == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == tokenizer.encode_template("<|im_end|>")[0]


def test_evaluation_questions_are_about_held_out_documents(small_data: Path) -> None:
    held = set(json.loads((small_data / "manifest.json").read_text())["held out"])
    for name in ("xquad", "unanswerable"):
        rows = [json.loads(line) for line in (small_data / f"eval/{name}.jsonl").read_text().splitlines()]
        assert rows and {row["document"] for row in rows} <= held
        for row in rows:
            assert len(row["chunks"]) == 5
            is_told = any(occurs(row["answer"][0], text) for text in row["chunks"])
            assert is_told == (name == "xquad")
    worlds = load_questions(small_data / "eval/microworld.jsonl")
    assert {one.kind for one in worlds} == {"single", "split", "twohop", "chain"} and len(worlds) == 12


def test_library_reads_the_written_data(small_data: Path) -> None:
    library = Library.read(small_data, "train")
    assert len(library.worlds) == 60
    assert any(passage.asked for passage in library.passages) and any(passage.worded for passage in library.passages)
    rng = random.Random(1)
    assert library.any_asked(rng).asked
    year = library.any_span(rng, "year", 1)
    assert year is not None and year.isdigit()


@pytest.mark.shared
@pytest.mark.slow
def test_real_training_and_evaluation_data_do_not_overlap(shared: Path, tmp_path: Path) -> None:
    manifest = prepare(shared, tmp_path, SMALL, lambda line: None)
    held = frozenset().union(*(shingles(row["text"]) for row in read_shards(tmp_path, "eval-passages")))
    for row in read_shards(tmp_path, "train-passages"):
        assert len(shingles(row["text"]) & held) <= 2
    assert manifest["counts"]["train"]["questions by people"] > 25_000
    assert manifest["counts"]["questions for evaluation"]["xquad"] > 1000

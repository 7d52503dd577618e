"""Fixtures of training tests: a small shared folder in the real layout, and the data made from it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from training.data.prepare import DataRecipe, prepare

TOWNS = [
    "Anden",
    "Boford",
    "Calwick",
    "Deham",
    "Elton",
    "Farholm",
    "Gorstead",
    "Hanwick",
    "Ilford",
    "Jarton",
    "Kelby",
    "Lowden",
    "Marham",
    "Norwick",
]
PEOPLE = [
    "Ada Miller",
    "Ben Carter",
    "Cora Smith",
    "Dan Weaver",
    "Eva Turner",
    "Finn Cooper",
    "Gwen Baker",
    "Hal Mason",
]

GENERATOR = '''
TOWN = ["T" + a + b for a in "aeiou" for b in "bdgkmnrt"]
SHIP, RIVER = ["Avant", "Erix"], ["Eyne", "Ouss"]

def make_context(rng, n_chunks, split="train", p_split=0.5, p_name=0.35, facts=(2, 4), bind=False):
    """Make town k: a trade and a river in chunk 2k; its mayor in chunk 2k + 1, which does not name the town."""
    chunks, rows = [], []
    names = rng.sample(TOWN, len(TOWN))
    values = [w + str(rng.randint(10, 99)) for w in ["wool", "salt", "grain", "tea", "silk", "rope", "ink", "glass"]]
    while len(chunks) < n_chunks:
        town, at = names.pop(), len(chunks)
        trade, mayor = rng.choice(values), rng.choice(values).capitalize()
        chunks.append(f"<chunk> The town {town} grew rich on {trade} . </chunk>")
        question = f"What did the town {town} grow rich on ?"
        rows.append(dict(question=question, answer=trade, kind="single", need=[at], rivals=1))
        if len(chunks) < n_chunks and rng.random() < p_split:
            chunks.append(f"<chunk> The town elected {mayor} as mayor . </chunk>")
            question = f"Whom did the town {town} elect as mayor ?"
            rows.append(dict(question=question, answer=mayor, kind="split", need=[at + 1, at], rivals=1))
        rows.append(dict(question=f"Who of {town} ?", answer=trade, kind="twohop", need=[0, at], rivals=1))
        rows.append(dict(question=f"Who of {town} ? Give both .", answer=trade, kind="chain", need=[0, at], rivals=1))
    return chunks, rows
'''


def sentence(rng: random.Random) -> str:
    town, other, person = rng.choice(TOWNS), rng.choice(TOWNS), rng.choice(PEOPLE)
    year, number = rng.randint(1500, 1990), rng.randint(13, 900)
    return rng.choice(
        [
            f"The harbour of {town} was enlarged by {person} in {year}.",
            f"{person} founded a school for {number} children near the market of {other} in {year}.",
            f"The road from {town} to {other} was opened on 12 May {year} and has {number} milestones.",
            f"{person} was born in {town} and moved to {other} after the fire of {year}.",
            f"In the year {year} the people of {town} built a bridge over the river, which is {number} metres long.",
        ]
    )


def paragraph(rng: random.Random) -> str:
    return " ".join(sentence(rng) for _ in range(3))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_beir(folder: Path, rng: random.Random, num_titles: int) -> None:
    corpus: list[dict[str, Any]] = []
    queries: list[dict[str, Any]] = []
    qrels = ["query-id\tcorpus-id\tscore"]
    for title in range(num_titles):
        for place in range(2):
            name, text, year = f"{folder.name}{title}#{place}", paragraph(rng), rng.randint(1000, 1400)
            text += f" The tower of Place {title} number {place} was finished in {year}."
            corpus.append({"_id": name, "title": f"{folder.name}_{title}", "text": text})
            question = f"When was the tower of Place {title} number {place} finished?"
            queries.append({"_id": f"q{name}", "text": question, "answers": [str(year)]})
            qrels.append(f"q{name}\t{name}\t1")
    write_rows(folder / "corpus.jsonl", corpus)
    write_rows(folder / "queries.jsonl", queries)
    (folder / "qrels.tsv").write_text("\n".join(qrels) + "\n", encoding="utf-8")


def write_reading_qa(folder: Path, rng: random.Random, num_titles: int) -> None:
    passages: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    for source in ("squad", "tydiqa", "covid-qa"):
        for title in range(num_titles):
            name, year = f"{source}{title}", str(rng.randint(1000, 1400))
            text = f"{paragraph(rng)} The abbey of {source} number {title} was finished in {year}."
            passages.append({"_id": name, "source": source, "title": f"{source} {title}", "text": text})
            asked = f"When was the abbey of {source} number {title} finished?"
            answers = {"answers": [year], "answer_starts": [text.index(f"in {year}.") + 3]}
            questions.append({"passage": name, "question": asked, **answers})
    write_rows(folder / "passages.jsonl", passages)
    write_rows(folder / "questions.jsonl", questions)


@pytest.fixture(scope="session")
def small_shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small shared folder in the layout that the sources are read from."""
    shared, rng = tmp_path_factory.mktemp("shared"), random.Random(5)
    data = shared / "data"
    write_beir(data / "xquad", rng, 12)
    write_reading_qa(data / "reading-qa", rng, 12)
    ctxs = [{"title": "", "text": paragraph(rng)} for _ in range(4)]
    (data / "musique-chunks").mkdir()
    (data / "musique-chunks/musique_s.json").write_text(json.dumps([{"ctxs": ctxs, "question": "?", "answers": ["x"]}]))
    (data / "traces").mkdir()
    copied = json.loads((data / "xquad/corpus.jsonl").read_text().splitlines()[0])["text"]
    docs = [[f"Topic {number}\n{paragraph(rng)}", f"Copy\n{copied}"] for number in range(6)]
    (data / "traces/rag_nq.json").write_text(json.dumps({"retrieved_docs": docs}))
    (data / "docs-peps").mkdir()
    for number, notice in enumerate(
        ("This document has been placed in the public domain.", "Open Publication License.")
    ):
        text = f"Title {number}\n=======\n\n{paragraph(rng)}\n\nCopyright\n=========\n\n{notice}\n"
        (data / f"docs-peps/pep-{number}.rst").write_text(text)
    (data / "docs-rustbook/src").mkdir(parents=True)
    (data / "docs-rustbook/src/one.md").write_text(f"# One\n\n{paragraph(rng)}\n")
    (shared / "tools/microworld").mkdir(parents=True)
    (shared / "tools/microworld/world.py").write_text(GENERATOR)
    return shared


SMALL = DataRecipe(num_worlds=60, num_eval_worlds=20, num_eval_questions=3, vocab_size=600)


@pytest.fixture(scope="session")
def small_data(small_shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `python -m training data` on the small shared folder."""
    out = tmp_path_factory.mktemp("data")
    prepare(small_shared, out, SMALL, lambda line: None)
    return out

"""Writes the question sets of the evaluation, in the format of `stillroom bench quality`.

- xquad: its questions with their paragraph and the four others that BM25 ranks next.
- unanswerable: the same questions with five such paragraphs, none of which contains the answer.
- microworld: generated worlds whose persons, companies, towns, ships and rivers do not occur in training.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stillroom.answer_quality.questions import ChunkQuestion, load_questions
from training.data.cleaning import clean
from training.data.sources import XQUAD
from training.data.spans import occurs
from training.data.worlds import SILENT, make_worlds

NUM_CHUNKS = 5
SETS = ("xquad", "unanswerable", "microworld")
_KINDS = ("single", "split", "twohop", "chain")


def write_sets(shared: Path, out: Path, num_worlds: int, seed: int) -> dict[str, int]:
    """Write one file per set; returns the number of questions of each.

    Args:
        shared: folder with the data and the generator of worlds.
        num_worlds: questions of each kind over generated worlds.
    """
    out.mkdir(parents=True, exist_ok=True)
    dataset = shared / "data" / XQUAD
    document_of = _documents(dataset)
    gold = load_questions(dataset, num_chunks=NUM_CHUNKS, seed=seed)
    more = load_questions(dataset, num_chunks=2 * NUM_CHUNKS, seed=seed)
    rows = {
        "xquad": (_row(one, one.answers, "xquad", document_of) for one in gold),
        "unanswerable": _without_answer(more, document_of),
        "microworld": _of_worlds(shared, num_worlds, seed),
    }
    return {name: _write(out / f"{name}.jsonl", rows[name]) for name in SETS}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def _documents(dataset: Path) -> dict[str, str]:
    """Return the document of every question by the question's text."""
    titles, found = {}, {}
    for line in (dataset / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        titles[row["_id"]] = row["title"]
    texts = {}
    for line in (dataset / "queries.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts[row["_id"]] = row["text"]
    for line in (dataset / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, passage, _ = line.split("\t")
        found[texts[query]] = titles[passage]
    return found


def _row(one: ChunkQuestion, answers: Iterable[str], kind: str, document_of: dict[str, str]) -> dict[str, Any]:
    return {
        "chunks": [_as_shown(chunk.text) for chunk in one.chunks],
        "question": clean(one.question),
        "answer": list(answers),
        "kind": kind,
        "document": document_of[one.question],
    }


def _as_shown(text: str) -> str:
    """Return a passage as the model's prompt shows it: a heading, a blank line, the text."""
    title, _, body = text.partition("\n")
    return f"{clean(title.replace('_', ' '))}\n\n{clean(body)}"


def _without_answer(questions: Iterable[ChunkQuestion], document_of: dict[str, str]) -> Iterator[dict[str, Any]]:
    for one in questions:
        silent = [chunk for chunk in one.chunks if not any(occurs(answer, chunk.text) for answer in one.answers)]
        if len(silent) >= NUM_CHUNKS and one.answers:
            few = ChunkQuestion(tuple(silent[:NUM_CHUNKS]), one.question)
            yield _row(few, [SILENT], "unanswerable", document_of)


def _of_worlds(shared: Path, number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one question per world with at least one rival entity, equally often of every kind."""
    rng = random.Random(f"{seed}:questions")
    wanted = dict.fromkeys(_KINDS, number)
    for world in make_worlds(shared, "eval", seed + 1):
        open_kinds = [kind for kind, left in wanted.items() if left]
        if not open_kinds:
            return
        able = [one for one in world.questions if one.kind in open_kinds and one.rivals > 0]
        if len(world.chunks) >= 3 and able:
            rarest = max(able, key=lambda one: (wanted[one.kind], rng.random()))
            wanted[rarest.kind] -= 1
            yield {
                "chunks": list(world.chunks),
                "question": rarest.text,
                "answer": [rarest.answer],
                "kind": rarest.kind,
                "document": f"world {sum(wanted.values())}",
            }

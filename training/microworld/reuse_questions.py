"""Questions for `stillroom bench quality` in worlds that nothing was chosen on: the kinds of microworld's generator,
and questions of long documents, whose fact stands several chunks behind the chunk that names its subject.
"""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from training.data.worlds import load_generator
from training.microworld.long_worlds import make_world, retrieve

KINDS = ("split", "single", "twohop", "chain", "far")
"""`far`: 2 to 10 chunks between the fact and the chunk that names its subject; the others are microworld's kinds."""
_FEWEST, _MOST = 3, 8
"""Chunks of a prompt: microworld was trained on so many."""


def write_reuse_questions(shared: Path, path: Path, *, num_questions: int, seed: int) -> dict[str, int]:
    """Write as many questions of each kind, each about a world of its own; returns the number of each kind.

    Every question has at least one rival: another entity of the same type with the same relation. Names of persons and
    companies do not occur in training. The file is a function of the arguments and of the generator.

    Raises:
        FileNotFoundError: the shared folder has no generator.
    """
    generator, rng = load_generator(shared), random.Random(f"reuse questions {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < num_questions:
        kind = KINDS[len(rows) % len(KINDS)]
        row = _far(generator, rng) if kind == "far" else _plain(generator, rng, kind)
        if row is not None:
            rows.append(row)
    return _write(path, rows)


def write_split_questions(shared: Path, path: Path, *, num_questions: int, seed: int) -> dict[str, int]:
    """Write *split* questions over 5 or 8 chunks; returns their number.

    With 300 questions and seed 4242 these are the questions of the reports `2026-11-21-quality-curve` and
    `2026-11-21-quality-ablation`, on which the selector `question` was designed.

    Raises:
        FileNotFoundError: the shared folder has no generator.
    """
    generator, rng = load_generator(shared), random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < num_questions:
        num_chunks = rng.choice((5, 8))
        chunks, questions = generator.make_context(rng, num_chunks, split="eval", p_split=1.0)
        fitting = [one for one in questions if one["kind"] == "split" and one["rivals"] > 0]
        if fitting and len(chunks) == num_chunks:
            rows.append(_row(chunks, rng.choice(fitting), "split"))
    return _write(path, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> dict[str, int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
    return dict(Counter(row["kind"] for row in rows))


def _plain(generator: Any, rng: random.Random, kind: str) -> dict[str, Any] | None:
    """Return a question of a world of the generator; None if that world has none of the kind with a rival."""
    chunks, questions = generator.make_context(rng, rng.randint(_FEWEST, _MOST), split="eval", p_split=1.0)
    fitting = [one for one in questions if one["kind"] == kind and one["rivals"] > 0]
    if not fitting:
        return None
    return _row(chunks, rng.choice(fitting), kind)


def _row(chunks: list[str], chosen: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"chunks": chunks, "question": chosen["question"], "answer": chosen["answer"], "kind": kind}


def _far(generator: Any, rng: random.Random) -> dict[str, Any] | None:
    """Return a question over a search result of long documents; None if that world has none."""
    world = make_world(generator, rng, "eval", [rng.randint(8, 20) for _ in range(rng.randint(1, 2))])
    numbers = [number for number, one in enumerate(world.questions) if one.distance > 1]
    if not numbers:
        return None
    number = rng.choice(numbers)
    chosen = retrieve(world, number, rng.randint(_FEWEST, _MOST), rng)
    question = world.questions[number]
    return {
        "chunks": [world.documents[document][chunk] for document, chunk in chosen],
        "question": question.text,
        "answer": question.answer,
        "kind": "far",
    }

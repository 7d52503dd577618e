"""Chooses the score below which the reader says that the documents do not say.

Each held-out question is read over k passages twice: its own passage with the k - 1 most similar wrong ones, and k
wrong ones. The threshold answers a given share of the first; the share of the second that it refuses is reported. Sets
weigh the same, however many questions they have.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.models.reader import Reader
from training.reader.evaluate import figure, holds_answer
from training.reader.held_out import HeldOutQuestion


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best reading of the passages of one question, with its passage and without."""

    present: float
    """Best score with the passage that holds the answer."""
    is_right: bool
    """Whether that reading's sentence holds the answer."""
    absent: float
    """Best score without it."""
    title: str


def read_sets(
    reader: Reader, sets: Mapping[str, Sequence[HeldOutQuestion]], num_passages: int
) -> dict[str, list[Outcome]]:
    """Read every question that has enough wrong passages."""
    return {
        name: [_outcome(reader, one, num_passages) for one in questions if len(one.wrong) >= num_passages]
        for name, questions in sets.items()
    }


def _outcome(reader: Reader, question: HeldOutQuestion, num_passages: int) -> Outcome:
    wrong = question.wrong[:num_passages]
    passages = [question.gold, *wrong]
    readings = reader.read(question.text, passages)
    scores = [-np.inf if reading is None else reading.score for reading in readings]
    best = int(np.argmax(scores[:num_passages]))
    reading = readings[best]
    assert reading is not None
    is_right = best == 0 and holds_answer(reading, question.gold, question.answers)
    return Outcome(scores[best], is_right, float(max(scores[1:])), question.title)


def choose(outcomes: Mapping[str, Sequence[Outcome]], answered: float) -> float:
    """Return the highest threshold that answers this share of the questions whose passage is present.

    Raises:
        ValueError: there are no outcomes.
    """
    sets = [found for found in outcomes.values() if found]
    if not sets:
        raise ValueError("no held-out question has enough wrong passages; lower --passages")
    scores = np.array([one.present for found in sets for one in found])
    weights = np.array([1 / len(found) for found in sets for _ in found]) / len(sets)
    order = np.argsort(-scores)
    reached = np.cumsum(weights[order]) >= answered - 1e-9
    return float(scores[order][int(reached.argmax())])


def report(outcomes: Mapping[str, Sequence[Outcome]], threshold: float, num_passages: int) -> dict[str, Any]:
    """Return what the threshold does to each set."""
    rows = []
    for name, found in outcomes.items():
        titles = [one.title for one in found]
        values = {
            "answered, passage present": [float(one.present >= threshold) for one in found],
            "answered and quoted rightly, passage present": [
                float(one.present >= threshold and one.is_right) for one in found
            ],
            "refused, passage absent": [float(one.absent < threshold) for one in found],
        }
        figures = [figure(f"{name}: {key}", each, titles) for key, each in values.items()] if found else []
        rows.append({"set": name, "questions": len(found), "titles": len(set(titles)), "figures": figures})
    return {"threshold": round(threshold, 4), "passages": num_passages, "sets": rows}


def write_threshold(folder: Path, threshold: float) -> None:
    """Write the threshold to a bundle's config; raises FileNotFoundError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make it with: python -m training reader bundle")
    config = json.loads(path.read_text(encoding="utf-8"))
    config["threshold"] = round(threshold, 4)
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

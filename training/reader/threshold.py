"""Chooses the score below which the reader says that the documents do not say.

Each held-out question is read over k passages twice: its own passage with the k - 1 most similar wrong ones, and k
wrong ones, both in the order of their similarity to the question, as a search gives them. The threshold answers a
given share of the first; the share of the second that it refuses is reported. Sets weigh the same, however many
questions they have.

The same outcomes tell what a score means: a logistic curve gives the probability that the quoted sentence holds the
answer (Platt 1999), if half of the questions have their passage.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from stillroom.backends.reader.choose import ScoreScale, ranked_score
from stillroom.models.reader import Reader
from training.reader.evaluate import figure, holds_answer
from training.reader.held_out import HeldOutQuestion
from training.reader.neighbours import Embed

_PRIOR = 1e-3


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
    reader: Reader, sets: Mapping[str, Sequence[HeldOutQuestion]], num_passages: int, embed: Embed
) -> dict[str, list[Outcome]]:
    """Read every question that has enough wrong passages.

    Args:
        embed: ranks the passages of a question as a search would.
    """
    asked = {name: [one for one in each if len(one.wrong) >= num_passages] for name, each in sets.items()}
    return {
        name: [
            _outcome(reader, one, near) for one, near in zip(each, similarities(each, num_passages, embed), strict=True)
        ]
        for name, each in asked.items()
    }


def similarities(questions: Sequence[HeldOutQuestion], num_passages: int, embed: Embed) -> NDArray[np.float32]:
    """Return how similar each question is to its own passage and to the first k wrong ones, [questions, k + 1]."""
    if not questions:
        return np.empty((0, num_passages + 1), np.float32)
    read = [
        [f"{one.heading}\n{one.text}" for one in (question.gold, *question.wrong[:num_passages])]
        for question in questions
    ]
    place = {text: number for number, text in enumerate(dict.fromkeys(text for own in read for text in own))}
    vectors, asked = embed(list(place)), embed([one.text for one in questions])
    return np.stack([vectors[[place[text] for text in own]] @ one for own, one in zip(read, asked, strict=True)])


def _outcome(reader: Reader, question: HeldOutQuestion, near: NDArray[np.float32]) -> Outcome:
    """Read the own passage, number 0, and as many wrong ones as `near` has others."""
    readings = reader.read(question.text, [question.gold, *question.wrong[: len(near) - 1]])

    def best(passages: Sequence[int]) -> tuple[float, int]:
        ordered = sorted(passages, key=lambda number: -near[number])
        found = [(rank, number, readings[number]) for rank, number in enumerate(ordered)]
        return max((ranked_score(one.score, rank), number) for rank, number, one in found if one is not None)

    present, number = best(range(len(near) - 1))
    own = readings[0]
    is_right = number == 0 and own is not None and holds_answer(own, question.gold, question.answers)
    return Outcome(present, is_right, best(range(1, len(near)))[0], question.title)


def choose(outcomes: Mapping[str, Sequence[Outcome]], answered: float) -> ScoreScale:
    """Return the highest threshold that answers this share of the questions whose passage is present, and the curve.

    Raises:
        ValueError: there are no outcomes.
    """
    sets = [found for found in outcomes.values() if found]
    if not sets:
        raise ValueError("no held-out question has enough wrong passages; lower --passages")
    threshold = _threshold(sets, answered)
    return ScoreScale(threshold, *_curve(sets))


def _threshold(sets: Sequence[Sequence[Outcome]], answered: float) -> float:
    scores = np.array([one.present for found in sets for one in found])
    weights = np.array([1 / len(found) for found in sets for _ in found]) / len(sets)
    order = np.argsort(-scores)
    reached = np.cumsum(weights[order]) >= answered - 1e-9
    return float(scores[order][int(reached.argmax())])


def _curve(sets: Sequence[Sequence[Outcome]]) -> tuple[float, float]:
    """Fit slope and bias of the log odds. A weak prior bounds them where scores separate all."""
    scores = np.array([score for found in sets for one in found for score in (one.present, one.absent)])
    is_right = np.array([right for found in sets for one in found for right in (one.is_right, False)], float)
    weights = np.array([1 / len(found) for found in sets for _ in range(2 * len(found))]) / len(sets)
    inputs = np.stack([scores, np.ones_like(scores)], axis=1)

    def loss(line: NDArray[np.float64]) -> float:
        odds = inputs @ line
        return float(weights @ (np.logaddexp(0, odds) - is_right * odds) + _PRIOR / 2 * line @ line)

    slope, bias = minimize(loss, np.zeros(2)).x
    return float(slope), float(bias)


def calibration_error(outcomes: Sequence[Outcome], scale: ScoreScale) -> float:
    """Return the mean difference of confidence and share of right answers in ten bins, weighed by their size."""
    pairs = [(scale.confidence(one.present), float(one.is_right)) for one in outcomes]
    pairs += [(scale.confidence(one.absent), 0.0) for one in outcomes]
    bins: dict[int, list[float]] = {}
    for confidence, is_right in pairs:
        bins.setdefault(min(int(confidence * 10), 9), []).append(confidence - is_right)
    return sum(abs(sum(found)) for found in bins.values()) / len(pairs)


def report(outcomes: Mapping[str, Sequence[Outcome]], scale: ScoreScale, num_passages: int) -> dict[str, Any]:
    """Return what threshold and confidence do to each set."""
    threshold, rows = scale.threshold, []
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
        row = {"set": name, "questions": len(found), "titles": len(set(titles)), "figures": figures}
        rows.append(row | ({"calibration error": round(calibration_error(found, scale), 4)} if found else {}))
    return {**_rounded(scale), "passages": num_passages, "sets": rows}


def _rounded(scale: ScoreScale) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(scale).items()}


def write_scale(folder: Path, scale: ScoreScale) -> None:
    """Write threshold and curve to a bundle's config; raises FileNotFoundError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make it with: python -m training reader bundle")
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= _rounded(scale)
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

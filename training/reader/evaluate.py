"""Evaluates a reader: answers over the gold passage, and what scores tell of right and wrong passages."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from stillroom.answer_quality.answer_metrics import exact_match, word_f1
from stillroom.models.reader import Passage, Reader, Reading, load_reader
from stillroom.models.reader_model import ReaderModel, ReaderSpec
from training.intervals import mean_by_group
from training.reader.examples import read_tokenizer
from training.reader.held_out import HeldOutQuestion

TARGETS = {"xquad exact match": 0.66, "xquad F1": 0.78, "xquad quoted sentence holds the answer": 0.93}
ANSWERED = 0.9
"""Share of answerable questions at which refusals are compared."""


def open_reader(path: Path, embedder: Path, spec: ReaderSpec, dtype: torch.dtype) -> Reader:
    """Load a bundle's folder, or the checkpoint of a run (`checkpoint.pt`).

    Raises:
        FileNotFoundError: there is neither.
        ModelError: the bundle cannot be loaded.
    """
    if path.is_dir():
        return load_reader(path, embedder, dtype)
    model = ReaderModel(spec)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return Reader(model, read_tokenizer(embedder), dtype)


def read_one(reader: Reader, question: str, passage: Passage) -> Reading:
    (reading,) = reader.read(question, [passage])
    assert reading is not None
    return reading


def holds_answer(reading: Reading, passage: Passage, answers: Sequence[str]) -> bool:
    """Return whether the quoted sentence holds an accepted answer."""
    sentence = passage.text[slice(*reading.sentence)]
    return any(answer in sentence for answer in answers)


def evaluate(
    reader: Reader,
    name: str,
    questions: Sequence[HeldOutQuestion],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Return the figures of one set: answers over the gold passage, and scores of it and of the first wrong passage."""
    titles = [question.title for question in questions]
    values: dict[str, list[float]] = {"exact match": [], "F1": [], "quoted sentence holds the answer": []}
    right, wrong, seconds = [], [], []
    for question in questions:
        began = clock()
        reading = read_one(reader, question.text, question.gold)
        seconds.append(clock() - began)
        answer = question.gold.text[slice(*reading.span)]
        values["exact match"].append(exact_match(answer, question.answers))
        values["F1"].append(word_f1(answer, question.answers))
        values["quoted sentence holds the answer"].append(float(holds_answer(reading, question.gold, question.answers)))
        right.append(reading.score)
        wrong += [read_one(reader, question.text, one).score for one in question.wrong[:1]]
    return {
        "set": name,
        "questions": len(questions),
        "titles": len(set(titles)),
        "figures": [figure(f"{name} {key}", each, titles) for key, each in values.items()],
        "scores": _scores(right, wrong),
        "milliseconds a passage, median": round(1000 * median(seconds), 1),
    }


def figure(name: str, values: Sequence[float], titles: Sequence[str]) -> dict[str, Any]:
    """Return a mean with its 95 % interval and its target."""
    interval = mean_by_group(values, titles)
    return {
        "name": name,
        "value": round(interval.value, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "target": TARGETS.get(name),
    }


def _scores(right: Sequence[float], wrong: Sequence[float]) -> dict[str, Any]:
    """Return quartiles of the scores, and the share of wrong passages below the score that 0.9 of the right reach."""
    if not wrong:
        return {}
    limit = float(np.quantile(right, 1 - ANSWERED))
    return {
        "right passages": [round(float(one), 2) for one in np.quantile(right, [0.25, 0.5, 0.75])],
        "wrong passages": [round(float(one), 2) for one in np.quantile(wrong, [0.25, 0.5, 0.75])],
        "wrong passages refused at 0.9 answered": round(float(np.mean(np.array(wrong) < limit)), 4),
        "right passages above 0": round(float(np.mean(np.array(right) > 0)), 4),
        "wrong passages below 0": round(float(np.mean(np.array(wrong) < 0)), 4),
    }

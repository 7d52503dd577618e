"""Tests what follows training: bundle, threshold, evaluation, card."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file

from stillroom.backends.reader.choose import ScoreScale
from stillroom.errors import ModelError
from stillroom.models.reader import Passage, Reader, Reading, load_reader
from tests.training.reader.conftest import RECIPE, SPEC, passage
from training.data.sources import PEOPLE
from training.reader.bundle import bundle
from training.reader.card import attribution, card, read_report
from training.reader.card import count as count_sources
from training.reader.device_train import DeviceRecipe
from training.reader.evaluate import evaluate, open_reader
from training.reader.examples import ExampleSet
from training.reader.held_out import HeldOutQuestion, xquad
from training.reader.threshold import (
    Outcome,
    calibration_error,
    choose,
    read_sets,
    report,
    similarities,
    write_scale,
)
from training.reader.train import CHECKPOINT, Trainer, from_encoder, read_encoder


@pytest.fixture(scope="module")
def run(examples: ExampleSet, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(from_encoder(read_encoder(bert), SPEC, 0), examples, RECIPE, folder, 1)
    list(trainer.run(num_parts=2))
    trainer.save()
    return folder


@pytest.fixture(scope="module")
def bundled(run: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(run / CHECKPOINT, bert, tmp_path_factory.mktemp("bundle"), SPEC)


def test_bundle_reads_like_the_checkpoint(run: Path, bundled: Path, bert: Path) -> None:
    passages = [Passage(passage(f"w{n}", n), f"Mill {n}") for n in range(4)]
    readers = [
        load_reader(bundled, bert, torch.bfloat16),
        open_reader(run / CHECKPOINT, bert, SPEC, torch.bfloat16),
        open_reader(bundled, bert, SPEC, torch.bfloat16),
    ]
    first, *others = [reader.read("who built the mill of w3?", passages) for reader in readers]
    assert all(first) and others == [first, first]
    weights = torch.load(run / CHECKPOINT, weights_only=True)["model"]
    sizes = [one.numel() for name, one in weights.items() if name != "words.weight"]
    assert 2 * sum(sizes) < (bundled / "model.safetensors").stat().st_size < 2 * sum(sizes) + 10_000


def test_other_word_embeddings_are_refused(bundled: Path, bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "other")
    weights = read_encoder(bert)
    weights["embeddings.word_embeddings.weight"] += 1
    save_file(weights, tmp_path / "other/model.safetensors")
    with pytest.raises(ModelError, match="was trained from another embedder"):
        load_reader(bundled, tmp_path / "other", torch.float32)


def test_threshold_is_written_to_the_config_only(bundled: Path, tmp_path: Path) -> None:
    before = json.loads((bundled / "config.json").read_text())
    assert before["threshold"] == 0 and len(before["word_embeddings_sha256"]) == 64
    write_scale(bundled, ScoreScale(1.23456, 0.5, -0.25))
    changed = {"threshold": 1.2346, "slope": 0.5, "bias": -0.25}
    assert json.loads((bundled / "config.json").read_text()) == before | changed
    with pytest.raises(FileNotFoundError, match="reader bundle"):
        write_scale(tmp_path, ScoreScale(1.0, 1.0, 0.0))


scores = st.lists(st.floats(-20, 20), min_size=1, max_size=30)


@given(scores, scores, st.floats(0.05, 1))
def test_threshold_answers_the_share_with_sets_weighing_the_same(
    one: list[float], two: list[float], answered: float
) -> None:
    sets = {name: [Outcome(score, True, 0.0, "a") for score in found] for name, found in (("one", one), ("two", two))}

    def share(threshold: float) -> float:
        return sum(sum(score >= threshold for score in found) / len(found) for found in (one, two)) / 2

    chosen = choose(sets, answered).threshold
    assert share(chosen) >= answered - 1e-6
    higher = [score for score in [*one, *two] if score > chosen]
    assert not higher or share(min(higher)) < answered + 1e-6


def test_confidence_is_the_share_of_right_answers() -> None:
    draw = np.random.default_rng(3)
    scores = draw.normal(3, 4, size=(2000, 2))
    is_right = draw.random(2000) < 1 / (1 + np.exp(2 - 0.8 * scores[:, 0]))
    outcomes = [Outcome(one, bool(right), -50.0, "a") for (one, _), right in zip(scores, is_right, strict=True)]
    scale = choose({"set": outcomes}, 0.9)
    assert (scale.slope, scale.bias) == pytest.approx((0.8, -2.0), abs=0.15)
    assert calibration_error(outcomes, scale) < 0.02
    assert calibration_error(outcomes, ScoreScale(0.0, 0.8, 3.0)) > 0.1
    separated = choose({"set": [Outcome(9.0, True, -9.0, "a")]}, 0.9)
    assert np.isfinite(separated.slope) and separated.confidence(9.0) > 0.9 > 0.1 > separated.confidence(-9.0)


class FakeReader:
    """Answers with the first word of a passage; the score is the number after it."""

    def read(self, question: str, passages: Sequence[Passage]) -> list[Reading]:
        found = [one.text.split() for one in passages]
        return [
            Reading((0, len(words[0])), (0, len(text.text)), float(words[1]))
            for words, text in zip(found, passages, strict=True)
        ]


FAKE = cast(Reader, FakeReader())


def asked(gold: str, wrong: Sequence[str], title: str = "a") -> HeldOutQuestion:
    return HeldOutQuestion("?", ("yes",), Passage(gold), tuple(Passage(one) for one in wrong), title)


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Make the passage "yes 3" less similar to the question than all others, and "yes 5" more."""
    near = {"?": 1.0, "\nyes 5": 0.9, "\nyes 3": 0.1}
    return np.array([[near.get(text, 0.5)] for text in texts], np.float32)


def test_questions_are_read_with_their_passage_and_without() -> None:
    questions = [
        asked("yes 5", ["no 1", "no 2", "no 9"]),
        asked("yes 3", ["no 4", "no 2", "no 1"], "b"),
        asked("yes 1", ["no 0"], "c"),
    ]
    found = read_sets(FAKE, {"set": questions}, 3, embed)
    third = 9.0 - 0.25 * np.log2(3)
    assert found["set"] == [Outcome(5.0, True, third, "a"), Outcome(4.0, False, 4.0, "b")], "the third has too few"
    np.testing.assert_allclose(similarities(questions[:2], 2, embed), [[0.9, 0.5, 0.5], [0.1, 0.5, 0.5]])
    result = report(found, ScoreScale(4.5, 1.0, 0.0), 3)
    (row,) = result["sets"]
    assert [one["value"] for one in row["figures"]] == [0.5, 0.5, 0.5] and row["questions"] == 2
    with pytest.raises(ValueError, match="lower --passages"):
        choose(read_sets(FAKE, {"set": questions}, 5, embed), 0.9)


def test_answers_and_scores_are_evaluated() -> None:
    questions = [asked("yes 5", ["no 1"]), asked("no 3 yes", ["no 4"], "b")]
    clock = count()
    result = evaluate(FAKE, "xquad", questions, lambda: float(next(clock)))
    values = {one["name"]: (one["value"], one["target"]) for one in result["figures"]}
    assert values == {
        "xquad exact match": (0.5, 0.66),
        "xquad F1": (0.5, 0.78),
        "xquad quoted sentence holds the answer": (1.0, 0.93),
    }
    assert result["scores"]["wrong passages refused at 0.9 answered"] == 0.5
    assert result["milliseconds a passage, median"] == 1000.0


def test_xquad_is_read_with_other_passages_of_the_article(small_shared: Path) -> None:
    found = xquad(small_shared / "data/xquad")
    assert len(found) == 24
    for one in found:
        assert one.answers[0] in one.gold.text and len(one.wrong) <= 1
        assert all(one.answers[0] not in wrong.text and wrong.heading == one.title for wrong in one.wrong)


def test_card_states_counts_figures_and_licences(reading_qa: Path, technical: Path, tmp_path: Path) -> None:
    counts = count_sources(reading_qa, technical)
    by_name = {one.name: one for one in counts}
    assert by_name["squad"].num_passages == 135 and by_name["squad"].num_questions == 270
    assert 0 < by_name["squad"].num_held_out < 60 and by_name["technical questions"].num_questions == 40
    text = card(counts, [], None, read_report(tmp_path / "threshold.json"))
    assert "Not evaluated." in text and "No threshold was chosen." in text and "The run has no log." in text
    figures = evaluate(FAKE, "xquad", [asked("yes 5", ["no 1"])])
    refusals = report(read_sets(FAKE, {"held out": [asked("yes 5", ["no 1"])]}, 1, embed), ScoreScale(2.5, 1.0, 0.0), 1)
    recipe = {name: getattr(RECIPE, name) for name in RECIPE.__slots__}
    log: list[dict[str, Any]] = [{"step": 0, "recipe": recipe}, {"step": 6, "loss": 3.14159}]
    text = card(counts, log, {"sets": [figures]}, refusals)
    assert "| xquad | 1 | 1 | 1.000 (1.000 to 1.000) |" in text and "The threshold is 2.5" in text
    assert "6 steps of 4 questions" in text and "3.14 nats" in text and "covid-qa | Apache-2.0 | 15 | 0 |" in text
    assert max(map(len, text.splitlines())) < 700


def test_card_states_the_runs_of_a_gpu_and_their_mean(reading_qa: Path, technical: Path) -> None:
    recipe = asdict(DeviceRecipe(taught=0.7, seed=4))
    start = {"run": "made", "steps": 3800, "examples": "made", "questions": 70806, "first": None, "teachers": []}
    taught = {"run": "student", "steps": 1900, "examples": "asked", "questions": 9, "first": "made", "teachers": ["t1"]}
    means = [{"name": "soup", "mean": {"student": 0.6, "t1": 0.4}}, {"name": "checkpoint", "mean": {"q1": 1, "q2": 1}}]
    log: list[dict[str, Any]] = [{**start, "recipe": recipe}, {**taught, "recipe": recipe}, *means]
    text = card(count_sources(reading_qa, technical), log, None, None)
    assert "70,806 questions made from text" in text and "soup: the mean of 0.6 of student, 0.4 of t1." in text
    assert "The bundled weights: the mean of q1, q2." in text
    assert "| made | 70,806 made from text | all-MiniLM-L6-v2 |  |  | 3,800 | 64 | 0.0004 | 0.05 |" in text
    assert "| student | 9 by people, technical | made | t1 | 0.7 | 1,900 |" in text


def test_attribution_names_every_work(technical: Path) -> None:
    text = attribution(technical)
    assert "MuSiQue" in text and "passages retrieved for 2WikiMultihopQA" in text and "Rust" not in text
    assert all(source.credit in text for source in PEOPLE) and "| town | Town records | MIT |" in text
    assert "all-MiniLM-L6-v2" in text

"""Tests the reader's trainer: loss, resuming, log."""

import json
import math
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stillroom.models.reader import MAX_ANSWER_TOKENS
from tests.training.reader.conftest import RECIPE, SPEC
from training.checkpoint import read_log
from training.reader.commands import needs_large_heap, run_training
from training.reader.examples import ExampleSet, Row
from training.reader.train import CHECKPOINT, Recipe, Trainer, from_encoder, group_loss, read_encoder

pytestmark = pytest.mark.usefixtures("one_thread")


def new_trainer(examples: ExampleSet, bert: Path, out: Path, recipe: Recipe = RECIPE, num_threads: int = 1) -> Trainer:
    return Trainer(from_encoder(read_encoder(bert), SPEC, recipe.seed), examples, recipe, out, num_threads)


def slow_loss(logits: torch.Tensor, may_answer: torch.Tensor, groups: list[list[Row]]) -> float:
    """Compute the loss of `group_loss` by adding probabilities one by one."""
    total, at = 0.0, 0
    for group in groups:
        for side in (0, 1):
            weights = {
                (number, place): math.exp(float(logits[at + number, place, side]))
                for number in range(len(group))
                for place in range(logits.shape[1])
                if may_answer[at + number, place]
            }
            gold = {(number, span[side]) for number, row in enumerate(group) for span in row.spans}
            chosen = sum(weights[one] for one in gold) if gold else 1.0
            total -= math.log(chosen / (1 + sum(weights.values())))
        spans = {
            (number, first, last): math.exp(slow_span_score(logits[at + number], first, last))
            for number in range(len(group))
            for first in range(logits.shape[1])
            for last in range(first, min(first + MAX_ANSWER_TOKENS, logits.shape[1]))
            if may_answer[at + number, first] and may_answer[at + number, last]
        }
        wanted = {(number, *span) for number, row in enumerate(group) for span in row.spans}
        total -= math.log((sum(spans[one] for one in wanted) if wanted else 1.0) / (1 + sum(spans.values())))
        at += len(group)
    return total


def slow_span_score(outputs: torch.Tensor, first: int, last: int) -> float:
    size = (outputs.shape[1] - 2) // 2
    score = float(outputs[first, 0] + outputs[last, 1])
    for place in range(size):
        score += float(outputs[first, 2 + place] * outputs[last, 2 + size + place]) / math.sqrt(size)
    return score


@pytest.mark.parametrize(("seed", "pair_size"), [(0, 0), (1, 0), (2, 3), (3, 3), (4, 4)])
def test_loss_is_that_of_its_definition(seed: int, pair_size: int) -> None:
    rng = random.Random(seed)
    groups = []
    for number in range(4):
        rows = [Row([0] * 12, 3, (), number) for _ in range(rng.randint(1, 2))]
        if number % 2:
            starts = [rng.randint(3, 8) for _ in range(rng.randint(1, 3))]
            rows[0] = replace(rows[0], spans=tuple((start, rng.randint(start, 10)) for start in starts))
        groups.append(rows)
    count = sum(map(len, groups))
    logits = torch.randn(count, 12, 2 + 2 * pair_size, generator=torch.Generator().manual_seed(seed))
    may_answer = torch.zeros(count, 12, dtype=torch.bool)
    may_answer[:, 3:11] = True
    assert float(group_loss(logits, may_answer, groups)) == pytest.approx(
        slow_loss(logits, may_answer, groups), rel=1e-5
    )


def test_resumed_run_gives_the_same_weights(examples: ExampleSet, bert: Path, tmp_path: Path) -> None:
    whole = new_trainer(examples, bert, tmp_path / "whole")
    assert [line["step"] for line in whole.run(num_parts=2, report_every=2)] == [2, 4, 6]
    first = new_trainer(examples, bert, tmp_path / "parts")
    for line in first.run(num_parts=2, report_every=1):
        if line["step"] == 3:
            first.stop()
    first.save()
    assert first.step == 3 and not first.is_done
    torch.rand(7)  # other draws in between
    second = new_trainer(examples, bert, tmp_path / "parts")
    list(second.run(num_parts=2))
    assert second.step == 6 and second.is_done
    for name, tensor in whole.master.state_dict().items():
        assert torch.equal(tensor, second.master.state_dict()[name]), name
    words = read_encoder(bert)["embeddings.word_embeddings.weight"]
    assert torch.equal(second.master.words.weight, words), "word embeddings do not change"


def test_loss_falls(examples: ExampleSet, bert: Path, tmp_path: Path) -> None:
    trainer = new_trainer(examples, bert, tmp_path, replace(RECIPE, num_steps=40), num_threads=2)
    losses = [line["loss"] for line in trainer.run(num_parts=2, report_every=10)]
    assert losses[-1] < 0.8 * losses[0]


def test_signal_stops_with_a_checkpoint_and_a_log(
    examples: ExampleSet, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = new_trainer(examples, bert, tmp_path)
    run_step = trainer._run_step

    def with_signal(batch: list[list[list[Row]]]) -> float:
        if trainer.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_step(batch)

    trainer._run_step = with_signal  # type: ignore[method-assign]
    run_training(trainer, None)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"step": 2, "done": False}
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True).keys() == {"step", "model", "optimizer"}
    run_training(new_trainer(examples, bert, tmp_path), minutes=10)
    log = read_log(tmp_path)
    assert [line["step"] for line in log] == [0, 6] and log[0]["recipe"]["skipped"] == ["covid-qa"]


def test_rate_warms_up_and_falls_to_zero() -> None:
    recipe = Recipe(num_steps=1000)
    assert recipe.rate(0) == pytest.approx(recipe.learning_rate / recipe.warm_up)
    assert recipe.rate(400) == recipe.learning_rate and recipe.rate(1000) == 0
    assert recipe.rate(750) == pytest.approx(recipe.learning_rate / 2)


def test_only_training_restarts_with_settings_of_the_allocator() -> None:
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1", "MALLOC_TOP_PAD_": "1"}
    assert needs_large_heap(["reader", "train", "--steps", "9"], {})
    assert not needs_large_heap(["reader", "train"], settings) and not needs_large_heap(["reader", "card"], {})

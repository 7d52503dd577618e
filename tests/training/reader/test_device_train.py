"""Training on a GPU, run on the CPU: its loss is that of the other trainer, and packed data comes back whole."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from stillroom.models.reader_model import ReaderModel, ReaderSpec
from tests.random_reader import drawn
from training.reader.device_train import (
    DeviceRecipe,
    DeviceStep,
    StepInput,
    gold_loss,
    measure,
    step_inputs,
    taught_loss,
    train_on_device,
)
from training.reader.examples import ExampleSet, Question, Row, TokenisedPassage, groups_of
from training.reader.packed import read_examples_file, read_weights, write_examples, write_weights
from training.reader.train import group_loss, tensors_of

SPEC = ReaderSpec(
    vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, inner_size=32, max_positions=512, pair_size=4
)
CPU = torch.device("cpu")


def tiny_model(seed: int = 0) -> ReaderModel:
    return drawn(ReaderModel(SPEC), seed)


def examples(num_questions: int = 40) -> ExampleSet:
    """Each passage holds the token of its question once, and the answer is that token and the next."""
    rng = random.Random(0)
    passages, questions = [], []
    for number in range(num_questions):
        ids = np.array([rng.randrange(150, 300) for _ in range(60)], np.int32)
        key, place = 110 + number % 30, rng.randrange(0, 58)
        ids[place] = key
        passages.append(TokenisedPassage(ids, np.zeros((0, 2), np.int32), (0, 20, 40, 60), (140, 141), ""))
        near = tuple(other for other in range(num_questions) if other % 30 != number % 30)[:3]
        spans = ((place, place + 1),) if number % 7 else ()
        questions.append(Question((key, 105), number, spans, near, 1.0))
    return ExampleSet(passages, questions)


def made_groups() -> list[list[Row]]:
    groups = list(groups_of(examples(), seed=3, epoch=0, max_tokens=64))[:12]
    long = Row([101, 110, 102, *range(150, 210), 102], 3, ((4, 60), (5, 6)), 0)
    only_long = Row([101, 110, 102, *range(150, 210), 102], 3, ((4, 60),), 0)
    return [*groups, [long], [only_long], [long, only_long]]


def test_loss_of_all_groups_at_once_is_that_of_one_after_the_other() -> None:
    groups, model = made_groups(), tiny_model()
    ids, parts, is_token, may_answer = tensors_of([row for group in groups for row in group])
    expected = group_loss(model(ids, parts, is_token), may_answer, groups)
    step = DeviceStep.of(StepInput.of(groups), CPU)
    found = gold_loss(model(*step.inputs), step)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    ours = torch.autograd.grad(found, model.head.weight)[0]
    theirs = torch.autograd.grad(expected, model.head.weight)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_reader_that_teaches_itself_has_nothing_to_learn() -> None:
    model = tiny_model()
    step = DeviceStep.of(StepInput.of(made_groups()), CPU)
    outputs = model(*step.inputs)
    own = taught_loss(outputs, [outputs.detach()], step)
    gradient = torch.autograd.grad(own, model.head.weight, retain_graph=True)[0]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-3, rtol=0)
    other = taught_loss(outputs, [tiny_model(1)(*step.inputs).detach()], step)
    assert torch.autograd.grad(other, model.head.weight)[0].abs().max() > 0.01


@pytest.mark.slow
def test_training_and_measuring(tmp_path: Path) -> None:
    data, model = examples(120), tiny_model()
    recipe = DeviceRecipe(num_steps=150, learning_rate=1e-2, warm_up=10, groups_per_step=8, max_tokens=64)
    step = DeviceStep.of(StepInput.of(list(groups_of(data, seed=9, epoch=0, max_tokens=64))), CPU)
    before = float(gold_loss(model(*step.inputs), step).detach())
    lines: list[dict[str, float]] = []
    times = iter(range(10_000))
    train_on_device(model, data, recipe, say=lines.append, num_processes=0, clock=lambda: next(times) / 100)
    assert float(gold_loss(model(*step.inputs), step).detach()) < 0.8 * before
    assert len(lines) == 1 and lines[0]["step"] == 100
    measured = measure(model, data)
    assert measured["questions"] == 102 and 0 <= measured["exact"] <= measured["F1"] <= 1
    recipe = DeviceRecipe(num_steps=20, groups_per_step=8, max_tokens=64, taught=0.5, averaged=0.5)
    train_on_device(model, data, recipe, [tiny_model(1)], num_processes=0, clock=lambda: next(times) * 1.0)
    write_weights(tmp_path / "weights.pt", model.state_dict())
    kept = read_weights(tmp_path / "weights.pt")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(kept[name], tensor, rtol=0.01, atol=0.02)


def first(seed: int, num_processes: int = 0) -> list[list[int]]:
    recipe = DeviceRecipe(groups_per_step=8, max_tokens=64, seed=seed)
    return next(step_inputs(examples(), recipe, num_processes)).ids_RN.tolist()  # type: ignore[no-any-return]


def test_steps_are_the_same_again_and_differ_between_seeds() -> None:
    assert first(0) == first(0) != first(1)


@pytest.mark.slow
def test_processes_make_the_same_steps() -> None:
    assert first(0, 2) == first(0)


@pytest.mark.parametrize("num_questions", [1, 40])
def test_packed_examples_come_back(tmp_path: Path, num_questions: int) -> None:
    data = examples(num_questions)
    write_examples(tmp_path / "examples.npz", data)
    back = read_examples_file(tmp_path / "examples.npz")
    assert back.questions == data.questions
    for ours, theirs in zip(back.passages, data.passages, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert (ours.cuts, ours.heading) == (theirs.cuts, theirs.heading)

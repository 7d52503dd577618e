"""Trains a reader on a GPU: large steps, batches made by processes, and an end by the clock.

The loss is that of `train.group_loss`, for all groups of a step at once. Several trained readers can teach another one:
its targets are then, in part, the mean of the probabilities that they give to starts, ends and answers.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stillroom.models.reader import MAX_ANSWER_TOKENS
from stillroom.models.reader_model import ReaderModel
from training.reader.examples import SEP, ExampleSet, Question, Row, groups_of

# R rows, G groups, N tokens, S answers

_NEVER = -1e9
_WINDOW = 32
"""Steps among which groups are sorted by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecipe:
    num_steps: int = 3000
    seconds: float = 600.0
    """The learning rate reaches 0 after this time, if not before by steps."""
    learning_rate: float = 4e-4
    warm_up: int = 150
    groups_per_step: int = 64
    max_tokens: int = 200
    weight_decay: float = 0.01
    dropout: float = 0.05
    taught: float = 0.0
    """Share of the loss that comes from teachers."""
    averaged: float = 0.0
    """Share of the run, at its end, whose mean weights are the result; the learning rate stays the same there
    (stochastic weight averaging, Izmailov and others 2018, https://arxiv.org/abs/1803.05407)."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepInput:
    """The rows of one step, as NumPy arrays."""

    ids_RN: NDArray[np.int32]
    num_question_R: NDArray[np.int32]
    first_R: NDArray[np.int32]
    size_R: NDArray[np.int32]
    group_R: NDArray[np.int32]
    starts_S3: NDArray[np.int32]
    """Group, row and token of each start of an answer, once."""
    ends_S3: NDArray[np.int32]
    """The same of ends."""
    answers_S4: NDArray[np.int32]
    """Group, row, first and last token of each answer that is not too long."""
    num_groups: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[Row]]) -> "StepInput":
        rows = [row for group in groups for row in group]
        longest = -(-max(len(row.ids) for row in rows) // 32) * 32
        ids_RN = np.zeros((len(rows), longest), np.int32)
        for number, row in enumerate(rows):
            ids_RN[number, : len(row.ids)] = row.ids
        group_R = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        answers = sorted(
            {(int(group_R[number]), number, *span) for number, row in enumerate(rows) for span in row.spans}
        )
        short = [one for one in answers if one[3] - one[2] < MAX_ANSWER_TOKENS]
        return cls(
            ids_RN,
            np.array([row.ids.index(SEP) + 1 for row in rows], np.int32),
            np.array([row.first for row in rows], np.int32),
            np.array([len(row.ids) for row in rows], np.int32),
            group_R.astype(np.int32),
            np.array(sorted({one[:3] for one in answers}), np.int32).reshape(-1, 3),
            np.array(sorted({(*one[:2], one[3]) for one in answers}), np.int32).reshape(-1, 3),
            np.array(short, np.int32).reshape(-1, 4),
            len(groups),
        )


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The rows of one step on the device."""

    inputs: tuple[Tensor, Tensor, Tensor]
    """Of the model: ids, parts and is_token, each [R, N]."""
    may_answer_RN: Tensor
    group_R: Tensor
    starts_S3: Tensor
    ends_S3: Tensor
    answers_S4: Tensor
    num_groups: int

    @classmethod
    def of(cls, step: StepInput, device: torch.device) -> "DeviceStep":
        def move(array: NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(array).long().to(device, non_blocking=True)

        place_N = torch.arange(step.ids_RN.shape[1], device=device)
        size_R = move(step.size_R)[:, None]
        is_token = place_N < size_R
        parts = ((place_N >= move(step.num_question_R)[:, None]) & is_token).long()
        may_answer = (place_N >= move(step.first_R)[:, None]) & (place_N < size_R - 1)
        inputs = (move(step.ids_RN), parts, is_token)
        answers = (move(step.starts_S3), move(step.ends_S3), move(step.answers_S4))
        return cls(inputs, may_answer, move(step.group_R), *answers, step.num_groups)


_examples = ExampleSet([], [])
"""Of a process that makes batches."""


def _keep(examples: ExampleSet) -> None:
    global _examples
    _examples = examples


def _part(seed: int, epoch: int, part: slice, groups_per_step: int, max_tokens: int) -> list[StepInput]:
    """Make the steps of a part of an epoch; groups of similar length stay together."""
    asked = ExampleSet(_examples.passages, _examples.questions[part])
    groups = list(groups_of(asked, seed, epoch, max_tokens))
    rng, made = random.Random(f"order/{seed}/{epoch}/{part.start}"), list[list[list[Row]]]()
    for start in range(0, len(groups), groups_per_step * _WINDOW):
        window = groups[start : start + groups_per_step * _WINDOW]
        window.sort(key=lambda rows: max(len(row.ids) for row in rows))
        made += [window[at : at + groups_per_step] for at in range(0, len(window), groups_per_step)]
    rng.shuffle(made)
    return [StepInput.of(one) for one in made if len(one) == groups_per_step]


def step_inputs(examples: ExampleSet, recipe: DeviceRecipe, num_processes: int = 4) -> Iterator[StepInput]:
    """Yield steps without end; epochs are divided into parts.

    Args:
        num_processes: They make steps ahead, and know the examples; 0: steps are made when they are wanted.
    """
    num_parts = max(1, len(examples.questions) // (recipe.groups_per_step * 64))
    sizes = (recipe.groups_per_step, recipe.max_tokens)

    def tasks() -> Iterator[tuple[int, int, slice]]:
        for epoch in count():
            for part in range(num_parts):
                yield recipe.seed, epoch, slice(part, None, num_parts)

    if not num_processes:
        _keep(examples)
        yield from (step for task in tasks() for step in _part(*task, *sizes))
    endless, context = tasks(), get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, initializer=_keep, initargs=(examples,)) as pool:
        waiting = [pool.submit(_part, *task, *sizes) for task in islice(endless, 2 * num_processes)]
        try:
            while True:
                yield from waiting.pop(0).result()
                waiting.append(pool.submit(_part, *next(endless), *sizes))
        finally:
            for one in waiting:
                one.cancel()


def batch_scores(outputs: Tensor, may_answer_RN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of starts [R, N], ends [R, N] and answers [R, N, N]; of what may not be, a large negative."""
    size, num_tokens = (outputs.shape[2] - 2) // 2, outputs.shape[1]
    starts = outputs[:, :, 0].masked_fill(~may_answer_RN, _NEVER)
    ends = outputs[:, :, 1].masked_fill(~may_answer_RN, _NEVER)
    runs = outputs[:, :, None, 0] + outputs[:, None, :, 1]
    if size:
        runs = runs + outputs[:, :, 2 : 2 + size] @ outputs[:, :, 2 + size :].mT * size**-0.5
    is_run = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=outputs.device).triu()
    is_run = is_run.tril(MAX_ANSWER_TOKENS - 1)
    allowed = is_run & may_answer_RN[:, :, None] & may_answer_RN[:, None, :]
    return starts, ends, runs.masked_fill(~allowed, _NEVER)


def _sums_by_group(values_X: Tensor, group_X: Tensor, num_groups: int, floor: float) -> Tensor:
    """Return the logarithm of each group's sum of exponentials, [G]; of an empty group, `floor`."""
    best = values_X.new_full((num_groups,), floor).scatter_reduce(0, group_X, values_X.detach(), "amax")
    total = torch.exp(floor - best).scatter_add(0, group_X, torch.exp(values_X - best[group_X]))
    return best + torch.log(total)


def _normalisers(scores: tuple[Tensor, ...], step: DeviceStep) -> list[Tensor]:
    """Return per kind of score the logarithm of each group's sum, with the choice of no answer, whose score is 0."""
    rows = [torch.logsumexp(one.flatten(1), 1) for one in scores]
    return [_sums_by_group(one, step.group_R, step.num_groups, 0.0) for one in rows]


def gold_loss(outputs: Tensor, step: DeviceStep) -> Tensor:
    """`train.group_loss` of all groups of a step."""
    scores, num_groups = batch_scores(outputs, step.may_answer_RN), step.num_groups
    normalisers = _normalisers(scores, step)
    nothing = torch.zeros(num_groups, dtype=torch.bool, device=outputs.device)
    is_answered = nothing.index_fill(0, step.starts_S3[:, 0], True)
    total = normalisers[0].sum() + normalisers[1].sum()
    for score_RN, places_S3 in zip(scores, (step.starts_S3, step.ends_S3), strict=False):
        group_S, row_S, place_S = places_S3.T
        golds = _sums_by_group(score_RN[row_S, place_S], group_S, num_groups, _NEVER)
        total = total - torch.where(is_answered, golds, 0.0).sum()
    group_S, row_S, first_S, last_S = step.answers_S4.T
    is_short = nothing.index_fill(0, group_S, True)
    golds = _sums_by_group(scores[2][row_S, first_S, last_S], group_S, num_groups, _NEVER)
    whole = torch.where(is_short, normalisers[2] - golds, torch.where(is_answered, 0.0, normalisers[2]))
    return total + whole.sum()


def taught_loss(outputs: Tensor, taught: Sequence[Tensor], step: DeviceStep) -> Tensor:
    """Cross entropy with the mean of the teachers' probabilities of starts, ends and answers.

    Args:
        taught: outputs of the teachers, like those of the model.
    """
    scores = batch_scores(outputs, step.may_answer_RN)
    targets = [torch.zeros_like(one) for one in scores]
    with torch.no_grad():
        for other in taught:
            theirs = batch_scores(other, step.may_answer_RN)
            for target, score, normaliser in zip(targets, theirs, _normalisers(theirs, step), strict=True):
                shift = normaliser[step.group_R].view(-1, *[1] * (score.ndim - 1))
                target.add_(torch.exp(score - shift) / len(taught))
    total = outputs.new_zeros(())
    for target, score, normaliser in zip(targets, scores, _normalisers(scores, step), strict=True):
        total = total + normaliser.sum() - (target * score.clamp_min(-1e4)).sum()
    return total


def train_on_device(  # noqa: PLR0913
    model: ReaderModel,
    examples: ExampleSet,
    recipe: DeviceRecipe,
    teachers: Sequence[ReaderModel] = (),
    say: Callable[[dict[str, Any]], None] = lambda line: None,
    num_processes: int = 4,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train the model on its device until the steps or the seconds of the recipe are over; returns the steps."""
    device = model.head.weight.device
    model.words.weight.requires_grad = False
    params = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in params if one.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [one for one in params if one.ndim <= 1], "weight_decay": 0.0},
        ],
        fused=True,
    )
    torch.manual_seed(recipe.seed)
    means, num_averaged = [one.detach().clone() for one in params], 0
    began, losses, num_steps = clock(), list[Tensor](), 0
    for number, made in enumerate(step_inputs(examples, recipe, num_processes)):
        progress = max(number / recipe.num_steps, (clock() - began) / recipe.seconds)
        if progress >= 1:
            break
        fall = 1.0 if recipe.averaged else 1.25 * (1 - progress)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((number + 1) / recipe.warm_up, 1.0, fall)
        step = DeviceStep.of(made, device)
        with torch.autocast(device.type, torch.bfloat16):
            outputs = model(*step.inputs, recipe.dropout)
            with torch.no_grad():
                taught = [one(*step.inputs).float() for one in teachers]
        loss = gold_loss(outputs.float(), step) if recipe.taught < 1 else outputs.new_zeros(())
        if teachers:
            loss = (1 - recipe.taught) * loss + recipe.taught * taught_loss(outputs.float(), taught, step)
        (loss / step.num_groups).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress >= 1 - recipe.averaged:
            num_averaged += 1
            with torch.no_grad():
                torch._foreach_lerp_(means, [one.detach() for one in params], 1 / num_averaged)
        losses.append(loss.detach() / step.num_groups)
        num_steps += 1
        if len(losses) == 100:
            say(
                {
                    "step": number + 1,
                    "loss": round(float(torch.stack(losses).mean()), 4),
                    "seconds": round(clock() - began, 1),
                }
            )
            losses.clear()
    if num_averaged:
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](params), means)
    return num_steps


@torch.inference_mode()
def measure(model: ReaderModel, examples: ExampleSet, groups_per_step: int = 64) -> dict[str, float]:
    """Return the share of questions whose best answer is right to the token, over their own passage alone, and the
    word F1 of its tokens."""
    device = model.head.weight.device
    asked = [one for one in examples.questions if one.spans]
    exact, overlap = 0.0, 0.0
    for start in range(0, len(asked), groups_per_step):
        questions = asked[start : start + groups_per_step]
        groups = [[_whole(examples, one)] for one in questions]
        step = DeviceStep.of(StepInput.of(groups), device)
        with torch.autocast(device.type, torch.bfloat16):
            outputs = model(*step.inputs)
        runs = batch_scores(outputs.float(), step.may_answer_RN)[2]
        best = runs.flatten(1).argmax(1).tolist()
        for (row,), place in zip(groups, best, strict=True):
            first, last = divmod(place, runs.shape[1])
            exact += (first, last) in row.spans
            overlap += max(_f1(set(range(first, last + 1)), set(range(a, b + 1))) for a, b in row.spans)
    return {"questions": len(asked), "exact": exact / len(asked), "F1": overlap / len(asked)}


def _f1(found: set[int], wanted: set[int]) -> float:
    return 2 * len(found & wanted) / (len(found) + len(wanted))


def _whole(examples: ExampleSet, question: Question) -> Row:
    passage = examples.passages[question.passage]
    head = [101, *question.ids, SEP, *passage.heading]
    tokens = passage.ids[: 384 - len(head) - 1].tolist()
    spans = tuple((a + len(head), b + len(head)) for a, b in question.spans)
    return Row([*head, *tokens, SEP], len(head), spans, 0)

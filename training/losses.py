"""Losses on answers and on text, and the share of answers whose every token is predicted."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.rows import NO_TARGET, Batch
from training.isolation import Isolation, block_mask, dense_mask
from training.model import Llama


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a batch, on the device."""

    tokens: Tensor
    targets: Tensor
    is_answer: Tensor
    positions: Tensor
    isolation: Isolation


def part_of(batch: Batch, rows: slice, device: torch.device, *, is_flex: bool) -> Part:
    def moved(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array[rows])
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    samples, branches = moved(batch.samples), moved(batch.branches)
    isolation = block_mask(samples, branches, is_compiled=True) if is_flex else dense_mask(samples, branches)
    return Part(
        moved(batch.tokens).long(),
        moved(batch.targets).long(),
        moved(batch.is_answer),
        moved(batch.positions),
        isolation,
    )


def summed_losses(model: Llama, hidden: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy summed over answer tokens, and over text tokens."""
    is_target = part.targets != NO_TARGET
    each = F.cross_entropy(model.logits(hidden[is_target]).float(), part.targets[is_target], reduction="none")
    is_answer = part.is_answer[is_target]
    return each[is_answer].sum(), each[~is_answer].sum()


def num_targets(batch: Batch) -> tuple[int, int]:
    """Return the numbers of predicted answer tokens and text tokens."""
    answers = int(batch.is_answer.sum())
    return answers, int((batch.targets != NO_TARGET).sum()) - answers


@dataclass(frozen=True, slots=True)
class Scores:
    answer_loss: float
    """Nats per token."""
    text_loss: float
    exact: float
    """Share of answers of which every token is the likeliest given those before it."""


@torch.no_grad()
def score(model: Llama, batches: list[Batch], device: torch.device, *, dtype: torch.dtype) -> Scores:
    """Score a model over all batches together."""
    sums, counts, right, total = np.zeros(2), np.zeros(2), 0, 0
    for batch in batches:
        for row in range(len(batch.tokens)):
            part = part_of(batch, slice(row, row + 1), device, is_flex=False)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                hidden = model(part.tokens, part.positions, part.isolation)
                sums += [float(one) for one in summed_losses(model, hidden, part)]
                logits = model.logits(hidden[part.is_answer])
            hits = (logits.argmax(-1) == part.targets[part.is_answer]).cpu().numpy()
            names = _answer_names(batch, row)
            wrong = set(names[~hits].tolist())
            found = set(names.tolist())
            right, total = right + len(found - wrong), total + len(found)
        counts += num_targets(batch)
    losses = sums / np.maximum(counts, 1)
    return Scores(float(losses[0]), float(losses[1]), right / max(total, 1))


def _answer_names(batch: Batch, row: int) -> np.ndarray:
    """Return for each answer token of a row a number that identifies its answer within the row."""
    chosen = batch.is_answer[row]
    names: np.ndarray = batch.samples[row][chosen].astype(np.int64) * 4096 + batch.branches[row][chosen]
    return names

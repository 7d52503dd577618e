"""Fine-tunes the embedder's encoder as a reader: float32 weights, bfloat16 products, one thread per micro-batch.

Loss: start, end and the answer as a whole are each chosen by one softmax over all passage tokens (runs of tokens) of a
question's rows and a "nothing" with logit 0 (shared normalisation: Clark and Gardner 2018, section 3.2, with an extra
choice as in section 3.3), so that scores of different passages can be compared, and a score above 0 means that an
answer is likely.

Batches and dropout of step n are a function of the seed and n. With one thread, a resumed run gives the weights of an
uninterrupted one; with several, sums are rounded in another order.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from stillroom.models.reader import MAX_ANSWER_TOKENS
from stillroom.models.reader_model import ReaderModel, ReaderSpec, span_scores
from stillroom.ops.bert import tensors_of_checkpoint
from training.reader.examples import SEP, ExampleSet, Row, steps

CHECKPOINT = "checkpoint.pt"

SPEC = ReaderSpec(pair_size=64)
"""Of the bundled reader."""

_NEVER = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All options of the arithmetic and of the order of the data."""

    num_steps: int = 2400
    decay_share: float = 0.5
    """The learning rate falls to 0 over this share of the steps, at the end."""
    learning_rate: float = 2.5e-4
    warm_up: int = 150
    groups_per_step: int = 24
    max_tokens: int = 200
    weight_decay: float = 0.01
    dropout: float = 0.05
    seed: int = 0
    skipped: tuple[str, ...] = ("fairytaleqa", "covid-qa")
    """Sources of reading-qa without questions in training: their answers are long, or their language is special."""
    technical_weight: float = 2.0
    """How often a technical question is asked in an epoch; a question of reading-qa is asked once."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        left = (self.num_steps - step) / max(1, self.num_steps * self.decay_share)
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up, max(left, 0.0))


def from_encoder(state: dict[str, Tensor], spec: ReaderSpec, seed: int) -> ReaderModel:
    """Build a reader from the weights of a BERT encoder; the head is random."""
    torch.manual_seed(seed)
    model = ReaderModel(spec)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    torch.nn.init.zeros_(model.head.bias)
    model.load_state_dict(tensors_of_checkpoint(state, spec.num_layers), strict=False)  # all but the head
    return model


def read_encoder(folder: Path) -> dict[str, Tensor]:
    """Read the weights of an embedder's folder, by the names that `from_encoder` expects."""
    state: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return {name.removeprefix("bert."): tensor for name, tensor in state.items()}


def tensors_of(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, parts, is_token and may_answer, each [rows, tokens]."""
    longest = -(-max(len(row.ids) for row in rows) // 16) * 16
    ids, parts = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    is_token, may_answer = (
        torch.zeros(len(rows), longest, dtype=torch.bool),
        torch.zeros(len(rows), longest, dtype=torch.bool),
    )
    for number, row in enumerate(rows):
        size = len(row.ids)
        ids[number, :size] = torch.tensor(row.ids)
        parts[number, row.ids.index(SEP) + 1 : size] = 1
        is_token[number, :size] = True
        may_answer[number, row.first : size - 1] = True
    return ids, parts, is_token, may_answer


def group_loss(outputs: Tensor, may_answer: Tensor, groups: Sequence[Sequence[Row]]) -> Tensor:
    """Sum over the groups of minus the log probability of all their answers' starts, of their ends, and of the answers
    (the compound objective of Fajcik and others, 2021, section 3).

    Args:
        outputs: of the model, [rows, tokens, 2 + 2 * pair_size], float32.
    """
    logits = outputs[:, :, :2].masked_fill(~may_answer[:, :, None], _NEVER)
    total, row = logits.new_zeros(()), 0
    for group in groups:
        part = logits[row : row + len(group)]
        total = total + _span_loss(outputs[row : row + len(group)], may_answer[row : row + len(group)], group)
        nothing = part.new_zeros(1, 2)
        everything = torch.logsumexp(torch.cat([part.reshape(-1, 2), nothing]), dim=0)
        total = total + everything.sum()
        golds = [(number, span) for number, one in enumerate(group) for span in one.spans]
        for side in (0, 1) if golds else ():
            places = sorted({(number, span[side]) for number, span in golds})
            total = total - torch.logsumexp(torch.stack([part[number, place, side] for number, place in places]), 0)
        row += len(group)
    return total


def _span_loss(outputs: Tensor, may_answer: Tensor, group: Sequence[Row]) -> Tensor:
    """Minus the log probability of a group's answers among all runs of at most `MAX_ANSWER_TOKENS` tokens; 0 if all its
    answers are longer."""
    golds = [(number, span) for number, row in enumerate(group) for span in row.spans]
    short = sorted({(number, *span) for number, span in golds if span[1] - span[0] < MAX_ANSWER_TOKENS})
    if golds and not short:
        return outputs.new_zeros(())
    size = outputs.shape[1]
    is_run = torch.ones(size, size, dtype=torch.bool).triu().tril(MAX_ANSWER_TOKENS - 1)
    scores = [
        span_scores(one).masked_fill(~(is_run & may[:, None] & may[None, :]), _NEVER)
        for one, may in zip(outputs, may_answer, strict=True)
    ]
    nothing = outputs.new_zeros(1)
    everything = torch.logsumexp(torch.cat([*(one.reshape(-1) for one in scores), nothing]), 0)
    if not short:
        return everything
    return everything - torch.logsumexp(torch.stack([scores[row][first, last] for row, first, last in short]), 0)


class Trainer:
    """One run in one folder. Weights and optimiser are float32; a bfloat16 copy of the weights computes gradients."""

    def __init__(
        self, model: ReaderModel, examples: ExampleSet, recipe: Recipe, out: Path, num_threads: int = 2
    ) -> None:
        """Resume from the folder's checkpoint if it has one."""
        self.master, self.recipe, self.out = model, recipe, out
        model.words.weight.requires_grad = False
        self.low = copy.deepcopy(model).bfloat16()
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.low_params = [p for p in self.low.parameters() if p.requires_grad]
        decays = [p for p in self.params if p.ndim > 1]
        others = [p for p in self.params if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decays, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
            fused=True,
        )
        self.examples, self.step = examples, 0
        self.pool = ThreadPoolExecutor(num_threads)
        self.sums: dict[int, list[Tensor]] = {}
        """Gradients by thread, float32."""
        self._is_stopping = False
        out.mkdir(parents=True, exist_ok=True)
        checkpoint = out / CHECKPOINT
        if checkpoint.exists():
            kept = torch.load(checkpoint, weights_only=True)
            self.step = kept["step"]
            self.master.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self._lower()

    @property
    def is_done(self) -> bool:
        return self.step >= self.recipe.num_steps

    def stop(self) -> None:
        """End `run` after the current step."""
        self._is_stopping = True

    def _lower(self) -> None:
        with torch.no_grad():
            for low, high in zip(self.low.parameters(), self.master.parameters(), strict=True):
                low.copy_(high)

    def save(self, name: str = CHECKPOINT) -> None:
        """Write a checkpoint atomically."""
        kept = {"step": self.step, "model": self.master.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(kept, self.out / "new.pt")
        (self.out / "new.pt").replace(self.out / name)

    def _part(self, groups: list[list[Row]]) -> float:
        """Add the gradients of a micro-batch to those of its thread; returns the loss."""
        ids, parts, is_token, may_answer = tensors_of([row for group in groups for row in group])
        logits = self.low(ids, parts, is_token, self.recipe.dropout)
        loss = group_loss(logits, may_answer, groups)
        grads = torch.autograd.grad(loss, self.low_params)
        thread = threading.get_ident()
        if thread not in self.sums:
            self.sums[thread] = [torch.zeros_like(param) for param in self.params]
        for one, grad in zip(self.sums[thread], grads, strict=True):
            one.add_(grad)
        return float(loss.detach())

    def _take_gradients(self, scale: float) -> None:
        first, *others = self.sums.values()
        for number, param in enumerate(self.params):
            for other in others:
                first[number].add_(other[number])
                other[number].zero_()
            param.grad = first[number].mul_(scale)

    def _run_step(self, batch: list[list[list[Row]]]) -> float:
        """Update the weights; returns the mean loss of a group."""
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        batch.sort(key=lambda part: -sum(len(row.ids) for group in part for row in group))  # the longest first
        results = list(self.pool.map(self._part, batch))
        scale = 1 / sum(len(part) for part in batch)
        self._take_gradients(scale)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self._lower()
        for param in self.params:
            assert param.grad is not None
            param.grad.zero_()
        self.step += 1
        return sum(results) * scale

    def run(
        self, num_parts: int = 4, report_every: int = 50, clock: Callable[[], float] = time.monotonic
    ) -> Iterable[dict[str, float]]:
        """Train to the end or until `stop`; yields figures of every `report_every` steps.

        Args:
            num_parts: Micro-batches of a step.
        """
        recipe = self.recipe
        began, losses, num_rows = clock(), [], 0
        batches = steps(self.examples, recipe.seed, self.step, recipe.groups_per_step, num_parts, recipe.max_tokens)
        while not (self.is_done or self._is_stopping):
            batch = next(batches)
            losses.append(self._run_step(batch))
            num_rows += sum(len(group) for part in batch for group in part)
            if self.step % report_every == 0 or self.is_done:
                yield {
                    "step": self.step,
                    "loss": sum(losses) / len(losses),
                    "rows_per_s": num_rows / max(clock() - began, 1e-9),
                    "lr": recipe.rate(self.step),
                }
                began, losses, num_rows = clock(), [], 0

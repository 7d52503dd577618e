"""Trains a model; an interrupted run resumes bit for bit on the same machine.

Batch n is a function of the seed and n, the initial weights are a function of the seed, and the checkpoint holds all
other state of a step.
"""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from stillroom.models.tokenizer import Tokenizer
from stillroom_bench.instrument.environment import record_environment
from training.batches import NUM_HELD, batches_of, held_batches
from training.checkpoint import Log, check_identity, identity_of, load_checkpoint, save_checkpoint
from training.data.rows import Batch, Batches, Renderer
from training.losses import num_targets, part_of, score, summed_losses
from training.model import Llama
from training.recipe import Recipe, learning_rate, text_weight
from training.signals import stopped_by_signals

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Options of device and duration. They do not change the result except for rounding."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of products and activations; weights and optimiser state are float32."""
    attention: Literal["mask", "flex"] = "mask"
    """`flex` skips masked blocks; for GPUs."""
    is_compiled: bool = False
    micro_rows: int | None = None
    """Rows per forward pass; None: all rows of a step."""
    num_workers: int = 0
    """Processes that make batches in advance."""
    minutes: float | None = None
    """Stop with a checkpoint after this many minutes; None: at the end of the run."""
    stop_step: int | None = None
    """Stop with a checkpoint after this step."""
    checkpoint_minutes: float = 3.0
    log_every: int = 10
    score_every: int = 200
    num_held: int = NUM_HELD
    """Held-out batches of each kind that are scored."""
    clock: Callable[[], float] = field(default=time.monotonic)


@dataclass(frozen=True, slots=True)
class Outcome:
    step: int
    """Number of completed steps."""
    is_done: bool
    scores: dict[str, float]
    """Scores on held-out documents and worlds; empty if the run was stopped."""


class _Numbered(Dataset[Batch]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, number: int) -> Batch:
        return self._batches.batch(number)


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a worker, because the training process ends its step first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


class Trainer:
    """One run in one folder."""

    def __init__(self, recipe: Recipe, run: Run, data: Path, out: Path) -> None:
        """Resume from the folder's checkpoint if it has one.

        Raises:
            ResumeError: the checkpoint is of another recipe, or of other data.
            FileNotFoundError: there is no data.
            ValueError: the data are incomplete.
        """
        self.recipe, self.run_options, self.out = recipe, run, out
        self._device = torch.device(run.device)
        self._identity = identity_of(recipe, data)
        self._renderer = Renderer(Tokenizer.load(data / "tokenizer"))
        self.model = Llama(recipe.shape, recipe.seed).to(self._device)
        self._optimiser = _optimiser(self.model, recipe, self._device)
        self.step, self._tokens, self._seconds = 0, 0, 0.0
        self._resume()
        self._data = data
        self._batches = batches_of(recipe, data, "train", self._renderer)
        self._log = Log(out, self.step)
        self._is_stopping = False
        self._forward: Callable[..., torch.Tensor] = (
            torch.compile(self.model, dynamic=False) if run.is_compiled else self.model
        )

    def stop(self) -> None:
        """Stop with a checkpoint after the current step."""
        self._is_stopping = True

    def train(self, on_step: Callable[[dict[str, Any]], None] = lambda line: None) -> Outcome:
        """Train until the run or the time ends, or until `stop`, Ctrl-C or SIGTERM."""
        options, recipe = self.run_options, self.recipe
        if self.step == 0:
            self._log.write(self._first_line())
        begun = saved = options.clock()
        already = self._seconds
        with stopped_by_signals(self.stop):
            for batch in self._stream():
                line = self._run_step(batch)
                self._seconds = already + options.clock() - begun
                self._report(line, begun, on_step)
                if self.step % options.score_every == 0 or self.step == recipe.num_steps:
                    self._log.write({"step": self.step, "held out": self.scores()})
                if options.clock() - saved > 60 * options.checkpoint_minutes:
                    self.save()
                    saved = options.clock()
                is_over = options.minutes is not None and options.clock() - begun > 60 * options.minutes
                if is_over or self._is_stopping or self.step == options.stop_step:
                    break
        self.save()
        is_done = self.step >= recipe.num_steps
        return Outcome(self.step, is_done, self.scores() if is_done else {})

    def scores(self) -> dict[str, float]:
        """Score fixed batches of held-out documents and held-out worlds."""
        found: dict[str, float] = {}
        dtype = _DTYPES[self.run_options.dtype]
        for name, batches in held_batches(self.recipe, self._data, self._renderer, self.run_options.num_held).items():
            result = score(self.model, batches, self._device, dtype=dtype)
            found |= {f"{name} {key}": round(value, 4) for key, value in asdict(result).items()}
        return found

    def save(self) -> None:
        state = {
            "identity": self._identity,
            "step": self.step,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "random": torch.get_rng_state(),
            "device random": torch.cuda.get_rng_state() if self._device.type == "cuda" else None,
        }
        save_checkpoint(self.out, state)

    def _resume(self) -> None:
        state = load_checkpoint(self.out)
        if state is None:
            torch.manual_seed(self.recipe.seed)
            return
        check_identity(self.out, state, self._identity)
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step, self._tokens, self._seconds = state["step"], state["tokens"], state["seconds"]
        torch.set_rng_state(state["random"])
        if state["device random"] is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(state["device random"])

    def _stream(self) -> Iterator[Batch]:
        """Yield the batches from this step on, in order."""
        numbers = range(self.step, self.recipe.num_steps)
        workers = self.run_options.num_workers
        yield from DataLoader(
            _Numbered(self._batches),
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            collate_fn=_unchanged,
            prefetch_factor=4 if workers else None,
            generator=torch.Generator(),
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_ignore_interrupts,
        )

    def _run_step(self, batch: Batch) -> dict[str, Any]:
        """Run one training step; returns values for the log."""
        options, recipe = self.run_options, self.recipe
        rate, weight = learning_rate(recipe, self.step), text_weight(recipe, self.step)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        counts = num_targets(batch)
        sums = torch.zeros(2, device=self._device)
        size = options.micro_rows or recipe.num_rows
        dtype = _DTYPES[options.dtype]
        for start in range(0, recipe.num_rows, size):
            part = part_of(batch, slice(start, start + size), self._device, is_flex=options.attention == "flex")
            with torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32):
                hidden = self._forward(part.tokens, part.positions, part.isolation)
                answer, text = summed_losses(self.model, hidden, part)
            loss = answer / max(counts[0], 1) + weight * text / max(counts[1], 1)
            torch.autograd.backward(loss)
            sums += torch.stack([answer.detach(), text.detach()])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self._tokens += recipe.step_tokens
        return {"sums": sums, "counts": counts, "norm": norm, "rate": rate, "weight": weight, "kinds": batch.kinds}

    def _report(self, line: dict[str, Any], begun: float, on_step: Callable[[dict[str, Any]], None]) -> None:
        if self.step % self.run_options.log_every and self.step != 1:
            return
        answer, text = (float(one) / max(n, 1) for one, n in zip(line["sums"], line["counts"], strict=True))
        speed = self._tokens / max(self._seconds, 1e-9)
        left = (self.recipe.num_steps - self.step) * self.recipe.step_tokens / speed / 60
        entry = {
            "step": self.step,
            "answer loss": round(answer, 4),
            "text loss": round(text, 4),
            "grad norm": round(float(line["norm"]), 3),
            "learning rate": line["rate"],
            "text weight": round(line["weight"], 3),
            "tokens": self._tokens,
            "tokens/s": round(speed),
            "minutes left": round(left, 1),
            "questions": line["kinds"],
        }
        self._log.write(entry)
        on_step(entry)

    def _first_line(self) -> dict[str, Any]:
        return {
            "step": 0,
            "parameters": sum(one.numel() for one in self.model.parameters()),
            "recipe": self.recipe.as_json(),
            "data": self._identity["data"],
            "environment": asdict(record_environment()),
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        }


def _optimiser(model: Llama, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")

"""Trains microworld further on long worlds: the same architecture and vocabulary, documents of up to 40 chunks.

A row is a system line, chunks, then questions with answers. Each pair sees the chunks and itself, at the positions that
it would have if it were the only one.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from training.data.worlds import load_generator
from training.microworld.long_worlds import LongWorld, make_world, retrieve

_MAX_PAIRS = 12
_LM_SHARE, _LM_WEIGHT = 0.3, 0.2
"""Share of the other tokens that are trained on as text, and the weight of their loss."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of one kind of step."""

    tokens: int
    rows: int


WHOLE, RETRIEVED = Shape(704, 6), Shape(288, 16)
"""Steps of whole documents, and of search results of 3 to 10 chunks; they alternate."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    model: Path
    shared: Path
    out: Path
    minutes: float = 30.0
    learning_rate: float = 1e-3
    seed: int = 0
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids with their positions, the pair that each belongs to (-1: padding, 0: context), and whether it is part
    of an answer."""

    ids: list[int]
    positions: list[int]
    pairs: list[int]
    answers: list[int]


def train(
    options: TrainOptions, say: Callable[[dict[str, Any]], None], stop: Callable[[], bool] = lambda: False
) -> Path:
    """Train for the given minutes; returns the folder of the checkpoint, with microworld's tokenizer.

    Args:
        options: the model to start from, folders and schedule.
        say: receives the progress after every 100 steps, when the checkpoint is written too.
        stop: asked before every step; the run ends with a checkpoint when it returns true.

    Raises:
        FileNotFoundError: the model's folder has no config.json, or the shared folder no generator.
    """
    if not (options.model / "config.json").is_file():
        raise FileNotFoundError(f"{options.model} has no config.json; name the folder of a checkpoint with --model")
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = {shape: _rows(options, tokenizer, shape) for shape in (WHOLE, RETRIEVED)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    began, step, mean = time.monotonic(), 0, None
    while (done := (time.monotonic() - began) / (60 * options.minutes)) < 1 and not stop():
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * done))
        shape = (WHOLE, RETRIEVED)[step % 2]
        loss, answer_loss = _loss(model, [next(rows[shape]) for _ in range(shape.rows)])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        mean = answer_loss if mean is None else 0.98 * mean + 0.02 * answer_loss
        if step % 100 == 0:
            say({"step": step, "minutes": round(done * options.minutes, 2), "answer loss": round(mean, 4)})
            _save(model, tokenizer, options.out)
    _save(model, tokenizer, options.out)
    return options.out


def _save(model: LlamaForCausalLM, tokenizer: Any, out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _rows(options: TrainOptions, tokenizer: Any, shape: Shape) -> Iterator[Row]:
    """Rows without end, deterministically from the seed."""
    generator, rng = load_generator(options.shared), random.Random(f"{options.seed} {shape.tokens}")
    ids_of = tokenizer.get_vocab()
    end = tokenizer.eos_token_id

    def encode(text: str) -> list[int]:
        return [ids_of[word] for word in text.split()]

    system = encode(generator.SYSTEM)
    while True:
        world = make_world(generator, rng, "train", _lengths(rng, shape))
        chosen, numbers = _chosen(world, rng, shape)
        context = [*system, *(token for at in chosen for token in encode(world.documents[at[0]][at[1]]))]
        size = len(context)
        row = Row(context, list(range(size)), [0] * size, [0] * size)
        for pair, number in enumerate(numbers, start=1):
            question = world.questions[number]
            asked, answer = encode(f"<q> {question.text} <a>"), [*encode(question.answer), end]
            pair_size = len(asked) + len(answer)
            if len(row.ids) + pair_size > shape.tokens:
                break
            row.ids.extend([*asked, *answer])
            row.positions.extend(range(size, size + pair_size))
            row.pairs.extend([pair] * pair_size)
            row.answers.extend([0] * len(asked) + [1] * len(answer))
        if any(row.answers):
            yield row


def _lengths(rng: random.Random, shape: Shape) -> list[int]:
    if shape is WHOLE:
        return [rng.randint(8, 40)]
    return [rng.randint(4, 16) for _ in range(rng.randint(1, 3))]


def _chosen(world: LongWorld, rng: random.Random, shape: Shape) -> tuple[list[tuple[int, int]], list[int]]:
    """The chunks of a row in order, and the questions that they answer, split questions twice as likely first."""
    order = sorted(range(len(world.questions)), key=lambda at: -(rng.random() ** _rarity(world, at)))
    if not order:
        return [], []
    if shape is WHOLE:
        return [(0, chunk) for chunk in range(len(world.documents[0]))], order[:_MAX_PAIRS]
    chosen = retrieve(world, order[0], rng.randint(3, 10), rng)
    present = set(chosen)

    def is_answered(number: int) -> bool:
        question = world.questions[number]
        return present.issuperset((question.document, chunk) for chunk in question.needed)

    return chosen, [number for number in order if is_answered(number)][:_MAX_PAIRS]


def _rarity(world: LongWorld, number: int) -> float:
    return {"single": 1.0, "split": 0.5, "twohop": 0.4, "chain": 0.6}[world.questions[number].kind]


def _loss(model: LlamaForCausalLM, rows: list[Row]) -> tuple[torch.Tensor, float]:
    """Mean cross-entropy of the answers, plus a share of the text's; and the former alone."""
    length = max(len(row.ids) for row in rows)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (length - len(values))

    ids = torch.tensor([padded(row.ids, 0) for row in rows])
    positions = torch.tensor([padded(row.positions, 0) for row in rows])
    pairs = torch.tensor([padded(row.pairs, -1) for row in rows])
    answers = torch.tensor([padded(row.answers, 0) for row in rows]).bool()
    order = torch.arange(length)
    sees = (order[:, None] >= order) & ((pairs[:, None, :] == 0) | (pairs[:, None, :] == pairs[:, :, None]))
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.bfloat16).min)[:, None].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state[:, :-1]
    targets, is_answer = ids[:, 1:], answers[:, 1:]
    is_next = (pairs[:, 1:] == pairs[:, :-1]) & (pairs[:, 1:] >= 0) & ~is_answer
    is_text = is_next & (torch.rand(targets.shape) < _LM_SHARE)

    def entropy(chosen: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden[chosen]).float(), targets[chosen])

    answer_loss = entropy(is_answer)
    return answer_loss + _LM_WEIGHT * entropy(is_text), float(answer_loss.detach())


def write_questions(shared: Path, path: Path, *, num_questions: int, num_chunks: int, seed: int) -> dict[str, int]:
    """Write questions for `stillroom bench contexts`; returns the number of each kind.

    Half of the questions are `split`, spread evenly over distances 1 to 10. Names of persons and companies do not occur
    in training.
    """
    generator, rng = load_generator(shared), random.Random(seed)
    wanted = ["split", "single", "split", "twohop", "split", "chain"]
    counts: dict[str, int] = {}
    lines: list[str] = []
    distance = 0
    while len(lines) < num_questions:
        kind = wanted[len(lines) % len(wanted)]
        lengths = [rng.randint(8, 40) for _ in range(rng.randint(1, 3))]
        world = make_world(generator, rng, "eval", lengths)
        numbers = [
            number
            for number, one in enumerate(world.questions)
            if one.kind == kind and (kind != "split" or one.distance == 1 + distance % 10)
        ]
        if not numbers:
            continue
        distance += kind == "split"
        number = rng.choice(numbers)
        lines.append(json.dumps(_line(world, number, num_chunks, rng)) + "\n")
        counts[kind] = counts.get(kind, 0) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)
    return counts


def _line(world: LongWorld, number: int, num_chunks: int, rng: random.Random) -> dict[str, Any]:
    question = world.questions[number]
    return {
        "documents": world.documents,
        "retrieved": retrieve(world, number, num_chunks, rng),
        "needed": [(question.document, chunk) for chunk in question.needed],
        "question": question.text,
        "answer": question.answer,
        "kind": question.kind,
        "distance": question.distance,
    }

"""Keeps training data and a start of the weights in one folder, for a machine that has neither texts nor packages."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.reader.examples import ExampleSet, Question, TokenisedPassage

_NO_CHARACTERS = np.zeros((0, 2), np.int32)


def write_examples(path: Path, examples: ExampleSet) -> None:
    """Write the tokens of passages and questions, without text and characters."""
    passages, questions = examples.passages, examples.questions
    arrays = {
        "ids": np.concatenate([one.ids for one in passages]).astype(np.uint16),
        "lengths": np.array([len(one.ids) for one in passages], np.int32),
        "weights": np.array([one.weight for one in questions], np.float32),
        "passages": np.array([one.passage for one in questions], np.int32),
    }
    lists: dict[str, Iterable[Sequence[int]]] = {
        "cuts": (one.cuts for one in passages),
        "headings": (one.heading for one in passages),
        "asked": (one.ids for one in questions),
        "negatives": (one.negatives for one in questions),
        "spans": ([place for span in one.spans for place in span] for one in questions),
    }
    for name, values in lists.items():
        each = [np.array(value, np.int32) for value in values]
        arrays[name] = np.concatenate(each)
        arrays[f"{name} lengths"] = np.array([len(one) for one in each], np.int32)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # keywords are arrays


def read_examples_file(path: Path) -> ExampleSet:
    """Read what `write_examples` wrote."""
    with np.load(path) as kept:
        arrays: dict[str, NDArray[np.int32]] = {name: kept[name] for name in kept.files}

    def lists(name: str) -> list[tuple[int, ...]]:
        ends = np.cumsum(arrays[f"{name} lengths"])
        values = arrays[name].tolist()
        return [tuple(values[end - size : end]) for end, size in zip(ends, arrays[f"{name} lengths"], strict=True)]

    ends = np.cumsum(arrays["lengths"])
    ids = [arrays["ids"][end - size : end].astype(np.int32) for end, size in zip(ends, arrays["lengths"], strict=True)]
    passages = [
        TokenisedPassage(one, _NO_CHARACTERS, cuts, heading, "")
        for one, cuts, heading in zip(ids, lists("cuts"), lists("headings"), strict=True)
    ]
    columns = (lists("asked"), arrays["passages"].tolist(), lists("spans"), lists("negatives"), arrays["weights"])
    questions = [
        Question(asked, passage, tuple(zip(spans[::2], spans[1::2], strict=True)), near, float(weight))
        for asked, passage, spans, near, weight in zip(*columns, strict=True)
    ]
    return ExampleSet(passages, questions)


def write_weights(path: Path, state: dict[str, Tensor]) -> None:
    """Write weights as bfloat16, the frozen word embeddings as 8 bits with a scale per word."""
    words = state["words.weight"].float()
    scale = words.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
    others = {name: tensor.bfloat16() for name, tensor in state.items() if name != "words.weight"}
    torch.save({"others": others, "words": (words / scale).round().to(torch.int8), "scale": scale}, path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read what `write_weights` wrote, as float32."""
    kept = torch.load(path, weights_only=True)
    state = {name: tensor.float() for name, tensor in kept["others"].items()}
    return state | {"words.weight": kept["words"].float() * kept["scale"]}


def mean_weights(states: Sequence[dict[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean of each tensor; shares need not add up to 1."""
    total = sum(shares)
    return {
        name: torch.stack([state[name] * (share / total) for state, share in zip(states, shares, strict=True)]).sum(0)
        for name in states[0]
    }

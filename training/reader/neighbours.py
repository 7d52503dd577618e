"""`python -m training reader prepare`: finds passages that a search returns for a question but that lack its answer.

They are wrong passages: in training, and in the choice of the threshold. Held-out passages are found only for questions
about held-out passages.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.models.reader_model import ReaderSpec
from training.reader.examples import CLS, SEP, is_held_out, is_held_out_passage, read_rows, read_tokenizer
from training.reader.train import from_encoder, read_encoder

PEOPLE, TECHNICAL = "neighbours.npy", "technical-neighbours.npy"
NUM_NEIGHBOURS = 8
_NUM_FOUND = 25
"""Passages of a search; those that hold the answer are left out."""
_MAX_CHARS = 700
"""Of a passage, which are embedded."""
_QUESTIONS = 2000
_BATCH, _MAX_TOKENS = 32, 254

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts -> [texts, dimension], rows of length 1."""


@dataclass(frozen=True, slots=True)
class Searched:
    """A question as it is searched."""

    text: str
    passage: int
    """Index of the passage that it was written for."""
    answers: tuple[str, ...]


def people_questions(passages: Sequence[dict[str, Any]], folder: Path) -> list[Searched]:
    """Return the questions of reading-qa, in the order of the file."""
    index = {row["_id"]: number for number, row in enumerate(passages)}
    asked = read_rows(folder / "questions.jsonl")
    return [Searched(one["question"], index[one["passage"]], tuple(one["answers"])) for one in asked]


def technical_questions(passages: Sequence[dict[str, Any]]) -> list[Searched]:
    """Return the technical questions that their passages answer, in the order of their files."""
    return [
        Searched(asked["question"], number, (asked["answer"],))
        for number, row in enumerate(passages)
        for asked in row["questions"]
        if asked["answer"] is not None
    ]


def find_neighbours(
    passages: Sequence[dict[str, Any]], questions: Sequence[Searched], is_held: NDArray[np.bool_], embed: Embed
) -> NDArray[np.int32]:
    """Return [questions, 8]: passages by falling similarity that do not hold an answer; -1 where there are fewer.

    Args:
        is_held: [passages], which are held out.
    """
    texts = [row["text"].lower() for row in passages]
    asked = embed([question.text for question in questions])
    found = embed([row["text"][:_MAX_CHARS] for row in passages])
    neighbours = np.full((len(questions), NUM_NEIGHBOURS), -1, np.int32)
    for start in range(0, len(questions), _QUESTIONS):
        products = asked[start : start + _QUESTIONS] @ found.T
        for number, row in enumerate(products, start):
            question = questions[number]
            if not is_held[question.passage]:
                row[is_held] = -np.inf
            best = np.argsort(-row)[:_NUM_FOUND]
            kept = [
                int(one)
                for one in best
                if one != question.passage
                and np.isfinite(row[one])
                and not any(answer.lower() in texts[one] for answer in question.answers)
            ][:NUM_NEIGHBOURS]
            neighbours[number, : len(kept)] = kept
    return neighbours


def read_neighbours(path: Path, num_questions: int) -> NDArray[np.int32]:
    """Read what `prepare` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file belongs to other questions.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make it with: python -m training reader prepare")
    neighbours: NDArray[np.int32] = np.load(path)
    if len(neighbours) != num_questions:
        raise ValueError(
            f"{path} is for {len(neighbours)} questions, but there are {num_questions}; remove it and make it again: "
            "python -m training reader prepare"
        )
    return neighbours


def prepare(data: Path, technical: Sequence[Path], out: Path, embed: Embed) -> Iterator[dict[str, Any]]:
    """Write the neighbours of all questions; files that are complete are kept. Yields a line for each file.

    Args:
        data: Folder of reading-qa.
        technical: Files of technical questions.
    """
    out.mkdir(parents=True, exist_ok=True)
    own = [row for file in technical for row in read_rows(file)]
    people = list(read_rows(data / "passages.jsonl"))
    for name, passages, questions, is_held in (
        (TECHNICAL, own, technical_questions(own), [is_held_out_passage(row["text"]) for row in own]),
        (PEOPLE, people, people_questions(people, data), [is_held_out(row["title"]) for row in people]),
    ):
        path = out / name
        is_kept = path.is_file() and len(np.load(path)) == len(questions)
        if not is_kept:
            np.save(out / "new.npy", find_neighbours(passages, questions, np.array(is_held), embed))
            (out / "new.npy").replace(path)
        yield {"file": str(path), "passages": len(passages), "questions": len(questions), "kept": is_kept}


def embedder(
    folder: Path,
    spec: ReaderSpec,
    dtype: torch.dtype,
    say: Callable[[dict[str, Any]], None] = lambda line: None,
    num_threads: int = 1,
) -> Embed:
    """Return the function that embeds texts with all-MiniLM-L6-v2, each at about its own length.

    It computes what the embedder computes: the mean of the hidden states, normalised. The reader's encoder with
    untrained weights is that model, and is faster in bfloat16.

    Args:
        folder: The embedder's folder.
        say: Called with the progress.
    """
    tokenizer = read_tokenizer(folder)
    model = from_encoder(read_encoder(folder), spec, 0).to(dtype)

    def vectors(ids: Sequence[list[int]]) -> NDArray[np.float32]:
        longest = -(-max(map(len, ids)) // 16) * 16
        tokens = torch.tensor([one + [0] * (longest - len(one)) for one in ids])
        is_token = torch.tensor([[True] * len(one) + [False] * (longest - len(one)) for one in ids])
        with torch.inference_mode():
            hidden = model.encode(tokens, torch.zeros_like(tokens), is_token).float() * is_token[:, :, None]
            found: NDArray[np.float32] = torch.nn.functional.normalize(hidden.sum(1), dim=-1).numpy()
        return found

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        ids = [[CLS, *one.ids[:_MAX_TOKENS], SEP] for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        batches = [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]
        result = np.empty((len(ids), model.spec.hidden_size), np.float32)
        with ThreadPoolExecutor(num_threads) as pool:
            parts = pool.map(lambda batch: vectors([ids[number] for number in batch]), batches)
            for number, (batch, part) in enumerate(zip(batches, parts, strict=True)):
                result[batch] = part
                if number % 100 == 99:
                    say({"embedded": (number + 1) * _BATCH, "texts": len(texts)})
        return result

    return embed

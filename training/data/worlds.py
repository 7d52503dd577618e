"""Generates fictional worlds in plain English: single facts, facts about the subject of the previous chunk, two hops.

The generator is that of the microworld model's training; only the spelling differs (no blanks before full stops). Names
of evaluation worlds do not occur in training worlds: the generator separates persons and companies by the pair of their
words; names of one word are separated here.
"""

import importlib.util
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.split import Split, held_out

SILENT = "The documents do not say."
"""The answer to a question without an answer in the documents."""

MAX_CHUNKS = 6
_GENERATOR = Path("tools/microworld/world.py")
_POOLS = ("TOWN", "SHIP", "RIVER")
"""The generator's lists of one-word names."""
_HELD_SHARE = 0.25
"""Share of these names for evaluation worlds only; the largest world needs about twenty towns."""
_P_REMOVED = 0.5
"""Probability that a chunk is removed from a world, so that questions about it have no answer."""
_P_DRILL = 0.15
"""Probability of a world with one fact per entity, where only the name distinguishes entities."""


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    text: str
    answer: str
    kind: str
    """`single`, `split`, `twohop`, `chain` or `unanswerable`."""
    rivals: int
    """Number of other entities with the same relation."""


@dataclass(frozen=True, slots=True)
class World:
    chunks: tuple[str, ...]
    """Chunks in fixed order, because a continuation refers to the subject of the previous chunk."""
    questions: tuple[WorldQuestion, ...]


def plain(text: str) -> str:
    """Remove the generator's markers and the blanks between its tokens."""
    return re.sub(r" +([.,?!])", r"\1", text.removeprefix("<chunk> ").removesuffix(" </chunk>")).strip()


def load_generator(shared: Path) -> Any:
    """Load the generator as a new module.

    Raises:
        FileNotFoundError: the shared folder has no generator.
    """
    path = shared / _GENERATOR
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; name the folder that contains {_GENERATOR} with --shared")
    spec = importlib.util.spec_from_file_location("microworld_generator", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _generator_of(shared: Path, split: Split) -> Any:
    """Load the generator with the one-word names of the split."""
    module = load_generator(shared)
    for pool in _POOLS:
        names = getattr(module, pool)
        held = held_out(names, _HELD_SHARE, seed=0)  # independent of the worlds' seed
        setattr(module, pool, [name for name in names if (name in held) == (split == "eval")])
    return module


def make_worlds(shared: Path, split: Split, seed: int) -> Iterator[World]:
    """Yield worlds without end, deterministically from the seed.

    Raises:
        FileNotFoundError: the shared folder has no generator.
    """
    return _worlds(_generator_of(shared, split), split, random.Random(f"{seed}:{split}"))


def _worlds(generator: Any, split: Split, rng: random.Random) -> Iterator[World]:
    while True:
        is_drill = split == "train" and rng.random() < _P_DRILL
        num_chunks = rng.randint(2, MAX_CHUNKS)
        settings = {"facts": (1, 3), "p_split": rng.choice([0.4, 1.0]), "bind": is_drill}
        chunks, rows = generator.make_context(rng, num_chunks + 1, split=split, **settings)
        if all(text.count(".") > 0 for text in chunks):  # the shortest drills are not sentences
            world = _cut(chunks, rows, rng)
            if world.questions:
                yield world


def _cut(chunks: list[str], rows: list[dict[str, Any]], rng: random.Random) -> World:
    """Drop one chunk: a random one, whose questions become unanswerable, or the last, whose questions are dropped."""
    gone = len(chunks) - 1
    bases = {min(row["need"]) for row in rows if row["kind"] == "split"}
    free = [place for place in range(len(chunks)) if place not in bases]
    is_removed = rng.random() < _P_REMOVED
    if is_removed:
        gone = rng.choice(free)
    questions = []
    for row in rows:
        if gone not in row["need"]:
            questions.append(_question(row, row["kind"], plain(row["answer"])))
        elif is_removed and row["need"] == [gone]:
            questions.append(_question(row, "unanswerable", SILENT))
    kept = tuple(plain(text) for place, text in enumerate(chunks) if place != gone)
    return World(kept, tuple(questions))


def _question(row: dict[str, Any], kind: str, answer: str) -> WorldQuestion:
    return WorldQuestion(plain(row["question"]), answer, kind, int(row["rivals"]))

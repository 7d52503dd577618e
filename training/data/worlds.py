"""Made-up worlds in plain English: facts over several chunks, facts about whoever the chunk before was about, two hops.

The generator is the one that the microworld model was trained with; only the spelling differs (no blanks before full
stops). Whoever and whatever evaluation worlds name is never named in training worlds: the generator keeps persons and
companies apart, by the pair of their words; names of one word are kept apart here.
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
"""The answer to a question that the documents do not answer."""

MAX_CHUNKS = 6
_GENERATOR = Path("tools/microworld/world.py")
_POOLS = ("TOWN", "SHIP", "RIVER")
"""The generator's lists of names that are one word."""
_HELD_SHARE = 0.25
"""Of these names, for evaluation worlds only; the largest world needs some twenty towns."""
_P_REMOVED = 0.5
"""Of a world that has a chunk taken away, so that questions about it have no answer."""
_P_DRILL = 0.15
"""Of a world with one fact for each of its entities, where only the name tells them apart."""


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    text: str
    answer: str
    kind: str
    """`single`, `split`, `twohop`, `chain` or `unanswerable`."""
    rivals: int
    """How many other entities have the asked relation."""


@dataclass(frozen=True, slots=True)
class World:
    chunks: tuple[str, ...]
    """In an order that may not change: a continuation speaks of whoever the chunk before it was about."""
    questions: tuple[WorldQuestion, ...]


def plain(text: str) -> str:
    """Without the generator's markers and the blanks between its tokens."""
    return re.sub(r" +([.,?!])", r"\1", text.removeprefix("<chunk> ").removesuffix(" </chunk>")).strip()


def _load_generator(shared: Path, split: Split) -> Any:
    """The module that makes worlds, with the names of one word that the split may use."""
    path = shared / _GENERATOR
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give the folder that has it with --shared")
    spec = importlib.util.spec_from_file_location("microworld_generator", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for pool in _POOLS:
        names = getattr(module, pool)
        held = held_out(names, _HELD_SHARE, seed=0)  # whatever the seed of the worlds
        setattr(module, pool, [name for name in names if (name in held) == (split == "eval")])
    return module


def make_worlds(shared: Path, split: Split, seed: int) -> Iterator[World]:
    """Without end; the same seed makes the same worlds.

    Raises:
        FileNotFoundError: the shared folder has no generator.
    """
    return _worlds(_load_generator(shared, split), split, random.Random(f"{seed}:{split}"))


def _worlds(generator: Any, split: Split, rng: random.Random) -> Iterator[World]:
    while True:
        is_drill = split == "train" and rng.random() < _P_DRILL
        num_chunks = rng.randint(2, MAX_CHUNKS)
        settings = {"facts": (1, 3), "p_split": rng.choice([0.4, 1.0]), "bind": is_drill}
        chunks, rows = generator.make_context(rng, num_chunks + 1, split=split, **settings)
        if all(text.count(".") > 0 for text in chunks):  # the barest drills are no sentences
            world = _cut(chunks, rows, rng)
            if world.questions:
                yield world


def _cut(chunks: list[str], rows: list[dict[str, Any]], rng: random.Random) -> World:
    """One chunk fewer: a removed one, whose questions have no answer then, or the last, whose questions go."""
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

"""Baselines of the training log: cross-entropies of unigram and bigram tables counted over training batches.

They are in nats per token on the held-out batches that the training log scores. A model below the bigram baseline uses
more context than the previous token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stillroom.models.tokenizer import Tokenizer
from training.batches import NUM_HELD, batches_of, held_batches
from training.data.rows import NO_TARGET, Batch, Renderer
from training.recipe import Recipe

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Marks:
    unigram: float
    bigram: float
    num_tokens: int
    """Number of counted tokens."""


def marks(train: Iterable[Batch], held: Sequence[Batch], vocab_size: int, *, is_answer: bool) -> Marks:
    """Compute the baselines for answer tokens or for text tokens."""
    pairs: Counter[Pair] = Counter()
    for batch in train:
        pairs.update(_pairs(batch, is_answer))
    singles: Counter[int] = Counter()
    followers: Counter[int] = Counter()
    before: Counter[int] = Counter()
    for (previous, token), count in pairs.items():
        singles[token] += count
        before[previous] += count
        followers[previous] += 1
    total = sum(singles.values())

    def single(token: int) -> float:
        return (singles[token] + 1) / (total + vocab_size)

    def pair(previous: int, token: int) -> float:
        """Return the Witten-Bell smoothed probability: the unigram weight is the number of distinct followers."""
        seen, kinds = before[previous], followers[previous]
        return (pairs[previous, token] + kinds * single(token)) / (seen + kinds) if seen else single(token)

    asked = [one for batch in held for one in _pairs(batch, is_answer)]
    unigram = -np.mean([np.log(single(token)) for _, token in asked])
    bigram = -np.mean([np.log(pair(previous, token)) for previous, token in asked])
    return Marks(round(float(unigram), 4), round(float(bigram), 4), total)


def _pairs(batch: Batch, is_answer: bool) -> list[Pair]:
    chosen = (batch.targets != NO_TARGET) & (batch.is_answer == is_answer)
    return list(zip(batch.tokens[chosen].tolist(), batch.targets[chosen].tolist(), strict=True))


def marks_of_recipe(recipe: Recipe, data: Path, num_batches: int) -> dict[str, Marks]:
    """Compute the baselines of held-out text, of answers over held-out documents, and of answers over held-out worlds.

    Args:
        num_batches: number of counted training batches, spread over the run.
    """
    renderer = Renderer(Tokenizer.load(data / "tokenizer"))
    batches = batches_of(recipe, data, "train", renderer)
    steps = range(0, recipe.num_steps, max(1, recipe.num_steps // num_batches))
    counted = [batches.batch(step) for step in steps]
    held = held_batches(recipe, data, renderer, NUM_HELD)
    size = recipe.shape.vocab_size
    return {
        "text": marks(counted, held["text"], size, is_answer=False),
        "answers": marks(counted, held["text"], size, is_answer=True),
        "answers over worlds": marks(counted, held["worlds"], size, is_answer=True),
    }

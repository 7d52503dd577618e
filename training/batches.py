"""Batches of a recipe: training batches, and held-out batches that the log scores."""

from dataclasses import replace
from pathlib import Path

from training.data.collection import Library
from training.data.rows import Batch, Batches, Renderer
from training.data.split import Split
from training.recipe import Recipe

HELD = {"text": 0.0, "worlds": 1.0}
"""Kind of held-out batches -> share of generated worlds."""
NUM_HELD = 2
"""Batches of each kind that the log scores."""
_NUM_HELD_ROWS = 4


def batches_of(recipe: Recipe, data: Path, split: Split, renderer: Renderer) -> Batches:
    """Make the batches of a recipe; raises FileNotFoundError if there is no data."""
    return Batches(
        library=Library.read(data, split),
        renderer=renderer,
        mixture=recipe.mixture,
        num_rows=recipe.num_rows,
        row_tokens=recipe.row_tokens,
        num_steps=recipe.num_steps,
        seed=recipe.seed,
    )


def held_batches(recipe: Recipe, data: Path, renderer: Renderer, count: int) -> dict[str, list[Batch]]:
    """Return fixed batches of held-out documents and worlds, as difficult as at the end of a run."""
    found = {}
    for name, worlds in HELD.items():
        mixture = replace(recipe.mixture, worlds=worlds, swapped=0.0)
        hard = replace(recipe, mixture=mixture, num_steps=1, num_rows=_NUM_HELD_ROWS)
        batches = batches_of(hard, data, "eval", renderer)
        found[name] = [batches.batch(number + 1) for number in range(count)]
    return found

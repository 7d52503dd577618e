"""Recipes: all options that determine the trained weights. Options of speed and device are in `trainer.Run`."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from training.data.tasks import Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama: RMSNorm, rotary positions, grouped queries, gated MLP, tied embeddings."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int = 8192
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied embeddings count once."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Options of a training run; a run can be resumed only with the same recipe and data."""

    shape: Shape
    num_steps: int
    num_rows: int
    """Rows per step."""
    row_tokens: int = 2048
    learning_rate: float = 2e-3
    schedule: Literal["wsd", "cosine"] = "wsd"
    """`wsd`: constant after the warm-up, then linear decay to 0; `cosine`: cosine decay to a tenth."""
    warmup_steps: int = 100
    decay_share: float = 0.3
    """Share of the run, at its end, in which `wsd` decays."""
    weight_decay: float = 0.1
    """Weight decay of matrices; embeddings and norms have none."""
    max_grad_norm: float = 1.0
    text_weight: tuple[float, float] = (1.0, 0.1)
    """Weight of the text loss relative to the answer loss, at the first step and from the middle of the run on."""
    mixture: Mixture = field(default_factory=Mixture)
    seed: int = 0

    @property
    def step_tokens(self) -> int:
        return self.num_rows * self.row_tokens

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


SMALL = Shape(hidden_size=256, num_layers=14, num_heads=4, num_kv_heads=2, intermediate_size=704)
BUNDLED = Shape(hidden_size=384, num_layers=16, num_heads=6, num_kv_heads=3, intermediate_size=1056)

RECIPES: dict[str, Recipe] = {
    # test of a GPU with the model of the long run, about a minute
    "smoke": Recipe(shape=BUNDLED, num_steps=60, num_rows=32, warmup_steps=10),
    "12m": Recipe(shape=SMALL, num_steps=3000, num_rows=64, learning_rate=3e-3),
    "30m": Recipe(shape=BUNDLED, num_steps=3600, num_rows=64),
}


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    left = 1 - step / recipe.num_steps
    if recipe.schedule == "wsd":
        return recipe.learning_rate * warm * min(1.0, left / recipe.decay_share)
    return recipe.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (1 - left))))


def text_weight(recipe: Recipe, step: int) -> float:
    """Return the text weight of a step: linear from the first value to the second, constant after half the run."""
    first, last = recipe.text_weight
    return first + (last - first) * min(1.0, 2 * step / recipe.num_steps)

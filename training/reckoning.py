"""How long a run takes before it is begun: operations of a token, tokens, and what a machine does in a second."""

from dataclasses import dataclass

from training.recipe import Recipe, Shape

BF16_FLOPS = 990e12
"""Of one H100 or H200, dense, by its data sheet."""
UTILISATION = 0.15
"""Of that, for products as narrow as these: their time goes into moving activations. The smoke test measures it."""


@dataclass(frozen=True, slots=True)
class Reckoning:
    parameters: int
    tokens: int
    flops_per_token: float
    minutes: float
    tokens_per_second: float


def flops_per_token(shape: Shape, context: float) -> float:
    """Forward and backward: 6 for each weight that multiplies, 12 x layers x width x context for attention.

    Args:
        context: how many tokens a token looks at, on average.
    """
    return 6 * shape.num_parameters + 12 * shape.num_layers * shape.hidden_size * context


def reckon(recipe: Recipe, *, context: float = 400, flops: float = BF16_FLOPS * UTILISATION) -> Reckoning:
    """Args:
    context: a sample has some 800 tokens, so a token looks at about half as many.
    flops: operations that the machine does in a second, in practice.
    """
    each = flops_per_token(recipe.shape, context)
    tokens = recipe.num_steps * recipe.step_tokens
    return Reckoning(recipe.shape.num_parameters, tokens, each, tokens * each / flops / 60, flops / each)

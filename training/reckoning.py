"""Estimates the duration of a run from the operations per token, the tokens, and the machine's speed."""

from dataclasses import dataclass

from training.recipe import Recipe, Shape

BF16_FLOPS = 990e12
"""Dense bfloat16 peak of one H100 or H200 by its data sheet."""
UTILISATION = 0.15
"""Assumed share of the peak for matrices this narrow, which are bound by activation traffic; `smoke` measures it."""


@dataclass(frozen=True, slots=True)
class Reckoning:
    parameters: int
    tokens: int
    flops_per_token: float
    minutes: float
    tokens_per_second: float


def flops_per_token(shape: Shape, context: float) -> float:
    """Return operations per token, forward and backward: 6 per weight, 12 x layers x width x context for attention.

    Args:
        context: mean number of tokens that a token attends to.
    """
    return 6 * shape.num_parameters + 12 * shape.num_layers * shape.hidden_size * context


def reckon(recipe: Recipe, *, context: float = 400, flops: float = BF16_FLOPS * UTILISATION) -> Reckoning:
    """Estimate the operations and the duration of a recipe.

    Args:
        context: mean number of tokens that a token attends to; a sample has about 800 tokens.
        flops: achieved operations per second of the machine.
    """
    each = flops_per_token(recipe.shape, context)
    tokens = recipe.num_steps * recipe.step_tokens
    return Reckoning(recipe.shape.num_parameters, tokens, each, tokens * each / flops / 60, flops / each)

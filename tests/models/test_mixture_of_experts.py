"""The mixture against its slow twin, and what it must not touch. The whole model is compared in test_oracle.py."""

import pytest
import torch

from stillroom.models.mixture_of_experts import GatedMlp, mix, mix_reference, route
from stillroom.ops.linear import Linear


def experts(num_experts: int, seed: int = 0) -> list[GatedMlp]:
    """Experts of 8 dimensions with 6 inner ones."""
    generator = torch.Generator().manual_seed(seed)

    def linear(*shape: int) -> Linear:
        return Linear(torch.randn(shape, generator=generator) * 0.5)

    return [GatedMlp(linear(12, 8), linear(8, 6), "silu") for _ in range(num_experts)]


@pytest.mark.parametrize("num_active", [1, 2, 6])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_mix_equals_its_twin(num_tokens: int, num_active: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x, router = torch.randn(num_tokens, 8, generator=generator), torch.randn(num_tokens, 6, generator=generator)
    routes = route(router, num_active, is_normalised=False)
    arguments = (x, routes, experts(6))
    torch.testing.assert_close(mix(*arguments), mix_reference(*arguments))


def test_experts_that_nobody_chose_are_not_read() -> None:
    several = experts(4)
    several[2].gate_up.weight[:] = torch.nan
    router = torch.tensor([[5.0, 1.0, -9.0, 2.0], [0.0, 3.0, -9.0, 1.0]])
    assert mix(torch.ones(2, 8), route(router, 2, is_normalised=True), several).isfinite().all()


def test_the_weights_are_probabilities_of_all_experts_or_of_the_chosen() -> None:
    router = torch.log(torch.tensor([[0.5, 0.125, 0.25, 0.125]]))
    plain, chosen = route(router, 2, is_normalised=False)
    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(plain, torch.tensor([[0.5, 0.25]]))
    torch.testing.assert_close(route(router, 2, is_normalised=True)[0], torch.tensor([[2 / 3, 1 / 3]]))

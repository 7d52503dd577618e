"""The mixture against its slow twin, and what it must not touch. The whole model is compared in test_oracle.py."""

import pytest
import torch
import torch.nn.functional as F

from stillroom.models.mixture_of_experts import mix, mix_reference, route


def weights(num_experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of 8 dimensions with 5 inner ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_experts, 10, 8), (num_experts, 8, 5)
    gate_up, down = (torch.randn(shape, generator=generator) * 0.5 for shape in shapes)
    return gate_up, down


@pytest.mark.parametrize("num_active", [1, 2, 6])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_mix_equals_its_twin(num_tokens: int, num_active: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x, router = torch.randn(num_tokens, 8, generator=generator), torch.randn(num_tokens, 6, generator=generator)
    routes = route(router, num_active, is_normalised=False)
    arguments = (x, routes, *weights(6), F.silu)
    torch.testing.assert_close(mix(*arguments), mix_reference(*arguments))


def test_experts_that_nobody_chose_are_not_read() -> None:
    gate_up, down = weights(4)
    gate_up[2], down[2] = torch.nan, torch.nan
    router = torch.tensor([[5.0, 1.0, -9.0, 2.0], [0.0, 3.0, -9.0, 1.0]])
    assert mix(torch.ones(2, 8), route(router, 2, is_normalised=True), gate_up, down, F.silu).isfinite().all()


def test_the_weights_are_probabilities_of_all_experts_or_of_the_chosen() -> None:
    router = torch.log(torch.tensor([[0.5, 0.125, 0.25, 0.125]]))
    plain, experts = route(router, 2, is_normalised=False)
    assert experts.tolist() == [[0, 2]]
    torch.testing.assert_close(plain, torch.tensor([[0.5, 0.25]]))
    torch.testing.assert_close(route(router, 2, is_normalised=True)[0], torch.tensor([[2 / 3, 1 / 3]]))

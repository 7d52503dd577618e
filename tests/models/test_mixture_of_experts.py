"""The mixture of experts equals its reference. The whole model is compared in test_oracle.py."""

from collections import Counter

import pytest
import torch

from stillroom.models.mixture_of_experts import GatedMlp, mix, mix_reference, route
from stillroom.ops.device_experts import DeviceExperts, expert_tiles
from stillroom.ops.linear import Linear
from tests.gpu_kernels import DEVICE, HALF_PRECISION


def experts(num_experts: int, seed: int = 0) -> list[GatedMlp]:
    """Return experts of 8 dimensions with 6 inner ones."""
    generator = torch.Generator().manual_seed(seed)

    def linear(*shape: int) -> Linear:
        return Linear(torch.randn(shape, generator=generator) * 0.5)

    return [GatedMlp(linear(12, 8), linear(8, 6), "silu") for _ in range(num_experts)]


@pytest.mark.parametrize("num_active", [1, 2, 6])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_mix_equals_its_reference(num_tokens: int, num_active: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x, router = torch.randn(num_tokens, 8, generator=generator), torch.randn(num_tokens, 6, generator=generator)
    routes = route(router, num_active, is_normalised=False)
    arguments = (x, routes, experts(6))
    torch.testing.assert_close(mix(*arguments), mix_reference(*arguments))


def test_experts_that_were_not_chosen_are_not_read() -> None:
    several = experts(4)
    several[2].gate_up.weight[:] = torch.nan
    router = torch.tensor([[5.0, 1.0, -9.0, 2.0], [0.0, 3.0, -9.0, 1.0]])
    assert mix(torch.ones(2, 8), route(router, 2, is_normalised=True), several).isfinite().all()


def test_expert_weights_are_normalised_over_all_or_over_chosen_experts() -> None:
    router = torch.log(torch.tensor([[0.5, 0.125, 0.25, 0.125]]))
    plain, chosen = route(router, 2, is_normalised=False)
    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(plain, torch.tensor([[0.5, 0.25]]))
    torch.testing.assert_close(route(router, 2, is_normalised=True)[0], torch.tensor([[2 / 3, 1 / 3]]))


def wide_experts(num_experts: int, dtype: torch.dtype) -> list[GatedMlp]:
    """Return experts of 72 dimensions with 70 inner ones, which fill no block of the kernel."""
    generator = torch.Generator().manual_seed(0)

    def linear(*shape: int) -> Linear:
        return Linear((torch.randn(shape, generator=generator) * 0.1).to(DEVICE, dtype))

    return [GatedMlp(linear(140, 72), linear(72, 70), "silu") for _ in range(num_experts)]


def on_device(several: list[GatedMlp]) -> DeviceExperts:
    return DeviceExperts([one.gate_up for one in several], [one.down for one in several], several[0].activation)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_PRECISION])
@pytest.mark.parametrize(("num_tokens", "num_active"), [(1, 1), (1, 3), (7, 2), (90, 2)])
def test_mixture_on_a_gpu_equals_its_reference(num_tokens: int, num_active: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 72, generator=generator).to(DEVICE, dtype)
    several, router = wide_experts(5, dtype), torch.randn(num_tokens, 5, generator=generator).to(DEVICE)
    routes = route(router, num_active, is_normalised=False)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    ours, expected = on_device(several).mix(x, routes), mix_reference(x, routes, several)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chosen", [[0], [4, 4, 4], [1, 3, 1, 1, 1, 0], [2] * 9, list(range(5)) * 4])
def test_tiles_cover_every_row_once_and_no_tile_mixes_experts(chosen: list[int]) -> None:
    ordered, covered = sorted(chosen), Counter[int]()
    for expert, begin, end in expert_tiles(torch.tensor(chosen), num_experts=5, block_r=4).tolist():
        assert 0 <= end - begin <= 4
        assert set(ordered[begin:end]) <= {expert}
        covered.update(range(begin, end))
    assert covered == Counter(range(len(chosen)))

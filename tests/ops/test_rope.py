"""Rotation keeps lengths, and products depend on distance only. tests/models/test_oracle.py compares frequencies."""

import math
from typing import Any

import pytest
import torch

from stillroom.ops.rope import RopeSpec, cos_sin, inverse_frequencies, rerotate_keys, rotate


def rotated(x_THD: torch.Tensor, positions: list[int]) -> torch.Tensor:
    inv_freq, factor = inverse_frequencies(RopeSpec(x_THD.shape[-1], 10000.0, 2048))
    return rotate(x_THD, *cos_sin(inv_freq, factor, torch.tensor(positions)))


def test_position_zero_is_the_identity_and_lengths_are_kept() -> None:
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotated(x, [0] * 5), x)
    torch.testing.assert_close(rotated(x, [1, 7, 99, 500, 2000]).norm(dim=-1), x.norm(dim=-1))


def test_first_pair_rotates_by_one_radian_per_position() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])  # pairs are (0, 2) and (1, 3)
    torch.testing.assert_close(rotated(x, [1])[0, 0], torch.tensor([math.cos(1), 0.0, math.sin(1), 0.0]))


def test_products_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 1, 16, generator=generator), torch.randn(1, 1, 16, generator=generator)
    near = (rotated(q, [9]) * rotated(k, [4])).sum()
    far = (rotated(q, [1009]) * rotated(k, [1004])).sum()
    torch.testing.assert_close(near, far, atol=1e-3, rtol=1e-3)


def test_partial_rotation_rotates_the_leading_dimensions_only() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(2))
    rotation = cos_sin(*inverse_frequencies(RopeSpec(4, 10000.0, 2048)), torch.tensor([1, 2, 3]))
    turned = rotate(x, *rotation)
    torch.testing.assert_close(turned[..., 4:], x[..., 4:], rtol=0, atol=0)
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4].contiguous(), *rotation))


def test_longrope_chooses_its_factors_by_the_longest_sequence_that_will_run() -> None:
    numbers = {"short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0], "original_max_position_embeddings": 64}
    plain, _ = inverse_frequencies(RopeSpec(4, 10000.0, 4096))
    for length, factors in ((64, [1.0, 2.0]), (65, [4.0, 8.0])):
        stretched, attention = inverse_frequencies(RopeSpec(4, 10000.0, 4096, "longrope", numbers, length))
        torch.testing.assert_close(plain / stretched, torch.tensor(factors))
        assert math.isclose(attention, math.sqrt(1 + math.log(64) / math.log(64)))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCHEMES = [
    pytest.param("default", {}, id="default"),
    pytest.param("linear", {"factor": 4.0}, id="linear"),
    pytest.param("llama3", LLAMA3, id="llama3"),
    pytest.param("yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}, id="yarn"),
]


@pytest.mark.parametrize(("kind", "parameters"), SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("old", "new"), [(0, 131_000), (131_000, 0), (77, 4_000), (4_000, 3_999), (9, 9)])
def test_rerotated_keys_equal_freshly_rotated_keys(
    kind: str, parameters: dict[str, Any], dtype: torch.dtype, old: int, new: int
) -> None:
    """Up to the last position of a long model, for scaled frequencies and for a factor on cos and sin."""
    inv_freq, factor = inverse_frequencies(RopeSpec(16, 500_000.0, 131_072, kind, parameters, 131_072))
    keys = torch.randn(5, 2, 20, generator=torch.Generator().manual_seed(3))

    def placed(first: int) -> torch.Tensor:
        cos, sin = cos_sin(inv_freq, factor, torch.arange(first, first + 5))
        return rotate(keys, cos, sin).to(dtype)

    turned = rerotate_keys(placed(old)[None], inv_freq[None], old, new)[0]
    assert turned.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(turned.float(), placed(new).float(), atol=tolerance, rtol=tolerance)


def test_layers_rerotate_with_their_own_frequencies() -> None:
    frequencies = torch.stack([inverse_frequencies(RopeSpec(8, theta, 2048))[0] for theta in (100.0, 10_000.0)])
    keys = torch.randn(2, 3, 1, 8, generator=torch.Generator().manual_seed(4))
    both = rerotate_keys(keys, frequencies, 5, 50)
    for layer in range(2):
        alone = rerotate_keys(keys[layer : layer + 1], frequencies[layer : layer + 1], 5, 50)
        torch.testing.assert_close(both[layer : layer + 1], alone)

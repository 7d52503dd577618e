"""Rotation: it is one, and it depends on distance only. Frequencies are compared in tests/models/test_oracle.py."""

import math

import torch

from stillroom.ops.rope import RopeSpec, cos_sin, inverse_frequencies, rotate


def rotated(x_THD: torch.Tensor, positions: list[int]) -> torch.Tensor:
    inv_freq, factor = inverse_frequencies(RopeSpec(x_THD.shape[-1], 10000.0, 2048))
    return rotate(x_THD, *cos_sin(inv_freq, factor, torch.tensor(positions), x_THD.dtype))


def test_position_zero_changes_nothing_and_lengths_are_kept() -> None:
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotated(x, [0] * 5), x)
    torch.testing.assert_close(rotated(x, [1, 7, 99, 500, 2000]).norm(dim=-1), x.norm(dim=-1))


def test_the_first_pair_turns_by_one_radian_per_position() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])  # pairs are (0, 2) and (1, 3)
    torch.testing.assert_close(rotated(x, [1])[0, 0], torch.tensor([math.cos(1), 0.0, math.sin(1), 0.0]))


def test_products_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 1, 16, generator=generator), torch.randn(1, 1, 16, generator=generator)
    near = (rotated(q, [9]) * rotated(k, [4])).sum()
    far = (rotated(q, [1009]) * rotated(k, [1004])).sum()
    torch.testing.assert_close(near, far, atol=1e-3, rtol=1e-3)

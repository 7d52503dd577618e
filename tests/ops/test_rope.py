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


def test_only_the_leading_dimensions_turn_where_fewer_are_rotated() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(2))
    turn = cos_sin(*inverse_frequencies(RopeSpec(4, 10000.0, 2048)), torch.tensor([1, 2, 3]), x.dtype)
    turned = rotate(x, *turn)
    torch.testing.assert_close(turned[..., 4:], x[..., 4:], rtol=0, atol=0)
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4].contiguous(), *turn))


def test_longrope_chooses_its_factors_by_the_longest_sequence_that_will_run() -> None:
    numbers = {"short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0], "original_max_position_embeddings": 64}
    plain, _ = inverse_frequencies(RopeSpec(4, 10000.0, 4096))
    for length, factors in ((64, [1.0, 2.0]), (65, [4.0, 8.0])):
        stretched, attention = inverse_frequencies(RopeSpec(4, 10000.0, 4096, "longrope", numbers, length))
        torch.testing.assert_close(plain / stretched, torch.tensor(factors))
        assert math.isclose(attention, math.sqrt(1 + math.log(64) / math.log(64)))

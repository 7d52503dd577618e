"""Where attention falls, against sums over the whole matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.ops.attention_mass import (
    attention_mass,
    attention_mass_reference,
    attention_to_itself,
    attention_weights_reference,
    one_hot,
    received_attention,
)

HEADS = [(1, 1, 8), (6, 2, 8), (4, 4, 16), (9, 3, 64), (5, 1, 4)]
POSITIONS = [None, [0, 22, 7, 7, 13], [22, 21, 3, 2, 1]]
LIMITS = [(None, None), (1, None), (5, None), (100, None), (None, 0.5), (5, 0.5)]
"""window, softcap"""


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual, expected.float(), atol=1e-5, rtol=1e-5)


def tensors(
    num_queries: int, num_keys: int, heads: tuple[int, int, int] = (6, 2, 8)
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    num_heads, num_kv_heads, head_dim = heads
    shapes = (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, head_dim)
    q, k = (2 * torch.randn(shape, generator=generator) for shape in shapes)
    return q, k


def drawn_groups(num_keys: int, num_groups: int) -> torch.Tensor:
    """Some keys of no group, groups anywhere."""
    return torch.randint(-1, num_groups, (num_keys,), generator=torch.Generator().manual_seed(num_keys))


@pytest.mark.parametrize(("window", "softcap"), LIMITS)
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_all_three_equal_their_twin(
    heads: tuple[int, int, int], positions: list[int] | None, window: int | None, softcap: float | None
) -> None:
    q, k = tensors(5, 23, heads)
    groups = drawn_groups(23, 3)
    where = None if positions is None else torch.tensor(positions)
    limits = (0.3, where, window, softcap)
    close(attention_mass(q, k, groups, 3, *limits), attention_mass_reference(q, k, groups, 3, *limits))
    weights_QK = attention_weights_reference(q, k, *limits).mean(0)
    close(received_attention(q, k, *limits), weights_QK.sum(0))
    own = torch.arange(18, 23) if where is None else where
    close(attention_to_itself(q, k, *limits), weights_QK[torch.arange(5), own])


@pytest.mark.parametrize("num_groups", [0, 1, 7, 8, 9, 20])
def test_more_groups_than_a_head_is_wide(num_groups: int) -> None:
    q, k = tensors(5, 23)
    groups = drawn_groups(23, num_groups) if num_groups else torch.full((23,), -1)
    mass = attention_mass(q, k, groups, num_groups, 0.3)
    assert mass.shape == (5, num_groups)
    if num_groups:
        close(mass, attention_mass_reference(q, k, groups, num_groups, 0.3))


@pytest.mark.parametrize(("window", "softcap"), LIMITS)
def test_tiles_of_queries_change_nothing(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = tensors(13, 40)
    groups = drawn_groups(40, 4)
    limits = (0.3, torch.randperm(40, generator=torch.Generator().manual_seed(1))[:13], window, softcap)
    whole = (
        attention_mass(q, k, groups, 4, *limits),
        received_attention(q, k, *limits),
        attention_to_itself(q, k, *limits),
    )
    monkeypatch.setattr("stillroom.ops.attention_mass._QUERIES_PER_TILE", 4)
    close(attention_mass(q, k, groups, 4, *limits), whole[0])
    close(received_attention(q, k, *limits), whole[1])
    close(attention_to_itself(q, k, *limits), whole[2])


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(0, 30),
    st.none() | st.integers(1, 40),
    st.none() | st.floats(0.1, 50.0),
    st.integers(1, 10),
)
def test_groups_that_cover_everything_share_out_everything(
    num_queries: int, num_before: int, window: int | None, softcap: float | None, num_groups: int
) -> None:
    q, k = tensors(num_queries, num_before + num_queries)
    groups = torch.arange(len(k)) % num_groups
    mass = attention_mass(q, k, groups, num_groups, 0.3, None, window, softcap)
    close(mass, attention_mass_reference(q, k, groups, num_groups, 0.3, None, window, softcap))
    close(mass.sum(1), torch.ones(num_queries))
    close(received_attention(q, k, 0.3, None, window, softcap).sum(), torch.tensor(float(num_queries)))


def test_inter_and_intra_of_a_chunk() -> None:
    """Cache-Craft's Equations 3 and 4 of the last 6 of 20 tokens, behind chunks of 4 and 10."""
    q, k = tensors(6, 20)
    groups = torch.tensor([0] * 4 + [1] * 10 + [2] * 6)
    weights = attention_weights_reference(q, k, 0.3).mean(0)
    mass = attention_mass(q, k, groups, 3, 0.3)
    close(mass[:, :2].sum(0), torch.stack([weights[:, :4].sum(), weights[:, 4:14].sum()]))
    intra = sum(weights[i, 14 + j] for i in range(6) for j in range(i))
    assert float(mass[:, 2].sum() - attention_to_itself(q, k, 0.3).sum()) == pytest.approx(float(intra), abs=1e-5)


def test_keys_that_no_query_sees_are_never_read() -> None:
    q, k = tensors(3, 20)
    groups, positions = drawn_groups(20, 2), torch.tensor([9, 12, 10])
    expected = attention_mass_reference(q, k, groups, 2, 0.3, positions, 4)
    k[:6], k[13:] = torch.nan, torch.nan
    close(attention_mass(q, k, groups, 2, 0.3, positions, 4), expected)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_and_gives_float32(dtype: torch.dtype, softcap: float | None) -> None:
    q, k = (tensor.to(dtype) for tensor in tensors(6, 20))
    groups = drawn_groups(20, 3)
    mass = attention_mass(q, k, groups, 3, 0.3, None, None, softcap)
    assert mass.dtype is torch.float32
    expected = attention_mass_reference(q, k, groups, 3, 0.3, None, None, softcap).float()
    torch.testing.assert_close(mass, expected, atol=1e-2, rtol=1e-2)
    mixed = attention_mass(q.float(), k, groups, 3, 0.3, None, None, softcap)
    close(mixed, expected)


def test_membership() -> None:
    assert one_hot(torch.tensor([1, -1, 0]), 2, torch.float32).tolist() == [[0, 1], [0, 0], [1, 0]]

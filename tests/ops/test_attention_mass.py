"""Attention mass equals sums over the whole attention matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.ops.attention_mass import (
    AttentionFlow,
    attention_flow,
    attention_weights_reference,
    mean_weights,
    one_hot,
)

HEADS = [(1, 1, 8), (6, 2, 8), (4, 4, 16), (9, 3, 64), (5, 1, 4)]
POSITIONS = [list(range(18, 23)), [0, 22, 7, 7, 13], [22, 21, 3, 2, 1]]
LIMITS = [(None, None), (1, None), (5, None), (100, None), (None, 0.5), (5, 0.5)]
"""window, softcap"""


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual, expected.float(), atol=tolerance, rtol=tolerance)


def flows_are_close(actual: AttentionFlow, expected: AttentionFlow, tolerance: float = 1e-5) -> None:
    for one, other in zip(actual, expected, strict=True):
        close(one, other, tolerance)


def tensors(
    num_queries: int, num_keys: int, heads: tuple[int, int, int] = (6, 2, 8)
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    num_heads, num_kv_heads, head_dim = heads
    shapes = (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, head_dim)
    q, k = (2 * torch.randn(shape, generator=generator) for shape in shapes)
    return q, k


def drawn_groups(num_keys: int, num_groups: int) -> torch.Tensor:
    """Return random groups of keys; some keys have none."""
    return torch.randint(-1, num_groups, (num_keys,), generator=torch.Generator().manual_seed(num_keys))


def slow_flow(  # noqa: PLR0913  as its reference
    q: torch.Tensor,
    k: torch.Tensor,
    groups: torch.Tensor,
    num_groups: int,
    scale: float,
    places: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionFlow:
    """Return sums over the whole matrix, one number at a time."""
    weights_QK = attention_weights_reference(q, k, scale, places, window, softcap).mean(0)
    paid, own = torch.zeros(len(q), num_groups, dtype=torch.float64), torch.zeros(len(q), dtype=torch.float64)
    for row, place in enumerate(places.tolist()):
        own[row] = weights_QK[row, place]
        for key, group in enumerate(groups.tolist()):
            if group >= 0 and key != place:
                paid[row, group] += weights_QK[row, key]
    return AttentionFlow(paid, own, weights_QK.sum(0))


@pytest.mark.parametrize(("window", "softcap"), LIMITS)
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_flow_equals_its_reference(
    heads: tuple[int, int, int], positions: list[int], window: int | None, softcap: float | None
) -> None:
    q, k = tensors(5, 23, heads)
    arguments = (q, k, drawn_groups(23, 3), 3, 0.3, torch.tensor(positions), window, softcap)
    flows_are_close(attention_flow(*arguments), slow_flow(*arguments))


@pytest.mark.parametrize(("window", "softcap"), LIMITS)
def test_tiles_of_queries_change_nothing(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = tensors(13, 40)
    places = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:13]
    arguments = (q, k, drawn_groups(40, 4), 4, 0.3, places, window, softcap)
    whole = attention_flow(*arguments)
    monkeypatch.setattr("stillroom.ops.attention_mass._LOGITS_PER_TILE", 6 * 40 * 4)
    flows_are_close(attention_flow(*arguments), whole)


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(0, 30),
    st.none() | st.integers(1, 40),
    st.none() | st.floats(0.1, 50.0),
    st.integers(1, 10),
)
def test_masses_of_groups_that_cover_all_keys_sum_to_one(
    num_queries: int, num_before: int, window: int | None, softcap: float | None, num_groups: int
) -> None:
    q, k = tensors(num_queries, num_before + num_queries)
    groups, places = torch.arange(len(k)) % num_groups, torch.arange(num_before, len(k))
    flow = attention_flow(q, k, groups, num_groups, 0.3, places, window, softcap)
    close(flow.paid_QM.sum(1) + flow.own_Q, torch.ones(num_queries))
    close(flow.received_K.sum(), torch.tensor(float(num_queries)))


def test_inter_and_intra_of_a_chunk() -> None:
    """Cache-Craft's Equations 3 and 4 for the last 6 of 20 tokens, after chunks of 4 and 10."""
    q, k = tensors(6, 20)
    groups = torch.tensor([0] * 4 + [1] * 10 + [2] * 6)
    weights = attention_weights_reference(q, k, 0.3).mean(0)
    paid = attention_flow(q, k, groups, 3, 0.3, torch.arange(14, 20)).paid_QM.sum(0)
    close(paid[:2], torch.stack([weights[:, :4].sum(), weights[:, 4:14].sum()]))
    intra = sum(weights[i, 14 + j] for i in range(6) for j in range(i))
    assert float(paid[2]) == pytest.approx(float(intra), abs=1e-5)


def test_keys_that_no_query_sees_are_never_read() -> None:
    q, k = tensors(3, 20)
    arguments = (drawn_groups(20, 2), 2, 0.3, torch.tensor([9, 12, 10]))
    expected = slow_flow(q, k, *arguments)
    k[13:] = torch.nan
    flows_are_close(attention_flow(q, k, *arguments), expected)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, softcap: float | None) -> None:
    q, k = (tensor.to(dtype) for tensor in tensors(6, 20))
    arguments = (drawn_groups(20, 3), 3, 0.3, torch.arange(14, 20), None, softcap)
    flows_are_close(attention_flow(q, k, *arguments), slow_flow(q, k, *arguments), 1e-4)
    flows_are_close(attention_flow(q.float(), k, *arguments), slow_flow(q, k, *arguments), 1e-4)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 20), (6, 20), (7, 7)])
def test_mean_weights_equal_their_reference(
    num_queries: int, num_keys: int, window: int | None, softcap: float | None
) -> None:
    q, k = tensors(num_queries, num_keys)
    found = mean_weights(q, k, 0.3, torch.arange(num_keys - num_queries, num_keys), window, softcap)
    close(found, attention_weights_reference(q, k, 0.3, None, window, softcap).mean(0))
    close(found.sum(1), torch.ones(num_queries))


def test_membership() -> None:
    assert one_hot(torch.tensor([1, -1, 0]), 2).tolist() == [[0, 1], [0, 0], [1, 0]]

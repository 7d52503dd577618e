"""Attention equals its reference, and packed spans equal one span at a time."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stillroom.ops.attention import (
    AttentionPlan,
    AttentionSpan,
    attend,
    attend_reference,
    attend_spans,
    causal_mask,
    spans_of_rows,
)


def tensors(num_queries: int, num_keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return queries of 6 heads, keys and values of 2."""
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    shapes = (num_queries, 6, 8), (num_keys, 2, 8), (num_keys, 2, 8)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 23), (7, 7), (5, 23), (23, 23)])
def test_attend_equals_its_reference(
    num_queries: int, num_keys: int, window: int | None, softcap: float | None
) -> None:
    q, k, v = tensors(num_queries, num_keys)
    expected = attend_reference(q, k, v, 0.3, window, softcap)
    torch.testing.assert_close(attend(q, k, v, 0.3, window, softcap), expected)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_queries", [1, 6])
def test_half_precision_keeps_its_dtype_and_stays_close(
    dtype: torch.dtype, num_queries: int, softcap: float | None
) -> None:
    q, k, v = tensors(num_queries, 20, dtype=dtype)
    out = attend(q, k, v, 0.3, None, softcap)
    assert out.dtype is dtype
    torch.testing.assert_close(out, attend_reference(q, k, v, 0.3, None, softcap), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 100, 5000])
@pytest.mark.parametrize("num_before", [1, 32, 213, 214])
def test_many_queries_behind_a_short_context_attend_as_those_of_the_whole_sequence(
    num_before: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(num_before)
    num_keys = 640 + num_before
    q, k, v = (torch.randn(num_keys, heads, 16, generator=generator) for heads in (4, 2, 2))
    whole = attend(q, k, v, 0.25, window)
    torch.testing.assert_close(attend(q[num_before:], k, v, 0.25, window), whole[num_before:])
    last = attend_reference(q[-2:], k, v, 0.25, window)
    torch.testing.assert_close(attend(q[num_before:], k, v, 0.25, window)[-2:], last)


def test_softcap_bounds_the_weight_of_one_key() -> None:
    q, k, v = torch.full((1, 1, 2), 50.0), torch.tensor([[[50.0, 50.0]], [[-50.0, -50.0]]]), torch.eye(2)[:, None]
    assert attend(q, k, v, 1.0, None)[0, 0, 1] == 0
    torch.testing.assert_close(attend(q, k, v, 1.0, None, 1.0)[0, 0], torch.softmax(torch.tensor([1.0, -1.0]), 0))


def test_slots_outside_the_context_are_never_read() -> None:
    q, k, v = tensors(9, 40)
    k_pool = torch.full((100, 2, 8), torch.nan)
    v_pool = torch.full((100, 2, 8), torch.nan)
    scattered = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:17] + 40
    k_pool[scattered], v_pool[scattered] = k[:17], v[:17]
    k_pool[3:26], v_pool[3:26] = k[17:], v[17:]
    spans = [AttentionSpan(0, 4, scattered, 17), AttentionSpan(4, 9, slice(3, 26), 23)]
    out = attend_spans(q, (k_pool, v_pool), spans, 0.3, None)
    torch.testing.assert_close(out[:4], attend_reference(q[:4], k[:17], v[:17], 0.3, None))
    torch.testing.assert_close(out[4:], attend_reference(q[4:], k[17:], v[17:], 0.3, None))


def test_mask_of_three_queries_over_five_keys() -> None:
    seen = causal_mask(3, 5, None, torch.device("cpu"))
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(3, 5, 2, torch.device("cpu")).int().tolist() == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@given(
    st.lists(st.integers(0, 29), min_size=1, max_size=12, unique=True).map(sorted),
    st.sampled_from([None, 1, 6]),
    st.sampled_from([None, 0.5]),
    st.booleans(),
    st.sampled_from([1, 4, 64]),
)
@example([0, 7, 9, 12, 20], 6, None, False, 4)
def test_queries_with_gaps_attend_as_each_does_alone(
    places: list[int], window: int | None, softcap: float | None, is_scattered: bool, num_together: int
) -> None:
    """In a step with a decoding row and a whole prompt of other sequences."""
    num_keys = places[-1] + 1
    q, k, v = tensors(len(places) + 4, 60)
    own = torch.randperm(40, generator=torch.Generator().manual_seed(num_keys))[:num_keys]
    context = own if is_scattered else slice(5, 5 + num_keys)
    end = 1 + len(places)
    spans = [
        AttentionSpan(0, 1, slice(40, 47), 7),
        AttentionSpan(1, end, context, num_keys, torch.tensor(places) if len(places) > 1 else None),
        AttentionSpan(end, end + 3, slice(50, 53), 3),
    ]
    with patch("stillroom.ops.attention._ROWS_WITH_GAPS", num_together):
        out = AttentionPlan(spans).attend(q, (k, v), 0.3, window, softcap)
    for row, place in enumerate(places, start=1):
        keys, values = k[context][: place + 1], v[context][: place + 1]
        alone = attend_reference(q[row : row + 1], keys, values, 0.3, window, softcap)
        torch.testing.assert_close(out[row : row + 1], alone)
    torch.testing.assert_close(out[:1], attend_reference(q[:1], k[40:47], v[40:47], 0.3, window, softcap))
    torch.testing.assert_close(
        out[end : end + 3], attend_reference(q[end : end + 3], k[50:53], v[50:53], 0.3, window, softcap)
    )
    rows = [1, end]
    some = AttentionPlan(spans_of_rows(spans, rows)).attend(q[rows], (k, v), 0.3, window, softcap)
    torch.testing.assert_close(some, out[rows])


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("place", [0, 70, 149])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 5.0)])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_nan_that_a_query_sees_reaches_its_output(
    which: int, place: int, window: int | None, softcap: float | None, num_queries: int
) -> None:
    """Also in a context of several splits."""
    q_k_v = tensors(num_queries, 150)
    q_k_v[which][place, :, 2] = float("nan")
    q, k, v = q_k_v
    out = AttentionPlan([AttentionSpan(0, num_queries, slice(0, 150), 150)]).attend(q, (k, v), 0.3, window, softcap)
    sees = causal_mask(num_queries, 150, window, torch.device("cpu"))[:, place]
    assert bool((out.flatten(1).isnan().any(1) | ~sees).all())

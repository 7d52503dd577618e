"""Attention against its slow twin, and packed spans against one span at a time."""

import pytest
import torch

from stillroom.ops.attention import AttentionSpan, attend, attend_reference, attend_spans, visible


def tensors(num_queries: int, num_keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries of 6 heads, keys and values of 2."""
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    shapes = (num_queries, 6, 8), (num_keys, 2, 8), (num_keys, 2, 8)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 23), (7, 7), (5, 23), (23, 23)])
def test_attend_equals_its_twin(num_queries: int, num_keys: int, window: int | None, softcap: float | None) -> None:
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


def test_a_cap_bounds_what_one_key_can_get() -> None:
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


def test_the_mask_of_three_queries_over_five_keys() -> None:
    seen = visible(3, 5, None, torch.device("cpu"))
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible(3, 5, 2, torch.device("cpu")).int().tolist() == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]

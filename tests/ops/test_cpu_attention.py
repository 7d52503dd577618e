"""The compiled attention of many queries beside the float64 reference, and its independence of how it is cut."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.ops import block_attention, cpu_kernels
from stillroom.ops.attention import AttentionPlan, AttentionSpan, attend_reference
from stillroom.ops.cpu_attention import PART, split_queries

ERROR = 2.0**-8
"""Of the greatest value: softmax weights are rounded to bfloat16, half of whose spacing is 2^-9 of a number."""


@pytest.fixture(autouse=True)
def kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "is_faster_than_torch", lambda: True)
    monkeypatch.setattr(block_attention, "is_torch_fastest_in_bfloat16", lambda: False)


def tensors(num_tokens: int, heads: tuple[int, int, int], num_slots: int, seed: int = 0) -> Any:
    """Return queries [T, H, D] that bfloat16 holds, and keys and values [S, G, D] in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((num_tokens, heads[0], heads[2]), generator=generator).to(torch.bfloat16).float()
    kv = torch.randn((2, num_slots, heads[1], heads[2]), generator=generator).to(torch.bfloat16)
    return q, (kv[0], kv[1])


def reference(q: Any, kv: Any, slots: Any, options: tuple[float, int | None, float | None]) -> Any:
    return attend_reference(q, kv[0][slots].float(), kv[1][slots].float(), *options)


@given(
    data=st.data(),
    shape=st.sampled_from([(1, 1, 16), (4, 4, 32), (6, 2, 48), (9, 3, 64), (8, 1, 128)]),
    window=st.none() | st.integers(1, 90),
    softcap=st.none() | st.just(20.0),
)
@settings(max_examples=12, deadline=None)
def test_packed_spans_agree_with_the_reference(
    data: st.DataObject, shape: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 24), st.integers(0, 80)), min_size=1, max_size=3))
    num_tokens, num_slots = sum(new for new, _ in sizes), sum(new + kept for new, kept in sizes) + 5
    q, kv = tensors(num_tokens, shape, num_slots, data.draw(st.integers(0, 99)))
    permuted = torch.from_numpy(np.random.default_rng(len(sizes)).permutation(num_slots))
    spans, row, slot = [], 0, 0
    for new, kept in sizes:
        spans.append(AttentionSpan(row, row + new, permuted[slot : slot + new + kept], new + kept))
        row, slot = row + new, slot + new + kept
    options = (shape[2] ** -0.5, window, softcap)
    out = AttentionPlan(spans).attend(q, kv, *options)
    for span in spans:
        rows = slice(span.query_start, span.query_end)
        expected = reference(q[rows], kv, span.context, options)
        assert (out[rows] - expected).abs().max() <= ERROR * kv[1].float().abs().max()


def test_long_context_in_contiguous_slots_agrees_with_the_reference() -> None:
    num_keys, num_queries = 2 * PART + 77, 9
    q, kv = tensors(num_queries, (3, 1, 64), num_keys + 10)
    span = AttentionSpan(0, num_queries, slice(10, num_keys + 10), num_keys)
    out = AttentionPlan([span]).attend(q, kv, 0.3, None)
    assert (out - reference(q, kv, slice(10, num_keys + 10), (0.3, None, None))).abs().max() <= ERROR * 4


def test_queries_with_gaps_see_the_context_up_to_themselves() -> None:
    q, kv = tensors(5, (2, 2, 16), 700)
    places = torch.tensor([0, 3, 64, 511, 699])
    span = AttentionSpan(0, 5, torch.arange(700), 700, places)
    out = AttentionPlan([span]).attend(q, kv, 0.25, None)
    for row, place in enumerate(places.tolist()):
        expected = reference(q[row : row + 1], kv, slice(0, place + 1), (0.25, None, None))
        assert (out[row : row + 1] - expected).abs().max() <= ERROR * 4


@given(first=st.integers(1, 1190), window=st.none() | st.integers(1, 700), head_dim=st.sampled_from([16, 64]))
@settings(max_examples=10, deadline=None)
def test_prefill_behind_a_kept_prefix_has_the_same_bits(first: int, window: int | None, head_dim: int) -> None:
    num_tokens = 1200
    q, kv = tensors(num_tokens, (3, 1, head_dim), num_tokens)
    whole = AttentionPlan([AttentionSpan(0, num_tokens, slice(0, num_tokens), num_tokens)])
    rest = AttentionPlan([AttentionSpan(0, num_tokens - first, torch.arange(num_tokens), num_tokens)])
    expected = whole.attend(q, kv, 0.25, window)[first:]
    assert torch.equal(rest.attend(q[first:].contiguous(), kv, 0.25, window), expected)


def test_result_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv = tensors(200, (6, 2, 32), 200)
    plan = AttentionPlan([AttentionSpan(0, 200, slice(0, 200), 200)])
    found = []
    for num_threads in (1, 2, 3):
        monkeypatch.setattr(cpu_kernels, "use_threads", lambda number=num_threads: number)
        found.append(plan.attend(q, kv, 0.2, None))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("head_dim", [16, 64])
def test_key_that_is_not_a_number_reaches_only_queries_that_see_it(head_dim: int) -> None:
    q, kv = tensors(70, (2, 1, head_dim), 70)
    kv[0][40] = torch.nan
    out = AttentionPlan([AttentionSpan(0, 70, slice(0, 70), 70)]).attend(q, kv, 0.25, None)
    assert not out[:40].isnan().any()
    assert out[40:].isnan().all()


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    share=st.integers(1, 70),
    num_kv_heads=st.integers(1, 8),
)
@settings(max_examples=40, deadline=None)
def test_every_query_is_in_one_block(sizes: list[int], share: int, num_kv_heads: int) -> None:
    ends = np.cumsum(sizes)
    bounds = np.stack([ends - sizes, ends], axis=1)
    tasks = split_queries(bounds, share, num_kv_heads)
    rows = [(span, row) for span, first, end in tasks.tolist() for row in range(first, end)]
    assert sorted(rows) == [
        (span, row) for span, (first, end) in enumerate(bounds.tolist()) for row in range(first, end)
    ]


def test_float32_keys_are_left_to_torch() -> None:
    _, kv = tensors(4, (2, 2, 16), 4)
    assert block_attention.is_supported(kv[0])
    assert not block_attention.is_supported(kv[0].float())
    assert not block_attention.is_supported(torch.zeros(4, 2, 24, dtype=torch.bfloat16))


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("has_gaps", [False, True])
def test_torch_in_bfloat16_agrees_with_the_reference(
    monkeypatch: pytest.MonkeyPatch, has_gaps: bool, window: int | None, softcap: float | None
) -> None:
    """Where it is fastest, as on processors with AMX. Softmax weights and the output are rounded."""
    monkeypatch.setattr(block_attention, "is_torch_fastest_in_bfloat16", lambda: True)
    q, kv = tensors(70, (9, 3, 64), 300)
    slots = torch.from_numpy(np.random.default_rng(0).permutation(300)[:200])
    places = torch.arange(60, 200, 2) + 1 if has_gaps else torch.arange(130, 200)
    options = (0.125, window, softcap)
    out = AttentionPlan([AttentionSpan(0, 70, slots, 200, places if has_gaps else None)]).attend(q, kv, *options)
    assert out.dtype == torch.float32
    for row in (0, 1, 33, 69):
        expected = reference(q[row : row + 1], kv, slots[: places[row] + 1], options)
        assert (out[row] - expected[0]).abs().max() <= 2 * ERROR * kv[1].float().abs().max()


def test_measurements_name_one_of_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for measured in (block_attention.is_faster_than_torch, block_attention.is_torch_fastest_in_bfloat16):
        measured.cache_clear()
        assert measured() in (True, False)
    assert torch.get_num_threads() >= 1

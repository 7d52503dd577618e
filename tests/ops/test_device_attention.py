"""Attention on a GPU equals its reference and attention by spans."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.ops.attention import AttentionPlan, AttentionSpan, attend_reference, spans_of_rows
from stillroom.ops.device_attention import DevicePlan, attend_tiles_reference
from tests.gpu_kernels import DEVICE, HALF_PRECISION, use_kernels

pytest.importorskip("triton")

Limits = tuple[float, int | None, float | None]
LIMITS: list[Limits] = [(0.3, None, None), (0.3, 5, None), (0.3, None, 0.5), (0.3, 1, 0.5), (0.3, 300, 50.0)]


def kernel(*arguments: Any) -> torch.Tensor:
    from stillroom.ops import triton_attention

    return triton_attention.attend_tiles(*arguments)


class AttentionCase:
    """Sequences with these numbers of queries and context tokens, whose contexts are scattered over random memory."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        heads: tuple[int, int, int] = (6, 2, 8),
        dtype: torch.dtype = torch.float32,
        max_rows: int = 3,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(len(sequences) + sequences[0][1])
        num_slots = sum(length for _, length in sequences)
        slots = torch.randperm(3 * num_slots, generator=generator)[:num_slots]

        def pool() -> torch.Tensor:
            numbers = torch.full((3 * num_slots, num_kv_heads, head_dim), torch.nan)
            numbers[slots] = torch.randn((num_slots, num_kv_heads, head_dim), generator=generator)
            return numbers.to(DEVICE, dtype)

        self.kv = pool(), pool()
        num_rows = sum(count for count, _ in sequences)
        self.q = torch.randn((num_rows, num_heads, head_dim), generator=generator).to(DEVICE, dtype)
        self.spans, row, offset = [], 0, 0
        for count, length in sequences:
            context = slots[offset : offset + length].to(DEVICE)
            self.spans.append(AttentionSpan(row, row + count, context, length))
            row, offset = row + count, offset + length
        bounds = [(span.query_start, span.query_end, span.num_context_tokens) for span in self.spans]
        self.plan = DevicePlan.of(bounds, [span.context for span in self.spans], DEVICE, max_rows)
        self.shape = (1 if all(count == 1 for count, _ in sequences) else max_rows), 1

    def expected(self, limits: Limits) -> torch.Tensor:
        k, v = self.kv
        rows = [
            attend_reference(self.q[span.query_start : span.query_end], k[span.context], v[span.context], *limits)
            for span in self.spans
        ]
        return torch.cat(rows)


SEQUENCES = {
    "first-token": [(1, 1)],
    "decoding": [(1, 70), (1, 3), (1, 129)],
    "prompt": [(7, 7)],
    "mixed": [(1, 20), (5, 66), (4, 4), (1, 1), (3, 130)],
}
"""Triton's interpreter needs 0.3 s for one: `make test` tries every limit on the mixed ones, which hold all others."""


@pytest.mark.parametrize(
    ("sequences", "limits"),
    [
        pytest.param(made, limits, id=f"{name}-{limits}", marks=[] if is_short else [pytest.mark.slow])
        for name, made in SEQUENCES.items()
        for limits in LIMITS
        for is_short in [name == "mixed" or limits == LIMITS[0]]
    ],
)
def test_kernel_and_its_reference_equal_attention_by_spans(sequences: list[tuple[int, int]], limits: Limits) -> None:
    case = AttentionCase(sequences)
    expected = case.expected(limits)
    torch.testing.assert_close(attend_tiles_reference(case.q, case.kv, case.plan.tensors, limits), expected)
    torch.testing.assert_close(kernel(case.q, case.kv, case.plan.tensors, case.shape, limits), expected)


@pytest.mark.parametrize("heads", [(4, 4, 16), (7, 1, 24), (8, 2, 64), (3, 3, 80), (2, 1, 128), (4, 2, 256)], ids=str)
def test_shapes_of_heads(heads: tuple[int, int, int]) -> None:
    case = AttentionCase([(1, 33), (9, 90)], heads, max_rows=8)
    limits = (heads[2] ** -0.5, None, None)
    torch.testing.assert_close(kernel(case.q, case.kv, case.plan.tensors, (8, 1), limits), case.expected(limits))


@pytest.mark.parametrize(
    ("num_splits", "limits"),
    [
        (2, LIMITS[0]),
        (4, LIMITS[3]),
        *(pytest.param(4, one, marks=pytest.mark.slow) for one in (*LIMITS[:3], LIMITS[4])),
        (16, LIMITS[-1]),
    ],
)
def test_splitting_a_context_changes_no_result(num_splits: int, limits: Limits) -> None:
    case = AttentionCase([(1, 1), (1, 64), (1, 65), (1, 300)])
    out = kernel(case.q, case.kv, case.plan.tensors, (1, num_splits), limits)
    torch.testing.assert_close(out, case.expected(limits))


@pytest.mark.parametrize("dtype", HALF_PRECISION)
def test_half_precision_keeps_its_dtype_and_stays_close(dtype: torch.dtype) -> None:
    case = AttentionCase([(1, 150), (6, 40)], dtype=dtype)
    limits = (0.3, None, None)
    out = kernel(case.q, case.kv, case.plan.tensors, case.shape, limits)
    assert out.dtype is dtype
    torch.testing.assert_close(out, case.expected(limits), atol=2e-2, rtol=2e-2)


sequences_of_a_step = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 80)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=4
)


@settings(max_examples=10)
@given(
    sequences_of_a_step,
    st.integers(1, 8),
    st.none() | st.integers(1, 90),
    st.none() | st.floats(0.1, 50.0),
)
def test_any_step(sequences: list[tuple[int, int]], max_rows: int, window: int | None, softcap: float | None) -> None:
    case = AttentionCase(sequences, max_rows=max_rows)
    limits = (0.3, window, softcap)
    shape = max_rows if case.shape[0] > 1 else 1
    out = kernel(case.q, case.kv, case.plan.tensors, (shape, 1), limits)
    torch.testing.assert_close(out, case.expected(limits))


def test_plan_of_spans_uses_the_kernel_for_whole_steps_and_for_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    case = AttentionCase([(1, 20), (5, 66), (1, 7)])
    k, v = (torch.cat((kv, torch.ones_like(kv[:7]))) for kv in case.kv)
    start = len(case.kv[0])
    case.kv, case.spans[2] = (k, v), AttentionSpan(6, 7, slice(start, start + 7), 7)  # read in place
    plan = AttentionPlan(case.spans)
    for limits in LIMITS:
        torch.testing.assert_close(plan.attend(case.q, (k, v), *limits), case.expected(limits))
    last = AttentionPlan(spans_of_rows(case.spans, [0, 5, 6]))
    out = last.attend(case.q[[0, 5, 6]], (k, v), 0.3, None)
    torch.testing.assert_close(out, case.expected((0.3, None, None))[[0, 5, 6]])


def test_few_rows_over_long_contexts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    case = AttentionCase([(1, 1100)])
    assert case.plan.num_splits(case.kv[0], None) > 1
    assert case.plan.num_splits(case.kv[0], 64) == 1, "a small window is not split"
    torch.testing.assert_close(case.plan.attend(case.q, case.kv, 0.3, None), case.expected((0.3, None, None)))


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_fit_into_their_shared_memory() -> None:
    """Compiling needs no GPU; it runs in a process of its own, without Triton's interpreter."""
    pytest.importorskip("triton", minversion="3.4")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.ops.compile_kernels"], env=environment, cwd=root, check=True)

"""Each compiled kernel equals a reference in float64, with odd shapes, for both kinds of weights and caches."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.ops import cpu_kernels, cpu_products, crossovers
from stillroom.ops import linear as linear_module
from stillroom.ops.attention import AttentionPlan, AttentionSpan, attend_reference, spans_of_rows
from stillroom.ops.cpu_row_attention import SPLIT, attend_rows, split_contexts
from stillroom.ops.cpu_vectors import HAS_DOT
from stillroom.ops.linear import Linear
from stillroom.ops.rope import rotate, rotate_and_store
from stillroom.ops.row_kernels import gate, rms_norm
from tests.fakes import random_checkpoint

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 8, 16, 17, 32, 33])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 2), (3, 8), (6, 6), (301, 48)])
def test_products(
    dtype: torch.dtype,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "most_rows_of_kernel", lambda: 16)  # it is measured, so it would vary
    weight, x = drawn(num_outputs, num_inputs).to(dtype), drawn(num_rows, num_inputs, seed=1)
    bias = drawn(num_outputs, seed=2).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    for is_faster in (True, False):
        monkeypatch.setattr(linear_module, "is_float32_faster", lambda is_faster=is_faster: is_faster)
        out = Linear(weight, bias)(x)
        assert out.dtype == torch.float32
        is_rounded = dtype == torch.bfloat16 and num_rows > 16 and not is_faster  # products in bfloat16
        torch.testing.assert_close(out.double(), expected, atol=0.2 if is_rounded else 1e-4, rtol=2e-2)


@pytest.mark.skipif(not HAS_DOT, reason="this processor multiplies float32")
@pytest.mark.parametrize("num_rows", [2, 4, 5, 16, 33])
@pytest.mark.parametrize("num_outputs", [1, 3, 301])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_several_rows_are_rounded_to_bfloat16_and_summed_in_float32(
    num_rows: int, num_outputs: int, num_threads: int
) -> None:
    weight, x = drawn(num_outputs, 96).to(torch.bfloat16), drawn(num_rows, 96, seed=1)
    out = torch.empty(num_rows, num_outputs)
    cpu_kernels.use_threads()
    cpu_products.linear_bfloat16(x.numpy(), weight.view(torch.uint32).numpy(), out.numpy(), num_threads)
    expected = x.to(torch.bfloat16).double() @ weight.double().T
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


def test_number_of_rows_for_the_kernel_ends_where_torch_takes_a_sixth_less(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([0.5, 0.9, 1.2, 1.21, 0.8])
    monkeypatch.setattr(linear_module, "ratio_of_times", lambda _first, _second: next(ratios))
    monkeypatch.setattr(linear_module, "is_float32_faster", lambda: False)
    monkeypatch.setattr(crossovers, "remembered", lambda _name, measure: measure())
    linear_module.most_rows_of_kernel.cache_clear()
    try:
        assert linear_module.most_rows_of_kernel() == 8
    finally:
        linear_module.most_rows_of_kernel.cache_clear()


def test_times_are_compared_on_one_thread_whose_number_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    assert linear_module.ratio_of_times(lambda: seen.append(torch.get_num_threads()), lambda: None) > 0
    assert set(seen) == {1} and torch.get_num_threads() == before


@pytest.mark.parametrize("num_rows", [1, 20])
def test_float16_weights_and_odd_widths_are_widened(num_rows: int) -> None:
    x = drawn(num_rows, 7)
    for dtype in (torch.float16, torch.bfloat16):
        weight = drawn(5, 7, seed=1).to(dtype)
        torch.testing.assert_close(Linear(weight)(x), x @ weight.float().T, atol=0.1, rtol=2e-2)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 3), (6, 5), (301, 48)])
def test_int8_products_are_those_of_the_rounded_weights(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    monkeypatch.setattr(linear_module, "most_rows_of_int8_kernel", lambda rounds_inputs: 16)
    monkeypatch.setattr(linear_module, "is_float32_faster", lambda: True)
    weight, x = drawn(num_outputs, num_inputs).bfloat16(), drawn(num_rows, num_inputs, seed=1)
    bias = drawn(num_outputs, seed=2) if has_bias else None
    linear = Linear.int8(torch.split(weight, 2), bias)
    assert linear.weight.dtype == torch.int8 and linear.scale is not None
    rounded = linear.weight.double() * linear.scale.double()[:, None]
    step = weight.double().abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded - weight.double()).abs() <= step / 2 * 1.0001).all()
    expected = x.double() @ rounded.T + (bias.double() if bias is not None else 0.0)
    torch.testing.assert_close(linear(x).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_float32_faster", [False, True])
def test_many_inputs_of_int8_weights_are_rounded_as_those_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, is_float32_faster: bool
) -> None:
    monkeypatch.setattr(linear_module, "is_float32_faster", lambda: is_float32_faster)
    weight, x = drawn(301, 48).bfloat16(), drawn(40, 48, seed=1)
    linear = Linear.int8([weight])
    assert linear.scale is not None
    expected = x @ (linear.weight.float() * linear.scale[:, None]).T
    atol, rtol = (1e-4, 1e-4) if is_float32_faster else (0.1, 1e-2)
    torch.testing.assert_close(linear._many_rows(x, torch.float32), expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(
        linear._many_rows(x.bfloat16(), torch.bfloat16), expected.bfloat16(), atol=0.2, rtol=2e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_rounded_inputs_are_exact_products_of_the_rounded_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(linear_module, "is_int8_faster", lambda: True)
    weight, x = drawn(33, 1536), drawn(20, 1536, seed=1).to(dtype)
    x[3], weight[5] = 127.0, -127.0  # the largest sums
    x[4] = 0.0
    linear = Linear.int8([weight], rounds_inputs=True)
    assert linear.scale is not None
    step = x.float().abs().amax(1, keepdim=True) / 127
    rounded = torch.where(step > 0, torch.round(x.float() / step), 0.0)
    exact = (rounded.double() @ linear.weight.double().T) * step.double() * linear.scale.double()
    found = linear._many_rows(x, torch.float32).double()
    torch.testing.assert_close(found, exact, atol=1e-4 + 2 * float(step.max() * linear.scale.max()) * 127, rtol=1e-4)
    assert found[4].abs().max() == 0 and found[3, 5] == exact[3, 5]


@pytest.mark.skipif(not cpu_products.can_multiply_bytes(64), reason="the processor does not multiply bytes")
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_threads"), [(2, 1, 1), (5, 7, 2), (16, 301, 2)])
def test_few_rows_of_bytes_give_the_products_of_many(num_rows: int, num_outputs: int, num_threads: int) -> None:
    weight, x = drawn(num_outputs, 128), drawn(num_rows, 128, seed=1)
    x[0], weight[0], x[1] = 3.0, -127.0, 0.0  # the largest sums, and none
    linear = Linear.int8([weight], rounds_inputs=True)
    assert linear.kernel_arrays is not None
    (rounded, scale, sums), _ = linear.kernel_arrays
    out = torch.empty(num_rows, num_outputs)
    cpu_kernels.use_threads()
    cpu_products.linear_bytes(x.numpy(), rounded, scale, sums, out.numpy(), num_threads)
    torch.testing.assert_close(out, linear._with_rounded_inputs(x, torch.float32), rtol=1e-6, atol=0)


def test_a_row_with_a_number_that_is_not_finite_gives_nan_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "is_int8_faster", lambda: True)
    x = drawn(20, 8)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    found = Linear.int8([drawn(6, 8, seed=1)], rounds_inputs=True)._many_rows(x, torch.float32)
    assert found[1:3].isnan().all() and found[3:].isfinite().all() and found[0].isfinite().all()


def test_rows_of_zeros_stay_zeros_in_int8() -> None:
    assert Linear.int8([torch.zeros(3, 4)])(torch.ones(2, 4)).tolist() == [[0.0] * 3] * 2


def test_large_weights_are_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_MAX_WIDENED", 40)
    monkeypatch.setattr(linear_module, "is_float32_faster", lambda: True)
    weight, x = drawn(33, 12).bfloat16(), drawn(40, 12, seed=1)
    torch.testing.assert_close(Linear(weight)._many_rows(x, torch.float32), x @ weight.float().T)


@pytest.mark.parametrize("shape", [(1, 8), (5, 3, 16), (0, 4), (70, 33)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape), drawn(shape[-1], seed=1)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=1e-5)


def test_gate_is_exact_over_the_range_of_float32() -> None:
    gates = torch.tensor([0.0, -0.0, 1e-30, -1e-3, 1.0, -1.0, 20.0, -20.0, 87.0, -87.0, 200.0, -200.0, 1e30, -1e30])
    gates = torch.cat((gates, drawn(500) * 10))
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    expected = torch.nn.functional.silu(gates.double())
    torch.testing.assert_close(gate(gate_up, "silu")[0].double(), expected, rtol=1e-6, atol=1e-8)
    tanh = torch.nn.functional.gelu(gates, approximate="tanh")
    torch.testing.assert_close(gate(gate_up, "gelu_tanh")[0], tanh)


@DTYPES
@pytest.mark.parametrize("num_pairs", [4, 3])
def test_rotation_writes_keys_and_values_to_their_slots_only(dtype: torch.dtype, num_pairs: int) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = 5, 4, 2, 8
    qkv = drawn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    angles = drawn(num_tokens, 1, num_pairs, seed=1)
    rotation = (angles.cos(), angles.sin())
    slots = torch.tensor([7, 0, 3, 9, 2])
    kv = (
        torch.full((10, num_kv_heads, head_dim), 99.0, dtype=dtype),
        torch.full((10, num_kv_heads, head_dim), 99.0, dtype=dtype),
    )
    q = rotate_and_store(qkv, rotation, slots, kv)
    torch.testing.assert_close(q, rotate(qkv[:, :num_heads], *rotation))
    keys = rotate(qkv[:, num_heads : num_heads + num_kv_heads], *rotation)
    torch.testing.assert_close(kv[0][slots], keys.to(dtype), rtol=0.01 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    torch.testing.assert_close(kv[1][slots], qkv[:, num_heads + num_kv_heads :].to(dtype), rtol=0, atol=0)
    others = [slot for slot in range(10) if slot not in slots.tolist()]
    assert (kv[0][others] == 99.0).all() and (kv[1][others] == 99.0).all()


def test_values_are_rounded_as_torch_rounds_them() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.0e38, -1e-40, 65504.0])
    qkv = torch.zeros(1, 3, 8)
    qkv[0, 2] = special
    kv = (torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 8, dtype=torch.bfloat16))
    rotate_and_store(qkv, (torch.ones(1, 1, 4), torch.zeros(1, 1, 4)), torch.tensor([0]), kv)
    assert kv[1][0, 0].tolist() == special.bfloat16().tolist()


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.sampled_from([1, 2, SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT + 5]), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, 1, 3, SPLIT, 2 * SPLIT]),
    softcap=st.sampled_from([None, 2.0]),
    shape=st.sampled_from([(6, 2, 8), (6, 2, 64), (5, 1, 128), (9, 3, 64)]),
    seed=st.integers(0, 1000),
)
def test_attend_rows_equals_its_reference(
    lengths: list[int],
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    shape: tuple[int, int, int],
    seed: int,
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    slots = torch.from_numpy(rng.permutation(sum(lengths) + 10))
    kv = (
        drawn(len(slots), num_kv_heads, head_dim, seed=seed).to(dtype),
        drawn(len(slots), num_kv_heads, head_dim).to(dtype),
    )
    q = drawn(len(lengths), num_heads, head_dim, seed=seed + 1)
    spans, start = [], 0
    for row, length in enumerate(lengths):
        spans.append(AttentionSpan(row, row + 1, slots[start : start + length], length))
        start += length
    out = AttentionPlan(spans).attend(q, kv, 0.4, window, softcap)
    for row, span in enumerate(spans):
        k, v = kv[0][span.context].float(), kv[1][span.context].float()
        expected = attend_reference(q[row : row + 1], k, v, 0.4, window, softcap)
        torch.testing.assert_close(out[row : row + 1], expected, atol=1e-5, rtol=1e-5)


def test_kernels_run_on_as_many_threads_as_torch() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert cpu_kernels.use_threads() == 1 == numba.get_num_threads()
    finally:
        torch.set_num_threads(before)
        cpu_kernels.use_threads()


@DTYPES
def test_products_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    before, linear = torch.get_num_threads(), Linear(drawn(303, 64).to(dtype))
    try:
        for num_rows in (1, 7):
            found = []
            for num_threads in (1, 2):
                torch.set_num_threads(num_threads)
                found.append(linear(drawn(num_rows, 64, seed=3)))
            assert torch.equal(*found)
    finally:
        torch.set_num_threads(before)


def test_splits_by_hand() -> None:
    tasks, bounds = split_contexts(np.array([SPLIT + 1, 1, 2 * SPLIT]))
    assert tasks.tolist() == [[0, 0], [0, SPLIT], [1, 0], [2, 0], [2, SPLIT]]
    assert bounds.tolist() == [0, 2, 3, 5]
    tasks, bounds = split_contexts(np.array([], dtype=np.int64))
    assert tasks.shape == (0, 2) and bounds.tolist() == [0]


def test_spans_of_rows_attend_as_their_rows() -> None:
    scattered = torch.tensor([5, 9, 1, 4, 7])
    spans = [AttentionSpan(0, 3, slice(10, 20), 10), AttentionSpan(3, 5, scattered, 5)]
    first, second, third = spans_of_rows(spans, [0, 2, 3])
    assert (first.query_start, first.query_end, first.context, first.num_context_tokens) == (0, 1, slice(10, 18), 8)
    assert (second.query_start, second.context) == (1, slice(10, 20))
    assert isinstance(third.context, torch.Tensor) and third.context.tolist() == [5, 9, 1, 4]


def test_cached_code_depends_on_all_kernel_sources() -> None:
    """A kernel contains the functions that it calls from other files, so a change there must invalidate it too."""
    kernels: list[Any] = [cpu_kernels.decode_layer, attend_rows, cpu_products.linear_scaled]
    for one in kernels:
        if one.stats.cache_path is None:
            pytest.skip("there is no folder to keep code in")
        sources, has_tiles = one._cache._cache_file._source_stamp
        assert isinstance(has_tiles, bool)
        names = {name for name, *_ in sources}
        assert names == {
            "cpu_attention.py",
            "cpu_blocks.py",
            "cpu_code_scan.py",
            "cpu_codes.py",
            "cpu_compiler.py",
            "cpu_elements.py",
            "cpu_graph_walk.py",
            "cpu_kernels.py",
            "cpu_narrow.py",
            "cpu_panels.py",
            "cpu_products.py",
            "cpu_row_attention.py",
            "cpu_tiles.py",
            "cpu_vectors.py",
        }


IN_A_PROCESS_OF_ITS_OWN = """
import sys
from pathlib import Path
import numpy as np
from stillroom.ops import cpu_kernels, cpu_panels, cpu_products, cpu_row_attention
from tests.engine.harness import engine_on, random_segments, request

kernels = [cpu_products.linear_scaled, cpu_products.linear_bfloat16, cpu_kernels.rms_norm, cpu_kernels.silu_gate]
kernels += [cpu_kernels.rotate_and_store, cpu_row_attention.attend_rows, cpu_kernels.decode_layer]
kernels += [cpu_panels.panel_products, cpu_panels.panel_gate]
compiled = lambda: [set(kernel.signatures) for kernel in kernels]
cpu_kernels.compile_all()
before = compiled()
for dtype in ("float32", "bfloat16"):
    engine = engine_on(Path(sys.argv[1]), dtype=dtype)
    for number in range(3):
        engine.submit(request(str(number), random_segments(np.random.default_rng(number), 300, [5, 9]), max_tokens=4))
    while engine.has_work:
        engine.step()
assert compiled() == before, "a user would have waited for the compiler"
"""


@pytest.mark.slow
def test_compile_all_compiles_every_kernel_of_a_plain_model(tmp_path: Path) -> None:
    """Runs in a process of its own, because other tests may have compiled kernels that `compile_all` forgets."""
    random_checkpoint(tmp_path, "Llama")
    command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr

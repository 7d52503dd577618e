"""Panels of weights against float64 products, and the same bits whichever rows are multiplied together."""

import pytest
import torch

from stillroom.ops import cpu_kernels, cpu_panels
from stillroom.ops import linear as linear_module
from stillroom.ops.cpu_vectors import HAS_DOT
from stillroom.ops.linear import Linear
from tests.ops.test_cpu_kernels import drawn

pytestmark = pytest.mark.skipif(not HAS_DOT, reason="this processor does not multiply bfloat16")


def operands(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = drawn(num_rows, num_inputs, seed=1), drawn(num_outputs, num_inputs)
    return x.to(torch.bfloat16), weight.to(torch.bfloat16)


def multiplied(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, is_added: bool = False) -> torch.Tensor:
    num_threads = cpu_kernels.use_threads()
    bits, pairs = cpu_kernels.array(x), weight.view(torch.uint32).numpy()
    cpu_panels.panel_products(bits, pairs, cpu_kernels.array(out), is_added, num_threads)
    return out


SHAPES = [(1, 16, 32), (5, 48, 64), (6, 64, 32), (7, 80, 96), (40, 144, 64)]


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_products_are_written_or_added(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    x, weight = operands(num_rows, num_outputs, num_inputs)
    expected = x.double() @ weight.double().T
    found = multiplied(x, weight, torch.full((num_rows, num_outputs), 7.0))
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(multiplied(x, weight, torch.ones_like(found), is_added=True), found + 1)
    assert torch.equal(multiplied(x, weight, torch.empty_like(found, dtype=torch.bfloat16)), found.to(torch.bfloat16))


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_gate_is_computed_from_sums(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    x, weight = operands(num_rows, 2 * num_outputs, num_inputs)
    x[0] *= 100  # gates far from zero
    product = x.double() @ weight.double().T
    expected = torch.nn.functional.silu(product[:, :num_outputs]) * product[:, num_outputs:]
    out, num_threads = torch.empty((num_rows, num_outputs), dtype=torch.bfloat16), cpu_kernels.use_threads()
    cpu_panels.panel_gate(cpu_kernels.array(x), weight.view(torch.uint32).numpy(), cpu_kernels.array(out), num_threads)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=5e-3)


def test_a_row_has_the_same_bits_among_others_and_with_any_number_of_threads() -> None:
    x, weight = operands(50, 208, 64)
    found = multiplied(x, weight, torch.empty(50, 208))
    for rows in (slice(0, 1), slice(3, 10), slice(44, 50)):
        assert torch.equal(multiplied(x[rows], weight, torch.empty(len(x[rows]), 208)), found[rows])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert torch.equal(multiplied(x, weight, torch.empty(50, 208)), found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_in_its_row(value: float) -> None:
    x, weight = operands(13, 64, 32)
    x[5, 3] = value
    found = multiplied(x, weight, torch.empty(13, 64))
    assert not found[5].isfinite().any()
    assert found[[row for row in range(13) if row != 5]].isfinite().all()


@pytest.mark.parametrize("is_fastest", [True, False])
def test_products_of_many_rows_agree_by_panels_and_by_torch(is_fastest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "are_panels_fastest", lambda: is_fastest)
    monkeypatch.setattr(linear_module, "is_float32_faster", lambda: False)
    x, weight = operands(70, 128, 64)
    linear, product = Linear(weight), x.double() @ weight.double().T
    torch.testing.assert_close(linear(x.float()).double(), product, atol=0.1, rtol=1e-2)
    total = torch.ones(70, 128)
    linear.add_to(total, x)
    torch.testing.assert_close(total.double(), product + 1, atol=0.1, rtol=1e-2)
    gated = torch.nn.functional.silu(product[:, :64]) * product[:, 64:]
    torch.testing.assert_close(linear.gated_in_bfloat16(x).double(), gated, atol=0.3, rtol=2e-2)


def test_many_inputs_and_rows_are_multiplied_in_turns() -> None:
    num_rows, num_inputs = 6 * cpu_panels._MOST_BLOCKS + 7, 2 * cpu_panels._MOST_PAIRS + 64
    x, weight = operands(num_rows, 64, num_inputs)
    found = multiplied(x, weight, torch.empty(num_rows, 64))
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=2e-3, rtol=1e-3)

"""A product whose rows do not depend on each other, beside torch's."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stillroom.ops import steady_linear
from stillroom.ops.steady_linear import SteadyLinear
from tests.random_reader import drawn

SHAPES = [(384, 1152), (384, 384), (384, 1536), (1536, 384)]
"""Those of the embedder and the reader: inputs, outputs."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_row_has_the_same_bits_with_any_other_rows(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    layer = drawn(SteadyLinear(num_inputs, num_outputs), 1).to(dtype)
    x = torch.randn(640, num_inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.inference_mode():
        whole = layer(x)
        for num_rows in (*range(2, 64), 100, 129, 200, 350, 383, 384, 511, 512, 600):
            assert torch.equal(layer(x[:num_rows]), whole[:num_rows]), num_rows


@pytest.mark.parametrize("then_gelu", [False, True])
@pytest.mark.parametrize("autocasts", [False, True])
def test_products_are_those_of_torch(autocasts: bool, then_gelu: bool) -> None:
    layer = drawn(SteadyLinear(384, 1536), 1)
    x = torch.randn(3, 10, 384, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        found, expected = layer(x, then_gelu=then_gelu), F.linear(x, layer.weight, layer.bias)
        expected = F.gelu(expected) if then_gelu else expected
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=2e-2 if autocasts else 1e-5, rtol=2e-2 if autocasts else 1e-5)


def test_a_changed_weight_is_packed_again_and_a_copy_has_its_own() -> None:
    layer = drawn(SteadyLinear(8, 4), 1)
    x = torch.ones(2, 8)
    with torch.no_grad():
        before, twin = layer(x), copy.deepcopy(layer)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before)
        assert torch.equal(twin(x), before)


def test_a_weight_is_packed_once_for_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries in float32 and sentences in bfloat16 come in turn."""
    layer, packed, pack = drawn(SteadyLinear(64, 32), 1), [], steady_linear._product_of

    def counted(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype, then_gelu: bool) -> Any:
        packed.append(dtype)
        return pack(weight, bias, dtype, then_gelu)

    monkeypatch.setattr(steady_linear, "_product_of", counted)
    monkeypatch.setattr(steady_linear, "_rows_at_once", lambda *_: None)  # its trial packs too
    with torch.inference_mode():
        for autocasts in (False, True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                layer(torch.ones(512, 64))
    assert sorted(map(str, packed)) == ["torch.bfloat16", "torch.float32"]


def test_gradients_reach_the_weight() -> None:
    layer = drawn(SteadyLinear(8, 4), 1)
    layer(torch.ones(2, 8), then_gelu=True).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0

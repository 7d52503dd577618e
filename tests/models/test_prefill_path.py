"""Prefill with bfloat16 between products equals the decoder's general path."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.backends.assembly import kv_shape
from stillroom.config.settings import Dtype, Weights
from stillroom.kvstore.device import DeviceStore
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from stillroom.models.packed import PackedInput
from stillroom.models.prefill_path import PrefillPath
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_observers import QueryPassObserver
from tests.fakes import random_checkpoint

NUM_BLOCKS, BLOCK = 12, 8


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use bfloat16 products, even if float32 is faster on this processor."""
    for module in ("ops.linear", "models.prefill_path"):
        monkeypatch.setattr(f"stillroom.{module}.is_float32_faster", lambda: False)


def load(
    folder: Path, kind: str = "Llama", dtype: Dtype = "bfloat16", weights: Weights = "checkpoint", **settings: Any
) -> Decoder:
    random_checkpoint(folder, kind, **settings)
    return load_own_decoder(folder, device="cpu", dtype=dtype, weights=weights)


def packed(wanted: list[int]) -> PackedInput:
    """Return a step: 20 tokens of a prompt in scattered slots, 9 after 6 cached ones, and one token of a third."""
    scattered = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:20]
    spans = [
        AttentionSpan(0, 20, scattered, 20),
        AttentionSpan(20, 29, slice(40, 55), 15),
        AttentionSpan(29, 30, slice(60, 64), 4),
    ]
    positions = torch.cat([torch.arange(20), torch.arange(6, 15), torch.tensor([3])])
    slots = torch.cat([scattered, torch.arange(46, 55), torch.tensor([63])])
    return PackedInput(torch.arange(30) * 7 % 250, positions, slots, spans, wanted)


def run(decoder: Decoder, wanted: list[int]) -> tuple[torch.Tensor, DeviceStore]:
    store = DeviceStore(kv_shape(decoder), NUM_BLOCKS, BLOCK, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for kv in (store.k_LSGD, store.v_LSGD):
        kv.copy_(torch.randn(kv.shape, generator=generator))
    return decoder.hidden_states(packed(wanted), store.layer), store


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with tolerance for sums in another order, some of which round to the next bfloat16."""
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 2e-2), ("w8a8", 5e-2), ("int4", 2e-2)])
def test_prefill_path_equals_the_general_path_with_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights, tolerance: float
) -> None:
    monkeypatch.setattr("stillroom.ops.linear.most_rows_of_int8_kernel", lambda rounds_inputs: 8)
    monkeypatch.setattr("stillroom.ops.linear.most_rows_of_int4_kernel", lambda: 8)
    monkeypatch.setattr("stillroom.ops.linear.is_int8_faster", lambda: True)
    decoder = load(tmp_path, weights=weights, hidden_size=64, num_attention_heads=4, intermediate_size=128)
    mlp = decoder.weights.layers[0].experts[0]
    assert decoder._prefill_path is not None and mlp.down.has_codes == (weights == "int4")
    assert not decoder.weights.lm_head.has_codes
    hidden, store = run(decoder, [19, 28, 29])
    monkeypatch.setattr(decoder, "_prefill_path", None)
    expected, expected_store = run(decoder, [19, 28, 29])
    for found, other in ((hidden, expected), (store.k_LSGD, expected_store.k_LSGD)):  # a number may round elsewhere
        assert (found.float() - other.float()).norm() <= tolerance * other.float().norm()


@pytest.mark.parametrize("wanted", [[19, 28, 29], [28], [], list(range(30))])
@pytest.mark.parametrize("window", [None, 8])
def test_prefill_path_equals_the_general_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[int], window: int | None
) -> None:
    decoder = load(tmp_path) if window is None else load(tmp_path, "Mistral", sliding_window=window)
    assert decoder._prefill_path is not None
    hidden, store = run(decoder, wanted)
    monkeypatch.setattr(decoder, "_prefill_path", None)
    expected, expected_store = run(decoder, wanted)
    assert hidden.shape == expected.shape == (len(wanted), decoder.spec.hidden_size)
    assert_same(hidden, expected)
    assert_same(store.k_LSGD, expected_store.k_LSGD)
    assert_same(store.v_LSGD, expected_store.v_LSGD)


def test_observer_gets_the_same_on_both_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, shares = load(tmp_path), []
    for _ in range(2):
        step = packed([29])
        observer = QueryPassObserver([AttentionSpan(20, 29, slice(40, 55), 15)])
        store = DeviceStore(kv_shape(decoder), NUM_BLOCKS, BLOCK, torch.device("cpu"))
        for kv in (store.k_LSGD, store.v_LSGD):
            kv.zero_()
        decoder.hidden_states(step, store.layer, observer)
        shares.append(torch.from_numpy(observer.shares()[0]))
        monkeypatch.setattr(decoder, "_prefill_path", None)
    torch.testing.assert_close(*shares, rtol=1e-3, atol=1e-4)
    assert shares[0].sum() == pytest.approx(2 * decoder.spec.num_layers, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Llama", "float32"),
        ("Qwen2", "bfloat16"),
        ("Qwen3", "bfloat16"),
        ("Gemma2", "bfloat16"),
        ("Mixtral", "bfloat16"),
    ],
)
def test_layers_that_are_not_plain_use_the_general_path(tmp_path: Path, kind: str, dtype: Dtype) -> None:
    decoder = load(tmp_path, kind, dtype)
    assert PrefillPath.of(decoder.spec, decoder.weights.layers) is None

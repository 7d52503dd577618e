"""BERT in numpy beside BERT in torch."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from stillroom.ops.bert import BertEncoder, BertSpec, tensors_of_checkpoint
from stillroom.ops.numpy_bert import NumpyBertEncoder, gelu

SPEC = BertSpec(vocab_size=50, hidden_size=24, num_layers=3, num_heads=4, inner_size=40, max_positions=70, epsilon=1e-5)


def checkpoint() -> dict[str, Tensor]:
    """Random tensors with the names of transformers."""
    size, inner = SPEC.hidden_size, SPEC.inner_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (SPEC.vocab_size, size),
        "embeddings.position_embeddings.weight": (SPEC.max_positions, size),
        "embeddings.token_type_embeddings.weight": (SPEC.num_parts, size),
    }
    linear = {
        "attention.output.dense": (size, size),
        "intermediate.dense": (inner, size),
        "output.dense": (size, inner),
    }
    linear |= {f"attention.self.{name}": (size, size) for name in ("query", "key", "value")}
    norms = ["embeddings.LayerNorm"]
    for layer in range(SPEC.num_layers):
        norms += [f"encoder.layer.{layer}.{name}.LayerNorm" for name in ("attention.output", "output")]
        for name, shape in linear.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    shapes |= {f"{name}.{kind}": (size,) for name in norms for kind in ("weight", "bias")}
    random = torch.Generator().manual_seed(5)
    return {name: 0.3 * torch.randn(shape, generator=random) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "model.safetensors"
    save_file(checkpoint(), path)
    return path


def opened(weights: Path) -> NumpyBertEncoder:
    return NumpyBertEncoder(weights, SPEC.num_layers, SPEC.num_heads, SPEC.epsilon)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, SPEC.vocab_size - 1), min_size=1, max_size=SPEC.max_positions))
def test_hidden_states_are_those_of_torch(weights: Path, token_ids: list[int]) -> None:
    torch_encoder = BertEncoder(SPEC)
    torch_encoder.load_state_dict(tensors_of_checkpoint(checkpoint(), SPEC.num_layers))
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        expected = torch_encoder.encode(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))[0]
    np.testing.assert_allclose(opened(weights).encode(token_ids), expected.numpy(), atol=5e-6)


def test_gelu_is_exact_to_a_millionth() -> None:
    values = np.linspace(-12, 12, 20_001, dtype=np.float32)
    expected = [value / 2 * (1 + math.erf(value / math.sqrt(2))) for value in values.tolist()]
    found = gelu(values)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_names_may_have_the_prefix_of_models_with_a_head(weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"bert.{name}": tensor for name, tensor in checkpoint().items()}, path)
    assert np.array_equal(opened(path).encode([3, 1, 4]), opened(weights).encode([3, 1, 4]))


def test_weights_in_half_precision_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in checkpoint().items()}, path)
    with pytest.raises(TypeError, match="BF16"):
        opened(path)

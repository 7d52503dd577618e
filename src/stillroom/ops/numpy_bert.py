"""BERT's encoder in numpy, for a process that embeds a few texts and ends: importing torch takes longer than its work.

The twin of `bert.py` in evaluation, equal up to rounding of float32. It computes one text at a time, without padding.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Rows = NDArray[np.float32]
_Map = Callable[[Rows], Rows]

_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Coefficients of formula 7.1.26 of Abramowitz and Stegun, highest power first. Its error is at most 1.5e-7."""
_ERFC_SCALE = 0.3275911


class NumpyBertEncoder:
    """Reads the layers at once, and the rows of the word embeddings that a text needs."""

    def __init__(self, weights: Path, num_layers: int, num_heads: int, epsilon: float) -> None:
        """
        Args:
            weights: a safetensors file with the names of a transformers checkpoint of BERT.
            epsilon: of layer norms.

        Raises:
            OSError, SafetensorError: the file is missing or damaged.
            KeyError: it lacks a tensor.
            TypeError: a tensor is not in float32.
        """
        tensors = _Tensors(weights)
        self._tensors = tensors
        self._norm = tensors.layer_norm("embeddings.LayerNorm", epsilon)
        self._layers = [_Layer(tensors, f"encoder.layer.{layer}.", num_heads, epsilon) for layer in range(num_layers)]

    def encode(self, token_ids: Sequence[int]) -> Rows:
        """Return the hidden states of the last layer, [tokens, hidden_size], of a text whose tokens are all in part
        0."""
        words = self._tensors.rows("embeddings.word_embeddings.weight", token_ids)
        positions = self._tensors.rows("embeddings.position_embeddings.weight", range(len(token_ids)))
        hidden = self._norm(words + positions + self._tensors.rows("embeddings.token_type_embeddings.weight", [0]))
        for layer in self._layers:
            hidden = layer(hidden)
        return hidden


class _Layer:
    def __init__(self, tensors: "_Tensors", name: str, num_heads: int, epsilon: float) -> None:
        self._num_heads = num_heads
        self._projections = [tensors.linear(f"{name}attention.self.{part}") for part in ("query", "key", "value")]
        self._out = tensors.linear(f"{name}attention.output.dense")
        self._norm_1 = tensors.layer_norm(f"{name}attention.output.LayerNorm", epsilon)
        self._up = tensors.linear(f"{name}intermediate.dense")
        self._down = tensors.linear(f"{name}output.dense")
        self._norm_2 = tensors.layer_norm(f"{name}output.LayerNorm", epsilon)

    def __call__(self, hidden: Rows) -> Rows:
        num_tokens, size = hidden.shape
        heads = (num_tokens, self._num_heads, size // self._num_heads)
        query, key, value = (project(hidden).reshape(heads).swapaxes(0, 1) for project in self._projections)
        query *= np.float32(heads[2] ** -0.5)
        attended = _softmax(query @ key.swapaxes(1, 2)) @ value
        hidden = self._norm_1(hidden + self._out(attended.swapaxes(0, 1).reshape(num_tokens, size)))
        return self._norm_2(hidden + self._down(gelu(self._up(hidden))))


class _Tensors:
    """A checkpoint's tensors by name, with or without the prefix of models with a head."""

    def __init__(self, path: Path) -> None:
        read: Callable[..., Any] = safe_open
        self._file = read(str(path), framework="numpy")
        self._names = {name.removeprefix("bert."): name for name in list(self._file.keys())}

    def rows(self, name: str, numbers: Sequence[int]) -> Rows:
        """Return [len(numbers), size], reading these rows only."""
        tensor = self._tensor(name)
        return np.concatenate([tensor[number : number + 1] for number in numbers])

    def linear(self, name: str) -> _Map:
        weight, bias = self._whole(f"{name}.weight").T, self._whole(f"{name}.bias")
        return lambda rows: rows @ weight + bias

    def layer_norm(self, name: str, epsilon: float) -> _Map:
        weight, bias = self._whole(f"{name}.weight"), self._whole(f"{name}.bias")

        def normed(rows: Rows) -> Rows:
            centred = rows - rows.mean(axis=-1, keepdims=True)
            variance = np.square(centred).mean(axis=-1, keepdims=True)
            found: Rows = centred / np.sqrt(variance + np.float32(epsilon)) * weight + bias
            return found

        return normed

    def _whole(self, name: str) -> Rows:
        found: Rows = self._tensor(name)[:]
        return found

    def _tensor(self, name: str) -> Any:
        """Return the tensor unread; slicing reads."""
        tensor = self._file.get_slice(self._names[name])
        if tensor.get_dtype() != "F32":
            raise TypeError(f"{name} is in {tensor.get_dtype()}, not in float32")
        return tensor


def gelu(rows: Rows) -> Rows:
    """Return x * Phi(x), with the normal distribution Phi, within 1e-6."""
    size = np.abs(rows)
    step: Rows = np.reciprocal(1 + np.float32(_ERFC_SCALE / math.sqrt(2)) * size)
    series: Rows = np.float32(_ERFC[0]) * step
    for coefficient in _ERFC[1:]:
        series = (series + np.float32(coefficient)) * step
    upper_tail = series * np.exp(np.float32(-0.5) * size * size)  # erfc(size / sqrt(2)), twice the tail beyond `size`
    found: Rows = np.maximum(rows, 0) - np.float32(0.5) * size * upper_tail
    return found


def _softmax(scores: Rows) -> Rows:
    """Return the softmax over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: Rows = powers / powers.sum(axis=-1, keepdims=True)
    return weights

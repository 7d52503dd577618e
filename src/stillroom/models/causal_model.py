"""What the engine needs of a model: `Decoder` computes its own architectures, `TransformersDecoder` all others."""

from dataclasses import dataclass
from typing import Protocol

import torch

from stillroom.models.packed import LayerKV, PackedInput
from stillroom.ops.attention_observers import AttentionObserver

# B rows whose hidden states are wanted, M model dimension, V vocabulary, L layers, P pairs of dimensions


class Shape(Protocol):
    """The sizes of a model that decide on its prompts and its KV."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Longest sequence that may run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """See `Shape`."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


class CausalModel(Protocol):
    """A model that predicts the next token, and whose KV is addressed by slot; holds no state between calls."""

    @property
    def spec(self) -> Shape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        ...

    @property
    def activation_dtype(self) -> torch.dtype: ...
    @property
    def identity(self) -> str:
        """All that KV depends on besides the weights and the dtypes."""
        ...

    @property
    def has_fixed_launches(self) -> bool:
        """Whether a step of a size always launches the same kernels, so that it can be recorded."""
        ...

    @property
    def inv_freq_LP(self) -> torch.Tensor:
        """Angle per position for each layer and pair of dimensions: what `ops.rope.rerotate_keys` needs."""
        ...

    def hidden_states(
        self, packed: PackedInput, layer_kv: LayerKV, observer: AttentionObserver | None = None
    ) -> torch.Tensor:
        """Return what `logits` needs of the wanted rows, [B, M]; writes this step's K (rotated) and V to their slots.

        Args:
            observer: receives the queries and keys of every layer.
        """
        ...

    def logits(self, hidden_BM: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [B, V] of the tokens that follow these hidden states."""
        ...

    def first_layers(self, count: int) -> "CausalModel":
        """Return the first `count` layers, or all; they share the weights. Their logits are undefined."""
        ...

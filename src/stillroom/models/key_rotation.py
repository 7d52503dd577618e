"""The ways in which a model of transformers may turn its keys: which pairs of dimensions, by which angles."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stillroom.ops.rope import rotate

# T tokens, G key/value heads, D head dimension, P = D / 2 pairs of dimensions


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """One way in which keys may turn."""

    order_D: torch.Tensor
    """Dimensions in the order in which pairs are (i, i + P)."""
    inv_freq_P: torch.Tensor
    """Angle per position; zero for pairs that do not turn."""

    @classmethod
    def of(cls, pairs: list[tuple[int, int]], inv_freq: torch.Tensor, head_dim: int) -> "KeyRotation":
        """Return the rotation of these pairs of dimensions, of which there are as many as frequencies."""
        num_pairs, turned = head_dim // 2, {place for pair in pairs for place in pair}
        rest = [place for place in range(head_dim) if place not in turned]
        spare = num_pairs - len(pairs)
        order = [a for a, _ in pairs] + rest[:spare] + [b for _, b in pairs] + rest[spare:]
        return cls(torch.tensor(order, device=inv_freq.device), F.pad(inv_freq.float(), (0, spare)))

    @property
    def keeps_order(self) -> bool:
        """Whether dimensions stay where the model has them."""
        return self.order_D.tolist() == list(range(len(self.order_D)))

    def error(self, near_TGD: torch.Tensor, far_TGD: torch.Tensor, distance: int) -> float:
        """Return how far keys of position 0 on, turned by the distance, are from those computed there, relatively."""
        angles_11P = (distance * self.inv_freq_P)[None, None]
        turned = rotate(near_TGD[..., self.order_D], angles_11P.cos(), angles_11P.sin())
        wanted = far_TGD[..., self.order_D]
        return float((turned - wanted).norm() / wanted.norm().clamp_min(1e-12))


def rotations(model: torch.nn.Module, head_dim: int, padded_dim: int) -> Iterator[KeyRotation]:
    """Yield no rotation, then each that a layer of the model can have, forwards and backwards.

    Args:
        head_dim: of the layer's keys.
        padded_dim: D, to which zeros are added.
    """
    yield KeyRotation.of([], torch.zeros(0, device=next(model.parameters()).device), padded_dim)
    for one in _frequencies(model):
        for inv_freq in (one, -one):
            for pairs in _pairings(len(inv_freq), head_dim):
                yield KeyRotation.of(pairs, inv_freq, padded_dim)


def _pairings(num_pairs: int, head_dim: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of dimensions that models rotate: halves or neighbours, of the first or the last dimensions."""
    if 2 * num_pairs > head_dim:
        return
    for start in sorted({0, head_dim - 2 * num_pairs}):
        yield [(start + i, start + i + num_pairs) for i in range(num_pairs)]
        yield [(start + 2 * i, start + 2 * i + 1) for i in range(num_pairs)]


def _frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the different angles per position that the model holds, each [number of pairs]."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        is_known = any(len(one) == len(buffer) and torch.equal(one, buffer) for one in found)
        if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1 and not is_known:
            found.append(buffer)
    return found

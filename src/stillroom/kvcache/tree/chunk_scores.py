"""Scores of a chunk's KV behind other chunks than those it was computed behind (Cache-Craft 3.1, 3.2, Eq. 3 to 14).

All scores follow from what the chunk's tokens attended to when its KV was computed (`ContextMass`). The paper writes
inter(i, j) with its indices in either order; here it is always the attention that tokens of the later chunk pay to the
earlier chunk. All functions are pure and define the result where the paper leaves 0 / 0.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NOTES = struct.Struct("<IH?d")
_NAME = 32
"""Bytes of a content hash."""


@dataclass(frozen=True, slots=True, eq=False)
class ContextMass:
    """Attention of the tokens of one chunk when its KV was computed, mean over heads and layers."""

    num_tokens: int
    prefix: tuple[bytes, ...]
    """Content hashes of the chunks before it, in order; may repeat."""
    prefix_lengths: tuple[int, ...]
    """Tokens of each, at least 1."""
    inter: NDArray[np.float32]
    """[len(prefix)] attention of all its tokens to all tokens of each chunk before it (Eq. 3)."""
    intra: float
    """Attention of its tokens to earlier tokens of the chunk (Eq. 4, k < l: attention to itself is left out)."""
    token_inter: NDArray[np.float32] | None = None
    """[num_tokens] attention of each token to all chunks before the chunk (the sum in Eq. 14)."""
    received: NDArray[np.float32] | None = None
    """[num_tokens] attention that each token received from all tokens computed with it (H2O)."""

    def __post_init__(self) -> None:
        assert len(self.prefix) == len(self.prefix_lengths) == len(self.inter)

    def to_bytes(self) -> bytes:
        """Return the notes of a record on disk, whose checksum covers them."""
        tokens = b""
        if self.token_inter is not None and self.received is not None:
            tokens = self.token_inter.astype("<f4").tobytes() + self.received.astype("<f4").tobytes()
        parts = [_NOTES.pack(self.num_tokens, len(self.prefix), bool(tokens), self.intra), *self.prefix]
        parts += [np.array(self.prefix_lengths, "<u4").tobytes(), self.inter.astype("<f4").tobytes()]
        return b"".join([*parts, tokens])

    @property
    def num_bytes(self) -> int:
        """Length of `to_bytes`."""
        num_numbers = 0 if self.token_inter is None or self.received is None else 2 * self.num_tokens
        return _NOTES.size + (_NAME + 8) * len(self.prefix) + 4 * num_numbers

    @classmethod
    def from_bytes(cls, data: bytes) -> "ContextMass":
        """The inverse of `to_bytes`."""
        num_tokens, count, has_tokens, intra = _NOTES.unpack_from(data)
        at = _NOTES.size
        prefix = tuple(data[at + _NAME * i : at + _NAME * (i + 1)] for i in range(count))
        at += _NAME * count
        lengths = tuple(np.frombuffer(data, "<u4", count, at).tolist())
        numbers = np.frombuffer(data, "<f4", offset=at + 4 * count)
        inter, rest = numbers[:count], numbers[count:]
        tokens = (rest[:num_tokens], rest[num_tokens:]) if has_tokens else (None, None)
        return cls(num_tokens, prefix, lengths, inter, intra, *tokens)

    @property
    def impact(self) -> float:
        """CCI (Eq. 11)."""
        return context_impact(outside_influence(self), own_influence(self))


def prefix_overlap(mass: ContextMass, new_prefix: Sequence[bytes]) -> float:
    """beta: share of its attention to earlier chunks that went to chunks of the new prefix (Eq. 6).

    Neither order nor repetition counts. Without attention to earlier chunks: 1 if the new prefix has the same chunks,
    else 0.
    """
    total = float(mass.inter.sum(dtype=np.float64))
    again = set(new_prefix)
    if total <= 0:
        return float(again == set(mass.prefix))
    kept = math.fsum(float(paid) for chunk, paid in zip(mass.prefix, mass.inter, strict=True) if chunk in again)
    return min(1.0, kept / total)


def order_penalty(old_prefix: Sequence[bytes], new_prefix: Sequence[bytes]) -> float:
    """gamma: Kendall's tau distance of the common chunks, the share of pairs whose order changed (Eq. 7).

    0 with fewer than two common chunks. A repeated chunk counts at its first position.
    """
    place = {chunk: index for index, chunk in reversed(list(enumerate(new_prefix)))}
    places = [place[chunk] for chunk in dict.fromkeys(old_prefix) if chunk in place]
    num_common = len(places)
    if num_common < 2:
        return 0.0
    discordant = sum(later < earlier for index, earlier in enumerate(places) for later in places[index + 1 :])
    return discordant / (num_common * (num_common - 1) / 2)


def adjusted_overlap(mass: ContextMass, new_prefix: Sequence[bytes]) -> float:
    """beta' = beta (1 - gamma) (Eq. 8)."""
    return prefix_overlap(mass, new_prefix) * (1 - order_penalty(mass.prefix, new_prefix))


def outside_influence(mass: ContextMass) -> float:
    """a: attention to earlier chunks per pair of tokens, summed over chunks (Eq. 9)."""
    shares = zip(mass.inter, mass.prefix_lengths, strict=True)
    return math.fsum(float(paid) / (mass.num_tokens * length) for paid, length in shares)


def own_influence(mass: ContextMass) -> float:
    """b: attention within the chunk per pair of tokens (Eq. 9)."""
    return float(mass.intra) / mass.num_tokens**2


def context_impact(outside: float, own: float) -> float:
    """CCI = sigmoid(a / b), from 0.5 (KV independent of other chunks) to 1 (fully dependent) (Eq. 11).

    With b = 0, as for a chunk of one token, the limit: 1, or 0.5 if a = 0.
    """
    if own <= 0:
        return 1.0 if outside > 0 else 0.5
    return 1 / (1 + math.exp(-outside / own))


def fix_overhead(impact: float, overlap: float, alpha: float) -> float:
    """CFO = alpha CCI (1 - beta'), clipped to [0, 1]: the share of tokens to recompute (Eq. 12)."""
    return min(1.0, max(0.0, alpha * impact * (1 - overlap)))


def num_to_recompute(overhead: float, num_tokens: int) -> int:
    """N = ceil(CFO |C|) (3.2.1); rounding errors in the last bits do not raise it."""
    return math.ceil(overhead * num_tokens * (1 - 1e-12))


class AlphaCell(NamedTuple):
    """Result of one alpha on a validation set."""

    alpha: float
    mean_overhead: float
    """Mean CFO over the requests."""
    quality: float
    """Mean score of the answers, such as F1."""


def choose_alpha(cells: Iterable[AlphaCell], desired: float) -> float | None:
    """Return the alpha that recomputes least among those of the desired quality (Eq. 13); None if there is none.

    Of equal overheads the better quality wins, then the smaller alpha.
    """
    good = [cell for cell in cells if cell.quality >= desired]
    if not good:
        return None
    return min(good, key=lambda cell: (cell.mean_overhead, -cell.quality, cell.alpha)).alpha

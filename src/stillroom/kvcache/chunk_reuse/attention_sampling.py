"""Measures how the chunks of a prompt attend to each other while it is computed, to be stored with their KV.

Where only sums are needed (Cache-Craft Eq. 3 to 12), a sample of each piece's tokens is measured; it costs a few
percent of the prefill. Selectors that rank tokens (Eq. 14, H2O) need every token.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import AttentionMasses, MassRequest
from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.chunk_scores import ContextMass
from stillroom.kvcache.tree.pieces import Piece

SAMPLE_EVERY = 32
"""One token in this many is measured."""


def mass_sample_every(options: AnywhereOptions) -> int:
    """Return n, where every n-th token must be measured for these options."""
    return 1 if options.ranks_kept_tokens else SAMPLE_EVERY


class AttentionMassSampler:
    """Measures one prompt that has chunks."""

    def __init__(self, pieces: Sequence[Piece], num_tokens: int, every: int) -> None:
        """
        Args:
            num_tokens: of the prompt; its tail may be in no piece.
            every: n, to measure every n-th token.
        """
        self._pieces = pieces
        self._is_sample = every > 1
        chunks = [index for index, piece in enumerate(pieces) if piece.kind is SegmentKind.CHUNK]
        assert chunks
        self._columns = {index: column for column, index in enumerate(chunks)}
        self._groups = np.full(num_tokens, -1, dtype=np.int64)
        self._is_measured = np.zeros(num_tokens, dtype=bool)
        for index, column in self._columns.items():
            piece = pieces[index]
            self._groups[piece.start : piece.end] = column
            self._is_measured[piece.start + min(every, piece.num_tokens) // 2 : piece.end : every] = True
        self._rows = np.cumsum(self._is_measured) - 1  # of measured positions
        num_rows = int(self._rows[-1]) + 1
        self._paid = np.zeros((num_rows, len(chunks)), np.float32)
        self._own = np.full(num_rows, np.nan, np.float32)  # NaN: not measured
        self._received = np.zeros(num_tokens, np.float32)

    @classmethod
    def of(cls, pieces: Sequence[Piece], num_tokens: int, every: int) -> "AttentionMassSampler | None":
        """Return a sampler; None for a prompt without chunks."""
        has_chunks = any(piece.kind is SegmentKind.CHUNK for piece in pieces)
        return cls(pieces, num_tokens, every) if has_chunks else None

    def skip(self, index: int) -> None:
        """Do not measure a piece, because its KV is kept already."""
        self._is_measured[self._pieces[index].start : self._pieces[index].end] = False

    def mass_request(self, positions: NDArray[np.int64]) -> MassRequest | None:
        """Return the request for a step that computes these positions, ascending; None if nothing is measured."""
        rows = np.flatnonzero(self._is_measured[positions])
        if not len(rows):
            return None
        return MassRequest(self._groups[: int(positions[-1]) + 1], len(self._columns), rows)

    def add(self, positions: NDArray[np.int64], masses: AttentionMasses) -> None:
        """Take the answer to the `mass_request` of these positions."""
        rows = self._rows[positions[self._is_measured[positions]]]
        self._paid[rows], self._own[rows] = masses.paid, masses.own
        self._received[: len(masses.received)] += masses.received

    def mass_of(self, index: int) -> ContextMass | None:
        """Return what is known so far of a piece; None if it is no chunk or nothing of it was measured."""
        if index not in self._columns:
            return None
        piece, column = self._pieces[index], self._columns[index]
        rows = np.unique(self._rows[piece.start : piece.end][self._is_measured[piece.start : piece.end]])
        rows = rows[~np.isnan(self._own[rows])]
        if not len(rows):
            return None
        before = [self._pieces[other] for other, place in self._columns.items() if place < column]
        num_represented = piece.num_tokens / len(rows)
        paid = self._paid[rows]
        is_whole = not self._is_sample and len(rows) == piece.num_tokens
        return ContextMass(
            num_tokens=piece.num_tokens,
            prefix=tuple(chunk.content for chunk in before),
            prefix_lengths=tuple(chunk.num_tokens for chunk in before),
            inter=paid[:, :column].sum(axis=0) * np.float32(num_represented),
            intra=float(paid[:, column].sum()) * num_represented,
            token_inter=paid[:, :column].sum(axis=1) if is_whole else None,
            received=self._received[piece.start : piece.end].copy() if is_whole else None,
        )

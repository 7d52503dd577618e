"""Measures, while a prompt is computed, how its chunks attend to each other, and notes that with their KV.

A sample of each piece's tokens stands for all of them where only sums are wanted (Cache-Craft Eq. 3 to 12): it costs a
few hundredths of the prefill. Selectors that rank tokens (Eq. 14, H2O) need every token.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import Masses, Weighing
from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.chunk_scores import ContextMass
from stillroom.kvcache.pieces import Piece
from stillroom.kvcache.placement import AnywhereOptions

SAMPLE_EVERY = 32
"""Tokens of a piece that one of them stands for."""


def weighs_every(options: AnywhereOptions) -> int:
    """How many tokens one may stand for."""
    return 1 if options.selector in ("context", "received") else SAMPLE_EVERY


class Weigher:
    """Of one prompt."""

    def __init__(self, pieces: Sequence[Piece], num_tokens: int, every: int) -> None:
        """
        Args:
            num_tokens: of the prompt, which may have a tail that is in no piece.
            every: tokens that one stands for.
        """
        assert pieces
        self._pieces = pieces
        self._is_sample = every > 1
        self._groups = np.full(num_tokens, -1, dtype=np.int64)
        self._is_watched = np.zeros(num_tokens, dtype=bool)
        for index, piece in enumerate(pieces):
            self._groups[piece.start : piece.end] = index
            if piece.kind is SegmentKind.CHUNK:
                self._is_watched[piece.start + min(every, piece.num_tokens) // 2 : piece.end : every] = True
        self._paid = np.zeros((num_tokens, len(pieces)), np.float32)
        self._own = np.full(num_tokens, np.nan, np.float32)  # not a number: not measured
        self._received = np.zeros(num_tokens, np.float32)

    def leave_out(self, index: int) -> None:
        """A piece whose KV is kept already."""
        self._is_watched[self._pieces[index].start : self._pieces[index].end] = False

    def weighing(self, positions: NDArray[np.int64]) -> Weighing | None:
        """What to ask of a step that computes the tokens at these positions, ascending; None: nothing."""
        rows = np.flatnonzero(self._is_watched[positions])
        if not len(rows):
            return None
        return Weighing(self._groups[: int(positions[-1]) + 1], len(self._pieces), rows)

    def take(self, positions: NDArray[np.int64], masses: Masses) -> None:
        """What came of it."""
        watched = positions[self._is_watched[positions]]
        self._paid[watched], self._own[watched] = masses.paid, masses.own
        self._received[: len(masses.received)] += masses.received

    def mass_of(self, index: int) -> ContextMass | None:
        """Of a piece, if it is a chunk and was computed, as far as is known now."""
        piece = self._pieces[index]
        measured = np.flatnonzero(~np.isnan(self._own[piece.start : piece.end])) + piece.start
        if not len(measured):
            return None
        before = [i for i in range(index) if self._pieces[i].kind is SegmentKind.CHUNK]
        stands_for = piece.num_tokens / len(measured)
        paid = self._paid[measured]
        is_whole = not self._is_sample and len(measured) == piece.num_tokens
        return ContextMass(
            num_tokens=piece.num_tokens,
            prefix=tuple(self._pieces[i].content for i in before),
            prefix_lengths=tuple(self._pieces[i].num_tokens for i in before),
            inter=paid[:, before].sum(axis=0) * np.float32(stands_for),
            intra=float(paid[:, index].sum()) * stands_for,
            token_inter=paid[:, before].sum(axis=1) if is_whole else None,
            received=self._received[piece.start : piece.end].copy() if is_whole else None,
        )

"""What waiting requests can load from the tier: asks for records, has them read and verified, and hands them out.

Invariant: a token counts as ready only when the record of its piece, and of all pieces between it and the tokens that
vLLM has itself, was read whole and verified. vLLM is told of no other, so no load can fail later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from stillroom.backends.vllm.piece_uses import PieceUses
from stillroom.core.clock import Clock
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvstore.shared.shared_tier import SharedTier, TierLookup


@dataclass(frozen=True, slots=True)
class PieceLoad:
    """Verified KV of consecutive blocks of a prompt."""

    first_block: int
    """Of the prompt."""
    content_BN: NDArray[np.uint8]
    """[num_blocks, bytes_per_block]; not to be written to."""


@dataclass(slots=True)
class _Wait:
    """A request that waits, or has its answer."""

    pieces: Sequence[Piece]
    """From the first one that vLLM did not have whole."""
    lookup: TierLookup
    until: float
    fetched: list[Piece] | None = None
    """None: the lookup has not ended."""
    num_computed: int = 0
    ready: list[Piece] = field(default_factory=list)
    """What the request was last told."""


class PrefixLoads:
    """Used by vLLM's scheduler only; other threads talk to the tier."""

    def __init__(
        self, tier: SharedTier, block_size: int, bytes_per_block: int, uses: PieceUses, clock: Clock, max_wait: float
    ) -> None:
        """
        Args:
            block_size: tokens; every piece has a whole number of blocks.
            bytes_per_block: of all layers.
            uses: is told what the tier holds.
            max_wait: seconds that a request waits for the tier.
        """
        self._tier = tier
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._uses = uses
        self._clock = clock
        self._max_wait = max_wait
        self._waits: dict[str, _Wait] = {}

    def num_ready(self, request_id: str, pieces: Sequence[Piece], num_computed: int) -> int | None:
        """Return how many tokens after the first `num_computed` can be loaded now; None: ask again in a moment.

        Args:
            pieces: of the request's prompt, from its first token on.
            num_computed: tokens that vLLM has in its own cache.
        """
        wait = self._waits.get(request_id)
        if wait is not None and wait.pieces[0].start > num_computed:  # vLLM has evicted what it had
            self.drop(request_id)
            wait = None
        wait = wait or self._begin(request_id, pieces, num_computed)
        if wait is None:
            return 0
        has_ended = self._clock.monotonic() >= wait.until
        if wait.fetched is None and wait.lookup.num_found is not None:
            wait.fetched = list(self._fetch(wait, wait.lookup.num_found))
        if not has_ended and (wait.fetched is None or not all(self._tier.is_fetched(one.key) for one in wait.fetched)):
            return None
        wait.num_computed, wait.ready = num_computed, self._verified(wait.fetched or [])
        return max(0, wait.ready[-1].end - num_computed) if wait.ready else 0

    def take(self, request_id: str, num_tokens: int) -> list[PieceLoad]:
        """Return the KV of `num_tokens` tokens after the `num_computed` of the last `num_ready`, and end the request.

        Precondition: the last `num_ready` returned `num_tokens`, or `num_tokens` is 0.
        """
        wait = self._waits.get(request_id)
        loads: list[PieceLoad] = []
        if num_tokens:
            assert wait is not None and wait.ready and wait.ready[-1].end == wait.num_computed + num_tokens
            loads = [self._load(piece, wait.num_computed) for piece in wait.ready if piece.end > wait.num_computed]
        self.drop(request_id)
        return loads

    def drop(self, request_id: str) -> None:
        """Forget a request, and what was read for it."""
        wait = self._waits.pop(request_id, None)
        for piece in (wait and wait.fetched) or []:
            self._tier.cancel_fetch(piece.key)

    def _begin(self, request_id: str, pieces: Sequence[Piece], num_computed: int) -> _Wait | None:
        wanted = [piece for piece in pieces if piece.end > num_computed]
        lookup = self._tier.look_up(wanted[0].owner, [(piece.key, None) for piece in wanted]) if wanted else None
        if lookup is None:
            return None
        self._waits[request_id] = _Wait(wanted, lookup, self._clock.monotonic() + self._max_wait)
        return self._waits[request_id]

    def _fetch(self, wait: _Wait, num_found: int) -> Iterator[Piece]:
        """Start to read the records that the tier holds, as far as there is memory for them."""
        self._uses.found(piece.key for piece in wait.pieces[:num_found])
        self._uses.lost(piece.key for piece in wait.pieces[num_found:])
        return takewhile(lambda piece: self._tier.fetch(piece.key, self._num_bytes(piece)), wait.pieces[:num_found])

    def _verified(self, fetched: Sequence[Piece]) -> list[Piece]:
        """The pieces up to the first one that is not there, or not intact."""
        has_failed = [self._tier.is_fetched(piece.key) and self._tier.get(piece.key) is None for piece in fetched]
        self._uses.lost(piece.key for piece, failed in zip(fetched, has_failed, strict=True) if failed)
        return list(takewhile(lambda piece: self._tier.get(piece.key) is not None, fetched))

    def _load(self, piece: Piece, num_computed: int) -> PieceLoad:
        """The blocks of a piece that vLLM does not have."""
        read = self._tier.get(piece.key)
        assert read is not None, "what was verified stays until it is released"
        first = max(piece.start, num_computed) // self._block_size
        content_BN = read.payload.numpy().reshape(-1, self._bytes_per_block)
        return PieceLoad(first, content_BN[first - piece.start // self._block_size :])

    def _num_bytes(self, piece: Piece) -> int:
        return piece.num_tokens // self._block_size * self._bytes_per_block

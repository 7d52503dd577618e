"""Counts the uses of pieces of prompts, and says which are to be stored in the tier. No torch."""

from collections import OrderedDict
from collections.abc import Iterable

from stillroom.core.kv import NodeKey

_MAX_PIECES = 65_536
"""Pieces that are remembered; the least recently used is forgotten."""
_STORED = -1


class PieceUses:
    """A piece is stored at its use number `save_at_use`, because most are used once only."""

    def __init__(self, save_at_use: int, max_pieces: int = _MAX_PIECES) -> None:
        self._save_at_use = save_at_use
        self._max_pieces = max_pieces
        self._uses: OrderedDict[NodeKey, int] = OrderedDict()
        """Uses so far, or `_STORED`."""

    def use(self, key: NodeKey) -> bool:
        """Count a use; return whether the piece is to be stored now. It then counts as stored."""
        uses = self._uses.get(key, 0)
        is_due = uses != _STORED and uses + 1 >= self._save_at_use
        self._note(key, _STORED if is_due or uses == _STORED else uses + 1)
        return is_due

    def found(self, keys: Iterable[NodeKey]) -> None:
        """Note pieces that the tier holds."""
        for key in keys:
            self._note(key, _STORED)

    def lost(self, keys: Iterable[NodeKey]) -> None:
        """Note pieces that the tier does not hold, or not intact: those that were stored are stored at their next
        use."""
        for key in keys:
            if self._uses.get(key) == _STORED:
                self._uses[key] = self._save_at_use - 1

    def _note(self, key: NodeKey, uses: int) -> None:
        self._uses[key] = uses
        self._uses.move_to_end(key)
        if len(self._uses) > self._max_pieces:
            self._uses.popitem(last=False)

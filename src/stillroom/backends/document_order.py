"""Orders the documents of a prompt so that it begins like an earlier prompt.

A server's prefix cache reuses KV up to the first document that differs, so two prompts with the same documents in
different orders share nothing.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_STEPS_PER_DOCUMENT = 64
"""Limits the search for the longest common beginning. Remembered orders contain no permutations of each other, so it
takes far fewer steps."""


class _Node(Generic[K]):
    __slots__ = ("children", "num_orders")

    def __init__(self) -> None:
        self.children: dict[K, _Node[K]] = {}
        self.num_orders = 0
        """Remembered orders that pass through this node."""


class PrefixOrder(Generic[K]):
    """The most recent orders, as a tree of documents. Deterministic; O(k) for k documents. Thread-safe."""

    def __init__(self, max_orders: int = 4096) -> None:
        self._max_orders = max_orders
        self._root: _Node[K] = _Node()
        self._orders: OrderedDict[tuple[K, ...], None] = OrderedDict()
        self._lock = Lock()

    def arrange(self, ranked: Sequence[K]) -> tuple[K, ...]:
        """Return the documents, given best first, in the order in which to send them.

        First the longest beginning of a remembered order that consists of these documents (of several, the one with
        the better ranks), then the others by rank.
        """
        with self._lock:
            prefix = self._longest_beginning(ranked)
        return (*prefix, *(document for document in ranked if document not in prefix))

    def remember(self, order: tuple[K, ...]) -> None:
        """Remember an order that is sent."""
        with self._lock:
            self._remember(order)

    def _longest_beginning(self, ranked: Sequence[K]) -> tuple[K, ...]:
        """Depth-first search, better ranks first, with a limited number of steps."""
        best: tuple[K, ...] = ()
        num_steps_left = _STEPS_PER_DOCUMENT * len(ranked)
        stack: list[tuple[tuple[K, ...], _Node[K]]] = [((), self._root)]
        while stack and num_steps_left and len(best) < len(ranked):
            path, node = stack.pop()
            num_steps_left -= 1
            if len(path) > len(best):
                best = path
            for document in reversed(ranked):
                child = node.children.get(document)
                if child is not None and document not in path:
                    stack.append(((*path, document), child))
        return best

    def _remember(self, order: tuple[K, ...]) -> None:
        if order in self._orders:
            self._orders.move_to_end(order)
            return
        self._orders[order] = None
        node = self._root
        for document in order:
            node = node.children.setdefault(document, _Node())
            node.num_orders += 1
        if len(self._orders) > self._max_orders:
            self._forget(self._orders.popitem(last=False)[0])

    def _forget(self, order: tuple[K, ...]) -> None:
        node = self._root
        for document in order:
            child = node.children[document]
            child.num_orders -= 1
            if child.num_orders == 0:
                del node.children[document]
                return
            node = child

    def check_integrity(self) -> None:
        """Check that every node counts exactly the orders that pass through it."""
        with self._lock:
            counted: dict[tuple[K, ...], int] = {}
            for order in self._orders:
                for end in range(1, len(order) + 1):
                    counted[order[:end]] = counted.get(order[:end], 0) + 1
            stack: list[tuple[tuple[K, ...], _Node[K]]] = [((), self._root)]
            while stack:
                path, node = stack.pop()
                assert not path or node.num_orders == counted.pop(path), path
                stack += [((*path, document), child) for document, child in node.children.items()]
            assert not counted, counted

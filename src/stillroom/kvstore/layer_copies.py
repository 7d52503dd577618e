"""Copies into the device's slots, made layer after layer by another thread while earlier layers compute (Cache-Craft
3.4.2, Algorithm 2).

Invariant: in each layer copies are made in the order in which they were added, and whoever reads or writes a layer's
slots waits for them first; so nobody can tell that they were not made at once. Nothing is looked up, read or verified
here: what can fail has happened before.

Each layer waits for its own copies only. Eq. 16's depth (`kvcache.preloading`) would let the first layer wait for
more, so that the processor, once taken, is never idle; but nobody else wants it, and nothing ends sooner by that.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

Copy = Callable[[slice], None]
"""Copies these layers; in any thread."""


class LayerCopies:
    """Used by one thread; the other only runs copies."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._executor = ThreadPoolExecutor(1, "stillroom-layers")
        self._added: list[Copy] = []
        self._layers: list[Future[None]] = []
        """Of what was begun, by layer; none when all of it is known to be done."""

    def add(self, copy: Copy) -> None:
        """To be made, behind all that were added before. Begins when somebody waits."""
        self._added.append(copy)

    def wait(self, layer: int) -> None:
        """Until all copies are made in this layer; the next layers go on.

        Raises:
            Exception: a copy failed. So does every later call, until all is dropped.
        """
        if self._added:
            self._finish()
            copies, self._added = self._added, []
            self._layers = [self._executor.submit(_copy, copies, layer) for layer in range(self._num_layers)]
        if self._layers:
            self._layers[layer].result()
            if layer == self._num_layers - 1:
                self._finish()

    def settle(self) -> None:
        """Until all copies are made; raises as `wait`."""
        self.wait(self._num_layers - 1)

    def drop(self) -> None:
        """Make no more copies; those that are being made have ended on return."""
        self._added = []
        for done in self._layers:
            done.cancel()
        wait(self._layers)
        self._layers = []

    def close(self) -> None:
        """Make no more copies, and wait for the thread to end."""
        self.drop()
        self._executor.shutdown()

    def _finish(self) -> None:
        for done in self._layers:
            done.result()
        self._layers = []


def _copy(copies: Sequence[Copy], layer: int) -> None:
    for copy in copies:
        copy(slice(layer, layer + 1))

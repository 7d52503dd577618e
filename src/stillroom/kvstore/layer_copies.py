"""Copies KV into the device's slots layer by layer in another thread, while earlier layers compute (Cache-Craft 3.4.2,
Algorithm 2).

Invariant: in each layer copies are made in the order in which they were added, and a layer's slots are read and written
only after `wait`. Nothing is looked up, read from disk or verified here.

Each layer waits for its own copies only. With Eq. 16's depth (`kvcache/chunk_reuse/layer_preloading.py`) the first
layer would wait for more layers, so that later layers never wait; prefill would not end sooner.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

Copy = Callable[[slice], None]
"""Copies a range of layers; runs in any thread."""


class LayerCopies:
    """Used by one thread; its own thread only runs copies."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._executor = ThreadPoolExecutor(1, "stillroom-layers")
        self._added: list[Copy] = []
        self._layers: list[Future[None]] = []
        """The running copies by layer; empty when all are known to be complete."""

    def add(self, copy: Copy) -> None:
        """Queue a copy behind all earlier copies; it starts at the next `wait`."""
        self._added.append(copy)

    def wait(self, layer: int) -> None:
        """Wait until all copies are made in this layer; later layers continue in the background.

        Raises:
            Exception: a copy failed. Every later call raises too, until `drop`.
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
        """Wait until all copies are made; raises as `wait`."""
        self.wait(self._num_layers - 1)

    def drop(self) -> None:
        """Cancel all copies and wait for those in progress to end."""
        self._added = []
        for done in self._layers:
            done.cancel()
        wait(self._layers)
        self._layers = []

    def close(self) -> None:
        """Cancel all copies and wait for the thread to end."""
        self.drop()
        self._executor.shutdown()

    def _finish(self) -> None:
        for done in self._layers:
            done.result()
        self._layers = []


def _copy(copies: Sequence[Copy], layer: int) -> None:
    for copy in copies:
        copy(slice(layer, layer + 1))

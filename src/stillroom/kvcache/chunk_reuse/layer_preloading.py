"""Computes how many layers of KV to load ahead of the computing layer (Cache-Craft 3.4.2, Eq. 16 and Algorithm 2).

Loads share one channel and run one after the other. The buffer holds the computing layer and `depth` more, which is
Algorithm 2's inclusive `i + L_p`; with one fewer, the wait for the first layer's release would open a gap.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


def preload_depth(num_layers: int, prefill_seconds: float, load_seconds: float) -> int:
    """L_p = ceil((L - 1) (1 - T_prefill / T_load) + 1), within [1, L] (Eq. 16, Algorithm 2 line 1).

    Args:
        prefill_seconds: to compute all layers.
        load_seconds: to load all layers.
    """
    if load_seconds <= prefill_seconds:
        return 1
    # layers loaded while others compute; rounding errors in the last bits do not lower it
    num_overlapped = (num_layers - 1) * prefill_seconds / load_seconds
    return num_layers - math.floor(num_overlapped * (1 + 1e-12))


class PreloadStep(NamedTuple):
    """Loads to begin, then the layer to compute; afterwards its buffer is released."""

    loads: range
    """Layers to load, in order; the loads continue while the layer computes."""
    layer: int


def preload_schedule(num_layers: int, depth: int) -> tuple[PreloadStep, ...]:
    """Return the steps of Algorithm 2, lines 2 to 6; layers count from 0 and are loaded once each."""
    ends = [0, *(min(layer + depth + 1, num_layers) for layer in range(num_layers))]
    return tuple(PreloadStep(range(ends[layer], ends[layer + 1]), layer) for layer in range(num_layers))


class Timeline(NamedTuple):
    """Times of each layer, in seconds after the first load began."""

    loaded: tuple[float, ...]
    started: tuple[float, ...]
    finished: tuple[float, ...]


def timeline(
    load_seconds: Sequence[float], compute_seconds: Sequence[float], depth: int, *, is_eager: bool = False
) -> Timeline:
    """Return when each layer is loaded and computed under `preload_schedule`.

    A layer is computed once it is loaded and the layer before it is done. The first layer waits until `depth` layers
    are loaded, so that with Eq. 16's depth the processor never waits after that.

    Args:
        load_seconds: of each layer.
        compute_seconds: of each layer.
        is_eager: compute the first layer as soon as it is loaded: never finishes later, but may wait in between.
    """
    loaded: list[float] = []
    started: list[float] = []
    finished: list[float] = []
    now = 0.0
    for loads, layer in preload_schedule(len(load_seconds), depth):
        for index in loads:
            loaded.append(max(now, loaded[-1] if loaded else 0.0) + load_seconds[index])
        if layer == 0 and not is_eager:
            now = loaded[min(depth, len(loaded)) - 1]
        started.append(max(now, loaded[layer]))
        now = started[-1] + compute_seconds[layer]
        finished.append(now)
    return Timeline(tuple(loaded), tuple(started), tuple(finished))

"""How many layers of KV to load ahead of the layer that computes. Cache-Craft 3.4.2, Equation 16 and Algorithm 2.

Loads share one channel and follow each other. The buffer holds the layer that computes and `depth` more, which is
Algorithm 2's inclusive `i + L_p`; with one fewer, waiting for the first layer's release would open a gap again.
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
    # layers that are loaded while others compute; a quotient that is whole but for its last bits is not rounded down
    num_overlapped = (num_layers - 1) * prefill_seconds / load_seconds
    return num_layers - math.floor(num_overlapped * (1 + 1e-12))


class PreloadStep(NamedTuple):
    """Begin these loads, compute this layer, then release its buffer."""

    loads: range
    """Layers that nothing has begun to load; in order, and they go on while the layer computes."""
    layer: int


def preload_schedule(num_layers: int, depth: int) -> tuple[PreloadStep, ...]:
    """Algorithm 2, lines 2 to 6, each layer loaded once; layers count from 0."""
    ends = [0, *(min(layer + depth + 1, num_layers) for layer in range(num_layers))]
    return tuple(PreloadStep(range(ends[layer], ends[layer + 1]), layer) for layer in range(num_layers))


class Timeline(NamedTuple):
    """Seconds after the first load began, per layer."""

    loaded: tuple[float, ...]
    started: tuple[float, ...]
    finished: tuple[float, ...]


def timeline(
    load_seconds: Sequence[float], compute_seconds: Sequence[float], depth: int, *, is_eager: bool = False
) -> Timeline:
    """When each layer is loaded and computed, if loads are begun as `preload_schedule` says.

    A layer is computed once it is loaded and the layer before it is done; the first one once `depth` layers are loaded,
    so that with Eq. 16's depth the processor, once taken, never waits.

    Args:
        load_seconds: of each layer.
        compute_seconds: of each layer.
        is_eager: the first layer is computed as soon as it is loaded: never finishes later, but may wait in between.
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

"""Observers of attention equal weights that are computed one query and one head at a time."""

import numpy as np
import torch

from stillroom.core.batch import MassRequest
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_mass import attention_weights_reference
from stillroom.ops.attention_observers import MassObserver, QueryPassObserver


def slow_weights(q_QHD: torch.Tensor, k_KGD: torch.Tensor, places_Q: torch.Tensor | None = None) -> torch.Tensor:
    """Return reference weights, mean over heads."""
    return attention_weights_reference(q_QHD, k_KGD, 0.3, places_Q).mean(0).float()


def layers(num_queries: int, num_keys: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        shapes = (num_queries, 6, 8), (num_keys, 2, 8)
        q, k = (torch.randn(shape, generator=generator) for shape in shapes)
        found.append((q, k))
    return found


CONTEXT = torch.tensor([30, 4, 11, 2, 19])


def test_layers_and_spans_are_kept_apart() -> None:
    spans = [AttentionSpan(1, 3, CONTEXT, 5), AttentionSpan(4, 5, slice(6, 9), 3)]
    observer, seen = QueryPassObserver(spans), layers(6, 40)
    for q, k in seen:
        observer.observe(q, k, 0.3, None, None)
    first, second = observer.shares()
    assert first.shape == (3, 2, 5) and second.shape == (3, 2, 3)
    for layer, (q, k) in enumerate(seen):
        ours = slow_weights(q[1:3], k[CONTEXT])
        torch.testing.assert_close(torch.from_numpy(first[layer]), torch.stack([ours[-1], ours.mean(0)]))
        other = slow_weights(q[4:5], k[6:9])
        torch.testing.assert_close(torch.from_numpy(second[layer]), other.expand(2, 3))


def test_masses_of_requested_rows_are_averaged_over_layers() -> None:
    span = AttentionSpan(1, 5, CONTEXT, 5, torch.tensor([0, 2, 3, 4]))
    mass_request = MassRequest(np.array([0, 0, -1, 1, 1]), 3, np.array([1, 3]))
    observer, seen = MassObserver(span, mass_request), layers(6, 40)
    for q, k in seen:
        observer.observe(q, k, 0.3, None, None)
    masses = observer.masses()
    ours = torch.stack([slow_weights(q[[2, 4]], k[CONTEXT], torch.tensor([2, 4])) for q, k in seen]).mean(0)
    torch.testing.assert_close(torch.from_numpy(masses.own), torch.stack([ours[0, 2], ours[1, 4]]))
    torch.testing.assert_close(torch.from_numpy(masses.received), ours.sum(0))
    paid = torch.stack([ours[:, :2].sum(1), torch.stack([ours[0, 3], ours[1, 3]]), torch.zeros(2)], dim=1)
    torch.testing.assert_close(torch.from_numpy(masses.paid), paid)


def test_queries_without_gaps_are_the_last_of_their_context() -> None:
    span = AttentionSpan(0, 2, CONTEXT, 5)
    observer, ((q, k), *_) = MassObserver(span, MassRequest(np.zeros(5, np.int64), 1, np.array([0]))), layers(2, 40)
    observer.observe(q, k, 0.3, None, None)
    ours = slow_weights(q[:1], k[CONTEXT], torch.tensor([3]))
    torch.testing.assert_close(torch.from_numpy(observer.masses().own), ours[:, 3])
    torch.testing.assert_close(torch.from_numpy(observer.masses().paid), ours[:, :3].sum(1, keepdim=True))

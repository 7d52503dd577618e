"""Observers of attention during a step: shares in a query pass, and attention mass between chunks.

Explicit weights of a few queries exist for one layer at a time. Reference:
`attention_mass.attention_weights_reference`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.core.batch import AttentionMasses, MassRequest
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_mass import attention_flow, mean_weights

# T packed query tokens, Q queries of one span, K context tokens of one span, S slots, L layers, H query heads,
# G key/value heads, D head dimension


NUM_OBSERVED = 16
"""Last queries of a query pass that are observed; observing costs as much as attention itself."""


class AttentionObserver(Protocol):
    """Receives the queries and keys of every layer."""

    def observe(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        """Observe one layer, whose keys are already written; arguments as for `AttentionPlan.attend`."""
        ...


class AttentionObservers:
    """Passes each layer to several observers."""

    def __init__(self, observers: Sequence[AttentionObserver]) -> None:
        self._observers = observers

    def observe(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        for observer in self._observers:
            observer.observe(q_THD, k_SGD, scale, window, softcap)


class MassObserver:
    """Sums over layers what some queries of a span pay to groups of its context (Cache-Craft Eq. 3)."""

    def __init__(self, span: AttentionSpan, mass_request: MassRequest) -> None:
        self._span = span
        self._groups_K = torch.from_numpy(mass_request.groups)
        self._num_groups = mass_request.num_groups
        self._rows = torch.from_numpy(mass_request.rows)
        places = torch.arange(span.num_context_tokens - (span.query_end - span.query_start), span.num_context_tokens)
        self._places_Q = (places if span.places is None else span.places)[self._rows]
        self._sums: list[torch.Tensor] = []
        self._num_layers = 0

    def observe(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        device = q_THD.device
        q_QHD = q_THD[self._rows.to(device) + self._span.query_start]
        groups_K, places_Q = self._groups_K.to(device), self._places_Q.to(device)
        k_KGD = k_SGD[self._span.context]
        flow = attention_flow(q_QHD, k_KGD, groups_K, self._num_groups, scale, places_Q, window, softcap)
        if not self._sums:
            self._sums = [torch.zeros_like(one) for one in flow]
        for total, one in zip(self._sums, flow, strict=True):
            total += one
        self._num_layers += 1

    def masses(self) -> AttentionMasses:
        """Return means over heads and layers. Precondition: at least one layer was observed."""
        paid, own, received = ((total / self._num_layers).cpu().numpy() for total in self._sums)
        return AttentionMasses(paid, own, received)


class QueryPassObserver:
    """Collects the shares of attention of some spans of one step."""

    def __init__(self, spans: Sequence[AttentionSpan]) -> None:
        """
        Args:
            spans: spans without gaps between queries.
        """
        assert all(span.places is None for span in spans)
        self._spans = tuple(spans)
        self._layers: list[list[torch.Tensor]] = [[] for _ in spans]

    def observe(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        for span, layers in zip(self._spans, self._layers, strict=True):
            rows = slice(max(span.query_start, span.query_end - NUM_OBSERVED), span.query_end)
            size = span.num_context_tokens
            places_Q = torch.arange(size - (rows.stop - rows.start), size, device=q_THD.device)
            weights_QK = mean_weights(q_THD[rows], k_SGD[span.context], scale, places_Q, window, softcap)
            layers.append(torch.stack((weights_QK[-1], weights_QK.mean(0))))

    def shares(self) -> list[NDArray[np.float32]]:
        """Return for each span [L, 2, K]: attention of its last query, and the mean of its observed queries; means over
        heads."""
        return [torch.stack(layers).cpu().numpy() for layers in self._layers]

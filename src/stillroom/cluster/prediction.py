"""Predicts how long an engine takes to the first token of a prompt, from the KV that it is believed to hold.

Follows the engine's own decision: the cut of the exact path that ends prefill soonest (`plan_reuse`), and behind it the
chunks whose copy is faster to load than to compute (`plan_placements`), if they save more than the query pass costs
(`pays_for_query_pass`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stillroom.cluster.routed_request import RoutedPiece, RoutedRequest
from stillroom.core.kv import Tier
from stillroom.kvcache.tree.cost_model import CostProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Costs of an engine, and how far it reuses KV."""

    profile: CostProfile
    bytes_per_token: int
    """Of KV."""
    recompute_share: float | None = None
    """Share of the tokens of chunks of other positions that is recomputed, in [0, 1]; None: only exact prefixes are
    reused."""
    has_query_pass: bool = True
    """Whether choosing these tokens takes a pass of the question over the placed chunks."""

    def exact_only(self) -> "EngineCosts":
        """Return the same costs of an engine that reuses exact prefixes only."""
        return EngineCosts(profile=self.profile, bytes_per_token=self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted work of one prompt on one engine."""

    seconds: float
    """Loading and computing until the first token, without waiting."""
    num_reused_tokens: int
    """Prompt tokens that are not computed."""


def predict(request: RoutedRequest, held: Mapping[bytes, Tier], costs: EngineCosts) -> Prediction:
    """Predict the work of a prompt on an otherwise idle engine that holds this KV."""
    cut, loads = _best_cut(request, held, costs)
    cached = sum(piece.num_tokens for piece in request.pieces[:cut])
    share = costs.recompute_share
    if share is None:
        return _prediction(request, cached, loads, costs)
    per_token = costs.profile.prefill_seconds(0, request.num_tokens) / request.num_tokens
    num_placed, placed_loads = 0, 0.0
    for piece in request.pieces[cut:]:
        tier = held.get(piece.content) if piece.is_chunk else None
        if tier is None:
            continue
        seconds = _load_seconds(piece, tier, costs)
        if seconds < (1.0 - share) * per_token * piece.num_tokens:
            num_placed += piece.num_tokens
            placed_loads += seconds
    found = _prediction(request, cached + int((1.0 - share) * num_placed), loads + placed_loads, costs)
    if not num_placed or not 0.0 < share < 1.0 or not costs.has_query_pass:
        return found
    query_pass = costs.profile.prefill_seconds(cached + num_placed, request.num_tail_tokens)
    without = _prediction(request, cached, loads, costs)
    pays = without.seconds - found.seconds > query_pass
    return Prediction(found.seconds + query_pass, found.num_reused_tokens) if pays else without


def prefix_tokens(request: RoutedRequest, held: Mapping[bytes, Tier]) -> int:
    """Return the length of the longest held prefix, in tokens."""
    found = 0
    for piece in request.pieces:
        if piece.key not in held:
            break
        found += piece.num_tokens
    return found


def _prediction(request: RoutedRequest, num_reused: int, loads: float, costs: EngineCosts) -> Prediction:
    seconds = costs.profile.prefill_seconds(num_reused, request.num_tokens - num_reused)
    return Prediction(loads + seconds, num_reused)


def _best_cut(request: RoutedRequest, held: Mapping[bytes, Tier], costs: EngineCosts) -> tuple[int, float]:
    """Return how many pieces of the held prefix to use, and the seconds to load them; as `plan_reuse` chooses."""
    total, cached, loads = request.num_tokens, 0, 0.0
    best, best_loads, least = 0, 0.0, costs.profile.prefill_seconds(0, total)
    for number, piece in enumerate(request.pieces, start=1):
        tier = held.get(piece.key)
        if tier is None:
            break
        cached += piece.num_tokens
        loads += _load_seconds(piece, tier, costs)
        seconds = loads + costs.profile.prefill_seconds(cached, total - cached)
        if seconds <= least:
            best, best_loads, least = number, loads, seconds
    return best, best_loads


def _load_seconds(piece: RoutedPiece, tier: Tier, costs: EngineCosts) -> float:
    if tier is Tier.DEVICE:
        return 0.0
    return costs.profile.load_seconds(tier, piece.num_tokens * costs.bytes_per_token)

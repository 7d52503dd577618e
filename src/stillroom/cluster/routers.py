"""Pure rules that choose an engine for a request: the product's (`CostRouter`), and the rules that it is compared with.

A choice depends on the arguments only: no clock, no random numbers, no order of the engines. Ties go to the engine that
the request's chunks prefer by hash; `CostRouter` leaves out those with too many requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stillroom.cluster.engine_belief import EngineBelief
from stillroom.cluster.placing import by_hash, min_hash, weight, within_bound
from stillroom.cluster.prediction import EngineCosts, predict, prefix_tokens
from stillroom.cluster.routed_request import RoutedRequest
from stillroom.errors import EngineUnavailableError

MAX_AGE_SECONDS = 10.0
"""An engine that was not heard of for longer gets no request."""


class Router(Protocol):
    """Chooses among engines."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
        """Return the engine for a request.

        Raises:
            EngineUnavailableError: no engine is alive.
        """
        ...


def alive(engines: Sequence[EngineBelief], max_age_seconds: float = MAX_AGE_SECONDS) -> list[EngineBelief]:
    """Return the engines that may get a request, by id; raises as `Router.choose`."""
    found = [one for one in engines if one.is_alive and one.age_seconds <= max_age_seconds]
    if not found:
        raise EngineUnavailableError(
            f"none of {len(engines)} engines is alive or was heard of in the last {max_age_seconds:g} s; start one"
        )
    return sorted(found, key=lambda one: one.engine_id)


def _least_loaded(request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
    least = min(one.num_outstanding for one in engines)
    return by_hash(min_hash(request.chunks), [one for one in engines if one.num_outstanding == least])[0]


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each engine in turn, by the number of the request."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
        found = alive(engines)
        return found[request.number % len(found)]


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The engine with the fewest outstanding requests."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
        return _least_loaded(request, alive(engines))


@dataclass(frozen=True, slots=True)
class PrefixThreshold:
    """The longest held prefix if it is long enough and no engine is overloaded.

    The `cache_aware` policy of SGLang's gateway and vLLM's router, with their defaults. They estimate what an engine
    holds from the requests they sent to it; here it is what the engine reported.
    """

    cache_threshold: float = 0.3
    """Least share of the prompt's tokens that the prefix must have."""
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    """The least loaded engine gets the request if the busiest has more requests than it by the first, and more than
    this many times as many."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
        found = alive(engines)
        loads = [one.num_outstanding for one in found]
        is_behind = max(loads) - min(loads) > self.balance_abs_threshold
        if is_behind and max(loads) > self.balance_rel_threshold * min(loads):
            return _least_loaded(request, found)
        order = by_hash(min_hash(request.chunks), found)
        best = max(order, key=lambda one: prefix_tokens(request, one.held))
        if prefix_tokens(request, best.held) > self.cache_threshold * request.num_tokens:
            return best
        return min(order, key=lambda one: len(one.held))  # most room: the smallest tree


@dataclass(frozen=True, slots=True)
class PrefixScore:
    """The highest weighted sum of prefix match and idle queue, each in [0, 1].

    llm-d's default profile: weights 3 and 2. Its third scorer, the use of KV memory, is left out: here kept KV fills
    the memory of every engine.
    """

    prefix_weight: float = 3.0
    queue_weight: float = 2.0

    def choose(self, request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
        found = alive(engines)
        loads = [one.num_outstanding for one in found]
        spread = max(loads) - min(loads)

        def score(one: EngineBelief) -> float:
            match = prefix_tokens(request, one.held) / request.num_tokens
            idle = (max(loads) - one.num_outstanding) / spread if spread else 1.0
            return self.prefix_weight * match + self.queue_weight * idle

        return max(by_hash(min_hash(request.chunks), found), key=score)


@dataclass(frozen=True, slots=True)
class BoundedHash:
    """The first engine with room in the hash order of the first chunk, or of the set of chunks.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), with rendezvous hashing in place of
    the ring.
    """

    load_factor: float = 1.25
    uses_set: bool = False
    """Hash the set of chunks (`min_hash`) in place of the first one."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
        name = min_hash(request.chunks) if self.uses_set else request.chunks[0]
        return by_hash(name, within_bound(alive(engines), self.load_factor))[0]


@dataclass(frozen=True, slots=True)
class CostRouter:
    """The engine with the least predicted time to the first token: waiting, loading and computing.

    With `costs.exact_only()` it sees prefixes only, as NVIDIA Dynamo's KV router does (there in blocks in place of
    seconds). Of tied engines, it takes the first one with room in the hash order of the chunks: consistent hashing with
    bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018). Design and first simulation: docs/cluster.md.
    """

    costs: EngineCosts
    load_factor: float = 2.0
    """As in `within_bound`."""
    tie_share: float = 0.02
    """Engines whose time exceeds the least by at most this share of computing the whole prompt are tied."""
    tie_load_factor: float = 1.25
    """As in `within_bound`, among tied engines: they answer equally soon, so running answers decide."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineBelief]) -> EngineBelief:
        return self.choose_among({one.engine_id: request for one in engines}, engines)

    def choose_among(self, requests: Mapping[str, RoutedRequest], engines: Sequence[EngineBelief]) -> EngineBelief:
        """Return the engine for a request whose documents each engine would get in an order of its own.

        Args:
            requests: by engine id; the same chunks and the same number of tokens for each.

        Raises:
            EngineUnavailableError: no engine is alive.
        """
        living = alive(engines)
        found = within_bound(living, self.load_factor)
        work = [predict(requests[one.engine_id], one.held, self.costs).seconds for one in found]
        seconds = [one.queue_seconds + computing for one, computing in zip(found, work, strict=True)]
        request = requests[found[0].engine_id]
        limit = min(seconds) + self.tie_share * self.costs.profile.prefill_seconds(0, request.num_tokens)
        home = min_hash(request.chunks)
        tied = [one for one, needed in zip(found, seconds, strict=True) if needed <= limit]
        # the bound counts all engines, so that a better belief of the chosen one never changes the choice
        with_room = {one.engine_id for one in within_bound(living, self.tie_load_factor)}
        candidates = [one for one in tied if one.engine_id in with_room] or tied
        return max(candidates, key=lambda one: (weight(home, one.engine_id), one.engine_id))

"""How often searches return the same passages again, alone and in the same order (Cache-Craft 2.3 and 2.4).

Counts over recorded lists of passages; deterministic. Intervals are Wilson's, over the requests of the trace.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom_bench.instrument.statistics import Interval, wilson

Lists = Sequence[tuple[str, ...]]
"""Passages of each request, best first, in order of arrival."""


@dataclass(frozen=True, slots=True)
class TopPassages:
    """Use of the most retrieved passages (Cache-Craft Figures 3 and 6a)."""

    num_passages: int
    of_slots: Interval
    """Share of all retrieved passages that are among them."""
    of_requests: Interval
    """Share of the requests that retrieve at least one of them."""


def top_passages(requests: Lists, share: float = 0.05) -> TopPassages:
    """Count the uses of the most retrieved `share` of the distinct passages, chosen on the same requests."""
    counts = Counter(text for request in requests for text in request)
    num_passages = max(1, round(share * len(counts)))
    top = {text for text, _ in counts.most_common(num_passages)}
    num_slots = sum(counts.values())
    return TopPassages(
        num_passages,
        wilson(sum(counts[text] for text in top), num_slots),
        wilson(sum(not top.isdisjoint(request) for request in requests), len(requests)),
    )


def repeated_prefixes(requests: Lists, length: int) -> Interval | None:
    """Return the share of requests whose first `length` passages, in this order, began an earlier request (Figure 6b).

    Of the requests with so many passages; None without any.
    """
    seen: set[tuple[str, ...]] = set()
    num_repeated = num_requests = 0
    for request in requests:
        if len(request) >= length:
            num_requests += 1
            num_repeated += request[:length] in seen
            seen.add(request[:length])
    return wilson(num_repeated, num_requests) if num_requests else None


def num_sources(wanted: Sequence[str], earlier: Lists) -> int | None:
    """Return the fewest earlier requests that together retrieved all wanted passages; None if one is new."""
    places = {text: 1 << number for number, text in enumerate(dict.fromkeys(wanted))}
    masks = {sum(places[text] for text in set(request) if text in places) for request in earlier} - {0}
    fewest, everything = {0: 0}, (1 << len(places)) - 1
    for _ in places:
        fewest |= {
            have | mask: min(count + 1, fewest.get(have | mask, len(places)))
            for have, count in list(fewest.items())
            for mask in masks
            if have | mask != have
        }
    return fewest.get(everything)


@dataclass(frozen=True, slots=True)
class Sources:
    """Requests whose passages were all retrieved before, by the earlier requests that they come from (Figure 8a)."""

    num_requests: int
    of_one: Interval
    """Share of them whose passages come from a single earlier request."""
    of_at_least_three: Interval


def sources(requests: Lists) -> Sources | None:
    """Count from how many earlier requests the passages of each request come; None if every request has a new one."""
    users: dict[str, list[int]] = {}
    counts: list[int] = []
    for number, request in enumerate(requests):
        earlier = {place for text in request for place in users.get(text, ())}
        count = num_sources(request, [requests[place] for place in sorted(earlier)])
        if count is not None:
            counts.append(count)
        for text in dict.fromkeys(request):
            users.setdefault(text, []).append(number)
    if not counts:
        return None
    of_one, of_many = (wilson(sum(map(fits, counts)), len(counts)) for fits in (_is_one, _is_many))
    return Sources(len(counts), of_one, of_many)


def _is_one(count: int) -> bool:
    return count <= 1


def _is_many(count: int) -> bool:
    return count >= 3

"""In which order waiting requests are admitted: a policy is a sort key over what is known of one, smallest first."""

from collections.abc import Callable
from typing import NamedTuple


class AdmissionCandidate(NamedTuple):
    """A waiting request, as things stand."""

    arrival: int
    """Its number, in the order in which requests came."""
    num_cached: int
    """Of its tokens: need not be computed, by what is kept now."""
    num_to_compute: int
    """The others; at least 1."""


Policy = Callable[[AdmissionCandidate], float]


def first_come(outlook: AdmissionCandidate) -> float:
    """The order of arrival."""
    return float(outlook.arrival)


def shortest_first(outlook: AdmissionCandidate) -> float:
    """The least to compute first."""
    return float(outlook.num_to_compute)


def cache_first(outlook: AdmissionCandidate) -> float:
    """Cached length / computation length, the largest first (RAGCache 5.2): who finds most of his prompt is served
    while it is there, and who has much to compute does not drive it out."""
    return -outlook.num_cached / outlook.num_to_compute


POLICIES: dict[str, Policy] = {policy.__name__: policy for policy in (cache_first, first_come, shortest_first)}

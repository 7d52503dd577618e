"""Admission policies: sort keys of waiting requests, smallest first."""

from collections.abc import Callable
from typing import NamedTuple


class AdmissionCandidate(NamedTuple):
    """A waiting request as an admission policy sees it."""

    arrival: int
    """Number of the request in order of arrival."""
    num_cached: int
    """Tokens whose KV is kept now."""
    num_to_compute: int
    """The other tokens; at least 1."""


Policy = Callable[[AdmissionCandidate], float]


def first_come(candidate: AdmissionCandidate) -> float:
    return float(candidate.arrival)


def shortest_first(candidate: AdmissionCandidate) -> float:
    return float(candidate.num_to_compute)


def cache_first(candidate: AdmissionCandidate) -> float:
    """Highest ratio of cached tokens to tokens to compute first (RAGCache 5.2).

    A request whose KV is kept runs before a request with much to compute evicts that KV.
    """
    return -candidate.num_cached / candidate.num_to_compute


POLICIES: dict[str, Policy] = {policy.__name__: policy for policy in (cache_first, first_come, shortest_first)}

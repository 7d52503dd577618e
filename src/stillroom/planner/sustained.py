"""The highest rate of requests that meets a target. Arithmetic only."""

from collections.abc import Callable

MOST_RATE = 64.0
"""Highest factor on the request rate that is tried."""


def sustained(meets: Callable[[float], bool], most: float) -> float:
    """Return the highest factor on the rate, up to `most`, that meets the target; by bisection, to 5 %.

    0 if not even 1/64 of the rate, or of `most` if that is below 1, meets it.
    """
    low, high = 0.0, min(1.0, most)
    least = high / MOST_RATE
    while low < most and meets(high):
        low, high = high, min(2 * high, most)
    while high - low > 0.05 * high and high > least:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low

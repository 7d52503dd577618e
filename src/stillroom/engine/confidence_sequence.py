"""Bounds on the mean of yes-or-no observations that hold at all times, however often they are tested.

Observations come one by one, and each is "yes" with probability p. For any fixed p, the likelihood of the observations,
averaged over all rates q in [0, 1] and divided by their likelihood under p,

    M(p) = integral of q^yes (1 - q)^no dq / (p^yes (1 - p)^no) = yes! no! / (n + 1)! / (p^yes (1 - p)^no),

is a martingale that begins at 1 if p is the true rate. So it reaches 1 / alpha at any time with probability at most
alpha (Ville 1939), and the rates with M(p) < 1 / alpha contain the true rate at all times at once with probability at
least 1 - alpha (Robbins 1970; Howard et al. 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences";
Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting").
"""

import math

_NUM_HALVINGS = 40
"""Steps of the search for a bound; its error is 1e-12."""


def is_surely_above(rate: float, num_yes: int, num_seen: int, alpha: float) -> bool:
    """Return whether the whole confidence sequence lies above `rate`.

    If p <= rate, the probability that any call over time returns True is at most `alpha`.
    """
    return num_yes > rate * num_seen and _excludes(rate, num_yes, num_seen, alpha)


def is_surely_below(rate: float, num_yes: int, num_seen: int, alpha: float) -> bool:
    """Return whether the whole confidence sequence lies below `rate`; as `is_surely_above`."""
    return num_yes < rate * num_seen and _excludes(rate, num_yes, num_seen, alpha)


def upper_bound(num_yes: int, num_seen: int, alpha: float) -> float:
    """Return the upper end of the confidence sequence; 1 without observations."""
    if num_yes == num_seen or not _excludes(1.0, num_yes, num_seen, alpha):
        return 1.0
    inside, outside = num_yes / num_seen, 1.0
    for _ in range(_NUM_HALVINGS):
        middle = (inside + outside) / 2
        if _excludes(middle, num_yes, num_seen, alpha):
            outside = middle
        else:
            inside = middle
    return outside


def _excludes(rate: float, num_yes: int, num_seen: int, alpha: float) -> bool:
    num_no = num_seen - num_yes
    if (rate == 0.0 and num_yes) or (rate == 1.0 and num_no):
        return True
    likelihood = (num_yes * math.log(rate) if num_yes else 0.0) + (num_no * math.log1p(-rate) if num_no else 0.0)
    mixture = math.lgamma(num_yes + 1) + math.lgamma(num_no + 1) - math.lgamma(num_seen + 2)
    return mixture - likelihood >= -math.log(alpha)

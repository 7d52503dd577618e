"""In which order waiting requests are admitted: a policy is a sort key, smallest first."""

from collections.abc import Callable

from stillroom.scheduler.sequence import Sequence

Policy = Callable[[Sequence], float]


def first_come(sequence: Sequence) -> float:
    """The order of arrival. Who was preempted came before all who still wait, and so goes first."""
    return float(sequence.arrival)

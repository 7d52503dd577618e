"""When it pays that the model begins to read before the search has ended: what that gained here and what it cost.

Searching in stages costs something itself, a search beside a model that computes is slower, and a wrong guess holds the
right documents up until the step under way is over. All three are measured, and so is how often and how long before
its end each stage of a search has the final list. Some questions are searched the other way than would be best, or
nothing would be known of it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from threading import Lock

_REMEMBERED = 32
"""Questions of either kind."""
_TRIED_FIRST = 3
"""Questions of either kind before one is judged."""
_TRY_OTHER_EVERY = 16


@dataclass(slots=True)
class Overlap:
    """A question whose search ran in stages."""

    search_seconds: float
    """From its arrival to the final list."""
    gained_seconds: float
    """How long the model had worked on the right prompt by then."""
    stalled_seconds: float = 0.0
    """How long wrong ones kept the engine after they had been cancelled."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A provisional list, when all is known."""

    is_final: bool
    """It was the final one already."""
    remaining_seconds: float
    """From it to the end of the search."""


class BreakEven:
    """The books of one kind of search. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._plain: deque[float] = deque(maxlen=_REMEMBERED)
        self._staged: deque[Overlap] = deque(maxlen=_REMEMBERED)
        self._stages: list[deque[Stage]] = []
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_asked = 0

    def decide(self) -> bool:
        """Whether the next question is to be searched in stages."""
        with self._lock:
            self._num_asked += 1
            if min(len(self._plain), len(self._staged)) < _TRIED_FIRST:
                return len(self._staged) < len(self._plain)
            return (self._net_seconds() > 0) != (self._num_asked % _TRY_OTHER_EVERY == 0)

    def is_promising(self, stage: int) -> bool:
        """Whether to begin with the list of this stage (from 0): what that gains if it is the final one, against what
        a wrong one holds up, each as likely as it was."""
        with self._lock:
            known = self._stages[stage] if stage < len(self._stages) else ()
            if not known or not self._stalls:
                return True
            share = (sum(one.is_final for one in known) + 1) / (len(known) + 2)
            remaining = fmean(one.remaining_seconds for one in known)
            return share * remaining > (1 - share) * fmean(self._stalls)

    @property
    def break_even_seconds(self) -> float | None:
        """The search time from which it pays, if the same share of it were gained; None where nothing is."""
        with self._lock:
            if not self._plain or not self._staged:
                return None
            gained = fmean(one.gained_seconds for one in self._staged)
            return self._cost() * median(self._plain) / gained if gained > 0 else None

    def note_plain(self, search_seconds: float) -> None:
        """A search in one go."""
        with self._lock:
            self._plain.append(search_seconds)

    def note_staged(self, overlap: Overlap, stages: Sequence[Stage]) -> None:
        """A search in stages, its last one left out of `stages`."""
        with self._lock:
            self._staged.append(overlap)
            for number, stage in enumerate(stages):
                if number == len(self._stages):
                    self._stages.append(deque(maxlen=_REMEMBERED))
                self._stages[number].append(stage)

    def note_stall(self, overlap: Overlap, seconds: float) -> None:
        """A wrong prompt of this question left the engine so long after it had been cancelled."""
        with self._lock:
            overlap.stalled_seconds += seconds
            self._stalls.append(seconds)

    def _net_seconds(self) -> float:
        return fmean(one.gained_seconds for one in self._staged) - self._cost()

    def _cost(self) -> float:
        slower = median(one.search_seconds for one in self._staged) - median(self._plain)
        return max(slower, 0.0) + fmean(one.stalled_seconds for one in self._staged)

"""Measures when speculative prefill pays: the time gained by overlapping prefill with the search, less its costs.

The costs are the staged search itself, the search's slowdown while the model computes, and the delay of the right
prompt until the step of a cancelled one is over. Also measured: how often, and how long before the end, each stage has
the final list. Every 16th question is searched the way that looks worse, so that both stay measured.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from threading import Lock

_REMEMBERED = 32
"""Searches remembered, plain and staged each."""
_TRIED_FIRST = 3
"""Searches of each kind before the two are compared."""
_TRY_OTHER_EVERY = 16


@dataclass(slots=True)
class Overlap:
    """Times of a staged search."""

    search_seconds: float
    """From its start to the final list."""
    gained_seconds: float
    """How long the right prompt had been in the engine by then."""
    stalled_seconds: float = 0.0
    """How long cancelled prompts still occupied the engine."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A provisional list, judged after the search."""

    is_final: bool
    """Whether it equals the final list."""
    remaining_seconds: float
    """From it to the end of the search."""


class BreakEven:
    """Measurements of one search mode. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._plain: deque[float] = deque(maxlen=_REMEMBERED)
        self._staged: deque[Overlap] = deque(maxlen=_REMEMBERED)
        self._stages: list[deque[Stage]] = []
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_asked = 0

    def decide(self) -> bool:
        """Whether to search the next question in stages."""
        with self._lock:
            self._num_asked += 1
            if min(len(self._plain), len(self._staged)) < _TRIED_FIRST:
                return len(self._staged) < len(self._plain)
            return (self._net_seconds() > 0) != (self._num_asked % _TRY_OTHER_EVERY == 0)

    def is_promising(self, stage: int) -> bool:
        """Whether to start a prefill with the list of this stage (from 0): whether the expected gain if the list is
        final exceeds the expected delay if it is not."""
        with self._lock:
            known = self._stages[stage] if stage < len(self._stages) else ()
            if not known or not self._stalls:
                return True
            share = (sum(one.is_final for one in known) + 1) / (len(known) + 2)
            remaining = fmean(one.remaining_seconds for one in known)
            return share * remaining > (1 - share) * fmean(self._stalls)

    @property
    def break_even_seconds(self) -> float | None:
        """The search time from which speculation pays, if the same share of it were gained; None if none was."""
        with self._lock:
            if not self._plain or not self._staged:
                return None
            gained = fmean(one.gained_seconds for one in self._staged)
            return self._cost() * median(self._plain) / gained if gained > 0 else None

    def note_plain(self, search_seconds: float) -> None:
        """Record a search without stages."""
        with self._lock:
            self._plain.append(search_seconds)

    def note_staged(self, overlap: Overlap, stages: Sequence[Stage]) -> None:
        """Record a staged search; `stages` excludes the last one."""
        with self._lock:
            self._staged.append(overlap)
            for number, stage in enumerate(stages):
                if number == len(self._stages):
                    self._stages.append(deque(maxlen=_REMEMBERED))
                self._stages[number].append(stage)

    def note_stall(self, overlap: Overlap, seconds: float) -> None:
        """Record how long a cancelled prompt of this search still occupied the engine."""
        with self._lock:
            overlap.stalled_seconds += seconds
            self._stalls.append(seconds)

    def _net_seconds(self) -> float:
        return fmean(one.gained_seconds for one in self._staged) - self._cost()

    def _cost(self) -> float:
        slower = median(one.search_seconds for one in self._staged) - median(self._plain)
        return max(slower, 0.0) + fmean(one.stalled_seconds for one in self._staged)

"""Simulates searches beside an engine, on a virtual clock and on the same cores.

While the engine computes and a search runs, each takes longer than alone, by a measured factor. One server searches one
batch at a time: a query that finds it idle is searched alone, and queries that arrive while it is busy are searched
together. Embedding a question, and what follows its search, need no server.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Releases = Callable[[Sequence[int]], NDArray[np.float64]]
"""Seconds from the start of a batch of these queries to the result of each, without other work on the machine."""

_TINY = 1e-12
_DUE, _EMBEDDED, _RELEASED, _DONE = range(4)


@dataclass(frozen=True, slots=True)
class SharedCores:
    """How much search and model slow each other down; at least 1. Both 1: each has cores of its own."""

    search_slowdown: float = 1.0
    """Time of a search while the model computes, divided by its time alone."""
    step_slowdown: float = 1.0
    """Time of a step while a search runs, divided by its time alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One question that is searched for."""

    due: float
    """When it arrives, in seconds."""
    before: float = 0.0
    """Seconds before the index is searched: embedding the question."""
    after: float = 0.0
    """Seconds from the index's result until the engine has the prompt."""
    is_searched: bool = True
    """False: the query cache answers it."""


class SearchStation:
    """The searches of a workload. `found` has the moments at which the engine gets the prompts."""

    def __init__(
        self, queries: Sequence[Query], releases: Releases, max_batch: int = 1, cores: SharedCores | None = None
    ) -> None:
        """
        Args:
            max_batch: most queries that are searched together.
        """
        cores = cores or SharedCores()
        self._queries, self._releases, self._max_batch = queries, releases, max_batch
        self._search_rate, self._step_rate = 1 / cores.search_slowdown, 1 / cores.step_slowdown
        self.now = 0.0
        self._work = 0.0  # seconds of work that every running search has done
        self._dues = [(query.due, _DUE, number) for number, query in enumerate(queries)]
        self._running: list[tuple[float, int, int]] = []  # work at which a phase ends, phase, number
        self._waiting: deque[int] = deque()
        self._num_in_batch = 0
        heapq.heapify(self._dues)
        self.found: deque[tuple[float, int]] = deque()
        """Moment and number of each query whose prompt the engine has, in order; the engine takes them from the
        left."""
        self.search_seconds = np.zeros(len(queries))
        """From arrival until the engine has the prompt: [n]."""

    def beside(self, now: float, seconds: float) -> float:
        """Advance beside a step that takes so many seconds alone; return the seconds that it takes."""
        self.idle_until(now)
        if not self._running and self._next(1.0) >= now + seconds:  # no search, the usual case
            self.now = now + seconds
            return seconds
        while seconds > self._tiny:
            rate = self._step_rate if self._running else 1.0
            end = min(self.now + seconds / rate, self._next(self._search_rate))
            seconds -= (end - self.now) * rate
            self._advance(end, self._search_rate)
        return self.now - now

    def idle_until(self, moment: float) -> None:
        """Advance while the engine computes nothing. No effect if the moment has passed."""
        while self.now < moment:
            self._advance(min(moment, self._next(1.0)), 1.0)

    def idle_until_found(self) -> float:
        """Advance until the engine gets a prompt, which must come; return that moment."""
        while not self.found:
            self._advance(self._next(1.0), 1.0)
        return self.found[0][0]

    def next_change(self) -> float:
        """Return the moment of the next change if the engine computes nothing; infinite if there is none."""
        return self._next(1.0)

    @property
    def _tiny(self) -> float:
        """Seconds that count as none: late in a long workload, adding less would not change the time."""
        return max(_TINY, 2 * math.ulp(self.now))

    def _next(self, rate: float) -> float:
        due = self._dues[0][0] if self._dues else float("inf")
        end = self.now + (self._running[0][0] - self._work) / rate if self._running else float("inf")
        return max(self.now, min(due, end))

    def _advance(self, moment: float, rate: float) -> None:
        """Advance to a moment up to which nothing changes, and then make the changes."""
        if self._running:
            self._work += (moment - self.now) * rate
        self.now = moment
        while self._dues and self._dues[0][0] <= moment:
            self._begin(heapq.heappop(self._dues)[2])
        while self._running and self._running[0][0] <= self._work + self._tiny:
            _, phase, number = heapq.heappop(self._running)
            self._end(phase, number)

    def _begin(self, number: int) -> None:
        query = self._queries[number]
        phase, seconds = (_EMBEDDED, query.before) if query.is_searched else (_DONE, query.after)
        self._run(phase, number, seconds)

    def _end(self, phase: int, number: int) -> None:
        if phase == _EMBEDDED:
            self._waiting.append(number)
            if not self._num_in_batch:
                self._start(1)
        elif phase == _RELEASED:
            self._num_in_batch -= 1
            self._run(_DONE, number, self._queries[number].after)
            if self._waiting and not self._num_in_batch:
                self._start(self._max_batch)
        else:
            self.found.append((self.now, number))
            self.search_seconds[number] = self.now - self._queries[number].due

    def _start(self, max_batch: int) -> None:
        batch = [self._waiting.popleft() for _ in range(min(max_batch, len(self._waiting)))]
        self._num_in_batch = len(batch)
        for number, seconds in zip(batch, self._releases(batch).tolist(), strict=True):
            self._run(_RELEASED, number, seconds)

    def _run(self, phase: int, number: int, seconds: float) -> None:
        heapq.heappush(self._running, (self._work + seconds, phase, number))

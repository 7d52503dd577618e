"""What one front knows of its engines: their reports, and the log of what it sent since.

Between two reports of an engine the front adds its own requests: their work to the queue, and their pieces to the KV
that the engine will hold. A request counts in the queue until its first token is there, however long that takes, and as
much longer than predicted as first tokens of this engine have taken lately. Several fronts do not see each other's
requests until the engine reports them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stillroom.cluster.engine_belief import EngineBelief
from stillroom.cluster.routed_request import RoutedRequest
from stillroom.core.kv import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Sent by an engine to every front."""

    at_seconds: float
    """When the engine made it, on the front's clock."""
    changes: Mapping[bytes, Tier | None]
    """Kept KV since its last report: fastest tier by key and by content; None: not held any more."""
    queue_seconds: float
    """Predicted work of the requests that wait or are being computed."""
    num_outstanding: int
    """Requests that it has not completed."""


_MAX_SLOWNESS = 100.0
_NEWEST_SHARE = 0.25
"""Of the last first token in the moving average of an engine's slowness."""
_FORGET_SECONDS = 60.0
"""After so long without a first token, an engine's slowness counts 1/e."""


@dataclass(slots=True)
class _Sent:
    """A request of this front."""

    at_seconds: float
    work_seconds: float
    predicted_seconds: float
    """To its first token, waiting included, for an engine that is as fast as its cost profile."""
    names: tuple[bytes, ...]
    """Of the KV that it leaves on the engine."""
    computed_at: float | None = None
    """Time of its first token, or of its end without one."""


class _Holdings:
    """KV of one engine: as reported, and as expected of requests under way."""

    def __init__(self) -> None:
        self.believed: dict[bytes, Tier] = {}
        self._reported: dict[bytes, Tier] = {}
        self._num_expecting: dict[bytes, int] = {}
        """Requests under way by the names of the KV that they leave."""

    def report(self, changes: Mapping[bytes, Tier | None]) -> None:
        for name, tier in changes.items():
            if tier is None:
                self._reported.pop(name, None)
            else:
                self._reported[name] = tier
            self._believe(name)

    def expect(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._num_expecting[name] = self._num_expecting.get(name, 0) + 1
            self._believe(name)

    def settle(self, names: Iterable[bytes]) -> None:
        """From now on, reports tell whether these are held."""
        for name in names:
            self._num_expecting[name] -= 1
            if not self._num_expecting[name]:
                del self._num_expecting[name]
            self._believe(name)

    def _believe(self, name: bytes) -> None:
        tier = Tier.DEVICE if name in self._num_expecting else self._reported.get(name)
        if tier is None:
            self.believed.pop(name, None)
        else:
            self.believed[name] = tier


@dataclass(slots=True)
class _Slowness:
    """Moving average of real over predicted seconds to the first token."""

    ratio: float = 1.0
    at_seconds: float = 0.0

    def add(self, ratio: float, now: float) -> None:
        before = self._remembered(now)
        self.ratio, self.at_seconds = before + _NEWEST_SHARE * (min(ratio, _MAX_SLOWNESS) - before), now

    def at(self, now: float) -> float:
        """Return the factor by which work takes longer, in [1, 100]."""
        return min(max(self._remembered(now), 1.0), _MAX_SLOWNESS)

    def _remembered(self, now: float) -> float:
        return 1.0 + (self.ratio - 1.0) * math.exp(-max(0.0, now - self.at_seconds) / _FORGET_SECONDS)


@dataclass(slots=True)
class _EngineLog:
    work_until: float
    """When the engine will have computed all prompts that the front knows of."""
    heard_at: float
    computed_at: float = -math.inf
    """Time of the last first token."""
    slowness: _Slowness = field(default_factory=_Slowness)
    holdings: _Holdings = field(default_factory=_Holdings)
    num_others: int = 0
    """Outstanding requests of other fronts, by the last report."""
    outstanding: dict[int, _Sent] = field(default_factory=dict)
    unsettled: list[_Sent] = field(default_factory=list)
    """Requests whose KV no report covers yet."""

    def queue_seconds(self, now: float, slowness: float) -> float:
        """Return the predicted seconds until the engine would begin a new prompt.

        Args:
            slowness: factor on the work of requests that have no first token yet.
        """
        waiting = [one for one in self.outstanding.values() if one.computed_at is None]
        if not waiting:
            return max(0.0, self.work_until - now)
        begun = max(waiting[0].at_seconds, self.computed_at)
        work = [slowness * one.work_seconds for one in waiting]
        done = now - begun
        if done < work[0]:  # else it is late, and how much of it is left is unknown
            work[0] -= done
        return max(self.work_until - now, sum(work))


class FrontBeliefs:
    """The engines of one front. Pure bookkeeping: every method gets the time."""

    def __init__(self, *, places_computed: bool = True) -> None:
        """
        Args:
            places_computed: whether engines place what prompts have computed; not with `reuse.mode = "prepared"`.
        """
        self._engines: dict[str, _EngineLog] = {}
        self._places_computed = places_computed

    def add_engine(self, engine_id: str, now: float) -> None:
        """Begin to route to an engine that holds nothing yet. One of the same id starts anew."""
        self._engines[engine_id] = _EngineLog(work_until=now, heard_at=now)

    def lose_engine(self, engine_id: str) -> list[int]:
        """Stop routing to an engine; returns the numbers of its requests that are not completed, oldest first."""
        return list(self._engines.pop(engine_id).outstanding)

    def on_report(self, engine_id: str, report: EngineReport) -> None:
        """Take an engine's report. No effect for an engine that was lost."""
        log = self._engines.get(engine_id)
        if log is None:
            return
        at = report.at_seconds
        log.heard_at = max(log.heard_at, at)
        log.holdings.report(report.changes)
        is_covered = [one.computed_at is not None and one.computed_at <= at for one in log.unsettled]
        for one, covered in zip(log.unsettled, is_covered, strict=True):
            if covered:
                log.holdings.settle(one.names)
        log.unsettled = [one for one, covered in zip(log.unsettled, is_covered, strict=True) if not covered]
        later = [one for one in log.outstanding.values() if one.at_seconds > at]
        log.work_until = at + report.queue_seconds + sum(one.work_seconds for one in later)
        log.num_others = max(0, report.num_outstanding - (len(log.outstanding) - len(later)))

    def on_sent(self, engine_id: str, request: RoutedRequest, work_seconds: float, now: float) -> None:
        """Note a request that was sent to an engine.

        Args:
            work_seconds: predicted, without waiting.
        """
        log = self._engines[engine_id]
        predicted = log.queue_seconds(now, 1.0) + work_seconds
        names = tuple(piece.key for piece in request.pieces)
        if self._places_computed:
            names += tuple(piece.content for piece in request.pieces)
        sent = _Sent(now, work_seconds, predicted, names)
        log.outstanding[request.number] = sent
        log.unsettled.append(sent)
        log.work_until = max(now, log.work_until) + work_seconds
        log.holdings.expect(names)

    def on_first_token(self, engine_id: str, number: int, now: float) -> None:
        """Note that an engine has computed a prompt. No effect for an engine that was lost."""
        log = self._engines.get(engine_id)
        if log is None:
            return
        sent = log.outstanding[number]
        sent.computed_at = log.computed_at = now
        if sent.predicted_seconds > 0.0:
            log.slowness.add((now - sent.at_seconds) / sent.predicted_seconds, now)

    def on_end(self, engine_id: str, number: int, now: float) -> None:
        """Note that a request has ended, complete or not. No effect for an engine that was lost."""
        log = self._engines.get(engine_id)
        if log is None:
            return
        sent = log.outstanding.pop(number)
        if sent.computed_at is None:  # from now on, reports tell what the engine holds
            sent.computed_at = now
        if not log.outstanding and not log.num_others:
            log.work_until = min(log.work_until, now)

    def at(self, now: float) -> list[EngineBelief]:
        """Return what is believed of every engine, by id. `held` changes with later calls of the other methods."""
        return [
            EngineBelief(
                engine_id=engine_id,
                held=log.holdings.believed,
                queue_seconds=log.queue_seconds(now, log.slowness.at(now)),
                num_outstanding=len(log.outstanding) + log.num_others,
                age_seconds=max(0.0, now - log.heard_at),
            )
            for engine_id, log in sorted(self._engines.items())
        ]

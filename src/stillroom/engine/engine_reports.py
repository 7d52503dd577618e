"""What an engine reports to fronts: which KV it holds, and how much work waits (`cluster.front_beliefs`).

The engine's thread reads its tree when a report is asked for: before its next step, so that no step is interrupted, or
at once while it is idle. A report never waits for a long step; then it is as old as the last reading.
"""

import threading
from concurrent.futures import Future

from stillroom.cluster.wire_state import EngineState
from stillroom.core.kv import Tier
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.kvcache.held_names import HeldChanges, HeldNames

_MAX_LOOKED_AT = 64
"""Waiting requests whose kept KV is looked up for a report; the others count as their mean."""


class EngineReports:
    """Reports of one engine. Thread-safe."""

    def __init__(self, engine: AsyncEngine, run: str) -> None:
        """
        Args:
            run: names this start of the engine.
        """
        self.run = run
        self._engine = engine
        self._held: HeldNames | None = None
        self._queue_seconds = 0.0
        self._kept_bytes: dict[Tier, int] = {}
        self._lock = threading.Lock()
        self._asked: Future[None] | None = None
        """Completed by the next reading; None: none is asked for."""
        engine.on_step = self._read_if_asked
        self.refresh()

    def refresh(self) -> "Future[None]":
        """Ask for a reading, and return its completion."""
        with self._lock:
            if (asked := self._asked) is None:
                asked = self._asked = Future()
        if not self._engine.has_work:  # else before the next step
            self._engine.run(self._read_if_asked)
        return asked

    def state(self, run: str, since: int, num_outstanding: int, *, is_draining: bool) -> EngineState:
        """Return the state as of the last reading.

        Args:
            run, since: `EngineState.run` and `sequence` of the asking front's last state; another run gets all names.
            num_outstanding: requests that are not completed.
        """
        held = HeldChanges(0, True, {}) if self._held is None else self._held.since(since if run == self.run else 0)
        engine = self._engine
        return EngineState(
            run=self.run,
            sequence=held.sequence,
            is_all=held.is_all,
            changes=held.tiers,
            queue_seconds=self._queue_seconds if num_outstanding else 0.0,
            num_outstanding=num_outstanding,
            num_waiting=engine.num_waiting,
            num_running=engine.num_running,
            num_blocks=engine.num_blocks,
            num_free_blocks=engine.num_free_blocks,
            kept_bytes=self._kept_bytes,
            is_draining=is_draining,
        )

    def _read_if_asked(self, engine: Engine) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is None:
            return
        try:
            self._read(engine)
        finally:
            asked.set_result(None)

    def _read(self, engine: Engine) -> None:
        kv = engine.scheduler.kv
        if kv.reuse is None:
            return
        if self._held is None:
            self._held = HeldNames(kv.reuse.tree, only_prepared=kv.uses_prepared)
        self._held.read()
        num_bytes = {tier: kv.reuse.tree.num_bytes(tier) for tier in Tier}
        self._kept_bytes = {tier: one for tier, one in num_bytes.items() if one}
        self._queue_seconds = queue_seconds(engine)


def queue_seconds(engine: Engine) -> float:
    """Predict the seconds until a new prompt would begin: of all prompts that are not computed yet. 0 without a cost
    profile."""
    scheduler = engine.scheduler
    if scheduler.kv.reuse is None:
        return 0.0
    profile = scheduler.kv.reuse.tree.profile
    num_waiting = scheduler.num_waiting
    found = [profile.prefill_seconds(*one) for one in scheduler.pending_prefills(_MAX_LOOKED_AT)]
    waiting = found[len(found) - min(num_waiting, _MAX_LOOKED_AT) :] if num_waiting else []
    num_left_out = num_waiting - len(waiting)
    return sum(found) + (num_left_out * sum(waiting) / len(waiting) if num_left_out else 0.0)

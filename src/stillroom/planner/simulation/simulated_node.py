"""An engine of a simulated cluster: the product's engine on its own virtual clock, with what it reports to fronts."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.cluster.front_beliefs import EngineReport
from stillroom.core.kv import Tier
from stillroom.planner.simulation.simulated_corpus import PreparingPrompt
from stillroom.planner.simulation.simulated_runtime import SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import Prompt


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an engine sends at the end of a step."""

    at_seconds: float
    firsts: list[tuple[int, list[int]]]
    """Requests with their first token, and their reused tokens by tier."""
    ended: list[int]
    """Completed requests."""
    changes: dict[bytes, Tier | None]
    """Of kept KV."""


class SimulatedNode:
    """An engine whose clock is at the end of the work that it has begun."""

    def __init__(self, engine_id: str, runtime: SimulatedRuntime) -> None:
        self.engine_id = engine_id
        self.runtime = runtime
        self.is_alive = True
        self._may_have_idle_work = True
        self._waiting: dict[int, float] = {}
        """Requests without first token, with their predicted work."""
        self._num_outstanding = 0
        self._changes: dict[bytes, Tier | None] = {}
        runtime.watch_changes()

    @property
    def now(self) -> float:
        return self.runtime.clock.now

    @property
    def can_run(self) -> bool:
        """Whether it has anything to do without a further request."""
        return self.is_alive and (self.runtime.has_work or self._may_have_idle_work)

    def submit(self, number: int, prompt: Prompt, work_seconds: float, now: float) -> None:
        """Take a request. A dead engine loses it."""
        if not self.is_alive:
            return
        if not self.runtime.has_work:
            self.runtime.sleep_until(now)
        self.runtime.find_in_network(prompt)
        self.runtime.submit(number, prompt)
        self._waiting[number] = work_seconds
        self._num_outstanding += 1

    def prepare(self, documents: Sequence[PreparingPrompt]) -> None:
        """Prepare documents before the first request; the next report has them."""
        self.runtime.prepare(documents)
        self._changes |= self.runtime.take_changes()

    def run(self) -> StepResult | None:
        """Run one step, or one piece of idle work; None if there was neither. Precondition: `can_run`."""
        if self.runtime.has_work:
            firsts, ended = self.runtime.step()
            self._may_have_idle_work = True
            for number, _ in firsts:
                del self._waiting[number]
        else:
            firsts, ended = [], []
            self._may_have_idle_work = self.runtime.do_idle_work()
            if not self._may_have_idle_work:
                return None
        return StepResult(self.now, firsts, ended, self.runtime.take_changes())

    def on_sent(self, result: StepResult) -> None:
        """Note that the moment of a step's result has come: later reports include it."""
        self._num_outstanding -= len(result.ended)
        self._changes |= result.changes

    def report(self, now: float) -> EngineReport:
        """Report what changed since the last report."""
        changes, self._changes = self._changes, {}
        return EngineReport(
            at_seconds=now,
            changes=changes,
            queue_seconds=max(0.0, self.now - now) + sum(self._waiting.values()),
            num_outstanding=self._num_outstanding,
        )

    def lose(self) -> None:
        """Stop at once: its KV and its requests are gone."""
        self.is_alive = False

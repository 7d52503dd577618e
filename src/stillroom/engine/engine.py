"""The step loop: scheduler decides, runner computes, events come out. Synchronous and single-threaded.

`async_engine` runs it in a thread of its own; tests run it by hand.
"""

from dataclasses import dataclass

from stillroom.core.batch import TokenLogprobs
from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.runner.torch_runner import Runner
from stillroom.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Something happened to a request: a token, its end, or both."""

    request_id: RequestId
    token_id: int | None
    """The new token; None if the request ended without one."""
    finish_reason: FinishReason | None
    """Set on the last event of a request."""
    at: float
    """Seconds on the engine's monotonic clock."""
    error: Exception | None = None
    """Why the request was aborted by the engine, if it was."""
    logprobs: TokenLogprobs | None = None
    """Of the new token, if the request wants them."""


class Engine:
    """Requests in, token events out, one step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request, *samples: Request) -> None:
        """Queue a request, with further samples of the same prompt, which then is computed once.

        Raises:
            PromptTooLongError: it can never run.
            UsageError: there are more samples than can run at the same time.
        """
        self.scheduler.add(request, *samples)

    def cancel(self, request_id: RequestId) -> TokenEvent | None:
        """Forget a request; its blocks are free from now on. None if it had ended already."""
        if not self.scheduler.abort(request_id):
            return None
        return TokenEvent(request_id, None, FinishReason.ABORTED, self.clock.monotonic())

    def step(self) -> list[TokenEvent]:
        """Run one step; nothing if there is nothing to run."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        result = self.runner.execute(batch)
        now = self.clock.monotonic()
        return [
            TokenEvent(update.request_id, update.token_id, update.finish_reason, now, logprobs=update.logprobs)
            for update in self.scheduler.update(batch, result)
        ]

    def check_integrity(self) -> None:
        """Every block is accounted for; see `Scheduler.check_integrity`."""
        self.scheduler.check_integrity()

"""The step loop: scheduler decides, runner computes, events come out. Synchronous and single-threaded.

`async_engine` runs it in a thread of its own; tests run it by hand.
"""

from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine.events import TokenEvent
from stillroom.runner.torch_runner import Runner
from stillroom.scheduler.scheduler import Scheduler


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

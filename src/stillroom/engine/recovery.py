"""Recovers a lost device: at once, and after failures again with growing pauses (RAGCache 6)."""

import logging
import math
from collections.abc import Callable

from stillroom.core.clock import Clock
from stillroom.errors import DeviceLostError
from stillroom.runner.device_errors import first_line, is_device_loss

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Losses without a successful step between them after which the device counts as unusable even if it recovers."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the next attempt; doubled after each failure."""


class Recovery:
    """State of one device. Used in the engine's thread; other threads may read `problem`."""

    def __init__(self, recover: Callable[[], None], clock: Clock) -> None:
        """
        Args:
            recover: `Runner.recover`; raises if the device is still unusable.
        """
        self.problem: str | None = None
        """Why the device cannot be used now; None if it can."""
        self.num_losses = 0
        self.retry_at = math.inf
        """Time of the next attempt; infinite if the device can be used."""
        self._recover = recover
        self._clock = clock
        self._num_in_a_row = 0
        self._pause = FIRST_PAUSE

    def lose(self, error: BaseException) -> bool:
        """Record a loss and try to recover; returns whether the device can be used again."""
        self.num_losses += 1
        self._num_in_a_row += 1
        if self._num_in_a_row > MAX_LOSSES:
            self._wait(error)
            return False
        return self._try()

    def retry(self) -> None:
        """Try to recover, not before `retry_at`."""
        if self._clock.monotonic() >= self.retry_at and self._try():
            logger.warning("the device can be used again")

    def end_streak(self) -> None:
        """Reset the count of losses: a step succeeded, or the request that caused the losses was ended."""
        self._num_in_a_row = 0
        self._pause = FIRST_PAUSE

    def check(self) -> None:
        """Raise DeviceLostError if the device cannot be used now."""
        if self.problem is not None:
            raise DeviceLostError(self.problem)

    def _try(self) -> bool:
        try:
            self._recover()
        except Exception as error:
            logger.error("the device could not be recovered", exc_info=True)
            self._wait(error)
            return False
        self.problem, self.retry_at = None, math.inf
        return True

    def _wait(self, error: BaseException) -> None:
        self.retry_at = self._clock.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        reason = first_line(error) if is_device_loss(error) else type(error).__name__  # visible to unauthorised clients
        self.problem = (
            f"the model's device is lost ({reason}); it is tried again at least every {LONGEST_PAUSE:g} seconds; "
            "restart Stillroom if it does not come back"
        )

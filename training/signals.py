"""Ends a run on Ctrl-C or SIGTERM after its current step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first SIGINT or SIGTERM; a second signal has its usual effect."""
    before: dict[signal.Signals, Any] = {}

    def first(number: int, frame: Any) -> None:
        for one, handler in before.items():
            signal.signal(one, handler)
        stop()

    for one in (signal.SIGINT, signal.SIGTERM):
        try:
            before[one] = signal.signal(one, first)
        except ValueError:  # only the main thread can set handlers
            break
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

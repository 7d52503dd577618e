"""Keeps OpenMP thread pools to the engine's thread, and shortens Python's switch interval while serving.

Each thread that calls a parallel kernel gets an OpenMP pool that lives as long as the thread. When the threads of all
pools outnumber the cores, they sleep while they wait instead of spinning, and a token takes three times as long
(docs/log.md). So models are loaded in short-lived threads, and an embedder computes in single-threaded workers
(`ops/side_by_side.py`).
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_HANDOVER_SECONDS = 1e-4


def run_in_short_lived_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that ends, and its OpenMP pool with it. Raises what `work` raises."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again by `result`
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="stillroom-load", daemon=True)
    thread.start()
    found = outcome.result()  # Ctrl-C interrupts this
    thread.join()
    return found


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let Python switch threads after 0.1 ms instead of 5 ms.

    A step of the engine takes the interpreter's lock hundreds of times, and waits up to one interval each time while
    another thread computes, such as an upload (docs/log.md).
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _HANDOVER_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)

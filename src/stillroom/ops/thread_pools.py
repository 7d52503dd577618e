"""Threads for parallel kernels: only the engine's thread keeps a pool.

Whoever calls a parallel kernel, torch's or ours, gets a team of threads that stays as long as the caller's thread does.
OpenMP's library counts the threads of all teams. As soon as they are more than there are cores, they sleep whenever
they wait, instead of looking again and again, and a token takes three times as long (docs/log.md). So models are loaded
in a thread that ends, and an embedder computes in threads that keep to themselves (`retrieval/side_by_side.py`).
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_HANDOVER_SECONDS = 1e-4


def in_a_thread_that_ends(work: Callable[[], T]) -> T:
    """Do something with parallel kernels, and leave no team of threads behind. Raises what `work` raises."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # whoever waits gets it
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="stillroom-load", daemon=True)
    thread.start()
    found = outcome.result()  # Ctrl-C ends this at once
    thread.join()
    return found


@contextlib.contextmanager
def quick_handovers() -> Iterator[None]:
    """Python code that computes lets others go on after 0.1 ms instead of 5: an engine's step needs Python's lock
    hundreds of times, and waits so long each time while something else (an upload, say) runs (docs/log.md)."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _HANDOVER_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)

"""Runs independent pieces of tensor work in parallel, each on one thread.

For the small batches of an embedder and a reader this is faster than one batch at a time on all threads, which wait for
each other after every operation (docs/retrieval.md). Results are the same. The caller's thread computes nothing, so it
gets no OpenMP team that would slow down the engine's (`ops/thread_pools.py`).
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def side_by_side(
    compute: Callable[[Piece], Result], pieces: Sequence[Piece]
) -> Generator[tuple[int, Result], None, None]:
    """Yield position and result of each piece as it finishes; errors of `compute` are raised here.

    Runs as many pieces at a time as torch has threads. Closing the iterator waits for running pieces, drops the rest.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or not pieces:
        yield from ((position, compute(piece)) for position, piece in enumerate(pieces))
        return
    pool = ThreadPoolExecutor(min(num_threads, len(pieces)), "stillroom-side-by-side", initializer=_keep_to_one_thread)
    try:
        futures = {pool.submit(compute, piece): position for position, piece in enumerate(pieces)}
        for future in as_completed(futures):
            torch.set_num_threads(num_threads)
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)


def _keep_to_one_thread() -> None:
    """Let the calling thread use one torch thread.

    torch also makes this the default of later threads, so `side_by_side` sets the old number again.
    """
    torch.get_num_threads()  # without it, the thread's first use of torch would reset the number to the default
    torch.set_num_threads(1)

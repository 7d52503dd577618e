"""Independent pieces of tensor work side by side, each on one thread.

The caller's thread computes nothing, so it gets no pool of threads, which would slow down the engine's
(`ops/thread_pools.py`). For the small batches of an embedder this beats one batch at a time on all threads: those wait
for each other after every operation, and where another program holds one core, all of them wait for it
(docs/retrieval.md).
The results are the same: a batch is computed as it would be alone.
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
    """Position and result of each piece, as they are done. What `compute` raises is raised here.

    As many at a time as torch has threads. Closing the iterator waits for the pieces in progress and drops the rest.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or not pieces:
        yield from ((position, compute(piece)) for position, piece in enumerate(pieces))
        return
    pool = ThreadPoolExecutor(min(num_threads, len(pieces)), "stillroom-embed", initializer=_keep_to_one_thread)
    try:
        futures = {pool.submit(compute, piece): position for position, piece in enumerate(pieces)}
        for future in as_completed(futures):
            torch.set_num_threads(num_threads)
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)


def _keep_to_one_thread() -> None:
    """For the calling thread. torch also takes the number as the default of threads that come later, so whoever starts
    the pool says the old number again."""
    torch.get_num_threads()  # else the first use of torch in this thread would take the default over our number
    torch.set_num_threads(1)

"""A search in front of every prompt of a bench: that of FAISS for `stillroom bench reuse --search`, the same for every
arm.

Like `reuse_worker.py`, it runs under the Python of any runtime, so it imports nothing of Stillroom. The search runs in
a thread of its own beside the model; FAISS' on one core. What it finds is not used: which documents a prompt has is
drawn from the popularity curve.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

Stepped = tuple[list[tuple[int, list[int]]], list[int]]
_TOP_K = 50


Asked = tuple[int, Sequence[Sequence[int]]]
"""Number and prompt of a request."""


class Searched:
    """A `reuse_worker.Runtime` whose prompts reach the one inside when their search has ended."""

    def __init__(
        self, inner: Any, search: Callable[["queue.SimpleQueue[Asked]", Callable[[Asked], None]], None]
    ) -> None:
        """
        Args:
            search: runs in a thread of its own for ever: takes requests from a queue, and tells of each when its search
                has ended.
        """
        self.inner = inner
        self.num_searching = 0
        self.asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self.found: queue.SimpleQueue[tuple[int, Sequence[Sequence[int]], float]] = queue.SimpleQueue()
        self.asked_at: dict[int, float] = {}
        self.search_seconds: dict[int, float] = {}
        """From sending to the end of the search, of each request."""
        threading.Thread(target=search, args=(self.asked, self.end), daemon=True).start()

    def end(self, one: Asked) -> None:
        """A search has ended."""
        self.found.put((*one, time.perf_counter()))

    def reset(self) -> None:
        self.inner.reset()

    @property
    def has_work(self) -> bool:
        return self.num_searching > 0 or bool(self.inner.has_work)

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None:
        self.num_searching += 1
        self.asked_at[number] = time.perf_counter()
        self.asked.put((number, prompt))

    def step(self) -> Stepped:
        """Hand over what was found, and go on; with nothing else to do, wait for a search."""
        while self.num_searching:
            try:
                number, prompt, at = self.found.get(block=not self.inner.has_work)
            except queue.Empty:
                break
            self.num_searching -= 1
            self.search_seconds[number] = at - self.asked_at[number]
            self.inner.submit(number, prompt)
        stepped: Stepped = self.inner.step()
        return stepped

    def do_idle_work(self) -> bool:
        return bool(self.inner.do_idle_work())


class FaissSearch:
    """One question at a time, in the order in which they come."""

    def __init__(self, file: str, nprobe: int, cores: Collection[int]) -> None:
        """
        Args:
            file: a FAISS IVF index.
            cores: on any of which the search may run.
        """
        import faiss
        import numpy as np

        self.faiss: Any = faiss  # its type information knows no kinds of index
        self.cores = cores
        self.index = self.faiss.read_index(file)
        self.index.nprobe = nprobe
        queries = np.random.default_rng(0).standard_normal((256, self.index.d)).astype(np.float32)
        self.queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)

    def __call__(self, asked: "queue.SimpleQueue[Asked]", end: Callable[[Asked], None]) -> None:
        self.faiss.omp_set_num_threads(1)  # of this thread
        os.sched_setaffinity(0, self.cores)  # vLLM ties the thread that this one comes from to a core
        while True:
            one = asked.get()
            at = one[0] % len(self.queries)
            self.index.search(self.queries[at : at + 1], _TOP_K)
            end(one)

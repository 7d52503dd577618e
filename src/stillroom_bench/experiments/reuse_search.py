"""Runs a search before every prompt of a benchmark: a FAISS search for `stillroom bench reuse --search`.

It runs under the Python of any runtime, so it imports nothing of Stillroom. The search runs in its own thread
concurrently with the model; FAISS uses one core. Its results are not used, because the documents of a prompt are drawn
from the popularity curve.
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
    """A `driving.DrivenRuntime` that passes a prompt to an inner runtime when its search has ended."""

    def __init__(
        self, inner: Any, search: Callable[["queue.SimpleQueue[Asked]", Callable[[Asked], None]], None]
    ) -> None:
        """
        Args:
            search: function of a daemon thread: takes requests from a queue, and calls its second argument with each
                request whose search has ended.
        """
        self.inner = inner
        self.num_searching = 0
        self.asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self.found: queue.SimpleQueue[tuple[int, Sequence[Sequence[int]], float]] = queue.SimpleQueue()
        self.asked_at: dict[int, float] = {}
        self.search_seconds: dict[int, float] = {}
        """Request -> seconds from submission to the end of its search."""
        threading.Thread(target=search, args=(self.asked, self.end), daemon=True).start()

    def end(self, request: Asked) -> None:
        """Queue a request whose search has ended for the inner runtime."""
        self.found.put((*request, time.perf_counter()))

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
        """Submit requests whose search has ended and run a step; wait for a search if the inner runtime is idle."""
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
    """Searches for one request at a time, in order of arrival."""

    def __init__(self, file: str, nprobe: int, cores: Collection[int]) -> None:
        """
        Args:
            file: a FAISS IVF index.
            cores: cores that the search may run on.
        """
        import faiss
        import numpy as np

        self.faiss: Any = faiss  # its type stubs lack the index classes
        self.cores = cores
        self.index = self.faiss.read_index(file)
        self.index.nprobe = nprobe
        queries = np.random.default_rng(0).standard_normal((256, self.index.d)).astype(np.float32)
        self.queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)

    def __call__(self, asked: "queue.SimpleQueue[Asked]", end: Callable[[Asked], None]) -> None:
        self.faiss.omp_set_num_threads(1)  # applies to this thread
        os.sched_setaffinity(0, self.cores)  # vLLM pins the parent thread to a core
        while True:
            request = asked.get()
            at = request[0] % len(self.queries)
            self.index.search(self.queries[at : at + 1], _TOP_K)
            end(request)

"""A FAISS search in front of every prompt of `stillroom bench reuse --search`, the same for every arm.

Like `reuse_worker.py`, it runs under the Python of any runtime, so it imports nothing of Stillroom. The search runs in
a thread of its own beside the model, on one core, a question at a time in the order in which they come. What it finds
is not used: which documents a prompt has is drawn from the popularity curve.
"""

import os
import queue
import threading
from collections.abc import Collection, Sequence
from typing import Any

Stepped = tuple[list[tuple[int, list[int]]], list[int]]
_TOP_K = 50


class Searched:
    """A `reuse_worker.Runtime` whose prompts reach the one inside when their search has ended."""

    def __init__(self, inner: Any, file: str, nprobe: int, cores: Collection[int]) -> None:
        """
        Args:
            file: a FAISS IVF index.
            cores: on any of which the search may run.
        """
        import faiss
        import numpy as np

        self.inner, self.cores = inner, cores
        index_of: Any = faiss.read_index  # its type information knows no kinds of index
        self.index = index_of(file)
        self.index.nprobe = nprobe
        queries = np.random.default_rng(0).standard_normal((256, self.index.d)).astype(np.float32)
        self.queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        self.num_searching = 0
        self.asked: queue.SimpleQueue[tuple[int, Sequence[Sequence[int]]]] = queue.SimpleQueue()
        self.found: queue.SimpleQueue[tuple[int, Sequence[Sequence[int]]]] = queue.SimpleQueue()
        threading.Thread(target=self._search, args=(faiss,), daemon=True).start()

    def _search(self, faiss: Any) -> None:
        faiss.omp_set_num_threads(1)  # of this thread
        os.sched_setaffinity(0, self.cores)  # vLLM ties the thread that this one comes from to a core
        while True:
            number, prompt = self.asked.get()
            at = number % len(self.queries)
            self.index.search(self.queries[at : at + 1], _TOP_K)
            self.found.put((number, prompt))

    def reset(self) -> None:
        self.inner.reset()

    @property
    def has_work(self) -> bool:
        return self.num_searching > 0 or bool(self.inner.has_work)

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None:
        self.num_searching += 1
        self.asked.put((number, prompt))

    def step(self) -> Stepped:
        """Hand over what was found, and go on; with nothing else to do, wait for a search."""
        while self.num_searching:
            try:
                found = self.found.get(block=not self.inner.has_work)
            except queue.Empty:
                break
            self.num_searching -= 1
            self.inner.submit(*found)
        stepped: Stepped = self.inner.step()
        return stepped

    def tend(self) -> bool:
        return bool(self.inner.tend())

"""Cuts documents into windows, and computes the KV of each window while the engine is idle (docs/prepared.md).

With `reuse.mode = "prepared"` a window is a run of chunks as long as the model takes; the next one begins with the last
chunks of the one before it, so that its own first chunks have context too. With the other modes a window is one chunk:
its KV behind the system message is the beginning of every prompt whose best chunk it is.
"""

import contextlib
import itertools
import math
import queue
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stillroom.backends.assembly import KVCache
from stillroom.backends.prompt_builder import PromptBuilder
from stillroom.config.settings import PrepareConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.document import Chunk
from stillroom.core.ids import RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.kvcache.tree.provenance import MAX_SEEN

DEFAULT_WINDOW_TOKENS = 4096
"""Most tokens of a window where the settings name none."""
_SECONDS_BETWEEN_CHECKS = 0.2
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class DocumentWindow:
    """Consecutive chunks of a document, computed together."""

    chunks: tuple[Chunk, ...]
    num_known: int
    """How many of them, at its beginning, are prepared with the window before it."""

    @property
    def new(self) -> tuple[Chunk, ...]:
        """The chunks that are prepared with this window."""
        return self.chunks[self.num_known :]

    def first(self, count: int) -> "DocumentWindow":
        """Return the window with the first `count` of its new chunks."""
        return replace(self, chunks=self.chunks[: self.num_known + count])


@dataclass(frozen=True, slots=True)
class DocumentWindows:
    """Prepares the documents of one tenant with one model. Thread-safe."""

    engine: AsyncEngine
    cache: KVCache
    prompts: PromptBuilder
    config: PrepareConfig
    max_tokens: int
    """Of a prompt: what the model and the KV pool take."""
    salt: str

    def windows_of(self, chunks: Sequence[Chunk]) -> list[DocumentWindow]:
        """Return the windows of a document, given all of its chunks in order. Chunks that are too long are in none."""
        lengths = [len(segment.token_ids) for segment in self._prompt(chunks).segments[1:-1]]
        empty = self._prompt(()).num_tokens
        room = longest_window(self.config, self.max_tokens) - empty
        if not self.cache.manager.uses_prepared:
            return [
                DocumentWindow((chunk,), 0) for chunk, length in zip(chunks, lengths, strict=True) if length <= room
            ]
        return [
            DocumentWindow(tuple(chunks[first:end]), known)
            for first, known, end in cut_windows(lengths, room, self.config.overlap)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of prepared KV that no question has used yet."""
        tree = self.cache.tree
        return 0 if tree is None else tree.num_unused_bytes(tree.prepared_tier)

    @property
    def num_displaced_bytes(self) -> int:
        """Bytes of prepared KV so far that made room for used KV before a question used it."""
        return 0 if self.cache.tree is None else self.cache.tree.stats.displaced_bytes

    def fits_again(self, num_displaced: int) -> bool:
        """Whether so many displaced bytes, or a quarter of the budget of prepared KV, have room now."""
        return self.cache.tree is not None and self.cache.tree.tiers.fits_again(num_displaced)

    @property
    def may_store(self) -> bool:
        """Whether this process may write KV to disk; False if another one does."""
        tiers = self.cache.tiers
        return tiers is None or tiers.disk is None or tiers.disk.is_writer

    def compute(self, window: DocumentWindow, stop: Cancellation) -> bool:
        """Compute and keep the KV of a window as soon as the engine is idle; False if it was kept already.

        Raises:
            ChangeCancelledError: `stop` was cancelled.
            PreparedFullError: the budgets of prepared KV have no room for it.
            EngineError: the window could not be computed.
        """
        ended: queue.SimpleQueue[tuple[Exception | None, bool]] = queue.SimpleQueue()

        def on_end(error: Exception | None, *, is_computed: bool) -> None:
            ended.put((error, is_computed))

        request = Request(
            request_id=RequestId(f"prepare-{next(_numbers)}"),
            prompt=self._prompt(window.chunks),
            sampling=SamplingParams(max_tokens=1),
            cache_salt=self.salt,
            prepares=frozenset(chunk.chunk_id for chunk in window.new),
        )
        self.engine.prepare(request, on_end)
        try:
            while True:
                stop.check()
                with contextlib.suppress(queue.Empty):
                    error, is_computed = ended.get(timeout=_SECONDS_BETWEEN_CHECKS)
                    break
        except BaseException:
            self.engine.cancel_preparing(request.request_id)
            raise
        if error is not None:
            raise error
        return is_computed

    def _prompt(self, chunks: Sequence[Chunk]) -> SegmentedPrompt:
        return self.prompts.build(chunks, "", None)


def longest_window(config: PrepareConfig, max_tokens: int) -> int:
    """Return the most tokens of a preparing prompt, if a prompt has at most `max_tokens`."""
    return min(config.window_tokens or DEFAULT_WINDOW_TOKENS, max_tokens - 1)


def cut_windows(lengths: Sequence[int], room: int, overlap: float) -> list[tuple[int, int, int]]:
    """Return first chunk, number of known chunks and end of each window.

    Every chunk that fits into a window is new in exactly one, and the new chunks of a window follow those of the one
    before it.

    Args:
        lengths: tokens of each chunk.
        room: most tokens of a window.
        overlap: share of a window that the chunks before its new ones may take.
    """
    windows = []
    start = 0
    while start < len(lengths):
        if lengths[start] > room:
            start += 1
            continue
        first = _first_known(lengths, start, min(math.floor(room * overlap), room - lengths[start]))
        first = max(first, start - min(MAX_SEEN - 1, math.floor(MAX_SEEN * overlap)))
        end, total = start, sum(lengths[first:start])
        while end < len(lengths) and end - first < MAX_SEEN and total + lengths[end] <= room:
            total += lengths[end]
            end += 1
        windows.append((first, start - first, end))
        start = end
    return windows


def _first_known(lengths: Sequence[int], start: int, room: int) -> int:
    """The first of the chunks directly before `start` that fit into this many tokens together."""
    first = start
    while first > 0 and lengths[first - 1] <= room:
        first -= 1
        room -= lengths[first]
    return first

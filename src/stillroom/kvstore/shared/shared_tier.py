"""The tier that several processes share: looks records up, reads and verifies them, writes and forgets them in threads.

Invariant: `get` returns KV only if every byte of its record verified: the signature where there is a key, the header
for exactly this node and model, and the checksum computed when the KV left a device. Everything else is a miss. Errors
of the tier are counted and never raised. The engine's thread calls the methods and never waits for the tier.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from stillroom.core.clock import Clock
from stillroom.core.ids import ChunkId
from stillroom.core.kv import Link, NodeKey, NodeRecord, OwnerTag
from stillroom.kvstore.prefetch import Prefetcher, PrefetchStats, ReadPayload
from stillroom.kvstore.record import MAX_HEADER_SIZE, Buffer, Defect
from stillroom.kvstore.shared.forgetting import Forgetting
from stillroom.kvstore.shared.guarded_calls import STUCK_TIMEOUTS, GuardedCalls
from stillroom.kvstore.shared.records import SharedRecords, TierFullError
from stillroom.kvstore.shared.signing import SIGNATURE_SIZE, Signer
from stillroom.kvstore.shared.tier_probe import probe
from stillroom.kvstore.shared.tier_stats import TierStats
from stillroom.kvstore.shared.verifying import verified

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
"""That look up and read at the same time."""
_MAX_QUEUED = 256
"""Records that wait to be written."""
_PROBE_SECONDS = 30.0
"""A tier that was not used for so long is measured again, as its speed may have changed."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Limits of a shared tier."""

    timeout_seconds: float = 1.0
    """Of a connection, and of a reply without bytes."""
    fetch_bytes: int = 256 * 2**20
    """Host memory for records that are read for waiting sequences."""
    queue_bytes: int = 64 * 2**20
    """Host memory for records that wait to be written; further ones are dropped."""
    close_seconds: float = 2.0
    """Longest time that `close` writes what waits."""


@dataclass(frozen=True, slots=True)
class TierState:
    """The state of the tier now, and its statistics."""

    is_usable: bool
    num_opened: int
    """How often the circuit breaker opened."""
    num_queued: int
    """Records that wait to be written."""
    num_to_forget: int
    """Removed chunks whose records are still to be deleted."""
    link: Link | None
    stats: TierStats
    defects: dict[Defect, int]
    """Records that failed verification, by reason."""
    fetched: PrefetchStats


class TierLookup:
    """The question how many records the tier holds; answered by a thread."""

    def __init__(self, future: "Future[int]") -> None:
        self._future = future

    @property
    def num_found(self) -> int | None:
        """None until it is known; 0 if the tier failed."""
        return self._future.result() if self._future.done() else None


@dataclass(slots=True)
class _Write:
    record: NodeRecord
    num_bytes: int
    """In memory."""
    parts: Callable[[], Sequence[Buffer] | None]
    """Returns the record; None if it is gone. Called by the writing thread."""


class SharedTier:
    """`look_up`, `fetch`, `get`, `write` and `forget` are for the engine's thread, `state` for any."""

    def __init__(  # noqa: PLR0913  the parts, once
        self,
        records: SharedRecords,
        fingerprint: bytes,
        clock: Clock,
        options: TierOptions,
        *,
        signer: Signer | None = None,
        is_pinned: bool = False,
        name: str = "the shared KV tier",
    ) -> None:
        """Start the threads and the first probe.

        Args:
            fingerprint: of the model.
            is_pinned: read into page-locked memory.
            name: for messages; holds no password.
        """
        self.options = options
        self._records = records
        self.fingerprint = fingerprint
        self._clock = clock
        self._signer = signer
        self._is_pinned = is_pinned
        self._calls = GuardedCalls(clock, options.timeout_seconds, name)
        self._lock = threading.Condition()
        self._stats = TierStats()
        self._defects: Counter[Defect] = Counter()
        self._queue: deque[_Write] = deque()
        self._queued_bytes = 0
        self._forgetting = Forgetting()
        self._to_remove: deque[NodeKey] = deque()
        self._is_busy = False
        self._closing_at: float | None = None
        self._probed = threading.Event()
        self._asked: list[Future[int]] = []
        self._lookups = ThreadPoolExecutor(_NUM_THREADS, "stillroom-tier")
        self._fetcher = Prefetcher(self._read, options.fetch_bytes, _NUM_THREADS)
        self._writer = threading.Thread(target=self._run, name="stillroom-tier-writer", daemon=True)
        self._writer.start()

    # What the engine's thread calls

    @property
    def link(self) -> Link | None:
        """Costs of reading from the tier, verification included; None while it cannot be used."""
        return self._calls.meter.link if self.is_usable else None

    @property
    def is_usable(self) -> bool:
        """See `GuardedCalls`."""
        return self._calls.is_usable

    def wait_for_probe(self) -> bool:
        """Wait until the first probe has ended, at most a few timeouts; return whether the tier can be used."""
        self._probed.wait(3 * self.options.timeout_seconds)
        return self.is_usable

    def look_up(self, owner: OwnerTag, pieces: Sequence[tuple[NodeKey, ChunkId | None]]) -> TierLookup | None:
        """Start to ask for the records of consecutive pieces; None if there is nothing to ask."""
        keys = []
        for key, chunk_id in pieces:
            if self._forgetting.covers(owner, (chunk_id,)):
                break
            keys.append(key)
        if not keys or not self.is_usable:
            return None
        try:
            future = self._lookups.submit(self._num_present, keys)
        except RuntimeError:  # no thread
            return None
        self._asked = [one for one in self._asked if not one.done()] + [future]
        return TierLookup(future)

    def fetch(self, key: NodeKey, num_bytes: int) -> bool:
        """Start to read a record whose KV has this many bytes; False if memory or a thread is lacking."""
        return self._fetcher.request(key, num_bytes)

    def is_fetched(self, key: NodeKey) -> bool:
        """Whether the reading of a record has ended."""
        return self._fetcher.is_done(key)

    def cancel_fetch(self, key: NodeKey) -> None:
        """End one `fetch`."""
        self._fetcher.release(key)

    def get(self, key: NodeKey) -> ReadPayload | None:
        """Return the KV of a record that was fetched; None if it is not there, or is damaged."""
        return self._fetcher.get(key) if self._fetcher.is_done(key) else None

    def write(self, record: NodeRecord, num_bytes: int, parts: Callable[[], Sequence[Buffer] | None]) -> bool:
        """Queue a record; False, and it is dropped, if the queue is full or the tier cannot be used.

        Args:
            num_bytes: of memory that it takes while it waits.
            parts: called by the writing thread; returns the record's bytes, or None if they are gone.
        """
        with self._lock:
            is_full = len(self._queue) >= _MAX_QUEUED or self._queued_bytes + num_bytes > self.options.queue_bytes
            if is_full or not self.is_usable or self._closing_at is not None:
                self._stats = replace(self._stats, num_dropped=self._stats.num_dropped + 1)
                return False
            self._queue.append(_Write(record, num_bytes, parts))
            self._queued_bytes += num_bytes
            self._lock.notify_all()
        return True

    def forget(self, owner: OwnerTag, chunk_ids: Collection[ChunkId] | None) -> None:
        """Delete an owner's records that have seen one of these chunks, now or as soon as the tier can be used; None:
        all of the owner's. Until then none of them is looked up or written."""
        self._forgetting.add(owner, chunk_ids)
        with self._lock:
            self._lock.notify_all()

    @property
    def state(self) -> TierState:
        with self._lock:
            return TierState(
                is_usable=self.is_usable,
                num_opened=self._calls.num_opened,
                num_queued=len(self._queue),
                num_to_forget=self._forgetting.num_open,
                link=self._calls.meter.link,
                stats=replace(self._stats, num_failures=self._calls.num_failures),
                defects=dict(self._defects),
                fetched=self._fetcher.stats,
            )

    def settle(self, seconds: float = 10.0) -> bool:
        """Wait until nothing is asked, read, queued or forgotten; return whether that came in time. For tests."""
        until = time.monotonic() + seconds
        while not self._is_settled():
            if time.monotonic() >= until:
                return False
            with self._lock:
                self._lock.wait(0.002)
        return True

    def close(self) -> None:
        """Write what waits, for a limited time, and stop the threads."""
        with self._lock:
            self._closing_at = self._clock.monotonic() + self.options.close_seconds
            self._lock.notify_all()
        self._writer.join(self.options.close_seconds + STUCK_TIMEOUTS * self.options.timeout_seconds)
        self._lookups.shutdown(cancel_futures=True)
        self._fetcher.close()
        self._records.close()

    # Threads that read

    def _num_present(self, keys: Sequence[NodeKey]) -> int:
        found = self._calls.run(lambda: self._records.num_present(keys))
        found = found or 0
        self._count(num_lookups=1, num_found=found)
        return found

    def _read(self, key: NodeKey, num_bytes: int) -> ReadPayload | None:
        """Read and verify a record whose KV has this many bytes; None if that fails for any reason."""
        began = self._clock.monotonic()
        trailer_size = 0 if self._signer is None else SIGNATURE_SIZE
        most = num_bytes + MAX_HEADER_SIZE + trailer_size
        data = self._calls.run(lambda: self._records.read(key, most), num_bytes)
        if data is None:
            self._count(num_missing=1)
            return None
        found = verified(data, key, self.fingerprint, num_bytes, self._signer)
        if isinstance(found, Defect):
            self._reject(key, found)
            return None
        header, payload = found
        try:
            kv = torch.frombuffer(payload, dtype=torch.uint8)
            kv = kv.pin_memory() if self._is_pinned else kv
        except (MemoryError, RuntimeError):  # PyTorch's own allocator raises the latter
            return None
        self._calls.meter.observe(num_bytes, self._clock.monotonic() - began)
        self._count(num_read=1, read_bytes=len(data))
        return ReadPayload(kv, header.checksum)

    def _reject(self, key: NodeKey, defect: Defect) -> None:
        """Count a record that failed verification, and let the writing thread remove it."""
        logger.warning("shared KV %s failed verification (%s) and will be computed", key.hex()[:16], defect.value)
        with self._lock:
            self._defects[defect] += 1
            self._to_remove.append(key)
            self._lock.notify_all()

    # The thread that writes

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_busy = False
                self._lock.notify_all()
                self._lock.wait_for(self._has_work, 0.25)
                if self._closing_at is not None and (
                    not self._queue or not self.is_usable or self._clock.monotonic() >= self._closing_at
                ):
                    break
                self._is_busy = True
            try:
                self._work()
            except Exception:  # the thread must live: removals depend on it
                logger.exception("a part of the shared KV tier's work failed")
        self._probed.set()

    def _has_work(self) -> bool:
        has_removals = bool(self._forgetting or self._to_remove)
        return self._closing_at is not None or bool(self._queue) or (has_removals and self.is_usable)

    def _work(self) -> None:
        if self._forgetting and (self.is_usable or self._calls.may_probe):  # a tier that fails otherwise may delete
            self._forget_next()
        self._probe_if_due()
        while self._to_remove and self.is_usable:
            key = self._to_remove.popleft()
            self._calls.run(lambda key=key: self._records.remove(key))  # type: ignore[misc]
        with self._lock:
            write = self._queue.popleft() if self._queue else None
            self._queued_bytes -= 0 if write is None else write.num_bytes
        if write is not None:
            self._write(write)
            if self.is_usable:
                self._calls.run(self._records.maintain, float("inf"))

    def _probe_if_due(self) -> None:
        is_first = not self._probed.is_set()
        if not (is_first or self._calls.may_probe or self._calls.is_idle(_PROBE_SECONDS)):
            return
        measured = self._calls.run(
            lambda: probe(self._records, self._clock, self.options.timeout_seconds), float("inf")
        )
        if measured is not None:
            self._calls.probed(*measured, is_first=is_first)
        self._probed.set()

    def _write(self, write: _Write) -> None:
        record = write.record
        is_removed = self._forgetting.covers(record.owner, record.seen)
        parts = write.parts() if self.is_usable and not is_removed else None
        if parts is None:
            self._count(num_dropped=1)
            return
        if self._calls.run(lambda: self._records.num_present([record.key])):
            self._count(num_present=1)
            return
        num_bytes = sum(map(len, parts))
        if self._signer is not None:
            parts = [*parts, self._signer.sign(record.key, parts)]

        def store() -> bool:
            try:
                self._records.write(record.key, parts, record.owner, record.seen)
                return True
            except TierFullError as error:
                self._calls.warn(f"takes no more KV; reading goes on: {error}")
                return False

        is_written = self._calls.run(store, num_bytes)
        if is_written:
            self._count(num_written=1, written_bytes=num_bytes)
        elif is_written is False:
            self._count(num_refused=1)

    def _forget_next(self) -> None:
        """Delete the records of an owner's removed chunks, which stay noted until the tier has done it."""
        owner, chunk_ids, is_all = self._forgetting.first()
        removed = self._calls.run(lambda: self._records.forget(owner, None if is_all else chunk_ids), float("inf"))
        if removed is None:
            return
        self._count(num_forgotten=removed)
        self._forgetting.remove(owner, chunk_ids, is_all=is_all)

    # All threads

    def _is_settled(self) -> bool:
        with self._lock:
            is_reading = self._fetcher.is_reading or not all(one.done() for one in self._asked)
            is_removing = self.is_usable and bool(self._to_remove or self._forgetting)
            return self._probed.is_set() and not (is_reading or is_removing or self._queue or self._is_busy)

    def _count(self, **changes: int) -> None:
        with self._lock:
            counts = {name: getattr(self._stats, name) + by for name, by in changes.items()}
            self._stats = replace(self._stats, **counts)

"""Moves KV between device, host and disk as the knowledge tree decides, and counts the transfers.

Invariant: bytes go from host or disk to the device, and from the host to disk, only after all of them verified against
the checksum that was computed when they were gathered from the device. KV that is not finite is not gathered. Bytes
from disk are read into a staging buffer, never into slots. A failed move leaves nothing behind. KV of 8 or 4 bits is
narrowed once, when it leaves the device, and widened when it is placed. Design: docs/kv-records.md
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from stillroom.core.clock import Clock
from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import FULL_BITS, Link, NodeCopy, NodeKey, NodeRecord, OwnerTag, Tier
from stillroom.kvstore.device import DeviceStore
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import path_of, stored_record
from stillroom.kvstore.host import HostStore
from stillroom.kvstore.prefetch import Prefetcher, PrefetchStats, read_record
from stillroom.kvstore.record import Buffer, Defect, checksum_of, encode
from stillroom.kvstore.shared.shared_tier import SharedTier, TierLookup
from stillroom.ops.narrow import NarrowKV, narrow, narrow_views
from stillroom.ops.rope import of_distinct_layers, rerotation, rotation_from_zero

logger = logging.getLogger(__name__)


class TransferFlow(NamedTuple):
    """Transfers from one tier to another so far."""

    num_copies: int = 0
    num_failed: int = 0
    """Copies that could not be made or failed verification."""
    num_bytes: int = 0
    """Bytes of the copies made."""
    seconds: float = 0.0
    """Duration of all transfers, failed ones included."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """All transfers so far, and disk errors."""

    flows: Mapping[tuple[Tier, Tier], TransferFlow]
    """By source and target: device to host is an offload, to the device a load, to disk a store. A placement counts as
    a load, or as device to device."""
    verify_failures: Mapping[tuple[Tier, Defect], int]
    """Copies that failed verification, by tier and reason; on the device, KV that was not finite."""
    num_write_failures: int
    """Records that could not be written."""
    prefetch: PrefetchStats = PrefetchStats()


DIRECTIONS = (
    (Tier.DEVICE, Tier.HOST),
    (Tier.HOST, Tier.DEVICE),
    (Tier.DISK, Tier.DEVICE),
    (Tier.NETWORK, Tier.DEVICE),
    (Tier.HOST, Tier.DISK),
    (Tier.DEVICE, Tier.DISK),
    (Tier.DEVICE, Tier.DEVICE),
)


class TieredStore:
    """The `KVMover` over three stores, and the `SharedKV` over a shared tier.

    Used by one thread; a move is complete when its method returns.
    """

    def __init__(  # noqa: PLR0913  the stores, once
        self,
        device: DeviceStore,
        host: HostStore,
        disk: DiskStore | None,
        clock: Clock,
        inv_freq_LP: torch.Tensor | None = None,
        prefetch_bytes: int = 0,
        shared: SharedTier | None = None,
    ) -> None:
        """
        Args:
            disk: None to keep nothing on disk; every `store` then fails.
            inv_freq_LP: of the decoder; None if nothing is ever placed or narrowed.
            prefetch_bytes: host memory for prefetched records; 0: no prefetching.
            shared: the tier shared with other processes; None: there is none.
        """
        self.device = device
        self.host = host
        self.disk = disk
        self.shared = shared
        self._clock = clock
        self._inv_freq_LP = None if inv_freq_LP is None else of_distinct_layers(inv_freq_LP)
        self._flows = dict.fromkeys(DIRECTIONS, TransferFlow())
        self._defects: Counter[tuple[Tier, Defect]] = Counter()  # of device and host
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._prefetcher: Prefetcher | None = None
        if disk is not None and prefetch_bytes:
            read = partial(read_record, disk.folder, disk.fingerprint, host.is_pinned)
            self._prefetcher = Prefetcher(read, prefetch_bytes)

    @property
    def stats(self) -> TransferStats:
        """A snapshot."""
        on_disk = {(Tier.DISK, why): count for why, count in self.disk.verify_failures.items()} if self.disk else {}
        shared = {(Tier.NETWORK, why): count for why, count in self.shared.state.defects.items()} if self.shared else {}
        return TransferStats(
            flows=MappingProxyType(dict(self._flows)),
            verify_failures=dict(self._defects) | on_disk | shared,
            num_write_failures=self.disk.num_write_failures if self.disk else 0,
            prefetch=self._prefetcher.stats if self._prefetcher else PrefetchStats(),
        )

    def prefetch(self, key: NodeKey, num_tokens: int, bits: int = FULL_BITS) -> bool:
        if self._prefetcher is None:
            return False
        return self._prefetcher.request(key, self.device.shape.num_bytes(num_tokens, bits))

    def cancel_prefetch(self, key: NodeKey) -> None:
        if self._prefetcher is not None:
            self._prefetcher.release(key)

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        if self.device.is_finite(block_ids, num_tokens) or self.device.is_lost:
            return True  # the next step notices that the device is lost
        self._reject(Tier.DEVICE, Defect.NON_FINITE)
        return False

    def offload(self, copy: NodeCopy) -> bool:
        start = self._clock.monotonic()
        self.host.drop(copy.key)
        num_bytes, is_finite = self._num_bytes(copy), self.is_finite(copy.block_ids, copy.num_tokens)
        payload = self.host.allocate(copy.key, num_bytes) if is_finite else None
        if payload is not None:
            try:
                is_filled = self._fill(payload, copy)
                self.host.seal(copy.key)
            except Exception:
                self.host.drop(copy.key)
                raise
            if self.device.is_lost or not is_filled:
                self.host.drop(copy.key)
                payload = None
        return self._count(Tier.DEVICE, Tier.HOST, None if payload is None else num_bytes, start)

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        start = self._clock.monotonic()
        payload = self._read(NodeCopy(key, source, (), 0, num_tokens))
        if payload is not None:
            self.device.scatter(block_ids, self._as_node(payload, num_tokens))
        return self._count(source, Tier.DEVICE, None if payload is None else payload.nbytes, start)

    def place(
        self,
        copy: NodeCopy,
        block_ids: Sequence[BlockId],
        first_position: int,
    ) -> bool:
        """Copy a node with its keys rotated to another position (Cache-Craft 3.4.3); the source does not change."""
        start = self._clock.monotonic()
        assert self._inv_freq_LP is not None, "placement needs inv_freq_LP"
        payload = None if copy.tier is Tier.DEVICE else self._read(copy)
        is_there = payload is not None or copy.tier is Tier.DEVICE
        if payload is not None and copy.bits != FULL_BITS:
            rotation = rotation_from_zero(copy.num_tokens, self._inv_freq_LP, first_position)
            self.device.place_narrow(self._as_narrow(payload, copy), block_ids, rotation)
        elif is_there:
            source = self.device if payload is None else self._as_node(payload, copy.num_tokens)
            by = rerotation(copy.num_tokens, self._inv_freq_LP, copy.first_position, first_position)
            self.device.place(source, copy.block_ids, block_ids, by)
        return self._count(copy.tier, Tier.DEVICE, self._num_bytes(copy) if is_there else None, start)

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        start = self._clock.monotonic()
        num_bytes = None
        if self.disk is not None and self.disk.is_writer:
            copy = NodeCopy(record.key, source, block_ids, record.first_position, record.num_tokens, record.bits)
            sealed = self._sealed(copy) if source is Tier.HOST else self._gathered(copy)
            self._cancel(record.key)
            if sealed is not None and self.disk.write(record, *sealed):
                num_bytes = len(sealed[0])
            else:
                self.disk.remove(record.key)
        return self._count(source, Tier.DISK, num_bytes, start)

    def mark_used(self, key: NodeKey) -> None:
        if self.disk is not None:
            self.disk.mark_used(key)

    def has(self, key: NodeKey, tier: Tier) -> bool:
        if tier is Tier.NETWORK:  # a record that was not read in time, or is damaged, is not waited for
            return False
        return key in self.host if tier is Tier.HOST else self.disk is not None and self.disk.has(key)

    def drop(self, key: NodeKey, tier: Tier) -> None:
        assert tier is not Tier.DEVICE, "slots belong to the block pool"
        if tier is Tier.HOST:
            self.host.drop(key)
        elif self.disk is not None:
            self._cancel(key)
            self.disk.remove(key)

    # The tier shared with other processes

    @property
    def link(self) -> Link | None:
        return None if self.shared is None else self.shared.link

    @property
    def timeout_seconds(self) -> float:
        assert self.shared is not None
        return self.shared.options.timeout_seconds

    def look_up(self, owner: OwnerTag, pieces: Sequence[tuple[NodeKey, ChunkId | None]]) -> TierLookup | None:
        return None if self.shared is None else self.shared.look_up(owner, pieces)

    def fetch(self, key: NodeKey, num_tokens: int) -> bool:
        return self.shared is not None and self.shared.fetch(key, self.device.shape.num_bytes(num_tokens))

    def is_fetched(self, key: NodeKey) -> bool:
        return self.shared is not None and self.shared.is_fetched(key)

    def cancel_fetch(self, key: NodeKey) -> None:
        if self.shared is not None:
            self.shared.cancel_fetch(key)

    def share(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        """As `SharedKV`. A record on disk is read by the writing thread; KV on the device is copied here."""
        if self.shared is None:
            return False
        if source is Tier.DISK and self.disk is not None:
            path = path_of(self.disk.folder, record.key)

            def stored() -> Sequence[Buffer] | None:
                data = stored_record(path)
                return None if data is None else [data]

            return self.shared.write(record, 0, stored)
        copy = NodeCopy(record.key, source, block_ids, record.first_position, record.num_tokens, record.bits)
        sealed = self._sealed(copy) if source is Tier.HOST else self._gathered(copy)
        if sealed is None:
            return False
        payload, checksum = sealed
        kept: Buffer = bytes(payload) if source is Tier.DEVICE else payload  # the staging buffer is used again
        parts = (encode(record, self.shared.fingerprint, len(payload), checksum), kept)
        return self.shared.write(record, len(payload), lambda: parts)

    def forget(self, owner: OwnerTag, chunk_ids: Collection[ChunkId] | None) -> None:
        if self.shared is not None:
            self.shared.forget(owner, chunk_ids)

    def close(self) -> None:
        """Drop the host's copies, stop the threads, and let another process write to the disk's folder."""
        if self.shared is not None:
            self.shared.close()
        self.host.clear()
        self.device.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self.disk is not None:
            self.disk.close()

    def _num_bytes(self, copy: NodeCopy) -> int:
        """Bytes of a node's KV where the copy is, or on host and disk for a copy that is to go there."""
        return self.device.shape.num_bytes(copy.num_tokens, copy.bits)

    def _read(self, copy: NodeCopy) -> torch.Tensor | None:
        """Return the verified bytes of a copy below the device, uint8, which must not be written to; None if it fails.

        Bytes from disk are valid until the staging buffer is used again.
        """
        if copy.tier is Tier.NETWORK:
            return self._from_shared(copy)
        return self._from_host(copy) if copy.tier is Tier.HOST else self._from_disk(copy)

    def _from_shared(self, copy: NodeCopy) -> torch.Tensor | None:
        """As `_read`, of what was fetched; never waits for the tier."""
        read = None if self.shared is None else self.shared.get(copy.key)
        if read is None or read.is_intact():
            return None if read is None else read.payload
        self._reject(Tier.HOST, Defect.CHECKSUM, copy.key)
        return None

    def _from_host(self, copy: NodeCopy) -> torch.Tensor | None:
        """As `_read`. A copy that fails verification is dropped and counted."""
        found = self.host.get(copy.key)
        if found is None:
            return None
        assert found.payload.nbytes == self._num_bytes(copy), (found.payload.nbytes, copy)
        if found.is_intact():
            return found.payload
        self.host.drop(copy.key)
        self._reject(Tier.HOST, Defect.CHECKSUM, copy.key)
        return None

    def _from_disk(self, copy: NodeCopy) -> torch.Tensor | None:
        read = self._prefetcher.get(copy.key) if self._prefetcher is not None else None
        if read is not None and read.is_intact():
            return read.payload
        if read is not None:
            self._reject(Tier.HOST, Defect.CHECKSUM, copy.key)
            self._cancel(copy.key)
        payload = self._stage(self._num_bytes(copy)) if self.disk is not None else None
        if self.disk is None or payload is None or not self.disk.read(copy.key, payload.numpy().data):
            self._cancel(copy.key)
            return None
        if self.device.preloads_layers:  # another thread reads it later
            self._staging = torch.empty(0, dtype=torch.uint8)
        return payload

    def _sealed(self, copy: NodeCopy) -> tuple[memoryview, bytes] | None:
        """Return the bytes of the host's copy, verified, and the checksum computed when it left the device."""
        payload, found = self._from_host(copy), self.host.get(copy.key)
        return None if payload is None or found is None else (payload.numpy().data, found.checksum)

    def _gathered(self, copy: NodeCopy) -> tuple[memoryview, bytes] | None:
        """Gather KV on the device into a buffer; return its bytes and checksum."""
        if not self.is_finite(copy.block_ids, copy.num_tokens):
            return None
        num_bytes = self._num_bytes(copy)
        payload = self._stage(num_bytes) if copy.bits == FULL_BITS else self._buffer(num_bytes)
        if payload is None or not self._fill(payload, copy) or self.device.is_lost:
            return None
        return payload.numpy().data, checksum_of(payload.numpy().data)

    def _fill(self, payload: torch.Tensor, copy: NodeCopy) -> bool:
        """Fill a buffer with KV on the device, narrowed to `copy.bits`; False if there is no memory for that."""
        if copy.bits == FULL_BITS:
            self.device.gather(copy.block_ids, copy.num_tokens, out=self._as_node(payload, copy.num_tokens))
            return True
        assert self._inv_freq_LP is not None, "narrowing needs inv_freq_LP"
        wide = self._stage(self.device.shape.num_bytes(copy.num_tokens))
        if wide is None:
            return False
        kv_2LTGD = self._as_node(wide, copy.num_tokens)
        self.device.gather(copy.block_ids, copy.num_tokens, out=kv_2LTGD)
        rotation = rotation_from_zero(copy.num_tokens, self._inv_freq_LP.cpu(), copy.first_position)
        narrow(kv_2LTGD, rotation, self._as_narrow(payload, copy))
        return True

    def _reject(self, tier: Tier, defect: Defect, key: NodeKey | None = None) -> None:
        self._defects[tier, defect] += 1
        name = "" if key is None else f" {key.hex()[:16]}"
        logger.warning(
            "KV%s on the %s failed verification (%s) and will be computed again", name, tier.label, defect.value
        )

    def _stage(self, num_bytes: int) -> torch.Tensor | None:
        """Return this many bytes of the staging buffer, uint8; None if there is no memory."""
        if len(self._staging) < num_bytes:
            buffer = self._buffer(num_bytes)
            if buffer is None:
                return None
            self._staging = buffer
        return self._staging[:num_bytes]

    def _buffer(self, num_bytes: int) -> torch.Tensor | None:
        """Allocate host memory, uint8; None if there is none."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.host.is_pinned)
        except (MemoryError, RuntimeError):
            return None

    def _as_node(self, payload: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """View flat bytes as [2, L, T, G, D]."""
        return payload.view(self.device.shape.dtype).view(self.device.shape.of_node(num_tokens))

    def _as_narrow(self, payload: torch.Tensor, copy: NodeCopy) -> NarrowKV:
        """View flat bytes as narrow KV."""
        return narrow_views(payload, self.device.shape.of_node(copy.num_tokens)[1:], copy.bits)

    def _cancel(self, key: NodeKey) -> None:
        if self._prefetcher is not None:
            self._prefetcher.cancel(key)

    def _count(self, source: Tier, target: Tier, num_bytes: int | None, start: float) -> bool:
        """Count a transfer of this many bytes that began at `start`, failed if None; return whether it succeeded."""
        flow = self._flows[source, target]
        seconds = flow.seconds + self._clock.monotonic() - start
        if num_bytes is None:
            flow = flow._replace(num_failed=flow.num_failed + 1, seconds=seconds)
        else:
            num_copies, num_bytes = flow.num_copies + 1, flow.num_bytes + num_bytes
            flow = flow._replace(num_copies=num_copies, num_bytes=num_bytes, seconds=seconds)
        self._flows[source, target] = flow
        return num_bytes is not None

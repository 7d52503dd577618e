"""Moves KV between device, host and disk as the knowledge tree decides, and counts the transfers.

Invariant: bytes go from host or disk to the device, and from the host to disk, only after all of them verified against
the checksum that was computed when they were gathered from the device. KV that is not finite is not gathered. Bytes
from disk are read into a staging buffer, never into slots. A failed move leaves nothing behind. Design:
docs/kv-records.md
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from stillroom.core.clock import Clock
from stillroom.core.ids import BlockId
from stillroom.core.kv import NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.kvstore.device import DeviceStore
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.host import HostStore, payload_of
from stillroom.kvstore.prefetch import Prefetcher, PrefetchStats, read_record
from stillroom.kvstore.record import Defect, checksum_of
from stillroom.ops.rope import rerotation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferFlow:
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
    (Tier.HOST, Tier.DISK),
    (Tier.DEVICE, Tier.DISK),
    (Tier.DEVICE, Tier.DEVICE),
)


class TieredStore:
    """The `KVMover` over three stores. Used by one thread; a move is complete when its method returns."""

    def __init__(
        self,
        device: DeviceStore,
        host: HostStore,
        disk: DiskStore | None,
        clock: Clock,
        inv_freq_LP: torch.Tensor | None = None,
        prefetch_bytes: int = 0,
    ) -> None:
        """
        Args:
            disk: None to keep nothing on disk; every `store` then fails.
            inv_freq_LP: of the decoder; None if nothing is ever placed.
            prefetch_bytes: host memory for prefetched records; 0: no prefetching.
        """
        self.device = device
        self.host = host
        self.disk = disk
        self._clock = clock
        self._inv_freq_LP = inv_freq_LP
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
        on_disk = self.disk.verify_failures if self.disk else {}
        return TransferStats(
            flows=MappingProxyType(dict(self._flows)),
            verify_failures=dict(self._defects) | {(Tier.DISK, why): count for why, count in on_disk.items()},
            num_write_failures=self.disk.num_write_failures if self.disk else 0,
            prefetch=self._prefetcher.stats if self._prefetcher else PrefetchStats(),
        )

    def prefetch(self, key: NodeKey, num_tokens: int) -> bool:
        if self._prefetcher is None:
            return False
        return self._prefetcher.request(key, self.device.shape.bytes_per_token * num_tokens)

    def cancel_prefetch(self, key: NodeKey) -> None:
        if self._prefetcher is not None:
            self._prefetcher.release(key)

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        if self.device.is_finite(block_ids, num_tokens) or self.device.is_lost:
            return True  # the next step notices that the device is lost
        self._reject(Tier.DEVICE, Defect.NON_FINITE)
        return False

    def offload(self, key: NodeKey, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        start = self._clock.monotonic()
        self.host.drop(key)
        copy = self.host.allocate(key, num_tokens) if self.is_finite(block_ids, num_tokens) else None
        if copy is not None:
            try:
                self.device.gather(block_ids, num_tokens, out=copy)
                self.host.seal(key)
            except Exception:
                self.host.drop(key)
                raise
            if self.device.is_lost:
                self.host.drop(key)
                copy = None
        return self._count(Tier.DEVICE, Tier.HOST, None if copy is None else copy.nbytes, start)

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        start = self._clock.monotonic()
        kv_2LTGD = self._from_host(key, num_tokens) if source is Tier.HOST else self._from_disk(key, num_tokens)
        if kv_2LTGD is not None:
            self.device.scatter(block_ids, kv_2LTGD)
        return self._count(source, Tier.DEVICE, None if kv_2LTGD is None else kv_2LTGD.nbytes, start)

    def place(
        self,
        copy: NodeCopy,
        block_ids: Sequence[BlockId],
        first_position: int,
    ) -> bool:
        """Copy a node with its keys rotated to another position (Cache-Craft 3.4.3); the source does not change."""
        start = self._clock.monotonic()
        assert self._inv_freq_LP is not None, "placement needs inv_freq_LP"
        source: DeviceStore | torch.Tensor | None = self.device
        if copy.tier is Tier.HOST:
            source = self._from_host(copy.key, copy.num_tokens)
        elif copy.tier is Tier.DISK:
            source = self._from_disk(copy.key, copy.num_tokens)
        if source is not None:
            by = rerotation(copy.num_tokens, self._inv_freq_LP, copy.first_position, first_position)
            self.device.place(source, copy.block_ids, block_ids, by)
        num_bytes = self.device.shape.bytes_per_token * copy.num_tokens
        return self._count(copy.tier, Tier.DEVICE, None if source is None else num_bytes, start)

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        start = self._clock.monotonic()
        num_bytes = None
        if self.disk is not None and self.disk.is_writer:
            from_host = source is Tier.HOST
            sealed = self._sealed(record) if from_host else self._gathered(block_ids, record.num_tokens)
            self._cancel(record.key)
            if sealed is not None and self.disk.write(record, *sealed):
                num_bytes = len(sealed[0])
            else:
                self.disk.remove(record.key)
        return self._count(source, Tier.DISK, num_bytes, start)

    def has(self, key: NodeKey, tier: Tier) -> bool:
        return key in self.host if tier is Tier.HOST else self.disk is not None and self.disk.has(key)

    def drop(self, key: NodeKey, tier: Tier) -> None:
        assert tier is not Tier.DEVICE, "slots belong to the block pool"
        if tier is Tier.HOST:
            self.host.drop(key)
        elif self.disk is not None:
            self._cancel(key)
            self.disk.remove(key)

    def close(self) -> None:
        """Drop the host's copies, stop the threads, and let another process write to the disk's folder."""
        self.host.clear()
        self.device.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self.disk is not None:
            self.disk.close()

    def _from_host(self, key: NodeKey, num_tokens: int) -> torch.Tensor | None:
        """Return verified KV, which must not be written to. A copy that fails verification is dropped and counted."""
        copy = self.host.get(key)
        if copy is None:
            return None
        assert copy.kv_2LTGD.shape[2] == num_tokens, (copy.kv_2LTGD.shape, num_tokens)
        if copy.is_intact():
            return copy.kv_2LTGD
        self.host.drop(key)
        self._reject(Tier.HOST, Defect.CHECKSUM, key)
        return None

    def _sealed(self, record: NodeRecord) -> tuple[memoryview, bytes] | None:
        """Return the bytes of the host's copy, verified, and the checksum computed when it left the device."""
        kv_2LTGD, copy = self._from_host(record.key, record.num_tokens), self.host.get(record.key)
        return None if kv_2LTGD is None or copy is None else (payload_of(kv_2LTGD), copy.checksum)

    def _gathered(self, block_ids: Sequence[BlockId], num_tokens: int) -> tuple[memoryview, bytes] | None:
        """Gather KV of these device blocks in the staging buffer; return its bytes and checksum."""
        kv_2LTGD = self._stage(num_tokens) if self.is_finite(block_ids, num_tokens) else None
        if kv_2LTGD is None:
            return None
        payload = payload_of(self.device.gather(block_ids, num_tokens, out=kv_2LTGD))
        return None if self.device.is_lost else (payload, checksum_of(payload))

    def _reject(self, tier: Tier, defect: Defect, key: NodeKey | None = None) -> None:
        self._defects[tier, defect] += 1
        name = "" if key is None else f" {key.hex()[:16]}"
        logger.warning(
            "KV%s on the %s failed verification (%s) and will be computed again", name, tier.label, defect.value
        )

    def _from_disk(self, key: NodeKey, num_tokens: int) -> torch.Tensor | None:
        """Return verified KV, valid until the staging buffer is used again; it must not be written to."""
        read = self._prefetcher.get(key) if self._prefetcher is not None else None
        if read is not None and read.is_intact():
            return self._as_node(read.payload, num_tokens)
        if read is not None:
            self._reject(Tier.HOST, Defect.CHECKSUM, key)
            self._cancel(key)
        kv_2LTGD = self._stage(num_tokens) if self.disk is not None else None
        if self.disk is None or kv_2LTGD is None or not self.disk.read(key, payload_of(kv_2LTGD)):
            self._cancel(key)
            return None
        if self.device.preloads_layers:  # another thread reads it later
            self._staging = torch.empty(0, dtype=torch.uint8)
        return kv_2LTGD

    def _stage(self, num_tokens: int) -> torch.Tensor | None:
        """Return the staging buffer shaped for one node, [2, L, T, G, D]; None if there is no memory."""
        shape = self.device.shape
        num_bytes = shape.bytes_per_token * num_tokens
        if len(self._staging) < num_bytes:
            try:
                self._staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.host.is_pinned)
            except (MemoryError, RuntimeError):
                return None
        return self._as_node(self._staging[:num_bytes], num_tokens)

    def _as_node(self, payload: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """View flat bytes as [2, L, T, G, D]."""
        return payload.view(self.device.shape.dtype).view(self.device.shape.of_node(num_tokens))

    def _cancel(self, key: NodeKey) -> None:
        if self._prefetcher is not None:
            self._prefetcher.cancel(key)

    def _count(self, source: Tier, target: Tier, num_bytes: int | None, start: float) -> bool:
        """Count a transfer of this many bytes that began at `start`, failed if None; return whether it succeeded."""
        flow = self._flows[source, target]
        seconds = flow.seconds + self._clock.monotonic() - start
        if num_bytes is None:
            flow = replace(flow, num_failed=flow.num_failed + 1, seconds=seconds)
        else:
            num_copies, num_bytes = flow.num_copies + 1, flow.num_bytes + num_bytes
            flow = replace(flow, num_copies=num_copies, num_bytes=num_bytes, seconds=seconds)
        self._flows[source, target] = flow
        return num_bytes is not None

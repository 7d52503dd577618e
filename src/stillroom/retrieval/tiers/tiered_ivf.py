"""IVF-PQ lists divided among tiers: hot lists in RAM, the others in a mapped file (VectorLiteRAG 4.1, 4.2).

So an index may be larger than its RAM. With devices, the hottest lists are on them (`device_shard`). The file holds
every list and RAM copies of some, so evicting a list from RAM only drops the copy. The set in RAM is one value that
`exchange` replaces as a whole: a running search keeps the value that it began with, so an exchange blocks no search
and changes no result.

A batch is searched as in the paper. One coarse search gives the lists of each query, and a mapping table their shards
(`partition`). Shards scan in parallel, one thread each, queries with the least to scan first. A query is released when
its last list is scanned, regardless of the rest of its batch. For a single query the system reads its lists on disk
ahead while those in RAM are scanned, without threads. Results equal those of the undivided index: the same codes of the
same lists are scored, and partial results are merged as in the stages of `ivf_pq`.

Single queries are scanned by faiss; batches by the kernels of `batch_scan` where the processor has the instructions.
They scan a list once for all queries of the batch that probe it, and give the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import first_arrays
from stillroom.retrieval.tiers.faiss_lists import Vectors, index_over
from stillroom.retrieval.tiers.host_scan import FaissScan, HostScan, Scored, scan
from stillroom.retrieval.tiers.list_file import ListFile, ListPlaces
from stillroom.retrieval.tiers.partition import Lists, Nearness, Partition
from stillroom.retrieval.vector_index import one_thread

if TYPE_CHECKING:  # it imports numba, which a single search does not need
    from stillroom.retrieval.tiers.batch_scan import CodeScanner

RAM, DISK, FIRST_DEVICE = 0, 1, 2
"""Shard numbers; further devices follow."""

_AHEAD = 2
"""Queries of a batch whose lists on disk are read ahead."""


class BatchShard(Protocol):
    """Lists that are scanned for a whole batch at once; see `device_shard`."""

    def scan_batch(
        self, queries: Vectors, num: int, probed: Lists, nearness: Nearness, allowed: Any = None
    ) -> list[Scored]:
        """Run `scan` for queries [q, d] in lists [q, p]."""
        ...


Placed = Sequence[tuple[BatchShard, Lists]]
"""Shards on devices with their lists, disjoint."""


class _OnDevices:
    """Placement of lists on devices. Immutable."""

    def __init__(self, num_lists: int, placed: Placed) -> None:
        self.shards = [shard for shard, _ in placed]
        self.device_of = np.full(num_lists, -1)
        """Device of each list, [nlist]; -1 is none."""
        for number, (_, held) in enumerate(placed):
            self.device_of[held] = number


@dataclass(frozen=True)
class _InRam:
    """The lists in RAM, and an index over them."""

    held: Mapping[int, Any]
    """ArrayInvertedLists with one list each, by list number."""
    is_held: NDArray[np.bool_]
    """[nlist]"""
    index: Any
    places: ListPlaces
    num_bytes: int


@dataclass
class _Pending:
    """A query of a batch during the scan."""

    num_shards: int
    of_devices: list[Scored] = field(default_factory=list)
    of_host: list[Any] = field(default_factory=list)
    """For `HostScan.merged`."""


class TieredLists:
    """The lists of a file, some of them also in RAM or on devices. Thread-safe."""

    def __init__(self, file: ListFile, hot: Lists | None = None, devices: Placed = ()) -> None:
        """
        Args:
            hot: lists to copy into RAM at the start.
            devices: see `place`.
        """
        self.file = file
        self._on_devices = _OnDevices(len(file.sizes), devices)
        self._empty = faiss.ArrayInvertedLists(1, file.code_size)
        self._exchanging = Lock()
        self._disk = index_over(file.shell, file.mapped)
        self._ram = self._in_ram({})
        self._pool: ThreadPoolExecutor | None = None
        if hot is not None:
            self.exchange((), hot)

    def close(self) -> None:
        """Wait for running scans. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    @property
    def quantizer(self) -> Any:
        """An index of the centres."""
        return self.file.shell.quantizer

    @property
    def is_in_ram(self) -> NDArray[np.bool_]:
        """Whether each list is in RAM, [nlist]; read-only."""
        return self._ram.is_held

    @property
    def ram_bytes(self) -> int:
        """Bytes of codes and ids in RAM."""
        return self._ram.num_bytes

    def list_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of codes and ids of each list, [nlist]."""
        found: NDArray[np.int64] = self.file.sizes * self.file.entry_bytes
        return found

    def exchange(self, out: Any, into: Any) -> None:
        """Drop lists from RAM and copy others there, atomically for searches, which never wait for it.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged in the file; nothing was changed.
        """
        with self._exchanging:
            held = dict(self._ram.held)
            for number in out:
                held.pop(int(number), None)
            for number in into:
                held[int(number)] = self._copied(int(number))
            self._ram = self._in_ram(held)

    def place(self, devices: Placed) -> None:
        """Replace the placement on devices. Running searches keep the old one. Scores equal faiss' up to rounding."""
        self._on_devices = _OnDevices(len(self.file.sizes), devices)

    @property
    def device_of(self) -> NDArray[np.int64]:
        """Device of each list, [nlist], -1 for none; read-only."""
        return self._on_devices.device_of

    def drop_pages(self) -> None:
        """Drop the file's pages from memory, for measuring. Precondition: no search is running."""
        self._disk = None  # mapped pages are not dropped
        self.file.drop_pages()
        self._disk = index_over(self.file.shell, self.file.mapped)

    # Searching

    def scan(self, query: Vectors, num: int, probed: Lists, nearness: Nearness, allowed: Any = None) -> Scored:
        """Run the function `scan` over all tiers; `read_ahead` comes before it.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged in the file.
        """
        ram, devices = self._ram, self._on_devices
        device = devices.device_of[probed]
        asked: list[Future[list[Scored]]] = []
        for number, shard in enumerate(devices.shards):
            mine = device == number
            if mine.any():
                own = probed[None, mine], nearness[None, mine]
                asked.append(self._threads().submit(shard.scan_batch, query[None], num, *own, allowed))
        is_held, is_cold = ram.is_held[probed] & (device < 0), ~ram.is_held[probed] & (device < 0)
        cold = probed[is_cold]
        parts = [scan(ram.index, query, num, probed[is_held], nearness[is_held], allowed)]
        self.file.check_lists(cold)
        parts.append(scan(self._disk, query, num, cold, nearness[is_cold], allowed))
        return _joined([*parts, *(one.result()[0] for one in asked)])

    def read_ahead(self, probed: Lists) -> None:
        """Let the system read those of the lists [p] that are only on disk."""
        self.file.will_need(probed[~self._ram.is_held[probed] & (self._on_devices.device_of[probed] < 0)])

    def search(self, query: Vectors, num: int, nprobe: int) -> Scored:
        """Return exactly the best `num` for a query [d]."""
        nearness, probed = self.probe(query.reshape(1, -1), nprobe)
        self.read_ahead(probed[0])
        return first_arrays(*self.scan(query, num, probed[0], nearness[0]), num)

    def probe(self, queries: Vectors, nprobe: int) -> tuple[Nearness, Lists]:
        """Return nearness [q, p] and numbers [q, p] of the lists nearest to queries [q, d]."""
        queries, nprobe = np.ascontiguousarray(queries), min(nprobe, len(self.file.sizes))
        if len(queries) > 1 and self._scanner is not None:
            return self._scanner.probe(queries, nprobe)
        with one_thread():
            nearness, probed = self.quantizer.search(queries, nprobe)
        return nearness, probed

    def search_batch(self, queries: Vectors, num: int, nprobe: int, on_found: Callable[[int, Scored], None]) -> None:
        """Find exactly the best `num` for each of queries [q, d].

        Args:
            on_found: called once per query with its number and results, as soon as its last list is scanned. It runs in
                a shard's thread and must return quickly.
        """
        nearness, probed = self.probe(queries, nprobe)

        def release(number: int, scored: Scored) -> None:
            on_found(number, first_arrays(*scored, num))

        running = self.start_batch(queries, num, probed, nearness, release)
        wait(running)
        for one in running:
            one.result()

    def start_batch(
        self,
        queries: Vectors,
        num: int,
        probed: Lists,
        nearness: Nearness,
        on_found: Callable[[int, Scored], None],
        allowed: Any = None,
    ) -> list[Future[None]]:
        """Start scanning for queries [q, d] in lists [q, p] with `nearness` [q, p].

        Args:
            on_found: as of `search_batch`, but with results that score as the last of the best `num` too.
            allowed: as of the function `scan`.

        Returns:
            Futures of the shards, which fail if a list is damaged; empty for a single query, which is scanned here.
        """
        if len(queries) == 1:  # starting the shards takes longer than they save
            self.read_ahead(probed[0])
            on_found(0, self.scan(queries[0], num, probed[0], nearness[0], allowed))
            return []
        return self._wake_shards(queries, num, probed, nearness, on_found, allowed)

    def _wake_shards(
        self,
        queries: Vectors,
        num: int,
        probed: Lists,
        nearness: Nearness,
        on_found: Callable[[int, Scored], None],
        allowed: Any,
    ) -> list[Future[None]]:
        devices = self._on_devices
        hosts, partition = self._host_scan(devices, queries, num, probed, nearness, allowed)
        num_in = partition.num_in(probed)
        pending = [_Pending(int((row > 0).sum())) for row in num_in]
        lock = Lock()

        def finish(number: int, part: Any, *, is_host: bool) -> None:
            one = pending[number]
            with lock:
                (one.of_host if is_host else one.of_devices).append(part)
                if len(one.of_host) + len(one.of_devices) < one.num_shards:
                    return
            of_host = [hosts.merged(number, one.of_host)] if one.of_host else []
            on_found(number, _joined([*of_host, *one.of_devices]))

        def run_device(shard: int) -> None:
            """Scan for the whole batch at once."""
            mine, near = partition.probes(shard, probed, nearness)
            asked = np.flatnonzero(num_in[:, shard])
            if not len(asked):
                return
            device = devices.shards[shard - FIRST_DEVICE]
            parts = device.scan_batch(queries[asked], num, mine[asked], near[asked], allowed)
            for number, part in zip(asked.tolist(), parts, strict=True):
                finish(number, part, is_host=False)

        def run(shard: int) -> None:
            steps = hosts.steps(shard)
            for at, (number, lists) in enumerate(steps):
                if shard == DISK:
                    for _, soon in steps[at + _AHEAD : at + _AHEAD + 1] if at else steps[: _AHEAD + 1]:
                        self.file.will_need(soon)
                    self.file.check_lists(lists)
                finish(number, hosts.scan(shard, at), is_host=True)

        threads = self._threads()
        running = [threads.submit(run, shard) for shard in (RAM, DISK)]
        return running + [threads.submit(run_device, FIRST_DEVICE + number) for number in range(len(devices.shards))]

    # Inside

    @cached_property
    def _scanner(self) -> "CodeScanner | None":
        """Kernels for batches; None if they cannot scan this index. The first batch loads them."""
        from stillroom.retrieval.tiers.batch_scan import CodeScanner, can_scan

        return CodeScanner(self.file.shell) if can_scan(self.file.shell) else None

    def _host_scan(
        self,
        devices: _OnDevices,
        queries: Vectors,
        num: int,
        probed: Lists,
        nearness: Nearness,
        allowed: Any,
    ) -> tuple[HostScan, Partition]:
        """Return a scan of a batch in RAM and on disk, by kernels where possible, and the shard of each list."""
        ram = self._ram
        on_host = np.where(ram.is_held, RAM, DISK)
        shard_of = np.where(devices.device_of >= 0, FIRST_DEVICE + devices.device_of, on_host)
        partition = Partition(shard_of, FIRST_DEVICE + len(devices.shards))
        if self._scanner is not None and (allowed is None or isinstance(allowed, faiss.IDSelectorBitmap)):
            from stillroom.retrieval.tiers.batch_scan import BatchScan

            places = {RAM: ram.places, DISK: self.file.places}
            batch = BatchScan(self._scanner, places, partition, queries, num, probed, nearness, allowed)
            if batch.is_scannable:
                return batch, partition
        indexes = {RAM: ram.index, DISK: self._disk}
        return FaissScan(indexes, partition, queries, num, probed, nearness, allowed), partition

    def _threads(self) -> ThreadPoolExecutor:
        """Return the pool, with one thread per shard."""
        if self._pool is None:
            num_shards = FIRST_DEVICE + len(self._on_devices.shards)
            self._pool = ThreadPoolExecutor(num_shards, thread_name_prefix="stillroom-shard")
        return self._pool

    def _copied(self, number: int) -> Any:
        rows, codes = self.file.entries(number)
        one = faiss.ArrayInvertedLists(1, self.file.code_size)
        if len(rows):
            one.add_entries(0, len(rows), faiss.swig_ptr(rows), faiss.swig_ptr(codes))
        return one

    def _in_ram(self, held: dict[int, Any]) -> _InRam:
        is_held = np.zeros(len(self.file.sizes), dtype=bool)
        is_held[list(held)] = True
        each = faiss.InvertedListsPtrVector()
        for number in range(len(is_held)):
            each.push_back(held.get(number, self._empty))
        stacked = faiss.VStackInvertedLists(len(is_held), each.data())
        index = index_over(self.file.shell, stacked, held)
        codes, rows = (np.zeros(len(is_held), dtype=np.int64) for _ in range(2))
        for number, one in held.items():
            codes[number], rows[number] = int(one.get_codes(0) or 0), int(one.get_ids(0) or 0)
        places = ListPlaces(codes, rows, self.file.sizes)
        return _InRam(held, is_held, index, places, int(self.list_bytes()[is_held].sum()))


def _joined(parts: Sequence[Scored]) -> Scored:
    """Return all entries of several results."""
    if not parts:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    ids, scores = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, scores

"""An IVF-PQ index whose lists are divided among tiers of memory (VectorLiteRAG 4.1, 4.2): hot ones in RAM, the others
in a file that is mapped into memory, so that an index may be larger than its RAM; where there are devices, the hottest
on them (`device_shard`).

One coarse search says which lists a query probes, a mapping table where they are (`partition`). Shards scan at the same
time, each in a thread of its own, and each those queries first that have least to scan there. A query is released the
moment the last of its lists is scanned, whatever the rest of its batch does. What it gets is what the undivided index
gives: distances are those of the same codes in the same lists, and lists of results are merged as `ivf_pq` merges the
stages of a search.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import faiss as _faiss
import numpy as np
from numpy.typing import NDArray

from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.partition import Lists, Nearness, Partition
from stillroom.retrieval.ranking import first_arrays, with_ties
from stillroom.retrieval.vector_index import one_thread

if TYPE_CHECKING:  # it imports torch, which two tiers can do without
    from stillroom.retrieval.device_shard import DeviceShard

faiss: Any = _faiss  # its type information lacks what is made at import

Vectors = NDArray[np.float32]
Scored = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Ids [n] and scores [n], best first, ties by id."""

RAM, DISK, FIRST_DEVICE = 0, 1, 2
"""Shards; a second device is the next number, and so on."""


def scan(lists: Any, query: Vectors, num: int, probed: Lists, nearness: Nearness) -> Scored:
    """The best `num` of an IVF index for a query [d], and those that equal the last of them, in lists [p] whose centres
    are as near as `nearness` [p]; -1 is no list."""
    probed, nearness = np.ascontiguousarray(probed), np.ascontiguousarray(nearness)
    query = np.ascontiguousarray(query)
    parameters = faiss.SearchParametersIVF(nprobe=max(1, len(probed)))
    pointer = faiss.swig_ptr

    def fetch(n: int) -> Scored:
        ids, scores = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.float32)
        chosen, result = (pointer(probed), pointer(nearness)), (pointer(scores), pointer(ids))
        with one_thread():
            lists.search_preassigned_c(1, pointer(query), n, *chosen, *result, False, parameters)
        return ids[ids >= 0], scores[ids >= 0]

    if not (probed >= 0).any():
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    return with_ties(fetch, num)


@dataclass
class _Pending:
    """A query of a batch, while shards scan for it."""

    num_shards: int
    parts: list[Scored] = field(default_factory=list)


class TieredLists:
    """The lists of a trained index, in RAM, in a file and on devices."""

    def __init__(self, lists: Any, partition: Partition, file: Path, devices: Sequence[str] = ()) -> None:
        """Copies everything that it needs, so `lists` can go afterwards.

        Args:
            lists: an IndexIVFPQ that holds vectors.
            partition: into `RAM`, `DISK`, and from `FIRST_DEVICE` on one for each device.
            file: for the second; written anew.
            devices: torch's names of them. Scores of what they hold are faiss' up to rounding.

        Raises:
            ConfigError: there are devices, and the codes are not a byte per subquantizer.
        """
        assert len(partition.shard_of) == lists.nlist and partition.num_shards == FIRST_DEVICE + len(devices)
        self.partition = partition
        self._quantizer = faiss.clone_index(lists.quantizer)
        self._file = file
        faiss.write_index(_shard(lists, self._quantizer, partition.of(DISK)), str(file))
        with file.open("rb+") as written:
            os.fsync(written.fileno())
        self._shards = [_shard(lists, self._quantizer, partition.of(RAM)), _map(file)]
        self._device_shards = _on_devices(lists, partition, devices)
        self._pool = ThreadPoolExecutor(partition.num_shards, thread_name_prefix="stillroom-shard")

    def close(self) -> None:
        """Wait for what is scanned. Idempotent."""
        self._pool.shutdown(wait=True)

    def drop_pages(self) -> None:
        """Forget what is in memory of the lists on disk, the system's copies of its pages too: for measuring. Between
        searches only."""
        self._shards[DISK] = None  # mapped pages are not dropped
        with self._file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._shards[DISK] = _map(self._file)

    def search(self, query: Vectors, num: int, nprobe: int) -> Scored:
        """The best `num` for a query [d], and no more."""
        found: list[Scored] = []
        self.search_batch(query.reshape(1, -1), num, nprobe, lambda _, scored: found.append(scored))
        return found[0]

    def search_batch(self, queries: Vectors, num: int, nprobe: int, on_found: Callable[[int, Scored], None]) -> None:
        """The best `num` for each of queries [q, d].

        Args:
            on_found: told the number of a query and what was found, once each, as soon as its last list is scanned; in
                a thread of a shard, so it must return quickly.
        """
        nprobe = min(nprobe, len(self.partition.shard_of))
        with one_thread():
            nearness, probed = self._quantizer.search(np.ascontiguousarray(queries), nprobe)
        num_in = self.partition.num_in(probed)
        pending = [_Pending(int((row > 0).sum())) for row in num_in]
        lock = Lock()

        def finish(number: int, part: Scored) -> None:
            with lock:
                one = pending[number]
                one.parts.append(part)
                if len(one.parts) < one.num_shards:
                    return
            ids, scores = (np.concatenate(arrays) for arrays in zip(*one.parts, strict=True))
            on_found(number, first_arrays(ids, scores, num))

        def run(shard: int) -> None:
            mine, near = self.partition.probes(shard, probed, nearness)
            asked = np.flatnonzero(num_in[:, shard])
            if shard >= FIRST_DEVICE:  # all of the batch at once
                device = self._device_shards[shard - FIRST_DEVICE]
                parts = device.scan_batch(queries[asked], num, mine[asked], near[asked])
                for number, part in zip(asked.tolist(), parts, strict=True):
                    finish(number, part)
                return
            for number in asked[np.argsort(num_in[asked, shard], kind="stable")].tolist():
                width = num_in[number, shard]
                finish(
                    number, scan(self._shards[shard], queries[number], num, mine[number, :width], near[number, :width])
                )

        running = [self._pool.submit(run, shard) for shard in range(self.partition.num_shards)]
        wait(running)
        for one in running:
            one.result()


def _shard(lists: Any, quantizer: Any, held: Lists) -> Any:
    """An index of some of the lists, with the same centres and codes. It keeps no copy of the quantizer."""
    shard = faiss.IndexIVFPQ(quantizer, lists.d, lists.nlist, lists.pq.M, lists.pq.nbits, lists.metric_type)
    shard.pq = lists.pq
    shard.by_residual = lists.by_residual
    shard.is_trained = True
    source, target = lists.invlists, shard.invlists
    for number in held.tolist():
        size = source.list_size(number)
        if size:
            target.add_entries(number, size, source.get_ids(number), source.get_codes(number))
    shard.ntotal = int(sum(source.list_size(number) for number in held.tolist()))
    return shard


def _on_devices(lists: Any, partition: Partition, devices: Sequence[str]) -> "list[DeviceShard]":
    if not devices:
        return []
    from stillroom.retrieval.device_shard import DeviceShard

    return [DeviceShard(lists, partition.of(FIRST_DEVICE + at), device) for at, device in enumerate(devices)]


def _map(file: Path) -> Any:
    """An index whose lists stay in its file."""
    try:
        return faiss.read_index(str(file), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        raise CorruptKnowledgeBaseError(f"{file} cannot be mapped: {error}") from None


def accesses(lists: Any, queries: Vectors, nprobe: int) -> NDArray[np.float64]:
    """[nlist]: how many of queries [q, d] probe each list."""
    probed = lists.quantizer.search(np.ascontiguousarray(queries), min(nprobe, int(lists.nlist)))[1]
    found: NDArray[np.float64] = np.bincount(probed[probed >= 0].ravel(), minlength=int(lists.nlist)).astype(float)
    return found

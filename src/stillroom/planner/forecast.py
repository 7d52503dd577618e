"""Predicts times to the first token for one split of memory.

The search is predicted by its model. Generation runs the product's own engine, scheduler, knowledge tree and policies
on modelled hardware with a virtual clock (`planner.simulation`). Both share the cores: while one runs, the other takes
longer, by measured factors (`planner.overheads`).

Not modelled: speculative prefills, and several questions that are embedded at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import ReuseMode, SearchMode
from stillroom.core.document import SearchResult
from stillroom.errors import PromptTooLongError
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvstore.files import size_on_disk
from stillroom.planner.documents import NOTHING_PREPARED, PreparedDocuments, all_windows, first_chunks, within
from stillroom.planner.inputs import SEARCH_BATCH, PlanInputs
from stillroom.planner.simulation.search_station import Query, SearchStation, SharedCores
from stillroom.planner.simulation.simulated_runtime import SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom.planner.splits import Split
from stillroom.rag.document_demand import DocumentDemand
from stillroom.rag.query_cache import QueryCache
from stillroom.retrieval.tiers.division import Division, hottest_in_ram, hottest_on_devices
from stillroom.retrieval.tiers.tiered_ivf import DISK, RAM

_MODE: SearchMode = "hybrid"
"""Mode of all questions in the simulated query cache."""


@dataclass(frozen=True, slots=True)
class _MeasuredResults:
    """A corpus whose every search returns the result that was measured."""

    found: Mapping[str, SearchResult]
    generation: int = 0

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return np.ones(1, dtype=np.float32)

    def search_staged(
        self, query: str, *, mode: SearchMode, top_k: int, num_stages: int, where: str
    ) -> Iterator[SearchResult]:
        yield self.found[query]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Changes to the measured inputs."""

    rate: float = 1.0
    """Factor on requests per second."""
    probes: float = 1.0
    """Factor on the inverted lists that a search probes; at most 2."""
    speed: float = 1.0
    """Factor on the speed of the decoder."""
    reuse: ReuseMode | None = None
    prepared: float = 1.0
    """Factor on `prepare.disk_bytes`, with `reuse.mode = "prepared"`."""
    prepared_chunks: int | None = None
    """Prepare this many chunks, with room of their own on disk, whatever `prepare.disk_bytes` says."""
    is_alone: bool = False
    """Ask each question when the previous one is answered."""
    at_once: bool = False
    """Submit all prompts at time 0 without searching: gives the throughput of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Predicted times of a workload's requests, in their order."""

    seconds: NDArray[np.float64]
    """Time to first token, search included: [n]."""
    search_seconds: NDArray[np.float64]
    """The part of it that is search, with the wait for it: [n]."""
    requests_per_second: float
    """Answered, from the first arrival to the last answer."""
    kept_share: float
    """Share of prompt tokens whose KV was reused."""
    list_hit_rate: float
    """Share of probed lists that are in RAM or on devices; 1 if the index cannot be divided."""
    device_hit_rate: float
    """Share of probed lists that are on devices."""
    cached_share: float
    """Share of questions that the query cache answered."""
    prepared: PreparedDocuments
    """What was prepared between the warm-up requests and these."""

    def percentile(self, percent: float) -> float:
        """Return a percentile of the time to first token, in seconds."""
        return float(np.percentile(self.seconds, percent))

    def as_json(self) -> dict[str, float]:
        return {
            "p50_seconds": self.percentile(50),
            "p95_seconds": self.percentile(95),
            "p99_seconds": self.percentile(99),
            "mean_search_seconds": float(self.search_seconds.mean()),
            "p95_search_seconds": float(np.percentile(self.search_seconds, 95)),
            "requests_per_second": self.requests_per_second,
            "kept_share": self.kept_share,
            "list_hit_rate": self.list_hit_rate,
            "device_hit_rate": self.device_hit_rate,
            "query_cache_share": self.cached_share,
        }


_PLAIN = Variation()


class Forecaster:
    """Forecasts for one set of inputs. Deterministic: the same inputs, split and variation give the same forecast."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs = inputs
        self._divisions: dict[tuple[int, int], Division] = {}
        self._known: dict[tuple[Split, Variation], Forecast] = {}
        self._windows: dict[int, PreparedDocuments] = {}

    @property
    def list_bytes(self) -> int:
        """Bytes of all inverted lists; 0 if the index cannot be divided."""
        return 0 if self.inputs.index is None else self.inputs.index.profile.list_bytes

    @property
    def num_devices(self) -> int:
        """Devices that may hold lists."""
        return 0 if self.inputs.index is None else len(self.inputs.index.devices)

    def list_bytes_within(self, ram_bytes: int, device_lists: int = 0) -> int:
        """Return the bytes of the hottest lists that fit into RAM, after `device_lists` bytes on each device."""
        return 0 if self.inputs.index is None else self.division(ram_bytes, device_lists).ram_bytes

    def least_device_bytes(self, device_lists: int) -> int:
        """Return the fewest bytes on each device that hold the same lists as `device_lists` bytes do."""
        if not self.num_devices:
            return 0
        division = self.division(0, device_lists)
        least = max(division.device_bytes)
        is_same = np.array_equal(self.division(0, least).partition.shard_of, division.partition.shard_of)
        return least if is_same else device_lists

    def division(self, ram_bytes: int, device_lists: int = 0) -> Division:
        """Place the hottest lists on the devices, with `device_lists` bytes each, and the next hottest in RAM."""
        index = self.inputs.index
        assert index is not None
        key = (ram_bytes, device_lists)
        if key not in self._divisions:
            shape = index.heat, index.profile.sizes, index.profile.bytes_per_vector
            on_devices = hottest_on_devices(*shape, device_lists, len(index.devices))
            self._divisions[key] = hottest_in_ram(*shape, ram_bytes, on_devices)
        return self._divisions[key]

    def division_of(self, split: Split) -> Division:
        return self.division(split.host_lists, split.device_lists)

    def forecast(self, split: Split, variation: Variation = _PLAIN) -> Forecast:
        """Simulate the workload; results are cached.

        Raises:
            PromptTooLongError: the device cannot hold the longest prompt.
        """
        key = (split, variation)
        if key not in self._known:
            self._known[key] = self._run(split, variation)
        return self._known[key]

    def _run(self, split: Split, variation: Variation) -> Forecast:
        inputs = self.inputs
        workload = inputs.workload
        runtime, prepared = self._warm_runtime(split, variation)
        search = self._search_seconds(split, variation)
        prompts = [inputs.found[number].prompt for number in workload.asked]
        if variation.is_alone:
            outcome = runtime.ask(prompts)
            searched = search.sum(axis=1)
            seconds = searched + np.array(outcome.seconds)
        elif variation.at_once:
            outcome = runtime.ask(prompts, [0.0] * len(prompts))
            seconds, searched = np.array(outcome.seconds), np.zeros(len(prompts))
        else:
            station = self._station(search, split, variation)
            outcome = runtime.ask_searched(prompts, station)
            seconds, searched = np.array(outcome.seconds), station.search_seconds
        return Forecast(
            seconds,
            np.maximum(0.0, searched - (0.0 if variation.at_once else inputs.overheads.request_seconds)),
            len(prompts) / max(outcome.wall_seconds, 1e-9),
            outcome.num_kept_tokens / max(1, outcome.num_tokens),
            *self._hit_rates(split, variation.probes),
            float(self._is_cached.mean()),
            prepared,
        )

    def _warm_runtime(self, split: Split, variation: Variation) -> tuple[SimulatedRuntime, PreparedDocuments]:
        """Return an engine that has answered the warm-up requests and then prepared documents."""
        inputs = self.inputs
        hardware = replace(
            inputs.hardware, device_bytes=split.device_kv, costs=_faster(inputs.hardware.costs, variation.speed)
        )
        if hardware.device_bytes < hardware.bytes_per_token * hardware.block_size:
            raise PromptTooLongError(
                f"{split.device_kv} bytes hold no KV block of {hardware.block_size} tokens; raise runtime.kv_bytes"
            )
        policy, prepared = self._policy(split, variation)
        runtime = SimulatedRuntime(hardware, policy, documents=inputs.documents.read)
        if policy.reuse.keeps_kv:
            runtime.ask([inputs.found[number].prompt for number in inputs.workload.warm])
        return runtime, prepared.first(runtime.prepare(prepared.prompts))

    def _policy(self, split: Split, variation: Variation) -> tuple[EnginePolicy, PreparedDocuments]:
        """Return the engine's policy, and what it has room to prepare."""
        inputs = self.inputs
        reuse = replace(inputs.policy.reuse, host_bytes=split.host_kv, disk_bytes=split.disk_kv)
        if variation.reuse is not None:
            reuse = replace(reuse, mode=variation.reuse)
        if reuse.mode != "prepared" or inputs.documents.refusal:
            return replace(inputs.policy, reuse=reuse), NOTHING_PREPARED
        prepare, windows = inputs.policy.prepare, self.windows(split.device_kv)
        prepare = replace(prepare, disk_bytes=int(variation.prepared * prepare.disk_bytes))
        if variation.prepared_chunks is None:
            on_disk, on_host = min(prepare.disk_bytes, split.disk_kv), min(prepare.host_bytes, split.host_kv)
            prepared = within(windows, on_disk if split.disk_kv else on_host)
        else:
            prepared = first_chunks(windows, variation.prepared_chunks, inputs.hardware, inputs.policy.prepare)
            prepare = replace(prepare, disk_bytes=prepared.num_bytes)
            reuse = replace(reuse, disk_bytes=split.disk_kv + prepared.num_bytes + self.system_bytes)
        return replace(inputs.policy, reuse=reuse, prepare=prepare), prepared

    @property
    def system_bytes(self) -> int:
        """Bytes of the system message's record, which all prepared KV stands behind."""
        system = self.inputs.documents.frame.segments[0].token_ids
        return size_on_disk(len(system) * self.inputs.hardware.bytes_per_token)

    def windows(self, device_kv: int) -> PreparedDocuments:
        """Return what preparing all documents takes, with this much device memory for KV."""
        if device_kv not in self._windows:
            inputs, demand = self.inputs, DocumentDemand()
            for number in (*inputs.workload.searched, *inputs.workload.warm):
                demand.add(scored.chunk.document_id for scored in inputs.found[number].result.results)
            hardware = replace(inputs.hardware, device_bytes=device_kv)
            self._windows[device_kv] = all_windows(inputs.documents, demand, hardware, inputs.policy.prepare)
        return self._windows[device_kv]

    @cached_property
    def _is_cached(self) -> NDArray[np.bool_]:
        """Whether the query cache would answer each asked question: [n]."""
        inputs = self.inputs
        found = {text: one.result for text, one in zip(inputs.texts, inputs.found, strict=True)}
        exact = replace(inputs.query_cache, similarity=1.0)  # a plan does not rely on similar questions
        cache = QueryCache(_MeasuredResults(found), exact)
        hits = []
        for number in (*inputs.workload.warm, *inputs.workload.asked):
            before = cache.num_hits
            cache.search(inputs.texts[number], _MODE, 1)
            hits.append(cache.num_hits > before)
        return np.array(hits[len(inputs.workload.warm) :])

    def policy(self, split: Split) -> EnginePolicy:
        """Return the policy of an engine with this much memory."""
        return self._policy(split, _PLAIN)[0]

    def search_seconds(self, split: Split) -> NDArray[np.float64]:
        """Return each asked question's search time alone, with the overhead of a request: [n]."""
        seconds: NDArray[np.float64] = self._search_seconds(split, _PLAIN).sum(axis=1)
        return seconds

    def _search_seconds(self, split: Split, variation: Variation) -> NDArray[np.float64]:
        """Return each asked question's search times, without waiting: before, in and after the dense index,
        with the overhead of a request: [n, 3]."""
        inputs = self.inputs
        dense = [self._dense_seconds(number, split, variation.probes) for number in range(len(inputs.found))]
        rows = np.zeros((len(inputs.workload.asked), 3))
        for row, number in enumerate(inputs.workload.asked):
            one = inputs.found[number]
            rows[row, 2] = inputs.overheads.request_seconds
            if not self._is_cached[row]:
                rest = max(0.0, one.result.search_seconds - one.dense_seconds)
                rows[row] += one.result.embed_seconds, dense[number], rest
        return rows

    def _dense_seconds(self, number: int, split: Split, probes: float) -> float:
        """Return the time measured with every list in RAM, plus what the model predicts that this split adds."""
        index, measured = self.inputs.index, self.inputs.found[number].dense_seconds
        if index is None:
            return measured
        added = self._release([number], split, probes) - self._release([number], None, 1.0)
        return max(0.0, measured + float(added[0]))

    def _release(self, numbers: Sequence[int], split: Split | None, probes: float) -> NDArray[np.float64]:
        """Predict the release times of a batch of questions: [batch]. `split` None has every list in RAM."""
        index = self.inputs.index
        assert index is not None
        division = self.division(self.list_bytes) if split is None else self.division_of(split)
        probed = np.stack([index.probed(number, probes) for number in numbers])
        return index.profile.model.release_seconds(division, probed)

    def _station(self, search: NDArray[np.float64], split: Split, variation: Variation) -> SearchStation:
        """Return the searches of the workload: embedding, the queue of the dense index, the rest."""
        workload, cores = self.inputs.workload, self.inputs.overheads.cores
        queries = [
            Query(due / variation.rate, before, after, not is_cached)
            for due, (before, _, after), is_cached in zip(
                workload.dues, search.tolist(), self._is_cached.tolist(), strict=True
            )
        ]

        def releases(batch: Sequence[int]) -> NDArray[np.float64]:
            own: NDArray[np.float64] = search[list(batch), 1]
            if len(batch) == 1:
                return own
            numbers = [workload.asked[at] for at in batch]
            together = self._release(numbers, split, variation.probes)
            alone = np.array([self._release([number], split, variation.probes)[0] for number in numbers])
            own = np.maximum(0.0, own + together - alone)
            return own

        max_batch = 1 if self.inputs.index is None else SEARCH_BATCH
        # a GPU leaves the cores to the searches
        return SearchStation(queries, releases, max_batch, cores if variation.speed == 1.0 else SharedCores())

    def _hit_rates(self, split: Split, probes: float) -> tuple[float, float]:
        """Return the shares of probed lists in RAM or on devices, and on devices."""
        index = self.inputs.index
        if index is None:
            return 1.0, 0.0
        probed = np.stack([index.probed(number, probes) for number in self.inputs.workload.asked])
        num_in = self.division_of(split).partition.num_in(probed).sum(axis=0)
        total, on_devices = max(1, num_in.sum()), num_in.sum() - num_in[RAM] - num_in[DISK]
        return float((num_in.sum() - num_in[DISK]) / total), float(on_devices / total)


def _faster(costs: CostProfile, speed: float) -> CostProfile:
    """Return the costs with computing `speed` times as fast; loading stays."""
    if speed == 1.0:
        return costs
    return replace(costs, seconds=tuple(tuple(one / speed for one in row) for row in costs.seconds))

"""Predicts times to the first token for one split of memory: the search by its model, then the product's own engine,
scheduler, knowledge tree and policies on a modelled machine (`rag.simulation`), all on a clock of their own.

Not modelled: that search and decoder share the cores of a CPU, that deciding takes time, and speculative prefills.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import ReuseMode, SearchMode
from stillroom.errors import PromptTooLongError
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.planner.inputs import SEARCH_BATCH, PlanInputs
from stillroom.planner.search_queue import released
from stillroom.planner.simulation.simulated_runtime import SimulatedRuntime
from stillroom.planner.splits import Split
from stillroom.rag.query_cache import QueryCache
from stillroom.retrieval.tiers.division import Division, hottest_in_ram, hottest_on_devices
from stillroom.retrieval.tiers.tiered_ivf import DISK, RAM

_MODE: SearchMode = "hybrid"
"""For the query cache, to which all questions of a workload are of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """What is otherwise than measured or asked for."""

    rate: float = 1.0
    """Times as many requests per second."""
    probes: float = 1.0
    """Times as many lists that a search looks at; at most 2."""
    speed: float = 1.0
    """Times as fast a decoder."""
    reuse: ReuseMode | None = None
    is_alone: bool = False
    """Each question asked when the one before is answered."""
    at_once: bool = False
    """All prompts are there in the first moment, without a search: what the model can serve."""


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Of the requests of a workload, in their order."""

    seconds: NDArray[np.float64]
    """To the first token, search included."""
    search_seconds: NDArray[np.float64]
    """Of that, until the engine has the prompt."""
    requests_per_second: float
    """Answered, from the first due to the last answer."""
    kept_share: float
    """Of prompt tokens, whose KV was there."""
    list_hit_rate: float
    """Share of probed lists that are in RAM or on devices; 1 where the index has none that could be elsewhere."""
    device_hit_rate: float
    """Share of probed lists that are on devices."""
    cached_share: float
    """Of questions, whose result the query cache had."""

    def percentile(self, percent: float) -> float:
        """Seconds to the first token."""
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
    """Forecasts for one scene; the same scene, split and variation give the same one."""

    def __init__(self, scene: PlanInputs) -> None:
        self.scene = scene
        self._divisions: dict[tuple[int, int], Division] = {}
        self._known: dict[tuple[Split, Variation], Forecast] = {}

    @property
    def list_bytes(self) -> int:
        """Of all lists that can be divided."""
        return 0 if self.scene.index is None else self.scene.index.profile.list_bytes

    @property
    def num_devices(self) -> int:
        """For lists."""
        return 0 if self.scene.index is None else len(self.scene.index.devices)

    def fitted(self, ram_bytes: int, device_lists: int = 0) -> int:
        """Bytes of the hottest lists that fit into so many, beside devices with so many bytes for lists each."""
        return 0 if self.scene.index is None else self.division(ram_bytes, device_lists).ram_bytes

    def fitted_on_devices(self, device_lists: int) -> int:
        """The least on each device that holds the same lists as so much does."""
        if not self.num_devices:
            return 0
        division = self.division(0, device_lists)
        least = max(division.device_bytes)
        is_same = np.array_equal(self.division(0, least).partition.shard_of, division.partition.shard_of)
        return least if is_same else device_lists

    def division(self, ram_bytes: int, device_lists: int = 0) -> Division:
        """The hottest lists that fit on the devices, with so many bytes each, and the next ones that fit in RAM."""
        index = self.scene.index
        assert index is not None
        key = (ram_bytes, device_lists)
        if key not in self._divisions:
            shape = index.heat, index.profile.sizes, index.profile.bytes_per_vector
            on_devices = hottest_on_devices(*shape, device_lists, len(index.devices))
            self._divisions[key] = hottest_in_ram(*shape, ram_bytes, on_devices)
        return self._divisions[key]

    def division_of(self, split: Split) -> Division:
        """Where the lists of a split are."""
        return self.division(split.host_lists, split.device_lists)

    def forecast(self, split: Split, variation: Variation = _PLAIN) -> Forecast:
        """Run the workload, or remember how it went.

        Raises:
            PromptTooLongError: the device has no room for the longest prompt.
        """
        key = (split, variation)
        if key not in self._known:
            self._known[key] = self._run(split, variation)
        return self._known[key]

    def _run(self, split: Split, variation: Variation) -> Forecast:
        scene = self.scene
        workload = scene.workload
        reuse = replace(scene.system.reuse, host_bytes=split.host_kv, disk_bytes=split.disk_kv)
        if variation.reuse is not None:
            reuse = replace(reuse, mode=variation.reuse)
        plant = replace(scene.plant, device_bytes=split.device_kv, costs=_faster(scene.plant.costs, variation.speed))
        if plant.device_bytes < plant.bytes_per_token * plant.block_size:
            raise PromptTooLongError(
                f"{split.device_kv} bytes hold no KV block of {plant.block_size} tokens; raise runtime.kv_bytes"
            )
        runtime = SimulatedRuntime(plant, replace(scene.system, reuse=reuse))
        if reuse.keeps_kv:
            runtime.ask([scene.found[number].prompt for number in workload.warm])
        search = self._search_seconds(split, variation)
        prompts = [scene.found[number].prompt for number in workload.asked]
        if variation.is_alone:
            outcome = runtime.ask(prompts)
            searched = search.sum(axis=1)
            seconds = searched + np.array(outcome.seconds)
        else:
            dues, searched = np.zeros(len(prompts)), np.zeros(len(prompts))
            if not variation.at_once:
                dues = np.array(workload.dues) / variation.rate
                searched = self._searched(dues, search, split, variation) - dues
            order = np.argsort(dues + searched, kind="stable")
            outcome = runtime.ask([prompts[at] for at in order], (dues + searched)[order].tolist())
            seconds = searched.copy()
            seconds[order] += outcome.seconds
        return Forecast(
            seconds,
            searched,
            len(prompts) / max(outcome.wall_seconds, 1e-9),
            outcome.num_kept_tokens / max(1, outcome.num_tokens),
            *self._hit_rates(split, variation.probes),
            float(self._is_cached.mean()),
        )

    @cached_property
    def _is_cached(self) -> NDArray[np.bool_]:
        """Of each asked question, whether the product's query cache would have its result."""
        scene = self.scene
        found = {text: one.result for text, one in zip(scene.texts, scene.found, strict=True)}
        vector = np.ones(1, dtype=np.float32)
        exact = replace(scene.query_cache, similarity=1.0)  # a plan does not count on similar questions
        cache = QueryCache(lambda text, *_: iter([found[text]]), lambda: 0, lambda _: vector, exact)
        hits = []
        for number in (*scene.workload.warm, *scene.workload.asked):
            before = cache.stats.num_hits
            cache.search(scene.texts[number], _MODE, 1)
            hits.append(cache.stats.num_hits > before)
        return np.array(hits[len(scene.workload.warm) :])

    def _search_seconds(self, split: Split, variation: Variation) -> NDArray[np.float64]:
        """Of each asked question, without waiting: before the dense index, in it, and after it: [n, 3]."""
        scene = self.scene
        dense = [self._dense_seconds(number, split, variation.probes) for number in range(len(scene.found))]
        rows = np.zeros((len(scene.workload.asked), 3))
        for row, number in enumerate(scene.workload.asked):
            one = scene.found[number]
            if not self._is_cached[row]:
                rest = max(0.0, one.result.search_seconds - one.dense_seconds)
                rows[row] = one.result.embed_seconds, dense[number], rest
        return rows

    def _dense_seconds(self, number: int, split: Split, probes: float) -> float:
        """Measured with everything in RAM, and what the model says that this split adds."""
        index, measured = self.scene.index, self.scene.found[number].dense_seconds
        if index is None:
            return measured
        added = self._release([number], split, probes) - self._release([number], None, 1.0)
        return max(0.0, measured + float(added[0]))

    def _release(self, numbers: Sequence[int], split: Split | None, probes: float) -> NDArray[np.float64]:
        """By the model, for a batch of questions; None has every list in RAM."""
        index = self.scene.index
        assert index is not None
        division = self.division(self.list_bytes) if split is None else self.division_of(split)
        probed = np.stack([index.probed(number, probes) for number in numbers])
        return index.profile.model.release_seconds(division, probed)

    def _searched(
        self, dues: NDArray[np.float64], search: NDArray[np.float64], split: Split, variation: Variation
    ) -> NDArray[np.float64]:
        """When the engine has each prompt: embedding, the queue before the dense index, the rest."""
        asked = self.scene.workload.asked
        waiting = np.flatnonzero(~self._is_cached)
        found = dues.copy()

        def releases(batch: Sequence[int]) -> NDArray[np.float64]:
            own: NDArray[np.float64] = search[waiting[list(batch)], 1]
            if len(batch) == 1:
                return own
            numbers = [asked[at] for at in waiting[list(batch)].tolist()]
            together = self._release(numbers, split, variation.probes)
            alone = np.array([self._release([number], split, variation.probes)[0] for number in numbers])
            own = np.maximum(0.0, own + together - alone)
            return own

        ready = (dues + search[:, 0])[waiting]
        max_batch = 1 if self.scene.index is None else SEARCH_BATCH
        found[waiting] = np.array(released(ready.tolist(), releases, max_batch)) + search[waiting, 2]
        return found

    def _hit_rates(self, split: Split, probes: float) -> tuple[float, float]:
        """Of probed lists, in RAM or on devices, and on devices."""
        index = self.scene.index
        if index is None:
            return 1.0, 0.0
        probed = np.stack([index.probed(number, probes) for number in self.scene.workload.asked])
        num_in = self.division_of(split).partition.num_in(probed).sum(axis=0)
        total, on_devices = max(1, num_in.sum()), num_in.sum() - num_in[RAM] - num_in[DISK]
        return float((num_in.sum() - num_in[DISK]) / total), float(on_devices / total)


def _faster(costs: CostProfile, speed: float) -> CostProfile:
    """The same with computing so many times as fast; loading takes as long as it did."""
    if speed == 1.0:
        return costs
    return replace(costs, seconds=tuple(tuple(one / speed for one in row) for row in costs.seconds))

"""Cases of `stillroom bench simulate`: a model on a modelled machine, its traffic, and the compared systems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillroom.config.settings import EvictionPolicy, ReuseConfig
from stillroom.planner.simulation.arrivals import arrivals
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedOutcome, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom_bench.experiments.experiment_options import SimulateOptions
from stillroom_bench.experiments.machines import Machine, load_machine
from stillroom_bench.loads.reuse_traffic import Pool, ReuseTraffic

Tables = dict[str, list[dict[str, Any]]]
Say = Callable[[str], None]

RATES = (0.2, 0.5, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.2, 4.0)
"""Multiples of the sequential throughput without reuse."""
OVERLOAD = 5.0
"""A system sustains a rate below this multiple of its mean time at the lowest rate (RAGCache 7)."""
SYSTEM_TOKENS, QUESTION_TOKENS = 64, 32
_MEAN_DOCUMENT, _SPREAD = 3718, 0.8

VLLM = EnginePolicy(reuse=ReuseConfig(mode="off"))
"""RAGCache's baseline: that version of vLLM caches nothing between requests."""
SGLANG = EnginePolicy(reuse=ReuseConfig(policy="lru", looks_ahead=False, host_bytes=0, disk_bytes=0))
"""LRU eviction on the device only."""


@dataclass(frozen=True)
class Case:
    """One model on its machine under one kind of traffic."""

    machine: Machine
    hardware: HardwareModel
    traffic: ReuseTraffic
    options: SimulateOptions

    def service_rate(self) -> float:
        """Return the sequential throughput without reuse, in requests per second."""
        outcome = SimulatedRuntime(self.hardware, VLLM).ask(self.traffic.prompts(60, 1))
        return len(outcome.seconds) / outcome.wall_seconds

    def run(self, system: EnginePolicy, rates: Sequence[float]) -> list[SimulatedOutcome]:
        """Run one arm after warm-up at each rate in requests per second; its cache persists between rates."""
        options, runtime = self.options, SimulatedRuntime(self.hardware, system)
        if system.reuse.keeps_kv:
            runtime.ask(self.traffic.prompts(options.num_warm, 0))
        found = []
        for number, rate in enumerate(rates):
            dues = arrivals(options.num_requests, rate, [options.seed, 6, number])
            found.append(runtime.ask(self.traffic.prompts(options.num_requests, 2 + number), dues))
        return found

    def ragcache(self, host_bytes: int | None = None, **changes: Any) -> EnginePolicy:
        """Return RAGCache's policy: device and host with PGDSF, and its cache-aware admission order."""
        return EnginePolicy(reuse=self._two_tiers("pgdsf", host_bytes), **{"scheduling": "cache_first", **changes})

    def ours(self, host_bytes: int | None = None) -> EnginePolicy:
        """Return the same tiers and admission order with Stillroom's default eviction policy."""
        return EnginePolicy(reuse=self._two_tiers(ReuseConfig().policy, host_bytes), scheduling="cache_first")

    def with_policy(self, policy: EvictionPolicy, host_bytes: int) -> EnginePolicy:
        return EnginePolicy(reuse=self._two_tiers(policy, host_bytes), scheduling="cache_first")

    def _two_tiers(self, policy: EvictionPolicy, host_bytes: int | None) -> ReuseConfig:
        room = int(self.machine["machine.host_bytes"]) if host_bytes is None else host_bytes
        return ReuseConfig(policy=policy, host_bytes=room, disk_bytes=0)


def ragcache_case(name: str, curve: str, k: int, options: SimulateOptions, max_seqs: int = 4) -> Case:
    """Make a case of RAGCache: answers have 1 token on MMLU and 6 on Natural Questions, their mean (7, Workloads)."""
    machine, max_tokens = load_machine(name), 1 if curve == "mmlu" else 6
    length = int(machine["model.max_tokens"])
    longest = (length - SYSTEM_TOKENS - QUESTION_TOKENS - max_tokens) // k
    pool = wikipedia_pool(options.num_documents, longest, options.seed)
    traffic = ReuseTraffic(pool, curve, k, options.companions, options.seed)
    return Case(machine, hardware_of(machine, max_seqs=max_seqs, max_tokens=max_tokens), traffic, options)


def hardware_of(machine: Machine, *, max_seqs: int, max_tokens: int) -> HardwareModel:
    return HardwareModel(
        costs=machine.costs(),
        bytes_per_token=machine.bytes_per_token,
        num_layers=int(machine["model.layers"]),
        device_bytes=int(machine["machine.device_bytes"]),
        max_model_len=int(machine["model.max_tokens"]),
        max_seqs=max_seqs,
        step_tokens=int(machine["model.max_tokens"]),
        max_tokens=max_tokens,
    )


def wikipedia_pool(size: int, longest: int, seed: int) -> Pool:
    """Make documents of random tokens with log-normal lengths, cut to `longest` tokens.

    RAGCache 3.1 gives the mean length, 3,718 tokens, and plots the distribution. Cutting lets prompts of two documents
    fit into LLaMA2's 4,096 tokens.
    """
    rng = np.random.default_rng([seed, 1])
    median = np.log(_MEAN_DOCUMENT) - _SPREAD**2 / 2
    lengths = np.clip(rng.lognormal(median, _SPREAD, size), 64, longest).astype(int)

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, 256, size=length).tolist())

    documents = tuple(text(length) for length in lengths.tolist())
    return Pool(text(SYSTEM_TOKENS), documents, tuple((text(QUESTION_TOKENS),) for _ in documents))

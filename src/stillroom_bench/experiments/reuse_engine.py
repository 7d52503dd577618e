"""Stillroom's engine as an arm of `stillroom bench reuse`, stepped by the worker process.

Every reset makes a new engine with empty tiers, the same weights and the same cost profile.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stillroom.backends.assembly import KVCache, kv_shape
from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import EvictionPolicy, ReuseConfig, RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.models.loader import fingerprint_of, load_own_decoder
from stillroom.models.spec import ModelSpec
from stillroom.planner.simulation.stepped_engine import EnginePolicy, SteppedEngine
from stillroom_bench.experiments.reuse_options import CACHE_FIRST, REUSE_RATIOS


def reuse_config(arm: str, host_bytes: int, disk_bytes: int) -> ReuseConfig:
    """Return the reuse settings of an arm."""
    if arm == "off":
        return ReuseConfig(mode="off")
    if arm == "lru":
        return ReuseConfig(policy="lru", looks_ahead=False, host_bytes=0, disk_bytes=0)
    policy: EvictionPolicy = "pgdsf" if arm == "pgdsf" else ReuseConfig().policy
    exact = ReuseConfig(policy=policy, host_bytes=host_bytes, disk_bytes=disk_bytes)
    if arm in REUSE_RATIOS:
        return replace(exact, mode="anywhere", recompute_ratio=REUSE_RATIOS[arm], audit_share=0.0)
    return exact


def system_of(arm: str, host_bytes: int, disk_bytes: int) -> EnginePolicy:
    """Return the reuse settings and the admission order of an arm."""
    reuse = reuse_config(arm, host_bytes, disk_bytes)
    return EnginePolicy(reuse=reuse, scheduling="cache_first" if arm == CACHE_FIRST else "first_come")


class OurRuntime(SteppedEngine):
    """`driving.Runtime` around an `Engine`."""

    def __init__(
        self,
        arm: str,
        folder: Path,
        settings: Mapping[str, Any],
        num_threads: int,
        profile: CostProfile | None = None,
    ) -> None:
        """
        Args:
            profile: costs of computing and loading; None: measure them.
        """
        torch.set_num_threads(num_threads)
        super().__init__(settings["max_tokens"])
        self._settings = settings
        self._decoder = load_own_decoder(folder, device="cpu", dtype="bfloat16")
        self._fingerprint = fingerprint_of(folder, self._decoder)
        self._kv_folder = Path(settings["scratch"]) / arm
        self._profile = profile
        self._cache: KVCache | None = None
        per_token = self.bytes_per_token
        self._system = system_of(arm, settings["host"] * per_token, settings["disk"] * per_token)
        self.reset()

    @property
    def profile(self) -> CostProfile | None:
        """Costs of computing and loading; None if no engine cached KV yet."""
        return self._profile

    @property
    def bytes_per_token(self) -> int:
        return kv_shape(self._decoder).bytes_per_token

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    def become(self, system: EnginePolicy) -> None:
        """Switch to another arm on the same weights, with empty tiers."""
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Replace the engine by a new one with empty tiers."""
        self.close()
        self._engine = self._cache = None
        shutil.rmtree(self._kv_folder, ignore_errors=True)
        self._kv_folder.mkdir(parents=True)
        settings, system = self._settings, self._system
        has_disk = system.reuse.keeps_kv and system.reuse.disk_bytes > 0
        self._engine, self._cache = build_engine(
            self._decoder,
            RuntimeConfig(
                kv_bytes=settings["device"] * self.bytes_per_token,
                max_num_seqs=settings["max_seqs"],
                max_num_batched_tokens=settings["step_tokens"],
                request_timeout_s=0.0,
                scheduling=system.scheduling,
                starvation_window=system.window,
            ),
            SystemClock(),
            reuse=system.reuse,
            fingerprint=self._fingerprint,
            profile=self._profile,
            kv_folder=self._kv_folder if has_disk else None,
        )
        if self._cache.tree is not None:
            self._profile = self._cache.tree.profile

    def close(self) -> None:
        """Close the tiers."""
        if self._cache is not None and self._cache.tiers is not None:
            self._cache.tiers.close()

"""Builds the engine of a decoder with its KV cache, and measures the costs of a configured model on this machine."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stillroom.backends.assembly import KVCache, build_cache, build_device
from stillroom.backends.calibration import (
    CalibrationTarget,
    calibrate,
    check_logits,
    load_profile,
    profile_path,
    quick_profile,
    save_profile,
    sequence_seconds,
)
from stillroom.backends.num_threads import tune_threads
from stillroom.backends.placement_check import check_placement
from stillroom.config.places import cache_root
from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig, StillroomConfig
from stillroom.core.clock import Clock, SystemClock
from stillroom.engine.audit import Audit
from stillroom.engine.audit_comparison import DocumentPrompt
from stillroom.engine.engine import Engine
from stillroom.engine.preparation import PreparingQueue
from stillroom.engine.reuse_level import ReuseLevel
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import LoadedModel, load_model
from stillroom.runner.torch_runner import TorchRunner
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.policy import POLICIES
from stillroom.scheduler.scheduler import Scheduler


def calibrate_model(
    config: StillroomConfig,
    kb_folder: Path,
    *,
    repeat: int = 5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Clock | None = None,
) -> tuple[CostProfile, Path]:
    """Measure the configured model's costs on this machine and save them; returns the profile and its file.

    Args:
        kb_folder: on the disk that KV is stored on; need not exist yet.

    Raises:
        ModelError: the checkpoint cannot be used.
        ConfigError, UsageError: the device does not exist, or there is too little memory to measure.
    """
    model = load_configured(config.runtime)
    pool, device = build_device(model.decoder, config.runtime)
    limits = _limits(model.decoder, config.runtime)
    target = _target(TorchRunner(model.decoder, device), pool, limits, clock or SystemClock())
    _use_threads(config.runtime, target)
    profile = calibrate(target, kb_folder, repeat=repeat, on_progress=on_progress)
    path = profile_path(cache_root(), model.fingerprint, model.decoder.device)
    save_profile(path, profile)
    return profile, path


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A loaded model and its costs on this machine."""

    model: LoadedModel
    profile: CostProfile
    is_calibrated: bool
    """True: the profile was saved by a calibration. False: a few points were measured now."""
    sequence_seconds: float
    """See `calibration.sequence_seconds`."""
    path: Path
    """File of the profile; there is none before a calibration."""


def measured_costs(config: StillroomConfig, kb_folder: Path, clock: Clock) -> ModelCosts:
    """The configured model with its saved profile, or a quick one. Raises as `calibrate_model`."""
    model = load_configured(config.runtime)
    pool, device = build_device(model.decoder, config.runtime)
    target = _target(TorchRunner(model.decoder, device), pool, _limits(model.decoder, config.runtime), clock)
    _use_threads(config.runtime, target)
    path = profile_path(cache_root(), model.fingerprint, model.decoder.device)
    kept = load_profile(path)
    profile = kept or quick_profile(target, kb_folder)
    return ModelCosts(model, profile, kept is not None, sequence_seconds(target), path)


def build_engine(  # noqa: PLR0913  the parts, once
    decoder: CausalModel,
    config: RuntimeConfig,
    clock: Clock,
    *,
    reuse: ReuseConfig | None = None,
    fingerprint: bytes = b"",
    profile: CostProfile | None = None,
    kv_folder: Path | None = None,
    tunes_threads: bool = False,
    prepare: PrepareConfig | None = None,
    document_prompt: DocumentPrompt | None = None,
) -> tuple[Engine, KVCache]:
    """Build scheduler, KV cache and runner for a decoder; starts no thread. Raises as `build_backend`.

    Args:
        reuse: None reuses nothing.
        fingerprint: of the model; names its KV on disk.
        profile: costs of computing and loading; None takes the saved one, or measures for about a second.
        tunes_threads: set the number of threads of the process: the configured one, or the fastest.
        prepare: how documents are prepared; None takes the defaults.
        document_prompt: builds the prompt of an audited answer's documents; None: answers from prepared KV are not
            audited.
    """
    prepare = prepare or PrepareConfig()
    pool, device = build_device(decoder, config)
    runner = TorchRunner(decoder, device)
    limits = _limits(decoder, config, reuse)
    target = _target(runner, pool, limits, clock)
    check_logits(target)
    if tunes_threads:
        _use_threads(config, target)
    reuse = reuse or ReuseConfig(mode="off")
    if profile is None and reuse.keeps_kv:
        kept = load_profile(profile_path(cache_root(), fingerprint, decoder.device))
        profile = kept or quick_profile(target, kv_folder if reuse.disk_bytes else None)
    inv_freq_LP = None
    if reuse.allows_any_position:
        check_placement(decoder, config.block_size)
        inv_freq_LP = decoder.inv_freq_LP
    cache = build_cache(
        pool,
        device,
        reuse,
        fingerprint=fingerprint,
        profile=profile,
        folder=kv_folder,
        clock=clock,
        inv_freq_LP=inv_freq_LP,
        prepare=prepare,
    )
    if profile is not None:
        seconds = decoder.spec.num_layers * prepare.layer_ms / 1000
        limits = replace(limits, preparing_tokens=_tokens_within(profile, seconds, limits))
    audit = _audit(cache, reuse, document_prompt)
    scheduler = Scheduler(cache.manager, limits, POLICIES[config.scheduling], config.starvation_window)
    engine = Engine(scheduler, runner, clock, config.request_timeout_s, audit, PreparingQueue(prepare.idle_s))
    return engine, replace(cache, audit=audit)


def _audit(cache: KVCache, reuse: ReuseConfig, document_prompt: DocumentPrompt | None) -> Audit | None:
    """Return the audit of answers with placed KV; None if none is placed, or none of them shall be audited."""
    manager = cache.manager
    anywhere = manager.reuse.anywhere if manager.reuse else None
    if anywhere is None or not reuse.audit_share or (anywhere.only_prepared and document_prompt is None):
        return None
    return Audit(
        ReuseLevel(anywhere, manager.allow_anywhere, reuse.max_disagreement),
        share=reuse.audit_share,
        randomness=random.Random(0),
        document_prompt=document_prompt if anywhere.only_prepared else None,
    )


def _tokens_within(profile: CostProfile, seconds: float, limits: SchedulerLimits) -> int:
    """Return how many tokens of a prompt a step computes in this time, a power of two and at least 16."""
    num_tokens = 16
    while 2 * num_tokens <= limits.max_num_batched_tokens and profile.prefill_seconds(0, 2 * num_tokens) <= seconds:
        num_tokens *= 2
    return num_tokens


def load_configured(runtime: RuntimeConfig) -> LoadedModel:
    """Load the model with the settings of `runtime`. Raises as `load_model`."""
    return load_model(
        runtime.model,
        device=runtime.device,
        dtype=runtime.dtype,
        weights=runtime.weights,
        max_model_len=runtime.max_model_len,
    )


def _limits(decoder: CausalModel, config: RuntimeConfig, reuse: ReuseConfig | None = None) -> SchedulerLimits:
    tail_blocks = ReuseConfig().tail_blocks if reuse is None else reuse.tail_blocks
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=decoder.spec.max_positions,
        batch_delay_s=config.batch_delay_ms / 1000,
        max_proposed_tokens=config.prompt_lookup,
        fixed_tail_tokens=tail_blocks * config.block_size if config.fixed_shapes else 0,
    )


def _target(runner: TorchRunner, pool: BlockPool, limits: SchedulerLimits, clock: Clock) -> CalibrationTarget:
    return CalibrationTarget(
        runner, runner.store, pool.num_blocks, limits.max_model_len, limits.max_num_batched_tokens, clock
    )


def _use_threads(config: RuntimeConfig, target: CalibrationTarget) -> None:
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    else:
        tune_threads(target)

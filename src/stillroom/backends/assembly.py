"""Assembles the KV cache of a loaded model: block pool, knowledge tree, and stores; and closes it."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stillroom.backends.tier_opening import open_tier
from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig
from stillroom.core.clock import Clock
from stillroom.core.kv import FULL_BITS, OWN_TIERS, Tier
from stillroom.engine.audit import Audit, AuditStats
from stillroom.errors import ConfigError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.chunk_reuse.attention_sampling import mass_sample_every
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.eviction import POLICIES
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.kvstore.disk import open_disk, shrink_other_models
from stillroom.kvstore.files import size_on_disk
from stillroom.kvstore.host import HostStore
from stillroom.kvstore.record import Defect
from stillroom.kvstore.shared.shared_tier import TierState
from stillroom.kvstore.tiered_store import TieredStore
from stillroom.models.causal_model import CausalModel
from stillroom.models.numerics import kv_fingerprint
from stillroom.ops.narrow import compile_kernels
from stillroom.runner.device_errors import first_line, is_device_loss
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings

logger = logging.getLogger(__name__)

_DEFECTS = (
    (Tier.DEVICE, Defect.NON_FINITE),
    (Tier.HOST, Defect.CHECKSUM),
    *((Tier.DISK, defect) for defect in Defect if defect not in (Defect.NON_FINITE, Defect.SIGNATURE)),
    *((Tier.NETWORK, defect) for defect in Defect if defect not in (Defect.NON_FINITE, Defect.UNREADABLE)),
)
"""Possible defects of a copy, by tier."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """KV blocks on the device, and the tiers below."""

    manager: KVCacheManager
    device: DeviceStore
    tiers: TieredStore | None = None
    """None if nothing is reused."""
    audit: Audit | None = None
    """None if no answer is compared with a full prefill."""

    @property
    def tree(self) -> KnowledgeTree | None:
        return self.manager.reuse.tree if self.manager.reuse else None

    def readings(self) -> Readings:
        """Return the metrics of the KV cache; none if nothing is reused.

        Called from any thread: the values may be of slightly different moments.
        """
        tree, tiers = self.tree, self.tiers
        if tree is None or tiers is None:
            return {}
        stats, moves = tree.stats, tiers.stats
        flows = {(source.label, target.label): flow for (source, target), flow in moves.flows.items()}
        return {
            catalogue.KV_NODES: {tier.label: tree.num_nodes(tier) for tier in Tier},
            catalogue.KV_BYTES: {tier.label: tree.num_bytes(tier) for tier in Tier},
            catalogue.KV_HITS: _labelled(stats.hits),
            catalogue.KV_HIT_TOKENS: _labelled(stats.hit_tokens),
            catalogue.KV_MISSES: stats.misses,
            catalogue.KV_MISSED_TOKENS: stats.missed_tokens,
            catalogue.KV_RECOMPUTED: stats.cheaper,
            catalogue.KV_PLACED: _labelled(stats.placed),
            catalogue.KV_PLACED_TOKENS: stats.placed_tokens,
            catalogue.KV_PREPARED_TOKENS: stats.prepared_tokens,
            catalogue.PREPARED: stats.prepared,
            catalogue.KV_IN_DOCUMENT: {tier.label: tree.tiers.in_document(tier)[0] for tier in OWN_TIERS},
            catalogue.KV_IN_DOCUMENT_BYTES: {tier.label: tree.tiers.in_document(tier)[1] for tier in OWN_TIERS},
            catalogue.KV_UNUSED_BYTES: {tier.label: tree.num_unused_bytes(tier) for tier in Tier},
            catalogue.KV_REPAIRED_TOKENS: stats.recomputed_tokens,
            catalogue.KV_PLACED_OVERLAP: stats.placed_overlap,
            catalogue.KV_PLACED_OVERHEAD: stats.placed_overhead,
            catalogue.KV_UNFOCUSED: stats.unfocused,
            catalogue.KV_EVICTIONS: _labelled(stats.evictions),
            catalogue.KV_FAILED_LOADS: _labelled(stats.failed_loads),
            catalogue.KV_REJECTED: stats.rejected,
            catalogue.KV_MOVED_BYTES: {pair: flow.num_bytes for pair, flow in flows.items()},
            catalogue.KV_MOVE_SECONDS: {pair: flow.seconds for pair, flow in flows.items()},
            catalogue.KV_MOVES: {pair: flow.num_copies for pair, flow in flows.items()},
            catalogue.KV_VERIFY_FAILURES: {
                (tier.label, str(defect)): moves.verify_failures.get((tier, defect), 0) for tier, defect in _DEFECTS
            },
            catalogue.KV_WRITE_FAILURES: moves.num_write_failures,
            catalogue.KV_PREFETCHED_BYTES: {"used": moves.prefetch.used_bytes, "wasted": moves.prefetch.wasted_bytes},
            **({} if self.audit is None else _audit_readings(self.audit.stats)),
            **({} if tiers.shared is None else _tier_readings(tiers.shared.state)),
        }

    def close(self, *, keeps_device: bool = True) -> None:
        """Store KV on disk, as far as it has room, and close the stores. Precondition: the engine has stopped.

        Args:
            keeps_device: False stores nothing, because the device's contents are unknown.
        """
        if self.tree is None or self.tiers is None:
            return
        try:
            if keeps_device:
                self._flush(self.tree)
        finally:
            self.tiers.close()

    def _flush(self, tree: KnowledgeTree) -> None:
        """Store KV on disk. If the device is lost, before or during this, only KV on the host is stored."""
        if self.device.is_lost:
            tree.lose_device()
        try:
            tree.flush()
        except Exception as error:
            if not is_device_loss(error):
                raise
            logger.warning("the device is lost: %s; only KV on the host is stored", first_line(error))
            tree.lose_device()
            tree.flush()


def build_device(decoder: CausalModel, config: RuntimeConfig) -> tuple[BlockPool, DeviceStore]:
    """Allocate the KV blocks that fit into `runtime.kv_bytes`.

    Raises:
        ConfigError: not one block fits, or the device has less memory.
    """
    shape = kv_shape(decoder)
    num_blocks = config.kv_bytes // (shape.bytes_per_token * config.block_size)
    if num_blocks < 1:
        raise ConfigError(
            f"runtime.kv_bytes={config.kv_bytes} holds no KV block of this model "
            f"({shape.bytes_per_token * config.block_size} bytes); raise it"
        )
    try:
        device = DeviceStore(shape, num_blocks, config.block_size, decoder.device)
    except (MemoryError, RuntimeError, TypeError) as error:  # PyTorch raises the last two
        raise ConfigError(
            f"runtime.kv_bytes={config.kv_bytes} is more memory than {decoder.device} has free; lower it"
        ) from error
    return BlockPool(num_blocks, config.block_size), device


def kv_shape(decoder: CausalModel) -> KVShape:
    """Shape of one token's KV."""
    spec = decoder.spec
    return KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, decoder.dtype)


def build_cache(  # noqa: PLR0913  the parts, once
    pool: BlockPool,
    device: DeviceStore,
    config: ReuseConfig,
    *,
    fingerprint: bytes,
    profile: CostProfile | None,
    folder: Path | None,
    clock: Clock,
    inv_freq_LP: torch.Tensor | None = None,
    prepare: PrepareConfig | None = None,
) -> KVCache:
    """Build the cache, with the KV that is on disk.

    Args:
        fingerprint: of the model.
        profile: None disables reuse.
        folder: for KV on disk; None stores none.
        inv_freq_LP: of the decoder; needed for reuse at any position.
        prepare: budgets of prepared KV; None takes the defaults.
    """
    if not config.keeps_kv or profile is None:
        return KVCache(KVCacheManager(pool), device)
    fingerprint = kv_fingerprint(fingerprint)
    writers = config.disk_writers or 1
    disk = open_disk(folder, fingerprint, writers) if folder is not None and config.disk_bytes else None
    if disk is not None and folder is not None and disk.is_writer:
        others = shrink_other_models(folder, fingerprint, config.disk_bytes // 2, writers)
        config = replace(config, disk_bytes=max(0, config.disk_bytes - others))
    if config.preload == "layers":
        device.preload_layers()
    host = HostStore(device.k_LSGD.device)
    shared = open_tier(config, fingerprint, clock, is_pinned=host.is_pinned)
    tiers = TieredStore(device, host, disk, clock, inv_freq_LP, config.prefetch_bytes, shared)
    if config.allows_any_position:
        device.compile_placing()
    if config.mode == "prepared" and (prepare or PrepareConfig()).bits != FULL_BITS and device.is_on_host:
        compile_kernels(device.shape.dtype)
    options = tree_options(
        config,
        device.shape.bytes_per_token,
        has_disk=disk is not None,
        is_disk_read_only=disk is not None and not disk.is_writer,
        prepare=prepare,
        narrow_size=device.shape.num_bytes,
    )
    tree = KnowledgeTree(pool, tiers, profile, options, clock.monotonic, None if shared is None else tiers)
    if disk is not None:
        for key in tree.restore(record for record, _ in disk.records()):
            disk.remove(key)
    return KVCache(KVCacheManager(pool, reuse_of(tree, config, fingerprint)), device, tiers)


def tree_options(
    config: ReuseConfig,
    bytes_per_token: int,
    *,
    has_disk: bool = True,
    is_disk_read_only: bool = False,
    prepare: PrepareConfig | None = None,
    narrow_size: Callable[[int, int], int] | None = None,
) -> TreeOptions:
    budgets = prepare or PrepareConfig()
    return TreeOptions(
        unused_host_bytes=budgets.host_bytes,
        unused_disk_bytes=budgets.disk_bytes,
        host_bytes=config.host_bytes,
        disk_bytes=config.disk_bytes if has_disk else 0,
        is_disk_read_only=is_disk_read_only,
        bytes_per_token=bytes_per_token,
        prepared_bits=budgets.bits,
        narrow_size=narrow_size,
        size_on_disk=size_on_disk,
        policy=POLICIES[config.policy],
        window_seconds=config.window_s,
        looks_ahead=config.looks_ahead,
        admits_by_frequency=config.admits_by_frequency,
    )


def reuse_of(tree: KnowledgeTree, config: ReuseConfig, fingerprint: bytes) -> Reuse:
    """Reuse options of the manager, as configured."""
    keys = PrefixKeys(fingerprint, config.tail_blocks * tree.pool.block_size)
    anywhere = anywhere_options(config) if config.allows_any_position else None
    sample_every = 0 if anywhere is None or anywhere.only_prepared else mass_sample_every(anywhere)
    return Reuse(tree, keys, config.load == "always", anywhere, sample_every)


def anywhere_options(config: ReuseConfig) -> AnywhereOptions:
    if config.mode == "prepared":
        return AnywhereOptions(0.0, "first", only_prepared=True)
    alpha = config.alpha if config.recompute_budget == "cfo" else None
    return AnywhereOptions(config.recompute_ratio, config.token_selector, alpha, config.focus_window)


def _labelled(counts: Counter[Tier]) -> dict[str, int]:
    return {tier.label: counts[tier] for tier in Tier}


def _tier_readings(state: TierState) -> Readings:
    stats, link, fetched = state.stats, state.link, state.fetched
    return {
        catalogue.TIER_USABLE: float(state.is_usable),
        catalogue.TIER_OPENED: state.num_opened,
        catalogue.TIER_FAILURES: stats.num_failures,
        catalogue.TIER_RECORDS: {
            "found": stats.num_found,
            "read": stats.num_read,
            "missing": stats.num_missing,
            "written": stats.num_written,
            "present": stats.num_present,
            "dropped": stats.num_dropped,
            "refused": stats.num_refused,
            "forgotten": stats.num_forgotten,
        },
        catalogue.TIER_BYTES: {"read": stats.read_bytes, "written": stats.written_bytes},
        catalogue.TIER_FETCHED_BYTES: {"used": fetched.used_bytes, "wasted": fetched.wasted_bytes},
        catalogue.TIER_WAITING: {"write": state.num_queued, "forget": state.num_to_forget},
        catalogue.TIER_LATENCY: 0.0 if link is None else link.latency_seconds,
        catalogue.TIER_SPEED: 0.0 if link is None else link.bytes_per_second,
    }


def _audit_readings(audit: AuditStats) -> Readings:
    agreed = audit.num_audited - audit.num_disagreed
    return {
        catalogue.AUDITS: {"agreed": agreed, "differed": audit.num_disagreed},
        catalogue.AUDIT_REFERENCES: {"prompt": audit.num_as_prompt, "documents": audit.num_as_documents},
        catalogue.AUDITS_WITHOUT_DOCUMENTS: audit.num_without_documents,
        catalogue.AUDIT_BOUND: audit.upper_bound,
        catalogue.PLACING_SUSPENDED: float(audit.is_suspended),
        catalogue.RECOMPUTE_RATIO: 1.0 if audit.is_suspended else audit.options.level,
    }

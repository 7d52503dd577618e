"""A KV connector for vLLM: loads exact prefixes of prompts from the shared KV tier and saves them there. An experiment.

vLLM imports this module when its `--kv-transfer-config` names it. It makes one connector in the process that schedules
and one in the process that computes, and calls each from one thread. Use and limits: docs/vllm-connector.md

The scheduling side asks the tier, has records read and verified, and tells vLLM of nothing else; the verified bytes go
to the computing side with the step that needs them. After a request has ended, its blocks are held for one more step,
in which the computing side copies the pieces that are due.
"""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from stillroom.backends.tier_opening import open_tier
from stillroom.backends.vllm.computing_side import ComputingSide
from stillroom.backends.vllm.connector_options import check_supported, read_options
from stillroom.backends.vllm.kv_identity import fingerprint_of
from stillroom.backends.vllm.scheduling_side import SchedulingSide
from stillroom.backends.vllm.step_work import LayoutNote, StepWork
from stillroom.core.clock import SystemClock
from stillroom.errors import ConfigError
from stillroom.kvstore.shared.shared_tier import SharedTier

try:
    from vllm import __version__ as vllm_version
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
except ImportError as error:
    raise ConfigError(
        f"this module is a part of vLLM's process and needs vLLM ({error}); install Stillroom into vLLM's environment, "
        "and name the module in --kv-transfer-config (docs/vllm-connector.md)"
    ) from error

logger = logging.getLogger(__name__)


@dataclass
class Handshake(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types here
    layout: LayoutNote


@dataclass
class Metadata(base.KVConnectorMetadata):  # type: ignore[misc]
    work: StepWork


class StillroomConnector(base.KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """
        Raises:
            ConfigError: an option is invalid, or vLLM's configuration is not supported.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        transfer = vllm_config.kv_transfer_config
        self._options, self._reuse = read_options(transfer.kv_connector_extra_config, os.environ)
        check_supported(vllm_version, vllm_config, kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._clock = SystemClock()
        self._tier: SharedTier | None = None
        self._scheduling: SchedulingSide | None = None
        self._computing: ComputingSide | None = None
        self._held: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache may lose what it should save."""
        return False

    def shutdown(self) -> None:
        """Write what waits, for a limited time, and log what the tier was used for."""
        tier, self._tier, self._scheduling, self._computing = self._tier, None, None, None
        if tier is not None:
            stats, num_rejected = tier.state.stats, sum(tier.state.defects.values())
            tier.close()
            text = "KV tier: %d records read, %d rejected, %d written, %d dropped"
            logger.info(text, stats.num_read, num_rejected, tier.state.stats.num_written, stats.num_dropped)

    # Computing process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Begin, in the computing process.

        Raises:
            ConfigError: the model is no folder, or the KV cache has unexpected blocks.
        """
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        layers = {name: kv_caches[name] for name in names}
        layout = str(self._kv_cache_config.kv_cache_layout)
        fingerprint = fingerprint_of(vllm_version, self._vllm_config, layout, layers)
        tier = self._open(fingerprint)
        self._computing = ComputingSide(layers, self._kv_cache_config.num_blocks, fingerprint, tier)

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._computing is None else Handshake(self._computing.layout)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._computing is not None:
            self._computing.load(self._get_connector_metadata().work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are loaded before the first computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole requests are saved when they have ended."""

    def wait_for_save(self) -> None:
        if self._computing is not None:
            work = self._get_connector_metadata().work
            self._computing.save(work)
            self._held |= work.held

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        held, self._held = self._held, set()
        return held or None, None

    # Scheduling process

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Begin, in the scheduling process, with what the computing process has told."""
        (handshake,) = metadata.values()
        layout, config = handshake.layout, self._kv_transfer_config
        self._scheduling = SchedulingSide(
            self._options,
            self._open(layout.fingerprint),
            layout,
            self._block_size,
            self._clock,
            loads=config.is_kv_consumer,
            saves=config.is_kv_producer,
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduling is None:
            return 0, False
        return self._scheduling.num_matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduling is not None:
            self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        return Metadata(StepWork() if self._scheduling is None else self._scheduling.step())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self._scheduling is not None and self._scheduling.finished(request, block_ids), None

    def reset_cache(self) -> bool:
        """Use the tier no longer: vLLM's users reset caches when they change the weights."""
        logger.warning("vLLM's cache was reset; its KV is neither loaded nor saved until a restart")
        if self._scheduling is not None:
            self._scheduling.stop()
        return True

    def _open(self, fingerprint: bytes) -> SharedTier:
        tier = self._tier = open_tier(self._reuse, fingerprint, self._clock, is_pinned=False)
        assert tier is not None, "the options name a tier"
        return tier


def _log_as_vllm() -> None:
    """Let messages of Stillroom's modules appear among those of vLLM."""
    own = logging.getLogger("stillroom")
    own.handlers, own.propagate = logging.getLogger("vllm").handlers, False
    own.setLevel(logging.INFO)

"""Metrics of engines and servers in other processes, for the backends that send requests to them."""

from collections.abc import Mapping
from typing import Protocol

from stillroom.cluster.front_engine import EngineCounts
from stillroom.cluster.front_engines import engine_name
from stillroom.cluster.wire_state import EngineState
from stillroom.core.kv import Tier
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings


class RequestCounts(Protocol):
    """Requests of one engine or server."""

    @property
    def num_sent(self) -> int: ...

    @property
    def num_broken(self) -> int: ...

    @property
    def num_refused(self) -> int: ...


def engine_readings(counts: Mapping[str, RequestCounts], alive: Mapping[str, bool]) -> Readings:
    """Return the metrics of engines by address: their requests, and whether they get any now."""
    return {
        catalogue.ENGINES_ALIVE: {(address, engine_name(address)): is_alive for address, is_alive in alive.items()},
        catalogue.ENGINE_STREAMS: {address: one.num_sent for address, one in counts.items()},
        catalogue.ENGINE_BROKEN: {address: one.num_broken for address, one in counts.items()},
        catalogue.ENGINE_REFUSED: {address: one.num_refused for address, one in counts.items()},
    }


def cluster_readings(counts: Mapping[str, EngineCounts], states: Mapping[str, EngineState]) -> Readings:
    """Return what a front knows of its engines beyond `engine_readings`, by address: what it counts, and their last
    reports."""
    blocks = {
        (address, state): number
        for address, one in states.items()
        for state, number in (("free", one.num_free_blocks), ("used", one.num_blocks - one.num_free_blocks))
    }
    kept = {
        (address, tier.label): float(one.kept_bytes.get(tier, 0)) for address, one in states.items() for tier in Tier
    }
    return {
        catalogue.ENGINE_LOSSES: {address: one.num_losses for address, one in counts.items()},
        catalogue.ENGINE_RUNS: {address: one.num_runs for address, one in counts.items()},
        catalogue.ENGINE_PREDICTED: {address: one.predicted_seconds for address, one in counts.items()},
        catalogue.ENGINE_FIRST_TOKEN: {address: one.first_token_seconds for address, one in counts.items()},
        catalogue.ENGINE_FIRST_TOKENS: {address: one.num_predicted for address, one in counts.items()},
        catalogue.ENGINE_PROMPT_TOKENS: {address: one.num_prompt_tokens for address, one in counts.items()},
        catalogue.ENGINE_CACHED_TOKENS: {address: one.num_reused_tokens for address, one in counts.items()},
        catalogue.ENGINE_OUTSTANDING: {address: one.num_outstanding for address, one in states.items()},
        catalogue.ENGINE_QUEUE: {address: one.queue_seconds for address, one in states.items()},
        catalogue.ENGINE_BLOCKS: blocks,
        catalogue.ENGINE_KEPT_BYTES: kept,
    }

"""Metrics of engines and servers in other processes, for the backends that send requests to them."""

from collections.abc import Mapping
from typing import Protocol

from stillroom.cluster.front_engines import engine_name
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

"""How metrics are shown: the Prometheus text format, from what was counted here and what others count by themselves."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the Prometheus text format."""

Series = Mapping[Any, float]
"""Values by their labels."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the reference."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds in seconds, of histograms."""


class Watched(Collector):
    """What somebody counts by himself, asked for whenever somebody looks."""

    def __init__(self, series: Callable[[], Iterable[tuple[MetricSpec, Series]]]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        for spec, values in self._series():
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = kind(spec.name.removesuffix("_total"), spec.help, labels=spec.labels)
            for labels, value in values.items():
                family.add_metric((labels,) if isinstance(labels, str) else labels, value)
            yield family


class WithoutCreated:
    """A registry less the `_created` samples, which the library adds to every counter and histogram.

    They would be metrics of ours whose names have no unit; the library's own switch for them is global to the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

"""Chooses one split among several that were simulated under the same requests.

The split with the smallest predicted percentile of the time to first token wins. Among splits within 1 % of it, the one
with the fewest lists on devices wins, then the one with the fewest in RAM, as VectorLiteRAG takes the smallest
sufficient hit rate: that leaves the most memory for KV.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stillroom.errors import PromptTooLongError
from stillroom.planner.forecast import Forecast, Forecaster
from stillroom.planner.splits import Split

_EQUAL = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """A percentile of the time to first token must be at most `seconds`."""

    seconds: float
    percent: float

    def is_met(self, forecast: Forecast) -> bool:
        return forecast.percentile(self.percent) <= self.seconds


@dataclass(frozen=True, slots=True)
class Option:
    """A split and its forecast."""

    split: Split
    forecast: Forecast


def simulate_splits(forecaster: Forecaster, splits: Sequence[Split], step: Callable[[], None]) -> list[Option]:
    """Simulate the splits; those whose device cannot hold the longest prompt are absent."""
    found = []
    for split in splits:
        with suppress(PromptTooLongError):
            found.append(Option(split, forecaster.forecast(split)))
        step()
    return found


def choose(options: Sequence[Option], percent: float) -> Option:
    """Apply the rule of the module."""
    least = min(option.forecast.percentile(percent) for option in options)
    equal = [option for option in options if option.forecast.percentile(percent) <= least * (1 + _EQUAL)]
    return min(equal, key=lambda option: (option.split.device_lists, option.split.host_lists))

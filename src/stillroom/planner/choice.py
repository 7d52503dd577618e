"""Which of several splits is taken.

Every split of a grid is simulated under the same requests. The one with the least predicted percentile of the time to
the first token is chosen: memory that was budgeted for is worth more when it is used. Where others are as good within a
hundredth, the one with the fewest lists on devices is, and of those the one with the fewest in RAM, as VectorLiteRAG
takes the smallest sufficient hit rate: it leaves the most to KV.
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
    """A percentile of the time to the first token that must be at most so many seconds."""

    seconds: float
    percent: float

    def is_met(self, forecast: Forecast) -> bool:
        return forecast.percentile(self.percent) <= self.seconds


@dataclass(frozen=True, slots=True)
class Option:
    """A split, and what it is predicted to give."""

    split: Split
    forecast: Forecast


def simulated(forecaster: Forecaster, splits: Sequence[Split], step: Callable[[], None]) -> list[Option]:
    """Those that leave room on the device for the longest prompt."""
    found = []
    for split in splits:
        with suppress(PromptTooLongError):
            found.append(Option(split, forecaster.forecast(split)))
        step()
    return found


def choose(options: Sequence[Option], percent: float) -> Option:
    """By the rule of the module."""
    least = min(option.forecast.percentile(percent) for option in options)
    equal = [option for option in options if option.forecast.percentile(percent) <= least * (1 + _EQUAL)]
    return min(equal, key=lambda option: (option.split.device_lists, option.split.host_lists))

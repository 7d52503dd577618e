"""Sizes and durations as users write them, and the ranges of numbers that settings allow."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from stillroom.errors import ConfigError

_SIZE_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**exponent
    for exponent, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting takes: `Annotated[int, Range(1, 8)]` beside the field."""

    low: float
    high: float = math.inf
    is_low_open: bool = False
    """Whether `low` itself is excluded."""

    def contains(self, value: float) -> bool:
        """Whether the value is in the range; infinities and NaN never are."""
        is_above = value > self.low if self.is_low_open else value >= self.low
        return math.isfinite(value) and is_above and value <= self.high

    def __str__(self) -> str:
        low = f"{'above' if self.is_low_open else 'at least'} {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and at most {'2^63 - 1' if self.high == 2**63 - 1 else format(self.high, 'g')}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The few numbers that a setting takes: `Annotated[int, OneOf((4, 8, 16))]` beside the field."""

    numbers: tuple[float, ...]
    """At least two, in the order of messages."""

    def contains(self, value: float) -> bool:
        return value in self.numbers

    def __str__(self) -> str:
        *others, last = (f"{number:g}" for number in self.numbers)
        return f"{', '.join(others)} or {last}"


AtLeastZero = Annotated[int, Range(0)]
AboveZero = Annotated[float, Range(0, is_low_open=True)]
Share = Annotated[float, Range(0, 1)]
Int63 = Annotated[int, Range(0, 2**63 - 1)]
UserPath = Annotated[str, "`~` is the user's home folder"]
Addresses = Annotated[str, "addresses, separated by commas; a file may have a list"]


@cache
def ranges_of(section_type: type) -> Mapping[str, Range | OneOf]:
    """Return the numbers that each number of a settings class may be, by field.

    A field without a `Range` or `OneOf` beside it takes whole numbers from 1 or other numbers from 0.
    """
    ranges: dict[str, Range | OneOf] = {}
    for name, annotation in get_type_hints(section_type, include_extras=True).items():
        kind, *extras = get_args(annotation) or (annotation,)
        if kind in (int, float):
            ranges[name] = next(
                (one for one in extras if isinstance(one, Range | OneOf)), Range(1 if kind is int else 0)
            )
    return ranges


def check_ranges(section: str, config: Any) -> None:
    """Raise ConfigError if a number of the section's settings is out of its range."""
    for name, allowed in ranges_of(config.__class__).items():
        value = getattr(config, name)
        if not allowed.contains(value):
            raise ConfigError(f"{section}.{name}={value}; it must be {allowed}")


def parse_size(text: str) -> int:
    """Return the bytes of `512MiB`, `1.5GB`, `1048576`, or `25%` of the machine's memory.

    Raises:
        ValueError: the text is not a size.
    """
    text = text.strip()
    if text.endswith("%"):
        share = float(text[:-1]) / 100
        if not 0 <= share <= 1:
            raise ValueError(text)
        return int(share * memory_bytes())
    number = text.rstrip("KMGTiB").rstrip()
    unit = text[len(number) :].strip() or "B"
    size = float(number) * _SIZE_UNITS.get(unit, math.nan)
    if not math.isfinite(size) or not size.is_integer():
        raise ValueError(text)
    return int(size)


def parse_seconds(text: str) -> float:
    """Return the seconds of `300ms`, `1.5s`, `500us`, `2min` or `1h`.

    Raises:
        ValueError: the text is not a duration above 0 with a unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+|[0-9]+\.)\s*(us|ms|s|min|h)\s*", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise ValueError(text)
    return seconds


def memory_bytes() -> int:
    """Return the memory of the machine, or of its container if that is smaller."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        return min(total, int(limit))
    except (OSError, ValueError):  # no such file, or `max`
        return total

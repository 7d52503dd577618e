"""Sizes and durations as people write them."""

import math
import os
import re
from pathlib import Path

_SIZE_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**exponent
    for exponent, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_size(text: str) -> int:
    """Bytes of `512MiB`, `4GiB`, `1.5GB`, `1048576`, or `25%` of the machine's memory; ValueError if it is none."""
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
    """Seconds of `300ms`, `1.5s`, `500us`, `2min` or `1h`, more than 0; ValueError if it is none: a number without a
    unit could mean either of two."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+|[0-9]+\.)\s*(us|ms|s|min|h)\s*", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise ValueError(text)
    return seconds


def memory_bytes() -> int:
    """Of the machine, or of its container where there is a smaller limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        return min(total, int(limit))
    except (OSError, ValueError):  # no such file, or `max`
        return total

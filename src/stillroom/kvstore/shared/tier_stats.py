"""Counts of a process's use of a shared tier."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a process did with the tier so far."""

    num_lookups: int = 0
    num_found: int = 0
    """Records that lookups found."""
    num_read: int = 0
    """Records that were read and verified."""
    read_bytes: int = 0
    num_missing: int = 0
    """Records that were gone when they were read."""
    num_written: int = 0
    written_bytes: int = 0
    num_present: int = 0
    """Records that another process had written before."""
    num_dropped: int = 0
    """Records that were not written because the queue was full or the tier unusable."""
    num_refused: int = 0
    """Records that the tier had no room for."""
    num_forgotten: int = 0
    """Records that removals deleted."""
    num_failures: int = 0
    """Calls that failed or took too long."""

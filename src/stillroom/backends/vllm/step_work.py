"""What vLLM's scheduling process asks of its computing process in one step. Plain values, which are pickled."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stillroom.core.kv import NodeRecord


@dataclass(frozen=True, slots=True)
class LayoutNote:
    """What the computing process tells the scheduling process once."""

    fingerprint: bytes
    """32 bytes."""
    bytes_per_block: int
    """Of all layers."""


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Verified KV for some blocks, before anything is computed."""

    block_ids: list[int]
    content_BN: NDArray[np.uint8]
    """[num_blocks, bytes_per_block]."""


@dataclass(frozen=True, slots=True)
class PieceSave:
    """A piece whose blocks are to be stored under its record, after everything is computed."""

    record: NodeRecord
    block_ids: list[int]


@dataclass(slots=True)
class StepWork:
    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[PieceSave] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    """Requests that have ended and whose blocks are free after the saves."""

"""Prompts as segments. Each segment is tokenised on its own, so a chunk has the same tokens in every prompt."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from stillroom.core.ids import ChunkId

if TYPE_CHECKING:  # `stillroom --help` loads this module, and takes longer with numpy
    import numpy as np
    from numpy.typing import NDArray


class SegmentKind(StrEnum):
    SYSTEM = "system"
    CHUNK = "chunk"
    QUESTION = "question"
    TURN = "turn"
    """An earlier question of a conversation, and its answer."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens that is reused or computed as a whole. Its KV starts on a fresh block."""

    kind: SegmentKind
    token_ids: tuple[int, ...]
    chunk_id: ChunkId | None = None
    """The chunk of its text; None for other kinds."""

    def __post_init__(self) -> None:
        assert self.token_ids, f"an empty {self.kind} segment; leave it out of the prompt"


@dataclass(frozen=True)
class SegmentedPrompt:
    """A prompt: system, chunk 1..k, question. In a conversation each earlier turn comes before: its chunks, then a turn
    with question and answer."""

    segments: tuple[Segment, ...]

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens; the position of a token is its index."""
        return tuple(self._tokens())

    @cached_property
    def array(self) -> "NDArray[np.uint32]":
        """As `token_ids`: [num_tokens], little-endian, read-only. Made once for hashing and for computing."""
        import numpy as np

        return np.frombuffer(struct.pack(f"<{self.num_tokens}I", *self._tokens()), "<u4")

    @property
    def chunk_ids(self) -> tuple[ChunkId, ...]:
        """Ids of its chunks, in order."""
        return tuple(segment.chunk_id for segment in self.segments if segment.chunk_id is not None)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return tuple(len(segment.token_ids) for segment in self.segments)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def _tokens(self) -> Iterator[int]:
        return chain.from_iterable(segment.token_ids for segment in self.segments)

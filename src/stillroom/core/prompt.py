"""Prompts as segments. Each segment is tokenised on its own, so a chunk has the same tokens in every prompt."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from stillroom.core.ids import ChunkId


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
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def chunk_ids(self) -> tuple[ChunkId, ...]:
        """Ids of its chunks, in order."""
        return tuple(segment.chunk_id for segment in self.segments if segment.chunk_id is not None)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

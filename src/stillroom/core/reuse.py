"""How much of a prompt's KV was kept, where it came from, and why the rest was not: plain values for reports."""

from dataclasses import dataclass, replace
from enum import StrEnum

from stillroom.core.ids import ChunkId
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentKind


class Reason(StrEnum):
    """Why a segment's KV came from where it came from."""

    HIT = "hit"
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    """It was kept once, and had to make room."""
    ORDER_DIFFERS = "order differs"
    """Its text is kept, but after other text: exact reuse needs the same text before it."""
    RECORD_FAILED = "record failed"
    """A stored copy was damaged or gone."""
    CHEAPER = "cheaper to recompute"
    """Loading it would have taken longer, as measured on this machine."""
    SHARED = "computed by another sample"
    """Several answers to one question: only the first one's prompt is computed."""
    TAIL = "always computed"
    """The end of a prompt: its last token must be computed, and short ends are not kept."""
    OFF = "reuse is off"


@dataclass(frozen=True, slots=True)
class SegmentReuse:
    """One segment of a prompt, or the kept and the computed part of a long last one."""

    kind: SegmentKind
    chunk_id: ChunkId | None
    num_tokens: int
    source: Tier | None
    """None: computed."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """A prompt as it was admitted."""

    segments: tuple[SegmentReuse, ...]
    load_seconds: float
    """What loading was expected to take, by the cost model."""
    saved_seconds: float
    """What was saved by the cost model: computing everything, less loading and computing the rest."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was not computed."""
        return sum(segment.num_tokens for segment in self.segments if segment.source is not None)

    def num_tokens_from(self, tier: Tier) -> int:
        return sum(segment.num_tokens for segment in self.segments if segment.source is tier)

    def shared(self) -> "PromptReuse":
        """The same for another sample of the same prompt, which computes none of it."""
        shared = [
            segment if segment.source is not None else replace(segment, source=Tier.DEVICE, reason=Reason.SHARED)
            for segment in self.segments
        ]
        return PromptReuse(tuple(shared), 0.0, 0.0)

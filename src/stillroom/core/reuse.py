"""How much of a prompt's KV was kept, where it came from, and why the rest was not: plain values for reports."""

from collections.abc import Sequence
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
    ANYWHERE = "placed"
    """It was kept from another place: its keys were turned to this one, and some of its tokens computed again."""
    SHARED = "computed by another sample"
    """Several answers to one question: only the first one's prompt is computed."""
    TAIL = "always computed"
    """The end of a prompt: its last token must be computed, and short ends are not kept."""
    OFF = "reuse is off"


@dataclass(frozen=True, slots=True)
class Variant:
    """The copy that a chunk was placed from, and what was expected of it (Cache-Craft 3.1, 3.2)."""

    behind: tuple[ChunkId | None, ...]
    """The chunks that stood before it when it was computed; None for one of which nothing is kept any more."""
    first_position: int
    """Where it stood."""
    overlap: float
    """beta': share of its attention to those chunks that goes to chunks which stand before it now, in [0, 1]."""
    impact: float | None
    """CCI: how much of it is owed to those chunks, from 0.5 (nothing) to 1; None if nobody measured it."""
    overhead: float
    """CFO: share of its tokens to compute again by these."""
    saved_seconds: float
    """What placing was expected to save: computing it, less loading and the share that is computed again."""
    is_focused: bool | None = None
    """Whether the question looks at it; None if nobody asked."""


@dataclass(frozen=True, slots=True)
class SegmentReuse:
    """One segment of a prompt, or the kept and the computed part of a long last one."""

    kind: SegmentKind
    chunk_id: ChunkId | None
    num_tokens: int
    source: Tier | None
    """None: computed."""
    reason: Reason
    num_recomputed: int = 0
    """Of the tokens of a placed chunk: computed again to repair it."""
    variant: Variant | None = None
    """Of a placed chunk."""


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """A prompt as it was admitted."""

    segments: tuple[SegmentReuse, ...]
    load_seconds: float
    """What loading was expected to take, by the cost model."""
    saved_seconds: float
    """What was saved by the cost model: computing everything, less loading and computing the rest."""
    recompute_ratio: float = 0.0
    """Share of the placed tokens that was to be computed again; 0 where nothing was placed."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was not computed."""
        return sum(one.num_tokens - one.num_recomputed for one in self.segments if one.source is not None)

    @property
    def has_placed(self) -> bool:
        """Whether KV of another place was used: the answer may differ from that of a full prefill."""
        return any(segment.reason is Reason.ANYWHERE for segment in self.segments)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens of placed chunks that were computed again."""
        return sum(segment.num_recomputed for segment in self.segments)

    def repaired(self, num_chosen: Sequence[int], is_focused: Sequence[bool | None]) -> "PromptReuse":
        """With what was computed again of each placed chunk, in order, and whether the question looks at it."""
        results = iter(zip(num_chosen, is_focused, strict=True))
        segments = []
        for segment in self.segments:
            if segment.variant is not None:
                num_recomputed, focused = next(results)
                variant = replace(segment.variant, is_focused=focused)
                segment = replace(segment, num_recomputed=num_recomputed, variant=variant)
            segments.append(segment)
        return replace(self, segments=tuple(segments))

    def num_tokens_from(self, tier: Tier) -> int:
        """Of the cached ones."""
        return sum(one.num_tokens - one.num_recomputed for one in self.segments if one.source is tier)

    def shared(self) -> "PromptReuse":
        """The same for another sample of the same prompt, which computes none of it."""
        shared = [
            segment if segment.source is not None else replace(segment, source=Tier.DEVICE, reason=Reason.SHARED)
            for segment in self.segments
        ]
        return PromptReuse(tuple(shared), 0.0, 0.0)

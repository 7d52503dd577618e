"""Reuse reports: which KV of a prompt was reused, from which tier, and why the rest was computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from stillroom.core.ids import ChunkId
from stillroom.core.kv import FULL_BITS, Tier
from stillroom.core.prompt import SegmentKind


class Reason(StrEnum):
    """Why a segment's KV was reused or computed."""

    HIT = "hit"
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    """Its KV was kept and then evicted."""
    ORDER_DIFFERS = "order differs"
    """Its KV is kept after other text; exact reuse needs the same text before it."""
    RECORD_FAILED = "record failed"
    """A stored copy was damaged or missing."""
    CHEAPER = "cheaper to recompute"
    """Loading would take longer, by the cost model of this machine."""
    ANYWHERE = "placed"
    """Reused from another position: its keys were rotated, and some of its tokens recomputed."""
    PREPARED = "prepared"
    """Reused from its document's context: it was computed behind the chunks before it in its document. No token is
    recomputed."""
    SUSPENDED = "suspended by audits"
    """Prepared KV of it is kept, and answers use none since too many audited answers differed."""
    SHARED = "computed by another sample"
    """Samples of one request share the prompt of the first."""
    TAIL = "always computed"
    """End of a prompt: the last token must be computed, and short ends are not kept."""
    OFF = "reuse is off"


class Variant(NamedTuple):
    """The copy that a chunk was placed from, with its expected costs (Cache-Craft 3.1, 3.2)."""

    behind: tuple[ChunkId | None, ...]
    """Chunks before it when it was computed; None for a chunk without kept KV."""
    first_position: int
    """Its position when it was computed."""
    overlap: float
    """beta': share of its attention to those chunks that goes to chunks before it now, in [0, 1]."""
    impact: float | None
    """CCI: how much of it depends on those chunks, from 0.5 (nothing) to 1; None if not measured."""
    overhead: float
    """CFO: resulting share of its tokens to recompute."""
    saved_seconds: float
    """Expected saving: computing it, minus loading and recomputing that share."""
    is_focused: bool | None = None
    """Whether the question attends to it; None if not measured."""
    bits: int = FULL_BITS
    """Of each of its numbers where it was read (`NodeRecord.bits`)."""


class SegmentReuse(NamedTuple):
    """One segment of a prompt, or the reused or the computed part of a long last one."""

    kind: SegmentKind
    chunk_id: ChunkId | None
    num_tokens: int
    source: Tier | None
    """None: computed."""
    reason: Reason
    num_recomputed: int = 0
    """Tokens of a placed chunk that were recomputed."""
    variant: Variant | None = None
    """For a placed chunk."""


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """Reuse of a prompt at its admission."""

    segments: tuple[SegmentReuse, ...]
    load_seconds: float
    """Expected time of loading, by the cost model."""
    saved_seconds: float
    """Expected saving: computing everything, minus loading and computing the rest."""
    recompute_ratio: float = 0.0
    """Share of the placed tokens to recompute; 0 if nothing was placed."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was not computed."""
        return sum(one.num_tokens - one.num_recomputed for one in self.segments if one.source is not None)

    @property
    def has_placed(self) -> bool:
        """Whether KV of another context was used, so that the answer may differ from a full prefill's."""
        return any(segment.reason in (Reason.ANYWHERE, Reason.PREPARED) for segment in self.segments)

    @property
    def num_recomputed_tokens(self) -> int:
        """Recomputed tokens of placed chunks."""
        return sum(segment.num_recomputed for segment in self.segments)

    def repaired(self, num_chosen: Sequence[int], is_focused: Sequence[bool | None]) -> "PromptReuse":
        """Return a copy with the recomputed tokens of each placed chunk, in order, and whether the question attends to
        it."""
        if not any(num_chosen) and all(focused is None for focused in is_focused):
            return self
        results = iter(zip(num_chosen, is_focused, strict=True))
        segments = []
        for segment in self.segments:
            if segment.variant is not None:
                num_recomputed, focused = next(results)
                variant = segment.variant._replace(is_focused=focused)
                segment = segment._replace(num_recomputed=num_recomputed, variant=variant)
            segments.append(segment)
        return replace(self, segments=tuple(segments))

    def num_tokens_from(self, tier: Tier) -> int:
        """Return the cached prompt tokens from this tier."""
        return sum(one.num_tokens - one.num_recomputed for one in self.segments if one.source is tier)

    def shared(self) -> "PromptReuse":
        """Return the report of another sample of the same prompt, which computes none of it."""
        shared = [
            segment if segment.source is not None else segment._replace(source=Tier.DEVICE, reason=Reason.SHARED)
            for segment in self.segments
        ]
        return PromptReuse(tuple(shared), 0.0, 0.0)

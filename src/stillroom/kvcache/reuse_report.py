"""Reports where the KV of each part of an admitted prompt comes from, and why the rest is computed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stillroom.core.kv import FULL_BITS, Tier
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.reuse import PromptReuse, Reason, SegmentReuse, Variant
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.stats import KVCacheStats
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece

Source = tuple[Tier | None, Reason]
"""Where a piece's KV comes from (None: computed), and why."""
_HIT, _PLACED = Reason.HIT, (Reason.ANYWHERE, Reason.PREPARED)


class Placed(NamedTuple):
    """A piece that took its KV from another context."""

    tier: Tier
    reason: Reason
    """`ANYWHERE` or `PREPARED`."""
    variant: Variant
    share: float
    """Of its tokens that is recomputed."""


class AdmissionReuse(NamedTuple):
    """Kept KV of a prompt when it was admitted."""

    matched: Sequence[Node]
    tiers: list[Tier | None]
    """The fastest tier of each of them then."""
    num_planned: int
    """How many of them were worth using."""
    num_tokens: int
    placed: Mapping[int, Placed]
    """Pieces that took their KV from another position, by index."""

    def bits(self, index: int) -> int:
        """Return the bits of each number in the copy of the prompt's `index`-th piece."""
        return self.placed[index].variant.bits if index in self.placed else FULL_BITS

    def sources(self, lease: Lease, tree: KnowledgeTree) -> list[Source]:
        """Return where the KV of each piece of the prompt comes from, and why."""
        num_hits = lease.num_committed
        hits: list[Source] = [(tier, _HIT) for tier in self.tiers[:num_hits]]
        return hits + [self.source(index, lease, tree) for index in range(num_hits, len(lease.pieces))]

    def source(self, index: int, lease: Lease, tree: KnowledgeTree) -> Source:
        """As `sources`, of a piece that is no hit."""
        if index in self.placed:
            return self.placed[index].tier, self.placed[index].reason
        if index < self.num_planned:
            return None, Reason.RECORD_FAILED
        if index < len(self.matched):
            return None, Reason.CHEAPER
        piece = lease.pieces[index]
        if tree.has_failed(piece):
            return None, Reason.RECORD_FAILED
        if tree.was_evicted(piece):
            return None, Reason.EVICTED
        variants = tree.variants(piece.content)
        if not lease.may_place and any(node.document_path for node in variants):
            return None, Reason.SUSPENDED
        return None, Reason.ORDER_DIFFERS if variants else Reason.NEVER_SEEN


class AdmissionReport(NamedTuple):
    """An admission as users and counters see it."""

    reuse: PromptReuse
    sources: Sequence[Source]
    """Of each piece."""
    cost_per_token: float
    """Seconds per computed token of the prompt, by the cost model (RAGCache Eq. 3)."""


def report_admission(tree: KnowledgeTree, lease: Lease, found: AdmissionReuse) -> AdmissionReport:
    """Describe where the KV of an admitted prompt comes from and what that saves. Changes nothing."""
    num_cached, ratio = sum(node.num_tokens for node in lease.nodes), 0.0
    if found.placed:
        num_placed = sum(lease.pieces[index].num_tokens for index in found.placed)
        num_recomputed = sum(origin.share * lease.pieces[index].num_tokens for index, origin in found.placed.items())
        ratio = num_recomputed / num_placed
        num_cached += int((1.0 - ratio) * num_placed)
    num_new = found.num_tokens - num_cached
    compute = tree.profile.prefill_seconds(num_cached, num_new)
    sources, loads = found.sources(lease, tree), 0.0
    for index, (tier, _) in enumerate(sources):
        if tier:  # neither computed nor on the device
            num_bytes = tree.options.num_bytes(lease.pieces[index].num_tokens, found.bits(index))
            loads += tree.profile.load_seconds(tier, num_bytes)
    saved = tree.profile.prefill_seconds(0, found.num_tokens) - compute - loads
    segments = segments_of(lease.prompt, lease.pieces, sources, found.placed)
    return AdmissionReport(PromptReuse(segments, loads, saved, ratio), sources, compute / num_new)


def count_sources(
    stats: KVCacheStats, pieces: Sequence[Piece], sources: Sequence[Source], placed: Mapping[int, Placed]
) -> None:
    """Add the hits, misses and placements of a prompt's pieces to the statistics."""
    for index, (piece, (tier, reason)) in enumerate(zip(pieces, sources, strict=True)):
        if index in placed:
            stats.placed_tokens += piece.num_tokens
            stats.prepared_tokens += piece.num_tokens if reason is Reason.PREPARED else 0
            variant = placed[index].variant
            stats.placed_overlap += variant.overlap
            stats.placed_overhead += variant.overhead
            continue
        if tier is not None:
            stats.hits[tier] += 1
            stats.hit_tokens[tier] += piece.num_tokens
            continue
        stats.misses += 1
        stats.missed_tokens += piece.num_tokens
        stats.cheaper += reason == Reason.CHEAPER


def segments_of(
    prompt: SegmentedPrompt, pieces: Sequence[Piece], sources: Sequence[Source], placed: Mapping[int, Placed]
) -> tuple[SegmentReuse, ...]:
    """Sum up the sources of pieces by segment; a last segment that is kept in part appears once for each source."""
    variants = {pieces[index].segment: origin.variant for index, origin in placed.items()}
    lengths: dict[tuple[int, Source], int] = {}
    for piece, source in zip(pieces, sources, strict=True):
        part = (piece.segment, source)
        lengths[part] = lengths.get(part, 0) + piece.num_tokens
    rest = prompt.num_tokens - sum(lengths.values())
    if rest > 0:
        lengths[len(prompt.segments) - 1, (None, Reason.TAIL)] = rest  # pieces cover all but the end
    report = []
    for (index, (tier, reason)), num_tokens in lengths.items():
        segment = prompt.segments[index]
        variant = variants.get(index) if reason in _PLACED else None
        report.append(SegmentReuse(segment.kind, segment.chunk_id, num_tokens, tier, reason, variant=variant))
    return tuple(report)


def nothing_reused(prompt: SegmentedPrompt) -> PromptReuse:
    """The report of a prompt while reuse is off."""
    return PromptReuse(
        tuple(
            SegmentReuse(segment.kind, segment.chunk_id, len(segment.token_ids), None, Reason.OFF)
            for segment in prompt.segments
        ),
        0.0,
        0.0,
    )

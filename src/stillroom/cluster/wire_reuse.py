"""The reuse report of a prompt as JSON: every field of `PromptReuse`, so that a front reports what its engine did."""

from typing import Any

from stillroom.cluster.wire_reading import Fields, chunk_id, count, flag, items, number, one_of, seconds, text
from stillroom.core.ids import ChunkId, format_chunk_id
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentKind
from stillroom.core.reuse import PromptReuse, Reason, SegmentReuse, Variant
from stillroom.errors import WireError


def reuse_to_json(reuse: PromptReuse) -> dict[str, Any]:
    return {
        "segments": [_segment_to_json(segment) for segment in reuse.segments],
        "load_seconds": reuse.load_seconds,
        "saved_seconds": reuse.saved_seconds,
        "recompute_ratio": reuse.recompute_ratio,
    }


def read_reuse(value: Any, where: str) -> PromptReuse:
    fields = Fields(value, where)
    found = PromptReuse(
        segments=fields.read("segments", items(_read_segment)),
        load_seconds=fields.read("load_seconds", number),
        saved_seconds=fields.read("saved_seconds", number),
        recompute_ratio=fields.read("recompute_ratio", seconds),
    )
    fields.close()
    return found


def tier_of(value: Any, where: str) -> Tier:
    """Read the label of a tier."""
    found = {tier.label: tier for tier in Tier}.get(text(value, where))
    if found is None:
        raise WireError(f"{where} is {value!r}; it must be one of {', '.join(tier.label for tier in Tier)}")
    return found


def _segment_to_json(segment: SegmentReuse) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": segment.kind.value,
        "num_tokens": segment.num_tokens,
        "reason": segment.reason.value,
    }
    if segment.chunk_id is not None:
        found["chunk"] = format_chunk_id(segment.chunk_id)
    if segment.source is not None:
        found["source"] = segment.source.label
    if segment.num_recomputed:
        found["num_recomputed"] = segment.num_recomputed
    if segment.variant is not None:
        found["variant"] = _variant_to_json(segment.variant)
    return found


def _read_segment(value: Any, where: str) -> SegmentReuse:
    fields = Fields(value, where)
    found = SegmentReuse(
        kind=fields.read("kind", one_of(SegmentKind)),
        chunk_id=fields.read_or("chunk", chunk_id, None),
        num_tokens=fields.read("num_tokens", count),
        source=fields.read_or("source", tier_of, None),
        reason=fields.read("reason", one_of(Reason)),
        num_recomputed=fields.read_or("num_recomputed", count, 0),
        variant=fields.read_or("variant", _read_variant, None),
    )
    fields.close()
    return found


def _variant_to_json(variant: Variant) -> dict[str, Any]:
    return {
        "behind": [None if one is None else format_chunk_id(one) for one in variant.behind],
        "first_position": variant.first_position,
        "overlap": variant.overlap,
        "impact": variant.impact,
        "overhead": variant.overhead,
        "saved_seconds": variant.saved_seconds,
        "is_focused": variant.is_focused,
        "bits": variant.bits,
    }


def _read_variant(value: Any, where: str) -> Variant:
    fields = Fields(value, where)
    found = Variant(
        behind=fields.read("behind", items(_chunk_or_none)),
        first_position=fields.read("first_position", count),
        overlap=fields.read("overlap", number),
        impact=fields.read_or("impact", number, None),
        overhead=fields.read("overhead", number),
        saved_seconds=fields.read("saved_seconds", number),
        is_focused=fields.read_or("is_focused", flag, None),
        bits=fields.read("bits", count),
    )
    fields.close()
    return found


def _chunk_or_none(value: Any, where: str) -> ChunkId | None:
    return None if value is None else chunk_id(value, where)

"""Rebuilds the nodes of the knowledge tree from the records of a disk when the process starts."""

import math
from collections.abc import Iterable

from stillroom.core.kv import NO_CONTENT, NodeKey, NodeRecord, Tier
from stillroom.kvcache.tree.chunk_scores import ContextMass
from stillroom.kvcache.tree.node_index import NodeIndex
from stillroom.kvcache.tree.provenance import Context
from stillroom.kvcache.tree.tier_state import TierState

_UNKNOWN_BEFORE = (NO_CONTENT,)
"""Stands for the unknown chunks before a detached node; matches no prompt."""


def restore_nodes(
    records: Iterable[NodeRecord], nodes: NodeIndex, tiers: TierState, *, half_lives: float, now: float
) -> list[NodeKey]:
    """Add a node with a disk copy for each record whose place in the tree is known.

    Args:
        half_lives: of uses until now, for heat.

    Returns:
        The keys of the other records.
    """
    orphans = []
    for record in sorted(records, key=lambda record: record.first_position):
        if nodes.get(record.key) is not None or not _has_place(record, nodes):
            orphans.append(record.key)
            continue
        mass = None if not record.notes else ContextMass.from_bytes(record.notes)
        before = _UNKNOWN_BEFORE if mass is None else mass.prefix
        node = nodes.attach(
            record.key,
            record.parent,
            content=record.content,
            first_position=record.first_position,
            num_tokens=record.num_tokens,
            chunk_id=record.chunk_id,
            owner=record.owner,
            context=_context(record, before) if _is_detached(record) else None,
            bits=record.bits,
        )
        node.mass = mass
        node.frequency.add(now, record.frequency)
        node.heat = half_lives + math.log2(max(record.frequency, 1.0)) if record.is_used else -math.inf
        node.avg_cost, node.num_computed = record.avg_cost, 1
        tiers.add_copy(node, Tier.DISK)
    return orphans


def _context(record: NodeRecord, before: tuple[bytes, ...]) -> Context:
    return Context(before, frozenset(record.seen), document_path=record.seen if record.is_in_document else ())


def _has_place(record: NodeRecord, nodes: NodeIndex) -> bool:
    if _is_detached(record):
        return record.chunk_id in record.seen  # of unknown provenance otherwise
    if record.parent == record.key:
        return True
    parent = nodes.get(record.parent)
    return parent is not None and parent.first_position + parent.num_tokens == record.first_position


def _is_detached(record: NodeRecord) -> bool:
    """Whether it is a node without parent that is no beginning of prompts."""
    return record.parent == record.key and (record.first_position > 0 or record.is_in_document)

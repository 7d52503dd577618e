"""Gives a sequence its KV when it is admitted: the kept path of its prompt, chunks placed behind it, and fresh blocks.

Planning changes nothing. `try_admit` moves blocks; `_record` then counts the uses that the decision implies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from stillroom.core.ids import BlockId
from stillroom.core.kv import Tier
from stillroom.core.reuse import Reason
from stillroom.kvcache.apply_placements import describe, place, plan_for, record_recompute
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.blocks.block_table import num_blocks_for, runs_after
from stillroom.kvcache.chunk_reuse.attention_sampling import AttentionMassSampler
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions, Placement
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.prepared import prepared_path
from stillroom.kvcache.reuse_report import AdmissionReuse, Placed, count_sources, report_admission
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import PrefixKeys


@dataclass(frozen=True, slots=True)
class Reuse:
    """The tree and the options of reuse; without them every prompt is computed."""

    tree: KnowledgeTree
    keys: PrefixKeys
    always_loads: bool = False
    """Load kept KV even where computing is faster."""
    anywhere: AnywhereOptions | None = None
    """How chunks behind the exact prefix take their KV from other positions; None: they do not."""
    mass_sample_every: int = 0
    """Measure how the chunks of prompts attend to each other on every n-th token; 0: do not."""


class AdmissionPlan(NamedTuple):
    """Kept KV to reuse for one prompt."""

    matched: Sequence[Node]
    """The longest kept path that the prompt begins with."""
    path: Sequence[Node]
    """The part of it that is worth using."""
    placements: Sequence[Placement]
    """Chunks behind the path that are worth placing."""


def plan_admission(reuse: Reuse, lease: Lease, num_tokens: int) -> AdmissionPlan:
    """Choose what to use of the path that a lease's prompt begins with, and what to place behind it.

    Args:
        num_tokens: of prompt and answer so far.
    """
    tree = reuse.tree
    is_in_document = lease.prepares and reuse.anywhere is not None and reuse.anywhere.only_prepared
    matched = prepared_path(tree, lease) if is_in_document else tree.match(lease.pieces[: lease.most_exact])
    bytes_per_token = tree.options.bytes_per_token
    end = plan_reuse(matched, num_tokens, tree.profile, bytes_per_token, always_loads=reuse.always_loads)
    placements = plan_for(tree, lease, end, num_tokens, reuse.anywhere, always_loads=reuse.always_loads)
    return AdmissionPlan(matched, matched[:end], placements)


def plan_reuse(
    path: Sequence[Node], num_tokens: int, profile: CostProfile, bytes_per_token: int, *, always_loads: bool = False
) -> int:
    """Return how many nodes of a path to use; the rest of the prompt is computed.

    Chooses the cut of the path that ends prefill soonest by measured cost; of equally fast cuts the longest. Nodes on
    the device are always used.

    Args:
        path: a path of the tree that the prompt begins with.
        num_tokens: of the prompt.
        always_loads: use the whole path.
    """
    if always_loads or not path or path[-1].block_ids is not None:  # no node is on a faster tier than its parent
        return len(path)
    on_device = list(takewhile(lambda node: node.block_ids is not None, path))
    num_cached, loads = sum(node.num_tokens for node in on_device), 0.0
    best, least = len(on_device), profile.prefill_seconds(num_cached, num_tokens - num_cached)
    for num_nodes, node in enumerate(path[len(on_device) :], start=len(on_device) + 1):
        assert node.tier is not None
        num_cached += node.num_tokens
        loads += profile.load_seconds(node.tier, node.num_tokens * bytes_per_token)
        seconds = loads + profile.prefill_seconds(num_cached, num_tokens - num_cached)
        if seconds <= least:
            best, least = num_nodes, seconds
    return best


def prefetch(tree: KnowledgeTree, lease: Lease, plan: AdmissionPlan) -> None:
    """Start reading the planned nodes that are on disk only."""
    if tree.num_nodes(Tier.DISK):
        nodes = [*plan.path, *(placement.node for placement in plan.placements)]
        tree.prefetch([node for node in nodes if node.key not in lease.prefetched], lease.prefetched)


def try_admit(reuse: Reuse, lease: Lease, segment_lengths: Sequence[int]) -> int | None:
    """Fill an empty lease: kept KV as far as it reaches, fresh blocks for the rest.

    After an exception the caller releases the lease.

    Args:
        segment_lengths: of the prompt; the last one includes the tokens generated so far.

    Returns:
        The number of tokens that need not be computed; None, and the lease is empty, if there is no room.
    """
    tree, num_tokens = reuse.tree, sum(segment_lengths)
    plan = plan_admission(reuse, lease, num_tokens)
    tiers = [node.tier for node in plan.matched]
    fresh = [node.num_tokens for node in plan.path if node.block_ids is None]
    fresh += runs_after(sum(node.num_tokens for node in plan.path), segment_lengths)
    num_blocks = num_blocks_for(fresh, tree.pool.block_size)
    tree.acquire(plan.path)
    lease.nodes = list(plan.path)
    sources = [node for placement in plan.placements for node in _path_to(placement.node)]
    tree.acquire(sources)  # so that they are neither evicted for their own copies nor counted as idle
    if sources and not tree.has_room(num_blocks):
        tree.release(reversed(sources))
        sources, plan = [], AdmissionPlan(plan.matched, plan.path, [])
    try:
        prefetch(tree, lease, plan)  # the next node is read while a node is copied
        if not tree.make_room(num_blocks):
            _shorten(tree, lease, 0)
            return None
        _shorten(tree, lease, len(list(takewhile(tree.load, plan.path))))
        num_cached = _fill(tree, lease, segment_lengths)
        if reuse.mass_sample_every:  # a prompt that was preempted is measured again
            lease.mass_sampler = AttentionMassSampler.of(lease.pieces, lease.prompt.num_tokens, reuse.mass_sample_every)
        placed = place(tree, lease, plan.placements, reuse.anywhere)
    finally:
        tree.release(reversed(sources))
    if lease.reuse is None or lease.reuse.has_placed:  # after a preemption the chunks placed last are recomputed
        origins = _origins(tree, lease, placed, reuse.anywhere)
        _record(tree, lease, AdmissionReuse(plan.matched, tiers, len(plan.path), num_tokens, origins))
    if lease.recompute is not None and lease.recompute.is_planned:
        record_recompute(tree, lease)
    return num_cached


def try_take(pool: BlockPool, tree: KnowledgeTree | None, num_blocks: int) -> list[BlockId] | None:
    """Take free blocks, evicting kept KV if needed; None, and nothing is taken, if too few can be had."""
    if tree is not None and not tree.make_room(num_blocks):
        return None
    return pool.try_allocate(num_blocks)


def _shorten(tree: KnowledgeTree, lease: Lease, num_nodes: int) -> None:
    """Keep only the first nodes of the lease."""
    tree.release(reversed(lease.nodes[num_nodes:]))
    lease.nodes = lease.nodes[:num_nodes]
    lease.num_committed = num_nodes


def _fill(tree: KnowledgeTree, lease: Lease, segment_lengths: Sequence[int]) -> int:
    """Append the blocks of the lease's nodes and fresh ones behind them; return the tokens of the nodes.

    Precondition: there is room.
    """
    kept = [block_id for node in lease.nodes for block_id in node.block_ids or ()]
    tree.pool.acquire(kept)
    kept_lengths = [node.num_tokens for node in lease.nodes]
    num_cached = sum(kept_lengths)
    run_lengths = runs_after(num_cached, segment_lengths)
    fresh = try_take(tree.pool, tree, num_blocks_for(run_lengths, tree.pool.block_size))
    assert fresh is not None, "room was made for all of it, and a load that fails gives its blocks back"
    lease.table.append_segments([*kept, *fresh], [*kept_lengths, *run_lengths])
    return num_cached


def _path_to(node: Node) -> list[Node]:
    """The node and its ancestors, which are not evicted before it; from the top."""
    return [node, *node.ancestors()][::-1]


def _origins(
    tree: KnowledgeTree, lease: Lease, placed: Sequence[Placement], options: AnywhereOptions | None
) -> dict[int, Placed]:
    """Where the KV of each placed piece came from, by the index of the piece."""
    origins = {}
    for placement in placed:
        assert options is not None
        share = options.share(placement.reusability)
        reason = Reason.PREPARED if placement.node.document_path else Reason.ANYWHERE
        origins[placement.piece_index] = Placed(
            placement.tier, reason, describe(tree, lease, placement, options), share
        )
    return origins


def _record(tree: KnowledgeTree, lease: Lease, found: AdmissionReuse) -> None:
    """Put the report on the lease, and count the uses of nodes (RAGCache Algorithm 1) and the hits and misses of
    pieces. Preparing is no use."""
    report = report_admission(tree, lease, found)
    lease.cost_per_token = report.cost_per_token
    lease.reuse = report.reuse
    if lease.prepares:
        return
    for index, node in enumerate(found.matched):
        if tree.get(node.key) is node:
            tree.touch(node, report.cost_per_token if index >= lease.num_committed else None)
    count_sources(tree.stats, lease.pieces, report.sources, found.placed)

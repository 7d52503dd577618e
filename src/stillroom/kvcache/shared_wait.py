"""What a waiting sequence does to get KV from the shared tier: ask for it, read it, and wait for that, not too long.

The engine's thread asks and looks whether replies have come; other threads talk to the tier. A sequence asks only where
the cost profile says that loading could pay, and waits at most as long as computing its prompt would take, so a tier
that is slow or gone costs a bounded time, and nothing once its circuit breaker is open.
"""

from collections.abc import Sequence
from itertools import takewhile

from stillroom.core.kv import Tier
from stillroom.kvcache.lease import Lease, SharedWait
from stillroom.kvcache.lease_admission import Reuse, plan_reuse
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece


def begin(reuse: Reuse, lease: Lease) -> None:
    """Ask the tier for the pieces of a prompt that this process does not keep, if loading them could pay."""
    tree = reuse.tree
    if tree.shared is None or lease.prepares or lease.shared_wait is not None or not tree.update_link():
        return
    kept = _kept(tree, lease)
    pieces = lease.pieces[: lease.most_exact][len(kept) :]
    num_cached, num_tokens = sum(node.num_tokens for node in kept), lease.prompt.num_tokens
    if not pieces or not (reuse.always_loads or _may_pay(tree, pieces, num_cached, num_tokens)):
        return
    lookup = tree.shared.kv.look_up(pieces[0].owner, [(piece.key, piece.chunk_id) for piece in pieces])
    if lookup is not None:
        seconds = tree.profile.prefill_seconds(num_cached, num_tokens - num_cached)
        seconds = tree.shared.kv.timeout_seconds if reuse.always_loads else seconds
        lease.shared_wait = SharedWait(lookup, pieces, tree.now() + seconds)


def is_waiting(reuse: Reuse, lease: Lease) -> bool:
    """Whether a sequence shall wait for the tier before it is admitted. Starts to read what the tier holds."""
    wait, tree = lease.shared_wait, reuse.tree
    if wait is None or wait.has_ended:
        return False
    assert tree.shared is not None
    if wait.attached is None and wait.lookup.num_found is not None:
        _fetch(reuse, lease, wait, wait.lookup.num_found)
    is_complete = wait.attached is not None and all(map(tree.shared.kv.is_fetched, wait.fetched))
    wait.has_ended = is_complete or tree.now() >= wait.until
    return not wait.has_ended


def end(tree: KnowledgeTree, lease: Lease) -> None:
    """Drop what was read for a sequence that was admitted or ended, and what is known of the tier for it."""
    wait, lease.shared_wait = lease.shared_wait, None
    if wait is None:
        return
    assert tree.shared is not None
    for key in wait.fetched:
        tree.shared.kv.cancel_fetch(key)
    tree.shared.detach(reversed(wait.attached or []))


def _kept(tree: KnowledgeTree, lease: Lease) -> list[Node]:
    """The path of a prompt that this process keeps itself."""
    path = tree.match(lease.pieces[: lease.most_exact])
    return list(takewhile(lambda node: node.tier is not Tier.NETWORK, path))


def _fetch(reuse: Reuse, lease: Lease, wait: SharedWait, num_found: int) -> None:
    """Start to read those of the pieces that the tier holds whose loading pays."""
    tree = reuse.tree
    assert tree.shared is not None
    nodes = tree.shared.attach(wait.pieces[:num_found])
    wait.attached = [node.key for node in nodes]
    kept = _kept(tree, lease)
    if not nodes or [node.key for node in kept] != [piece.key for piece in lease.pieces[: len(kept)]]:
        return
    bytes_per_token, num_tokens = tree.options.bytes_per_token, lease.prompt.num_tokens
    path = [*kept, *nodes]
    end = plan_reuse(path, num_tokens, tree.profile, bytes_per_token, always_loads=reuse.always_loads)
    for node in path[len(kept) : end]:
        if not tree.shared.kv.fetch(node.key, node.num_tokens):
            return
        wait.fetched.append(node.key)


def _may_pay(tree: KnowledgeTree, pieces: Sequence[Piece], num_cached: int, num_tokens: int) -> bool:
    """Whether loading some of these pieces from the tier and computing the rest is faster than computing all."""
    profile: CostProfile = tree.profile
    loads, computed = 0.0, profile.prefill_seconds(num_cached, num_tokens - num_cached)
    for piece in pieces:
        num_cached += piece.num_tokens
        loads += profile.load_seconds(Tier.NETWORK, tree.options.num_bytes(piece.num_tokens))
        if loads + profile.prefill_seconds(num_cached, num_tokens - num_cached) < computed:
            return True
    return False

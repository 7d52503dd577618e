"""Policies: a hand-made trace, Belady's rule beside every possible way to evict, and the report."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stillroom.core.kv import NodeKey
from stillroom.errors import UsageError
from stillroom.kvcache.tree.eviction import gdsf, lfu, lru, pgdsf, prefix_heat, tamm
from stillroom_bench.experiments.options import PoliciesScope
from stillroom_bench.experiments.policies import ARMS, BELADY, DEFAULT, losses, run_policies
from stillroom_bench.loads.policy_replay import Capacity, PolicyOutcome, Setup, replay
from stillroom_bench.loads.retrieved_traces import QUESTION_TOKENS
from stillroom_bench.loads.reuse_workloads import (
    MMLU_LIKE,
    SYSTEM_TOKENS,
    Ask,
    ReuseWorkload,
    document_ask,
    made_workload,
    retrieved_workload,
    trace_workload,
    zipf_exponent,
)

SIZE = 32
"""Tokens per document here, and per block: the question takes one block, the system prompt two."""
BESIDE = (SYSTEM_TOKENS + QUESTION_TOKENS) // SIZE


def workload(*requests: str) -> ReuseWorkload:
    """Each letter is a document."""
    asks = tuple(document_ask([(letter, SIZE) for letter in request]) for request in requests)
    return ReuseWorkload("by hand", asks, block_size=SIZE)


def hits(requests: ReuseWorkload, num_documents: int, setup: Setup) -> list[int]:
    """Documents found, by request, where `num_documents` fit beside the system prompt and a question."""
    share = (num_documents + BESIDE) / requests.num_distinct_blocks
    return [tokens // SIZE for tokens in replay(requests, Capacity(share), setup).hits]


def test_what_each_policy_keeps_of_a_trace_made_by_hand() -> None:
    """Room for two of four documents. A comes four times, then B and C once each, then A again, D, C, A."""
    trace = workload(*"AAAABCADCA")
    warm = [0, 1, 1, 1, 0, 0]
    assert hits(trace, 2, Setup(policy=lru)) == [*warm, 0, 0, 0, 0], "B and C drove A out, D drove C out, C drove A out"
    assert hits(trace, 2, Setup(policy=lfu)) == [*warm, 1, 0, 0, 1], "A was used most"
    assert hits(trace, 2, Setup(policy=prefix_heat)) == [*warm, 1, 0, 0, 1]
    assert hits(trace, 2, Setup(policy=None)) == [*warm, 1, 0, 1, 0], "Belady gives up A for D: C comes before it"
    assert sum(hits(trace, 2, Setup(policy=lru, queue=3))) == 5, "three that wait are as good as the whole future here"


def test_documents_count_only_after_the_same_documents() -> None:
    assert hits(workload("AB", "AB", "BA", "AC"), 9, Setup()) == [0, 2, 0, 1]


def best_possible(requests: ReuseWorkload, num_documents: int) -> int:
    """The most documents that can be found, over every way to evict: dynamic programming over what is kept."""
    paths = [[piece.key for piece in ask.pieces[1:]] for ask in requests.asks]

    @cache
    def after(number: int, kept: frozenset[bytes]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        found = 0
        while found < len(path) and path[found] in kept:
            found += 1
        needed, others = frozenset(path), kept - frozenset(path)
        subsets = _closed_subsets(others | needed, needed, parents, num_documents)
        return found + max(after(number + 1, subset) for subset in subsets)

    parents: dict[bytes, bytes] = {piece.key: piece.parent for ask in requests.asks for piece in ask.pieces[2:]}
    return after(0, frozenset())


def _closed_subsets(
    nodes: frozenset[bytes], needed: frozenset[bytes], parents: dict[bytes, bytes], limit: int
) -> set[frozenset[bytes]]:
    """Every subset with all that is needed, and each node's parent, of at most `limit` nodes."""
    found: set[frozenset[bytes]] = set()

    def grow(chosen: frozenset[bytes]) -> None:
        if chosen in found or len(chosen) > limit:
            return
        found.add(chosen)
        for node in nodes - chosen:
            if parents.get(node) is None or parents[node] in chosen:
                grow(chosen | {node})

    grow(needed)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_beladys_rule_is_the_optimum_of_pieces_of_one_size(seed: int) -> None:
    randomness = random.Random(seed)
    requests = workload(*("".join(randomness.sample("ABCD", 2)) for _ in range(9)))
    for room in (2, 3, 4):
        ours = sum(hits(requests, room, Setup(policy=None)))
        assert ours == best_possible(requests, room)
        for policy in (prefix_heat, pgdsf, gdsf, lru, lfu, tamm):
            assert sum(hits(requests, room, Setup(policy=policy, queue=3))) <= ours


def test_a_made_workload_is_as_unequal_as_asked_and_repeats() -> None:
    one, again = (made_workload(MMLU_LIKE, 2, num_asks=3000, num_documents=200, seed=1) for _ in range(2))
    assert one.asks == again.asks
    assert one.asks != made_workload(MMLU_LIKE, 2, num_asks=3000, num_documents=200, seed=2).asks
    firsts = [ask.pieces[1].content for ask in one.asks]
    popular = sorted((firsts.count(content) for content in set(firsts)), reverse=True)
    assert sum(popular[:6]) / 3000 == pytest.approx(0.6, abs=0.03)
    assert all(len({piece.content for piece in ask.pieces}) == 3 for ask in one.asks), "no document twice"
    assert zipf_exponent(100, 0.03) == pytest.approx(0.0, abs=1e-6)


def test_replaying_twice_gives_the_same() -> None:
    requests = made_workload(MMLU_LIKE, 3, num_asks=200, num_documents=50)
    for setup in ARMS.values():
        one, again = (replay(requests, Capacity(0.1, 0.1, 0.1), setup) for _ in range(2))
        assert one.hits == again.hits and one.saved_seconds == again.saved_seconds


def unbounded_hit_rate(requests: ReuseWorkload) -> float:
    """Return the share of document tokens that a cache without limits would have."""
    seen: set[NodeKey] = set()
    hits = 0
    for ask in requests.asks:
        hits += max(0, sum(piece.num_tokens for piece in ask.pieces if piece.key in seen) - ask.free_tokens)
        seen.update(piece.key for piece in ask.pieces)
    return hits / requests.num_document_tokens


def test_with_room_for_everything_every_policy_finds_all_that_can_be_found() -> None:
    requests = made_workload(MMLU_LIKE, 2, num_asks=200, num_documents=50)
    for setup in ARMS.values():
        assert replay(requests, Capacity(1.1), setup).hit_rate == pytest.approx(unbounded_hit_rate(requests))


def test_traces(tmp_path: Path) -> None:
    (tmp_path / "mooncake_x.jsonl").write_text('{"hash_ids": [1, 2, 3]}\n{"hash_ids": [1, 2, 4]}\n{"hash_ids": [5]}\n')
    conversation = trace_workload(tmp_path / "mooncake_x.jsonl", 10)
    assert [ask.num_tokens for ask in conversation.asks] == [3 * 512, 3 * 512], "one block is always computed"
    assert unbounded_hit_rate(conversation) == 0.5
    (tmp_path / "rag_x.json").write_text(json.dumps({"retrieved_docs": [["a b", "c"], ["a b", "d"]]}))
    retrieved = retrieved_workload(tmp_path / "rag_x.json", 2, 10)
    assert unbounded_hit_rate(retrieved) == pytest.approx(3 / 8)
    (tmp_path / "other").write_text("[1]")
    readers: list[Callable[[Path], ReuseWorkload]] = [
        lambda path: trace_workload(path, 9),
        lambda path: retrieved_workload(path, 2, 9),
    ]
    for read in readers:
        with pytest.raises(UsageError, match="is no trace"):
            read(tmp_path / "other")


def test_the_report_says_who_won_and_where_the_default_did_not(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    with pytest.raises(UsageError, match="has no rag_"):
        run_policies(PoliciesScope(tmp_path))
    (tmp_path / "traces" / "rag_x.json").write_text(json.dumps({"retrieved_docs": [["a b", "c"], ["a b", "d"]]}))
    result = run_policies(PoliciesScope(tmp_path, 60, (1,), (0.1, 0.4), 2))
    rows = result.tables["Token hit rate"]
    assert [(row["workload"], row["fits"]) for row in rows][::2] == [
        ("mmlu-like, k=1", "10%"),
        ("nq-like, k=1", "10%"),
        ("rag_x, k=1", "10%"),
    ]
    assert all(set(ARMS) < set(row) for row in rows)
    assert len(result.samples.of(DEFAULT, "token_hit_rate")) == 2
    assert len(result.tables["Three tiers, share of prefill seconds saved, each improvement alone"]) == 3


def test_a_loss_is_told() -> None:
    def outcome(num_hit_tokens: int) -> list[PolicyOutcome]:
        return [PolicyOutcome(100, num_hit_tokens)]

    requests = workload("A")
    cell = dict.fromkeys(ARMS, outcome(40)) | {"lfu": outcome(41), BELADY: outcome(90)}
    assert [row["better"] for row in losses([(requests, 0.1)], [cell])] == ["lfu"]
    assert losses([(requests, 0.1)], [cell | {DEFAULT: outcome(41)}]) == []


def test_an_ask_is_an_ask() -> None:
    ask: Ask = document_ask([("A", 10), ("B", 20)])
    assert ask.segment_lengths == [SYSTEM_TOKENS, 10, 20, QUESTION_TOKENS]

"""Tests `stillroom bench policies`: a hand-made trace, Belady's rule against exhaustive search, and the report."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stillroom.core.kv import NodeKey
from stillroom.errors import UsageError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.eviction import NodeUse, gdsf, lfu, lru, pgdsf, prefix_heat, reusability, tamm
from stillroom_bench.experiments.experiment_options import PoliciesOptions
from stillroom_bench.experiments.policies import ARMS, BELADY, DEFAULT, losses, run_policies
from stillroom_bench.experiments.policy_choice import (
    ANYWHERE_ARMS,
    CHANGES,
    cost_cases,
    gdsf_by_size,
    run_anywhere_policies,
    run_policy_choice,
)
from stillroom_bench.experiments.policy_choice import ARMS as CHOICE_ARMS
from stillroom_bench.experiments.recorded_policies import ARMS as RECORDED_ARMS
from stillroom_bench.experiments.recorded_policies import NUM_SEEN, OF_PAPER, run_recorded_policies
from stillroom_bench.loads.policy_replay import Capacity, FirstIn, PolicyOutcome, Setup, replay
from stillroom_bench.loads.retrieved_traces import QUESTION_TOKENS
from stillroom_bench.loads.reuse_workloads import (
    MMLU_LIKE,
    SYSTEM_TOKENS,
    Ask,
    Lengths,
    ReuseWorkload,
    changing_workload,
    document_ask,
    made_workload,
    retrieved_workload,
    trace_workload,
    windows_of,
    zipf_exponent,
)

SIZE = 32
"""Tokens per document and per block: the question takes one block, the system prompt two."""
NUM_OTHER_BLOCKS = (SYSTEM_TOKENS + QUESTION_TOKENS) // SIZE


def workload(*requests: str) -> ReuseWorkload:
    """Make a workload in which each letter is a document."""
    asks = tuple(document_ask([(letter, SIZE) for letter in request]) for request in requests)
    return ReuseWorkload("by hand", asks, block_size=SIZE)


def hits(requests: ReuseWorkload, num_documents: int, setup: Setup) -> list[int]:
    """Return hits per request with capacity for `num_documents` documents, the system prompt and a question."""
    share = (num_documents + NUM_OTHER_BLOCKS) / requests.num_distinct_blocks
    return [tokens // SIZE for tokens in replay(requests, Capacity(share), setup).hits]


def test_policies_keep_the_expected_documents_of_a_hand_made_trace() -> None:
    """Two of four documents fit. A is requested four times, then B, C, A, D, C, A."""
    trace = workload(*"AAAABCADCA")
    warm = [0, 1, 1, 1, 0, 0]
    assert hits(trace, 2, Setup(policy=lru)) == [*warm, 0, 0, 0, 0], "B and C evict A, D evicts C, C evicts A"
    assert hits(trace, 2, Setup(policy=lfu)) == [*warm, 1, 0, 0, 1], "A was used most"
    assert hits(trace, 2, Setup(policy=prefix_heat)) == [*warm, 1, 0, 0, 1]
    assert hits(trace, 2, Setup(makes_policy=FirstIn)) == [*warm, 0, 0, 0, 0], "C evicts A, which came first"
    assert hits(trace, 2, Setup(policy=None)) == [*warm, 1, 0, 1, 0], (
        "Belady evicts A for D, because C is used before A"
    )
    assert sum(hits(trace, 2, Setup(policy=lru, queue=3))) == 5, "three waiting requests equal full knowledge here"


@pytest.mark.parametrize("seed", range(4))
def test_first_in_first_out_equals_a_queue_of_documents(seed: int) -> None:
    letters = random.Random(seed).choices("ABCDEF", [6, 5, 4, 3, 2, 1], k=60)
    for room in (1, 2, 3, 4):
        queue, expected = list[str](), list[int]()
        for letter in letters:
            expected.append(int(letter in queue))
            queue = queue if letter in queue else [*queue, letter][-room:]
        assert hits(workload(*letters), room, Setup(makes_policy=FirstIn)) == expected


def test_document_is_a_hit_only_behind_the_same_prefix() -> None:
    assert hits(workload("AB", "AB", "BA", "AC"), 9, Setup()) == [0, 2, 0, 1]


def best_possible(requests: ReuseWorkload, num_documents: int) -> int:
    """Return the most hits over every sequence of evictions, by dynamic programming over the cached set."""
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
    """Return every subset of at most `limit` nodes that has the needed nodes and each node's parent."""
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
def test_beladys_rule_is_optimal_for_pieces_of_one_size(seed: int) -> None:
    randomness = random.Random(seed)
    requests = workload(*("".join(randomness.sample("ABCD", 2)) for _ in range(9)))
    for room in (2, 3, 4):
        ours = sum(hits(requests, room, Setup(policy=None)))
        assert ours == best_possible(requests, room)
        for policy in (prefix_heat, pgdsf, gdsf, lru, lfu, tamm):
            assert sum(hits(requests, room, Setup(policy=policy, queue=3))) <= ours


def test_generated_workload_is_reproducible_and_has_the_requested_skew() -> None:
    one, again = (made_workload(MMLU_LIKE, 2, num_asks=3000, num_documents=200, seed=1) for _ in range(2))
    assert one.asks == again.asks
    assert one.asks != made_workload(MMLU_LIKE, 2, num_asks=3000, num_documents=200, seed=2).asks
    firsts = [ask.pieces[1].content for ask in one.asks]
    popular = sorted((firsts.count(content) for content in set(firsts)), reverse=True)
    assert sum(popular[:6]) / 3000 == pytest.approx(0.6, abs=0.03)
    assert all(len({piece.content for piece in ask.pieces}) == 3 for ask in one.asks), "no document twice"
    assert zipf_exponent(100, 0.03) == pytest.approx(0.0, abs=1e-6)


def test_popular_documents_change_at_equal_distances() -> None:
    requests = changing_workload(Lengths(400.5, 0.0), num_changes=2, num_asks=900, num_documents=60, seed=3)
    firsts = [ask.pieces[1].content for ask in requests.asks]
    most_popular = [max(set(part), key=part.count) for part in (firsts[:300], firsts[300:600], firsts[600:])]

    assert len(set(most_popular)) == 3
    assert {piece.num_tokens for ask in requests.asks for piece in ask.pieces[1:]} == {400}
    assert all(len({piece.content for piece in ask.pieces}) == 3 for ask in requests.asks), "no document twice"


def test_reuse_at_any_position_counts_placed_documents_and_recomputed_tokens() -> None:
    """B was computed behind A. Asked for behind C, nothing of its old context is there again, so CFO is the CCI."""
    requests = workload("AB", "AB", "CB")
    anywhere = AnywhereOptions(recompute_ratio=0.0, selector="question", alpha=1.0)

    exact, placed = (replay(requests, Capacity(1.2), Setup(anywhere=one)) for one in (None, anywhere))

    assert exact.hits == [0, 2 * SIZE, 0] and placed.hits == [0, 2 * SIZE, SIZE // 4]
    assert (exact.document_hit_rate, placed.document_hit_rate) == (2 / 6, 3 / 6)


def test_reusability_keeps_what_was_reused_most_with_the_least_recomputed() -> None:
    """Two of three documents fit. A is used twice after it was computed, B is used last."""
    assert hits(workload(*"AAABCA"), 2, Setup(policy=reusability))[-1] == 1
    assert hits(workload(*"AAABCA"), 2, Setup(policy=lru))[-1] == 0


def test_gdsf_with_cost_by_size_ignores_what_a_token_costs() -> None:
    use = NodeUse(NodeKey(b"x" * 32), 40, 1.5, 3.0, 0.2, 0.7, 0.9, 5, 1.0, 1)
    assert gdsf_by_size(use) == gdsf_by_size(use._replace(num_tokens=400, cost_alone=7.0, avg_cost=9.0)) == 4.5


def test_costs_of_a_token_are_equal_or_rise_with_the_prompt() -> None:
    def per_token(name: str, count: int) -> float:
        return cost_cases()[name][1].prefill_seconds(0, count) / count

    equal, paper, long = cost_cases()
    assert per_token(equal, 100) == pytest.approx(per_token(equal, 8000))
    assert per_token(long, 40_000) > 4 * per_token(long, 1000) > 0
    assert per_token(paper, 100) > 2 * per_token(paper, 2000), "a step costs something beside its tokens"


@pytest.mark.slow  # measures every arm
def test_report_of_changing_traffic_has_every_case_and_interval() -> None:
    (rows,) = run_policy_choice(PoliciesOptions(num_asks=120, changing=True, repeat=2)).tables.values()
    (anywhere,) = run_anywhere_policies(PoliciesOptions(num_asks=120, anywhere=True, repeat=2)).tables.values()

    assert len(rows) == len(cost_cases()) * len(CHANGES) * len(CHOICE_ARMS)
    assert len(anywhere) == 4 * len(ANYWHERE_ARMS)
    assert all("[" in row["tokens / pgdsf"] for row in rows if row["policy"] != "pgdsf")


def test_replay_is_deterministic() -> None:
    requests = made_workload(MMLU_LIKE, 3, num_asks=80, num_documents=50)
    for setup in ARMS.values():
        one, again = (replay(requests, Capacity(0.1, 0.1, 0.1), setup) for _ in range(2))
        assert one.hits == again.hits and one.saved_seconds == again.saved_seconds


def unbounded_hit_rate(requests: ReuseWorkload) -> float:
    """Return the hit rate of a cache without limits."""
    seen: set[NodeKey] = set()
    hits = 0
    for ask in requests.asks:
        hits += max(0, sum(piece.num_tokens for piece in ask.pieces if piece.key in seen) - ask.free_tokens)
        seen.update(piece.key for piece in ask.pieces)
    return hits / requests.num_document_tokens


def test_every_policy_reaches_the_unbounded_hit_rate_with_full_capacity() -> None:
    requests = made_workload(MMLU_LIKE, 2, num_asks=200, num_documents=50)
    for setup in ARMS.values():
        assert replay(requests, Capacity(1.1), setup).hit_rate == pytest.approx(unbounded_hit_rate(requests))


def test_traces_are_read_and_other_files_refused(tmp_path: Path) -> None:
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
        with pytest.raises(UsageError, match="is not a trace"):
            read(tmp_path / "other")


@pytest.mark.slow  # measures every arm
def test_report_has_every_workload_and_policy(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    with pytest.raises(UsageError, match="has no rag_"):
        run_policies(PoliciesOptions(tmp_path))
    (tmp_path / "traces" / "rag_x.json").write_text(json.dumps({"retrieved_docs": [["a b", "c"], ["a b", "d"]]}))
    result = run_policies(PoliciesOptions(tmp_path, 60, (1,), (0.1, 0.4), 2))
    rows = result.tables["Token hit rate"]
    assert [(row["workload"], row["fits"]) for row in rows][::2] == [
        ("mmlu-like, k=1", "10%"),
        ("nq-like, k=1", "10%"),
        ("rag_x, k=1", "10%"),
    ]
    assert all(set(ARMS) < set(row) for row in rows)
    assert len(result.samples.of(DEFAULT, "token_hit_rate")) == 2
    assert len(result.tables["Three tiers, share of prefill seconds saved, each improvement alone"]) == 3


def test_windows_are_disjoint_in_order_and_behind_the_first_requests() -> None:
    whole = workload(*"ABCDEFGHIJ")

    assert [one.asks for one in windows_of(whole, 3, 2, first=1)] == [whole.asks[1:3], whole.asks[4:6], whole.asks[7:9]]
    assert [one.asks for one in windows_of(whole, 2, 99)] == [whole.asks[:5], whole.asks[5:]]
    assert windows_of(whole, 3, 2, first=10) == []


def test_recorded_requests_on_which_the_default_was_chosen_are_left_out(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    lines = [json.dumps({"hash_ids": [number % 7, number % 3, 9]}) + "\n" for number in range(NUM_SEEN + 40)]
    options = PoliciesOptions(tmp_path, num_asks=15, repeat=2)
    (traces / "mooncake_short.jsonl").write_text("".join(lines[:NUM_SEEN]))
    with pytest.raises(UsageError, match="more than 1,500"):
        run_recorded_policies(options)
    (traces / "mooncake_long.jsonl").write_text("".join(lines))
    tables = run_recorded_policies(options).tables
    rows, of_paper = tables["Recorded requests"], tables["RAGCache's policies, relative to PGDSF"]

    assert {row["trace"] for row in rows} == {"mooncake_long"} and len(rows) == 2 * len(RECORDED_ARMS)
    assert {(row["windows"], row["requests"]) for row in rows} == {(2, 30)}
    ratios = {row["policy"]: row[f"tokens / {DEFAULT}"] for row in rows if row["fits"] == "20%"}
    assert ratios["lfu + look-ahead"] == "1 [1, 1]" and ratios["lru"] == "-", "LRU finds nothing in a window"
    shares = {(row["fits"], row["policy"]): row["tokens"] for row in rows}
    assert [row["policy"] for row in of_paper[: len(OF_PAPER)]] == list(OF_PAPER)
    assert all(row["tokens"] == shares[row["fits"], row["policy"]] for row in of_paper)
    assert {row["tokens / pgdsf"] for row in of_paper if row["policy"] == "pgdsf"} == {""}
    with pytest.raises(UsageError, match="--data"):
        run_recorded_policies(PoliciesOptions())


def test_losses_list_policies_better_than_the_default() -> None:
    def outcome(num_hit_tokens: int) -> list[PolicyOutcome]:
        return [PolicyOutcome(100, num_hit_tokens)]

    requests = workload("A")
    cell = dict.fromkeys(ARMS, outcome(40)) | {"lfu": outcome(41), BELADY: outcome(90)}
    assert [row["better"] for row in losses([(requests, 0.1)], [cell])] == ["lfu"]
    assert losses([(requests, 0.1)], [cell | {DEFAULT: outcome(41)}]) == []


def test_document_ask_has_system_prompt_documents_and_question() -> None:
    ask: Ask = document_ask([("A", 10), ("B", 20)])
    assert ask.segment_lengths == [SYSTEM_TOKENS, 10, 20, QUESTION_TOKENS]

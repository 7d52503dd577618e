"""`PrefixOrder`: worked examples, invariants, and how many more tokens prompts share."""

import json
from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.backends.document_order import PrefixOrder


def arranged(*sets: str, max_orders: int = 100) -> list[str]:
    """Orders of sets of documents (letters), arranged one after another."""
    order: PrefixOrder[str] = PrefixOrder(max_orders)
    found = []
    for ranked in sets:
        found.append("".join(order.arrange(ranked)))
        order.check_integrity()
    return found


@pytest.mark.parametrize(
    ("sets", "last"),
    [
        (["abc"], "abc"),  # nothing was sent: by rank
        (["abc", "cab"], "abc"),  # the same documents: the same order
        (["abc", "dba"], "abd"),  # a b was sent; c is not wanted, d was not sent
        (["abc", "cbd"], "cbd"),  # nothing began with b or c
        (["abc", "bca", "cba"], "abc"),
        (["abc", "xyz", "axyzbc"], "abcxyz"),  # two beginnings of the same length: the one with the better rank ...
        (["abc", "xyz", "xabcyz"], "xyzabc"),
        (["ab", "xyz", "zxyab"], "xyzab"),  # ... but a longer one goes first
        (["abc", "abd", "dab"], "abd"),
        (["ab", "ac", "cba"], "acb"),
        (["a", "", "ba"], "ab"),
    ],
)
def test_worked_examples(sets: list[str], last: str) -> None:
    assert arranged(*sets)[-1] == last


def test_oldest_orders_are_forgotten() -> None:
    assert arranged("abc", "xyz", "cba", max_orders=1)[-1] == "cba"
    assert arranged("abc", "xyz", "abc", "uvw", "cba", "zyx", max_orders=2)[-2:] == ["abc", "zyx"]


@given(st.lists(st.lists(st.integers(0, 6), unique=True, max_size=5), max_size=30))
def test_order_keeps_all_documents_and_the_longest_sent_beginning(questions: list[list[int]]) -> None:
    order: PrefixOrder[int] = PrefixOrder(1000)
    sent: list[tuple[int, ...]] = []
    for ranked in questions:
        found = order.arrange(ranked)
        assert sorted(found) == sorted(ranked)
        possible = (shared_beginning(choice, sent) for choice in permutations(ranked))
        assert shared_beginning(found, sent) == max(possible, default=0)
        sent.append(found)
    order.check_integrity()


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=5), max_size=30))
def test_orders_are_deterministic(questions: list[list[int]]) -> None:
    first, second = (
        [order.arrange(ranked) for ranked in questions] for order in (PrefixOrder[int](8), PrefixOrder[int](8))
    )

    assert first == second


def shared_beginning(order: Sequence[object], sent: Iterable[Sequence[object]]) -> int:
    """Length of the longest beginning that an earlier order has too."""
    longest = 0
    for other in sent:
        num_shared = 0
        for one, two in zip(order, other, strict=False):
            if one != two:
                break
            num_shared += 1
        longest = max(longest, num_shared)
    return longest


def shared_token_ratio(questions: Sequence[Sequence[str]], *, is_arranged: bool) -> float:
    """Share of the documents' words that are in a beginning that was sent before."""
    order: PrefixOrder[str] = PrefixOrder()
    prefixes: set[tuple[str, ...]] = set()
    num_shared = num_sent = 0
    for ranked in questions:
        documents = order.arrange(ranked) if is_arranged else tuple(ranked)
        for end in range(1, len(documents) + 1):
            num_words = len(documents[end - 1].split())
            num_sent += num_words
            num_shared += num_words if documents[:end] in prefixes else 0
            prefixes.add(documents[:end])
    return num_shared / num_sent


def test_prefix_order_shares_more_on_popular_topics() -> None:
    rng = np.random.default_rng(0)
    questions = []
    for _ in range(400):  # each topic has 8 documents, and a question about it finds 5 of them
        topic = min(int(rng.zipf(1.3)), 50)
        questions.append([f"{topic} {document} text" for document in rng.permutation(8)[:5]])

    by_rank = shared_token_ratio(questions, is_arranged=False)
    by_prefix = shared_token_ratio(questions, is_arranged=True)

    assert by_prefix > by_rank + 0.25


@pytest.mark.shared
@pytest.mark.parametrize(
    ("trace", "by_rank", "by_prefix"),
    [("rag_2wikimultihopqa", 0.009, 0.074), ("rag_musique", 0.095, 0.221), ("rag_nq", 0.007, 0.020)],
)
def test_prefix_order_shares_more_on_real_traces(shared: Path, trace: str, by_rank: float, by_prefix: float) -> None:
    retrieved = json.loads((shared / "data/traces" / f"{trace}.json").read_text())["retrieved_docs"]

    assert shared_token_ratio(retrieved, is_arranged=False) == pytest.approx(by_rank, abs=0.001)
    assert shared_token_ratio(retrieved, is_arranged=True) == pytest.approx(by_prefix, abs=0.001)

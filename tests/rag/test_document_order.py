"""`PrefixOrder`: worked examples, invariants, and how many more tokens prompts share."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.backends.document_order import PrefixOrder
from stillroom.backends.prompt_names import Part, request_of
from stillroom.cluster.server_beliefs import ServerBeliefs


def arranged(*sets: str, max_orders: int = 100) -> list[str]:
    """Orders of sets of documents (letters), arranged one after another."""
    order: PrefixOrder[str] = PrefixOrder(max_orders)
    found = []
    for ranked in sets:
        documents = order.arrange(ranked)
        order.remember(documents)
        found.append("".join(documents))
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
        order.remember(found)
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


class Servers:
    """Servers with unbounded prefix caches, one of which gets each question in an order that suits it."""

    def __init__(self, num_servers: int, *, is_arranged: bool, is_chosen: bool, num_outstanding: int) -> None:
        """
        Args:
            is_chosen: by what was sent before; otherwise each server in turn.
            num_outstanding: questions without an answer at any time. The newer half has no first token yet.
        """
        self.urls = [f"http://{number}/v1" for number in range(num_servers)]
        self.orders: dict[str, PrefixOrder[str]] = {url: PrefixOrder() for url in self.urls}
        self.beliefs = ServerBeliefs(self.urls, max_wait_s=30.0)
        self.is_arranged, self.is_chosen, self.num_outstanding = is_arranged, is_chosen, num_outstanding
        self.outstanding: list[tuple[str, int]] = []

    def send(self, number: int, ranked: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return the server for a question, and the order of its documents."""
        arranged = {url: self.orders[url].arrange(ranked) if self.is_arranged else tuple(ranked) for url in self.urls}
        requests = {
            url: replace(request_of([Part(text, is_chunk=True) for text in order], ""), number=number)
            for url, order in arranged.items()
        }
        url = self.beliefs.choose(requests, 0.0) if self.is_chosen else self.urls[number % len(self.urls)]
        self.orders[url].remember(arranged[url])
        self.beliefs.on_sent(url, requests[url], 0.0)
        self.outstanding.append((url, number))
        if len(self.outstanding) > self.num_outstanding // 2:
            self.beliefs.on_first_token(*self.outstanding[-1 - self.num_outstanding // 2])
        if len(self.outstanding) > self.num_outstanding:
            self.beliefs.on_end(*self.outstanding.pop(0))
        return url, arranged[url]


def shared_token_ratio(
    questions: Sequence[Sequence[str]],
    *,
    is_arranged: bool,
    num_servers: int = 1,
    is_chosen: bool = False,
    num_outstanding: int = 0,
) -> float:
    """Share of the documents' words that are in a beginning that was sent to the same server before."""
    servers = Servers(num_servers, is_arranged=is_arranged, is_chosen=is_chosen, num_outstanding=num_outstanding)
    prefixes: set[tuple[str, ...]] = set()
    num_shared = num_sent = 0
    for number, ranked in enumerate(questions):
        url, documents = servers.send(number, ranked)
        for end in range(1, len(documents) + 1):
            num_words = len(documents[end - 1].split())
            num_sent += num_words
            num_shared += num_words if (url, *documents[:end]) in prefixes else 0
            prefixes.add((url, *documents[:end]))
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


SLOW = pytest.mark.slow
TRACES = {
    "rag_musique": (0.095, 0.221, 0.036, 0.089, 0.224, 0.149),
    "rag_2wikimultihopqa": (0.009, 0.074, 0.002, 0.013, 0.076, 0.039),
    "rag_nq": (0.007, 0.019, 0.003, 0.007, 0.019, 0.010),
}
"""The table of docs/engines.md: one server by rank and by prefix; four servers in turn by rank and by prefix; one of
four chosen, idle and with eight questions under way."""


@pytest.mark.shared
@pytest.mark.parametrize("trace", TRACES)
def test_prefix_order_shares_more_on_real_traces(shared: Path, trace: str) -> None:
    by_rank, by_prefix, *_ = TRACES[trace]
    retrieved = documents_of(shared, trace)

    assert shared_token_ratio(retrieved, is_arranged=False) == pytest.approx(by_rank, abs=0.001)
    assert shared_token_ratio(retrieved, is_arranged=True) == pytest.approx(by_prefix, abs=0.001)


@pytest.mark.shared
@pytest.mark.parametrize("trace", [pytest.param(one, marks=[] if one == "rag_musique" else [SLOW]) for one in TRACES])
def test_chosen_server_has_what_one_server_would_have(shared: Path, trace: str) -> None:
    retrieved = documents_of(shared, trace)
    _, _, turn_by_rank, turn, idle, busy = (pytest.approx(one, abs=0.001) for one in TRACES[trace])

    def shared_by_four(*, is_arranged: bool = True, is_chosen: bool = False, num_outstanding: int = 0) -> float:
        return shared_token_ratio(
            retrieved,
            num_servers=4,
            is_arranged=is_arranged,
            is_chosen=is_chosen,
            num_outstanding=num_outstanding,
        )

    assert shared_by_four(is_arranged=False) == turn_by_rank
    assert shared_by_four() == turn
    assert shared_by_four(is_chosen=True) == idle
    assert shared_by_four(is_chosen=True, num_outstanding=8) == busy


def documents_of(shared: Path, trace: str) -> list[list[str]]:
    found: list[list[str]] = json.loads((shared / "data/traces" / f"{trace}.json").read_text())["retrieved_docs"]
    return found

"""Beliefs about servers without reports: the choice against a brute-force twin, forgetting, and avoiding."""

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.cluster.placing import max_outstanding
from stillroom.cluster.routed_request import RoutedPiece, RoutedRequest
from stillroom.cluster.server_beliefs import FIRST_WAIT_S, NUM_FREE, ServerBeliefs, ServerState

URLS = ("http://a/v1", "http://b/v1", "http://c/v1")
SIZES = (40, 90, 100, 170, 260)
TIE = 0.02
"""`CostRouter.tie_share`."""


def request_of(documents: Sequence[int], number: int) -> RoutedRequest:
    """A prompt of documents; the name of each piece is the path to it."""
    pieces = [
        RoutedPiece(bytes(documents[: place + 1]), bytes([document]), SIZES[document])
        for place, document in enumerate(documents)
    ]
    return RoutedRequest(number, tuple(pieces), 10)


class Front:
    """Sends requests by beliefs, one after another."""

    def __init__(self, num_servers: int = 3, max_names: int = 1000) -> None:
        self.beliefs = ServerBeliefs(URLS[:num_servers], max_wait_s=30.0, max_names=max_names)
        self.num_sent = 0

    def send(self, *documents: int, now: float = 0.0, to: str | None = None) -> tuple[str, int]:
        request = request_of(documents, self.num_sent)
        url = to or self.beliefs.choose(dict.fromkeys(URLS, request), now)
        self.beliefs.on_sent(url, request, now)
        self.num_sent += 1
        return url, request.number

    def answer(self, *documents: int, now: float = 0.0, to: str | None = None) -> str:
        url, number = self.send(*documents, now=now, to=to)
        self.beliefs.on_first_token(url, number)
        self.beliefs.on_end(url, number)
        return url

    def fail(
        self, *documents: int, now: float = 0.0, to: str | None = None, after: float = 0.0, lost: bool = False
    ) -> str:
        url, number = self.send(*documents, now=now, to=to)
        self.beliefs.on_failure(url, number, now, retry_after_s=after, is_lost=lost)
        self.beliefs.on_end(url, number)
        return url

    def state(self, url: str, now: float = 0.0) -> ServerState:
        return next(one for one in self.beliefs.states(now) if one.url == url)


PROMPTS = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)


@settings(max_examples=25)
@given(st.lists(st.tuples(PROMPTS, st.sampled_from(["wait", "answer", "end"])), max_size=NUM_FREE), PROMPTS)
def test_chosen_server_has_the_least_work_by_brute_force(sent: list[tuple[list[int], str]], asked: list[int]) -> None:
    front = Front()
    prompts: dict[str, list[list[int]]] = {url: [] for url in URLS}
    waiting, outstanding = dict.fromkeys(URLS, 0), dict.fromkeys(URLS, 0)

    def computed(documents: list[int], url: str) -> int:
        """Tokens behind the longest beginning that was sent to the server."""
        shared = max((common(documents, other) for other in prompts[url]), default=0)
        return 10 + sum(SIZES[document] for document in documents[shared:])

    for documents, how in sent:
        url, number = front.send(*documents)
        if how == "wait":
            waiting[url] += computed(documents, url)
        else:
            front.beliefs.on_first_token(url, number)
        if how == "end":
            front.beliefs.on_end(url, number)
        outstanding[url] += how != "end"
        prompts[url].append(documents)
    chosen, _ = front.send(*asked)

    assert [one.num_outstanding - (one.url == chosen) for one in front.beliefs.states(0.0)] == list(
        outstanding.values()
    )
    least = min(waiting[url] + computed(asked, url) for url in URLS)
    assert waiting[chosen] + computed(asked, chosen) <= least + TIE * (10 + sum(SIZES[one] for one in asked)) + 1e-6


def common(first: list[int], second: list[int]) -> int:
    return next(
        (n for n, (one, two) in enumerate(zip(first, second, strict=False)) if one != two), min(len(first), len(second))
    )


def test_repeated_questions_go_to_the_same_server_and_sets_are_spread() -> None:
    front = Front()
    first = {start: front.answer(start, 4) for start in range(4)}
    assert len(set(first.values())) > 1
    for start, url in first.items():
        assert front.answer(start, 4, 3 if start != 3 else 2) == url


def test_queue_that_costs_more_than_it_saves_sends_a_question_elsewhere() -> None:
    front = Front()
    home = front.answer(2)
    front.send(3, to=home)  # 180 tokens wait, and 100 would be saved
    assert front.send(2, 0)[0] != home


@settings(max_examples=25)
@given(st.lists(PROMPTS, max_size=30), st.integers(4, 12))
def test_names_are_forgotten_least_recently_sent_first(sent: list[list[int]], most: int) -> None:
    front, expected = Front(1, most), OrderedDict[bytes, None]()
    for documents in sent:
        front.answer(*documents)
        for end in range(len(documents), 0, -1):
            expected[bytes(documents[:end])] = None
            expected.move_to_end(bytes(documents[:end]))
        while len(expected) > most:
            expected.popitem(last=False)
    (belief,) = front.beliefs._beliefs(0.0)
    assert list(belief.held) == list(expected)


def test_failed_server_is_avoided_for_longer_each_time_and_comes_back() -> None:
    front, now = Front(2), 0.0
    home = front.answer(1)
    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert front.fail(1, now=now, to=home) == home
        assert front.answer(1, now=now + wait_s - 0.01) != home
        now += wait_s
        assert front.state(home, now).is_available
    assert front.answer(1, now=now, to=home) == home
    front.fail(1, now=now, to=home)
    assert front.state(home, now + FIRST_WAIT_S).is_available, "an answer ends the row of failures"
    assert (front.state(home).num_sent, front.state(home).num_refused, front.state(home).num_broken) == (11, 9, 0)


def test_retry_after_is_respected_by_all_requests() -> None:
    front = Front(2)
    home = front.fail(1, after=7.0)
    assert front.answer(1, now=6.9) != home
    assert front.state(home, 7.0).is_available
    other = front.fail(2, now=1.0, after=100.0)
    assert other != home
    assert front.beliefs.asked_seconds(1.0) == 6.0
    assert front.answer(3, now=2.0) == home, "all are avoided: the one that is free first"


def test_one_request_tries_a_server_that_failed() -> None:
    front = Front(2)
    home = front.fail(1)
    _, number = front.send(1, now=1.0, to=home)
    assert not front.state(home, 1.0).is_available
    front.beliefs.on_end(home, number)  # cancelled
    assert front.state(home, 1.0).is_available
    _, number = front.send(1, now=1.0, to=home)
    front.beliefs.on_first_token(home, number)
    assert front.state(home, 1.0).is_available


def test_failed_server_is_dead_until_it_answers_a_probe_or_a_request() -> None:
    front = Front(2)
    home = front.fail(1)
    assert front.beliefs.to_probe(0.4) == [] and not front.state(home, 0.4).is_alive
    assert front.beliefs.to_probe(0.5) == [home]
    assert front.state(home, 0.5).is_available and not front.state(home, 0.5).is_alive
    front.beliefs.on_failed_probe(home, 0.5, is_lost=True)
    assert front.beliefs.to_probe(1.4) == [] and not front.state(home, 1.4).is_available
    front.beliefs.on_probed(home, 1.5)
    assert front.state(home, 1.5).is_alive and front.beliefs.to_probe(31.4) == []
    assert front.beliefs.to_probe(31.5) == [home], "only probes reach it"
    front.fail(1, now=2.0, to=home)
    assert not front.state(home, 2.0).is_alive, "it answers probes only"
    assert front.answer(1, now=4.0, to=home) == home
    assert front.state(home, 4.0).is_alive and front.beliefs.to_probe(100.0) == []
    assert (front.state(home).num_sent, front.state(home).num_refused) == (3, 2), "probes are not requests"


def test_requests_that_fail_together_count_as_one_failure() -> None:
    front = Front(2)
    home, _ = front.send(1)
    numbers = [front.send(1, to=home)[1] for _ in range(9)]
    for number in numbers:
        front.beliefs.on_failure(home, number, 0.1, is_lost=False)
        front.beliefs.on_end(home, number)
    assert front.state(home, 0.1 + FIRST_WAIT_S).is_available
    assert front.state(home).num_refused == 9


@pytest.mark.parametrize("is_lost", [True, False])
def test_server_without_connection_holds_nothing_and_a_busy_one_what_it_held(*, is_lost: bool) -> None:
    front = Front(2)
    home = front.answer(1, 2)
    front.fail(1, 3, to=home, lost=is_lost)
    (held,) = (set(one.held) for one in front.beliefs._beliefs(0.0) if one.engine_id == home)
    assert held == (set() if is_lost else {bytes([1]), bytes([1, 2])})


def test_one_server_answers_equal_questions_until_it_is_loaded() -> None:
    """8 are free; then m = 0, 1, 2 loaded ones allow 1, 2, 2 on one of three servers."""
    front, chosen = Front(), []
    for _ in range(NUM_FREE + 3):
        url, number = front.send(1, 2)
        front.beliefs.on_first_token(url, number)
        chosen.append(url)
        beliefs = front.beliefs._beliefs(0.0)
        assert max(one.num_outstanding for one in beliefs) <= max_outstanding(beliefs, 2.0)
    assert len(set(chosen[:-1])) == 1 and chosen[-1] != chosen[0]
    assert not front.beliefs.may_take(chosen[0], 0.0) and front.beliefs.may_take(chosen[-1], 0.0)

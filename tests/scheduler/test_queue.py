"""Order of the waiting queue, compared with a reference that scans all requests."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.kvcache.blocks.block_table import BlockTable
from stillroom.kvcache.lease import Lease
from stillroom.scheduler.policy import POLICIES, AdmissionCandidate, Policy, cache_first, first_come, shortest_first
from stillroom.scheduler.queue import WaitingQueue
from stillroom.scheduler.sequence import Sequence, Status
from tests.examples import most_examples

NAMES = (b"key", b"content")


def sequence(arrival: int, tenant: str = "", priority: int = 0) -> Sequence:
    prompt = SegmentedPrompt((Segment(SegmentKind.QUESTION, (1,) * 10),))
    request = Request(
        request_id=RequestId(f"r{arrival}"),
        prompt=prompt,
        sampling=SamplingParams(max_tokens=1),
        cache_salt=tenant,
        priority=priority,
    )
    return Sequence(request, Lease(prompt, BlockTable(4, 11)), arrival)


@dataclass
class QueueFixture:
    """A queue, and the number of cached tokens of each request."""

    policy: Policy
    window: int = 1000
    cached: dict[RequestId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = WaitingQueue(self.policy, self.candidate, self.window)

    def candidate(self, one: Sequence) -> AdmissionCandidate:
        num_cached = self.cached.get(one.request_id, 0)
        return AdmissionCandidate(one.arrival, num_cached, 10 - num_cached)

    def push(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.queue.push(one)

    def drain(self) -> list[int]:
        order = []
        while (one := self.queue.first()) is not None:
            self.queue.admit(one)
            order.append(one.arrival)
        return order


def test_each_policy_orders_as_documented() -> None:
    candidate = AdmissionCandidate(arrival=3, num_cached=6, num_to_compute=4)
    assert (first_come(candidate), shortest_first(candidate), cache_first(candidate)) == (3.0, 4.0, -1.5)
    assert set(POLICIES) == {"first_come", "shortest_first", "cache_first"}
    cached = {RequestId("r1"): 2, RequestId("r2"): 7, RequestId("r3"): 5}
    for policy, order in ((first_come, [0, 1, 2, 3]), (shortest_first, [2, 3, 1, 0]), (cache_first, [2, 3, 1, 0])):
        fixture = QueueFixture(policy, cached=cached)
        fixture.push(*map(sequence, range(4)))
        assert fixture.drain() == order


def test_ties_are_admitted_in_order_of_arrival() -> None:
    fixture = QueueFixture(cache_first)
    fixture.push(*map(sequence, range(5)))
    assert fixture.drain() == [0, 1, 2, 3, 4]


def test_reorder_applies_changes_of_kept_kv() -> None:
    fixture = QueueFixture(cache_first)
    one, two = sequence(0), sequence(1)
    two.lease.watched = NAMES
    fixture.push(one, two)
    assert fixture.queue.first() is one
    fixture.cached[two.request_id] = 8
    fixture.queue.reorder({b"another node"})
    assert fixture.queue.first() is one
    for name in NAMES:
        fixture.queue.reorder({name})
        assert fixture.queue.first() is two
        fixture.cached[two.request_id] = 0
        fixture.queue.reorder({name})
        assert fixture.queue.first() is one
        fixture.cached[two.request_id] = 8
    assert fixture.queue.remove(two.request_id) is two and fixture.queue.remove(two.request_id) is None
    fixture.queue.reorder(set(NAMES))
    assert len(fixture.queue) == 1 and list(fixture.queue) == [one]


def test_window_bounds_how_often_a_request_is_overtaken() -> None:
    fixture = QueueFixture(cache_first, window=3)
    fixture.push(sequence(0))
    order = []
    for arrival in range(1, 12):
        late = sequence(arrival)
        fixture.cached[late.request_id] = 9
        fixture.push(late)
        one = fixture.queue.first()
        assert one is not None
        fixture.queue.admit(one)
        order.append(one.arrival)
    assert order[:5] == [1, 2, 3, 0, 4]
    strict = QueueFixture(cache_first, window=0, cached={RequestId("r2"): 9})
    strict.push(*map(sequence, range(4)))
    assert strict.drain() == [0, 1, 2, 3]


def test_resubmitted_request_id_has_its_second_arrival() -> None:
    fixture = QueueFixture(cache_first, window=0)
    again = sequence(5)
    again.request = sequence(0).request
    fixture.push(sequence(0), sequence(3))
    fixture.queue.remove(again.request_id)
    fixture.push(again)
    assert fixture.queue.oldest.arrival == 3 and fixture.drain() == [3, 5]


def test_preempted_requests_are_first_oldest_first() -> None:
    fixture = QueueFixture(cache_first, cached={RequestId("r5"): 9})
    preempted = [sequence(3), sequence(1)]
    for one in preempted:
        one.status = Status.PREEMPTED
    fixture.push(sequence(5, priority=-7), *preempted)
    assert fixture.drain() == [1, 3, 5]


def test_lower_priority_number_is_admitted_first() -> None:
    fixture = QueueFixture(first_come)
    fixture.push(sequence(0, priority=2), sequence(1), sequence(2, priority=-1), sequence(3))
    assert fixture.drain() == [2, 1, 3, 0]


def test_tenants_take_turns() -> None:
    fixture = QueueFixture(first_come)
    fixture.push(*(sequence(arrival, "many") for arrival in range(4)), sequence(4, "few"), sequence(5, "few"))
    assert fixture.drain() == [0, 4, 1, 5, 2, 3]


def test_priority_orders_requests_of_one_tenant_only() -> None:
    fixture = QueueFixture(first_come)
    fixture.push(*(sequence(arrival, "pushy", priority=-arrival) for arrival in range(4)), sequence(4, "modest"))
    assert fixture.drain() == [3, 4, 2, 1, 0]


def test_idle_tenant_accumulates_no_turns() -> None:
    fixture = QueueFixture(first_come)
    fixture.push(*(sequence(arrival, "busy") for arrival in range(8)))
    for _ in range(4):
        one = fixture.queue.first()
        assert one is not None
        fixture.queue.admit(one)
    fixture.push(*(sequence(arrival, "late") for arrival in range(8, 12)))
    assert fixture.drain() == [4, 8, 5, 9, 6, 10, 7, 11]


class ReferenceQueue:
    """The same rules over a list."""

    def __init__(self, fixture: QueueFixture) -> None:
        self.fixture = fixture
        self.waiting: list[Sequence] = []
        self.overtaken: dict[RequestId, int] = {}
        self.served: dict[str, float] = {}

    def push(self, one: Sequence) -> None:
        new = [other.request.cache_salt for other in self.waiting if not has_run(other)]
        if not has_run(one) and one.request.cache_salt not in new:
            least = min((self.served[tenant] for tenant in new), default=0.0)
            self.served[one.request.cache_salt] = max(self.served.get(one.request.cache_salt, 0.0), least)
        self.waiting.append(one)
        self.overtaken[one.request_id] = 0

    def first(self) -> set[RequestId]:
        """Return all requests that may be next; ties are not broken."""
        oldest = min(self.waiting, key=lambda one: one.arrival)
        if self.overtaken[oldest.request_id] >= self.fixture.window:
            return {oldest.request_id}
        if any(map(has_run, self.waiting)):
            return {min(filter(has_run, self.waiting), key=lambda one: one.arrival).request_id}
        least = min(self.served[one.request.cache_salt] for one in self.waiting)
        chosen: set[RequestId] = set()
        for tenant in {one.request.cache_salt for one in self.waiting if self.served[one.request.cache_salt] == least}:
            of_tenant = [one for one in self.waiting if one.request.cache_salt == tenant]
            best = min(map(self.key, of_tenant))
            chosen |= {one.request_id for one in of_tenant if self.key(one) == best}
        return chosen

    def key(self, one: Sequence) -> tuple[int, float]:
        return one.request.priority, self.fixture.policy(self.fixture.candidate(one))

    def admit(self, one: Sequence) -> None:
        self.remove(one)
        if not has_run(one):
            self.served[one.request.cache_salt] += one.num_to_compute
        for other in self.waiting:
            self.overtaken[other.request_id] += other.arrival < one.arrival
        if not self.waiting:
            self.served.clear()

    def remove(self, one: Sequence) -> None:
        self.waiting.remove(one)


def has_run(one: Sequence) -> bool:
    return one.status is Status.PREEMPTED


@settings(max_examples=most_examples(200))
@given(st.integers(0, 10_000), st.sampled_from(sorted(POLICIES)), st.sampled_from([0, 1, 3, 1000]))
def test_queue_agrees_with_a_reference_that_scans_all_requests(seed: int, policy: str, window: int) -> None:
    draw = random.Random(seed)
    fixture = QueueFixture(POLICIES[policy], window)
    reference, running = ReferenceQueue(fixture), list[Sequence]()
    for arrival in range(40):
        one = sequence(arrival, draw.choice("ab"), draw.choice((0, 0, 0, 1)))
        one.lease.watched = (bytes([arrival]), bytes([arrival, 1]))
        fixture.cached[one.request_id] = draw.randint(0, 9)
        fixture.push(one)
        reference.push(one)
        for other in draw.sample(reference.waiting, min(2, len(reference.waiting))):
            fixture.cached[other.request_id] = draw.randint(0, 9)
            fixture.queue.reorder({draw.choice(other.lease.watched)})
        if draw.random() < 0.1 and reference.waiting:
            gone = draw.choice(reference.waiting)
            assert fixture.queue.remove(gone.request_id) is gone
            reference.remove(gone)
        if draw.random() < 0.1 and running:
            back = running.pop(draw.randrange(len(running)))
            back.status = Status.PREEMPTED
            fixture.push(back)
            reference.push(back)
        while reference.waiting and draw.random() < 0.5:
            chosen = fixture.queue.first()
            assert chosen is not None and chosen.request_id in reference.first()
            fixture.queue.admit(chosen)
            reference.admit(chosen)
            chosen.status = Status.RUNNING
            running.append(chosen)
        assert len(fixture.queue) == len(reference.waiting)

"""Who is next, against a twin that decides by looking at everybody."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.kvcache.blocks.table import BlockTable
from stillroom.kvcache.lease import Lease
from stillroom.scheduler.policy import POLICIES, AdmissionCandidate, Policy, cache_first, first_come, shortest_first
from stillroom.scheduler.queue import WaitingQueue
from stillroom.scheduler.sequence import Sequence, Status

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
class World:
    """What is cached of whom, and a queue."""

    policy: Policy
    window: int = 1000
    cached: dict[RequestId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = WaitingQueue(self.policy, self.outlook, self.window)

    def outlook(self, one: Sequence) -> AdmissionCandidate:
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


def test_the_three_orders() -> None:
    outlook = AdmissionCandidate(arrival=3, num_cached=6, num_to_compute=4)
    assert (first_come(outlook), shortest_first(outlook), cache_first(outlook)) == (3.0, 4.0, -1.5)
    assert set(POLICIES) == {"first_come", "shortest_first", "cache_first"}
    cached = {RequestId("r1"): 2, RequestId("r2"): 7, RequestId("r3"): 5}
    for policy, order in ((first_come, [0, 1, 2, 3]), (shortest_first, [2, 3, 1, 0]), (cache_first, [2, 3, 1, 0])):
        world = World(policy, cached=cached)
        world.push(*map(sequence, range(4)))
        assert world.drain() == order


def test_equals_go_in_order_of_arrival() -> None:
    world = World(cache_first)
    world.push(*map(sequence, range(5)))
    assert world.drain() == [0, 1, 2, 3, 4]


def test_the_order_follows_what_is_kept() -> None:
    world = World(cache_first)
    one, two = sequence(0), sequence(1)
    two.lease.watched = NAMES
    world.push(one, two)
    assert world.queue.first() is one
    world.cached[two.request_id] = 8
    world.queue.reorder({b"somebody else"})
    assert world.queue.first() is one
    for name in NAMES:
        world.queue.reorder({name})
        assert world.queue.first() is two
        world.cached[two.request_id] = 0
        world.queue.reorder({name})
        assert world.queue.first() is one
        world.cached[two.request_id] = 8
    assert world.queue.remove(two.request_id) is two and world.queue.remove(two.request_id) is None
    world.queue.reorder(set(NAMES))
    assert len(world.queue) == 1 and list(world.queue) == [one]


def test_nobody_is_overtaken_more_often_than_the_window_says() -> None:
    world = World(cache_first, window=3)
    world.push(sequence(0))
    order = []
    for arrival in range(1, 12):
        late = sequence(arrival)
        world.cached[late.request_id] = 9
        world.push(late)
        one = world.queue.first()
        assert one is not None
        world.queue.admit(one)
        order.append(one.arrival)
    assert order[:5] == [1, 2, 3, 0, 4]
    strict = World(cache_first, window=0, cached={RequestId("r2"): 9})
    strict.push(*map(sequence, range(4)))
    assert strict.drain() == [0, 1, 2, 3]


def test_a_name_that_comes_again_is_as_late_as_its_second_time() -> None:
    world = World(cache_first, window=0)
    again = sequence(5)
    again.request = sequence(0).request
    world.push(sequence(0), sequence(3))
    world.queue.remove(again.request_id)
    world.push(again)
    assert world.queue.oldest.arrival == 3 and world.drain() == [3, 5]


def test_who_has_run_already_goes_first_and_the_oldest_of_them() -> None:
    world = World(cache_first, cached={RequestId("r5"): 9})
    preempted = [sequence(3), sequence(1)]
    for one in preempted:
        one.status = Status.PREEMPTED
    world.push(sequence(5, priority=-7), *preempted)
    assert world.drain() == [1, 3, 5]


def test_a_lower_number_goes_before() -> None:
    world = World(first_come)
    world.push(sequence(0, priority=2), sequence(1), sequence(2, priority=-1), sequence(3))
    assert world.drain() == [2, 1, 3, 0]


def test_tenants_take_turns() -> None:
    world = World(first_come)
    world.push(*(sequence(arrival, "many") for arrival in range(4)), sequence(4, "few"), sequence(5, "few"))
    assert world.drain() == [0, 4, 1, 5, 2, 3]


def test_a_tenants_priority_is_over_his_own_requests_only() -> None:
    world = World(first_come)
    world.push(*(sequence(arrival, "pushy", priority=-arrival) for arrival in range(4)), sequence(4, "modest"))
    assert world.drain() == [3, 4, 2, 1, 0]


def test_a_tenant_who_had_nothing_to_ask_has_saved_no_turns() -> None:
    world = World(first_come)
    world.push(*(sequence(arrival, "busy") for arrival in range(8)))
    for _ in range(4):
        one = world.queue.first()
        assert one is not None
        world.queue.admit(one)
    world.push(*(sequence(arrival, "late") for arrival in range(8, 12)))
    assert world.drain() == [4, 8, 5, 9, 6, 10, 7, 11]


class Twin:
    """The same rules over a list."""

    def __init__(self, world: World) -> None:
        self.world = world
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
        """All that may be next: equals are not told apart."""
        oldest = min(self.waiting, key=lambda one: one.arrival)
        if self.overtaken[oldest.request_id] >= self.world.window:
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
        return one.request.priority, self.world.policy(self.world.outlook(one))

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


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.sampled_from(sorted(POLICIES)), st.sampled_from([0, 1, 3, 1000]))
def test_decisions_are_those_of_a_twin_that_looks_at_everybody(seed: int, policy: str, window: int) -> None:
    draw = random.Random(seed)
    world = World(POLICIES[policy], window)
    twin, running = Twin(world), list[Sequence]()
    for arrival in range(40):
        one = sequence(arrival, draw.choice("ab"), draw.choice((0, 0, 0, 1)))
        one.lease.watched = (bytes([arrival]), bytes([arrival, 1]))
        world.cached[one.request_id] = draw.randint(0, 9)
        world.push(one)
        twin.push(one)
        for other in draw.sample(twin.waiting, min(2, len(twin.waiting))):
            world.cached[other.request_id] = draw.randint(0, 9)
            world.queue.reorder({draw.choice(other.lease.watched)})
        if draw.random() < 0.1 and twin.waiting:
            gone = draw.choice(twin.waiting)
            assert world.queue.remove(gone.request_id) is gone
            twin.remove(gone)
        if draw.random() < 0.1 and running:
            back = running.pop(draw.randrange(len(running)))
            back.status = Status.PREEMPTED
            world.push(back)
            twin.push(back)
        while twin.waiting and draw.random() < 0.5:
            chosen = world.queue.first()
            assert chosen is not None and chosen.request_id in twin.first()
            world.queue.admit(chosen)
            twin.admit(chosen)
            chosen.status = Status.RUNNING
            running.append(chosen)
        assert len(world.queue) == len(twin.waiting)

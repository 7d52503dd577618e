"""Scheduler, KV cache and knowledge tree over a simulated memory: every token must come from its own prefix.

Random arrivals, cancellations, forks, damaged records, lost devices and removed documents over tiers so small that all
of them evict. `check_integrity` runs after every step.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.batch import StepResult
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import OWN_TIERS, Link, Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import FinishReason, Request, SamplingParams
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvcache.tree.eviction import POLICIES
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.policy import POLICIES as SCHEDULING
from stillroom.scheduler.scheduler import Scheduler
from stillroom_bench.loads.policy_replay import NoMover
from tests.examples import most_examples
from tests.fakes import ManualClock
from tests.kvcache.prefix_memory import PrefixMemory, PrefixRunner, answer_of

SIZE = 4
STOP = frozenset({7})
WINDOW = 3
LINKS = {Tier.HOST: Link(1e-4, 1e6), Tier.DISK: Link(5e-3, 1e5)}


Step = list[tuple[RequestId, int, list[int]]]
"""Request, first position and slots of each entry of a step."""


@dataclass
class SchedulerFixture:
    """A seeded scheduler with its cache, tree and simulated memory."""

    seed: int
    num_blocks: int = 24
    host_bytes: int = 60
    disk_bytes: int = 90
    policy: str = "pgdsf"
    scheduling: str = "first_come"
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    answers: dict[RequestId, list[int]] = field(default_factory=dict)
    ended: dict[RequestId, FinishReason] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.randomness = random.Random(self.seed)
        self.clock = ManualClock()
        self.memory = PrefixMemory(SIZE)
        self.runner = PrefixRunner(self.memory)
        options = TreeOptions(
            host_bytes=self.host_bytes, disk_bytes=self.disk_bytes, policy=POLICIES[self.policy], window_seconds=50.0
        )
        pool = BlockPool(self.num_blocks, SIZE)
        self.tree = KnowledgeTree(
            pool, self.memory, linear_profile(1e-3, 1e-3, 1e-6, LINKS), options, self.clock.monotonic
        )
        self.kv = KVCacheManager(pool, Reuse(self.tree, PrefixKeys(b"m", 2 * SIZE)))
        limits = SchedulerLimits(max_num_seqs=5, max_num_batched_tokens=17, max_model_len=80)
        self.scheduler = Scheduler(self.kv, limits, SCHEDULING[self.scheduling], window=WINDOW)
        self.overtaken: Counter[RequestId] = Counter()
        """Later requests that were admitted before each waiting one."""
        self.steps: list[Step] = []
        self.num_requests = 0

    def request(self) -> Request:
        """Return a random request; each document has a fixed length, and popular ones are far more frequent."""
        draw = self.randomness
        documents = [min(int(draw.expovariate(0.4)), 11) for _ in range(draw.randint(0, 3))]
        segments = [Segment(SegmentKind.SYSTEM, (40, 41, 42))]
        segments += [
            Segment(SegmentKind.CHUNK, tuple(50 + d + i for i in range(1 + d * 5 % 9)), ChunkId(d)) for d in documents
        ]
        question = tuple(draw.choice((30, 31)) for _ in range(draw.choice((1, 3, 9, 17))))
        self.num_requests += 1
        return Request(
            request_id=RequestId(f"r{self.num_requests}"),
            prompt=SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, question))),
            sampling=SamplingParams(max_tokens=draw.randint(1, 6)),
            stop_token_ids=STOP,
        )

    def submit(self, num_samples: int = 1) -> None:
        first = self.request()
        group = [first]
        for index in range(1, num_samples):
            group.append(replace(first, request_id=RequestId(f"{first.request_id}-{index}")))
        for one in group:
            self.runner.protect(one.request_id, one.prompt.token_ids)
            self.waiting[one.request_id] = one
            self.answers[one.request_id] = []
        self.scheduler.add(*group)

    def cancel(self) -> None:
        if self.waiting:
            request_id = self.randomness.choice(sorted(self.waiting))
            assert self.scheduler.abort(request_id)
            del self.waiting[request_id]

    def step(self) -> None:
        self.clock.advance(0.3)
        waiting = {one.request_id: one.arrival for one in self.scheduler._waiting}
        batch = self.scheduler.schedule(self.clock.now)
        self._count_overtaking(waiting)
        if batch is not None:
            self.steps.append([(one.request_id, one.first_position, one.slots.tolist()) for one in batch.sequences])
            for update in self.scheduler.update(batch, self.runner.execute(batch)):
                if update.token_id is not None:
                    self.answers[update.request_id].append(update.token_id)
                if update.finish_reason is not None:
                    self._finish(update.request_id)
        self.scheduler.check_integrity()
        lower = self.memory.lower
        assert all(
            node.is_in(tier) == (node.key in lower[tier]) for node in self.tree for tier in (Tier.HOST, Tier.DISK)
        )
        assert all(self.tree.get(key) is not None for kept in lower.values() for key in kept), (
            "a copy that the tree does not know"
        )

    def _count_overtaking(self, waiting: dict[RequestId, int]) -> None:
        """
        Args:
            waiting: arrival numbers of the requests that waited before the last decision.
        """
        still = waiting.keys() & {one.request_id for one in self.scheduler._waiting}
        admitted = [arrival for request_id, arrival in waiting.items() if request_id not in still]
        for request_id in waiting:
            if request_id not in still:
                del self.overtaken[request_id]
                continue
            self.overtaken[request_id] += sum(arrival > waiting[request_id] for arrival in admitted)
            assert self.overtaken[request_id] <= WINDOW, request_id

    def _finish(self, request_id: RequestId) -> None:
        request = self.waiting.pop(request_id)
        expected = answer_of(request.prompt.token_ids, request.sampling.max_tokens, STOP, self.memory.vocabulary)
        assert self.answers[request_id] == expected

    def lose_device(self) -> None:
        self.memory.lose_device()
        self.scheduler.lose_device()

    def remove_document(self) -> None:
        gone = self.randomness.randint(0, 11)
        self.scheduler.forget_chunks(lambda chunk_ids: chunk_ids - {ChunkId(gone)})
        assert ChunkId(gone) not in self.tree.chunk_ids()

    def finish(self) -> None:
        for _ in range(2_000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.waiting
        self.tree.clear()
        self.scheduler.check_integrity()
        assert self.kv.pool.num_free == self.num_blocks, "a block leaked"
        assert not any(self.memory.lower.values())
        assert not any(self.memory.expected.values()), "a prefetch without a request"


ACTIONS = (
    "submit",
    "submit",
    "submit",
    "step",
    "step",
    "step",
    "step",
    "fork",
    "cancel",
    "damage",
    "lose",
    "remove",
    "tend",
)


def act(fixture: SchedulerFixture, action: str) -> None:
    if action == "submit":
        fixture.submit()
    elif action == "fork":
        fixture.submit(fixture.randomness.randint(2, 3))
    elif action == "step":
        fixture.step()
    elif action == "cancel":
        fixture.cancel()
    elif action == "damage":
        fixture.memory.damage(fixture.randomness, 0.1)
    elif action == "lose":
        fixture.lose_device()
    elif action == "remove":
        fixture.remove_document()
    elif action == "tend":
        fixture.tree.store_next()


@settings(max_examples=most_examples(60), deadline=None)
@given(
    st.lists(st.sampled_from(ACTIONS), max_size=80),
    st.integers(0, 2**16),
    st.integers(20, 40),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(SCHEDULING)),
)
def test_tokens_are_right_for_any_sequence_of_actions(
    actions: list[str], seed: int, num_blocks: int, policy: str, scheduling: str
) -> None:
    fixture = SchedulerFixture(seed, num_blocks=num_blocks, policy=policy, scheduling=scheduling)
    for action in actions:
        act(fixture, action)
    fixture.finish()


def steps_of(actions: Iterable[str], seed: int, scheduling: str) -> list[Step]:
    fixture = SchedulerFixture(seed, scheduling=scheduling)
    for action in actions:
        act(fixture, action)
    fixture.finish()
    return fixture.steps


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=60), st.integers(0, 2**16), st.sampled_from(sorted(SCHEDULING)))
def test_same_arrivals_and_clock_give_the_same_steps(actions: list[str], seed: int, scheduling: str) -> None:
    assert steps_of(actions, seed, scheduling) == steps_of(actions, seed, scheduling)


def steps_of_200_actions() -> list[list[Step]]:
    actions = random.Random(5).choices(ACTIONS, k=200)
    return [steps_of(actions, 5, scheduling) for scheduling in sorted(SCHEDULING)]


def test_another_process_takes_the_same_steps() -> None:
    """The other process iterates sets in another order."""
    program = "from tests.scheduler.test_reuse import steps_of_200_actions; print(steps_of_200_actions())"
    other = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"PYTHONHASHSEED": str((hash("a") + 1) % 1000)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    here = f"{steps_of_200_actions()}\n"
    assert here == other and len(here) > 1000


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=() if name in ("lru", "pgdsf", "prefix_heat") else pytest.mark.slow)
        for name in sorted(POLICIES)
    ],
)
def test_hundreds_of_requests_with_eviction_in_every_tier(policy: str) -> None:
    scheduling = sorted(SCHEDULING)[len(policy) % len(SCHEDULING)]
    fixture = SchedulerFixture(1, policy=policy, scheduling=scheduling)
    while fixture.num_requests < 300:
        act(fixture, fixture.randomness.choice(ACTIONS[:11]))
        if fixture.randomness.random() < 0.005:
            fixture.lose_device()
    fixture.finish()
    stats = fixture.tree.stats
    for counter in (stats.hits, stats.evictions):
        assert all(counter[tier] for tier in OWN_TIERS), counter
    assert stats.loads[Tier.HOST] and stats.loads[Tier.DISK] and stats.failed_loads[Tier.DISK]
    assert stats.offloads and stats.stores


def test_cache_first_admits_requests_with_kept_documents_first() -> None:
    """RAGCache's Figure 10; when the documents are dropped, the request returns to its place."""
    fixture = SchedulerFixture(0, num_blocks=40, scheduling="cache_first")

    def ask(document: int) -> Request:
        segments = [
            Segment(SegmentKind.SYSTEM, (40, 41, 42)),
            Segment(SegmentKind.CHUNK, (50 + document,) * 6, ChunkId(document)),
        ]
        fixture.num_requests += 1
        request = Request(
            request_id=RequestId(f"q{fixture.num_requests}"),
            prompt=SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, (30, 31)))),
            sampling=SamplingParams(max_tokens=1),
        )
        fixture.runner.protect(request.request_id, request.prompt.token_ids)
        fixture.waiting[request.request_id], fixture.answers[request.request_id] = request, []
        fixture.scheduler.add(request)
        return request

    def admitted() -> list[str]:
        batch = fixture.scheduler.schedule()
        assert batch is not None
        for update in fixture.scheduler.update(batch, fixture.runner.execute(batch)):
            fixture.waiting.pop(update.request_id)
        fixture.scheduler.check_integrity()
        return [entry.request_id for entry in batch.sequences]

    ask(1)
    admitted()
    fixture.scheduler.limits = replace(fixture.scheduler.limits, max_num_seqs=1)
    ask(2)
    ask(1)
    assert admitted() == ["q3"]
    ask(1)
    fixture.scheduler.forget_chunks(lambda chunk_ids: chunk_ids - {ChunkId(1)})
    assert admitted() == ["q2"] and admitted() == ["q4"]


@pytest.mark.parametrize("may_place", [True, False])
def test_cache_first_counts_documents_that_can_be_placed(may_place: bool) -> None:
    pool = BlockPool(40, SIZE)
    tree = KnowledgeTree(pool, NoMover(), linear_profile(1e-3, 1e-3, 1e-6), TreeOptions(), lambda: 0.0)
    anywhere = AnywhereOptions(0.1, "first") if may_place else None
    kv = KVCacheManager(pool, Reuse(tree, PrefixKeys(b"m", 2 * SIZE), anywhere=anywhere))
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=20, max_model_len=80)
    one = Scheduler(kv, limits, SCHEDULING["cache_first"])
    for name, documents in (("keeps", [1]), ("early", [4, 5]), ("late", [3, 1])):
        chunks = [Segment(SegmentKind.CHUNK, (50 + number,) * 8, ChunkId(number)) for number in documents]
        prompt = SegmentedPrompt((*chunks, Segment(SegmentKind.QUESTION, (30, 31))))
        one.add(Request(request_id=RequestId(name), prompt=prompt, sampling=SamplingParams(max_tokens=1)))
    batch = one.schedule()
    assert batch is not None and [entry.request_id for entry in batch.sequences] == ["keeps"]
    one.update(batch, StepResult({RequestId("keeps"): 5}))
    one.check_integrity()
    batch = one.schedule()
    assert batch is not None and batch.sequences[0].request_id == ("late" if may_place else "early")

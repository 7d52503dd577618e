"""The modelled runner and mover with the product's engine, scheduler and tree: sums by hand, and a soak."""

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.batch import Batch, MassRequest, SampleSpec, ScheduledSequence
from stillroom.core.clock import VirtualClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Link, Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.chunk_reuse.attention_sampling import mass_sample_every
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import CostProfile, linear_profile
from stillroom.kvcache.tree.eviction import lru
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom.kvstore.modelled import ModelledMover
from stillroom.runner.modelled_runner import ModelledRunner, even_masses
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.policy import cache_first
from stillroom.scheduler.scheduler import Scheduler

SIZE = 4
HOST = {Tier.HOST: Link(0.5, 8.0)}
"""One second for the four tokens of a segment, one byte each."""
COSTS = linear_profile(2.0, 1.0, 0.0, HOST)
"""T(cached, new) = 2 + new."""
DEVICE_ONLY = TreeOptions(policy=lru, replicates_system=False)
PAIRS = linear_profile(1.0, 0.1, 0.01, {Tier.HOST: Link(0.01, 1e3), Tier.DISK: Link(0.05, 1e2)})


class ModelledFixture:
    """A modelled runner with engine, scheduler, cache and tree."""

    def __init__(
        self,
        costs: CostProfile,
        num_blocks: int,
        options: TreeOptions = DEVICE_ONLY,
        anywhere: AnywhereOptions | None = None,
    ) -> None:
        self.clock = VirtualClock()
        pool = BlockPool(num_blocks, SIZE)
        mover = ModelledMover(self.clock, costs.load_seconds, 1)
        tree = KnowledgeTree(pool, mover, costs, options, self.clock.monotonic)
        weighs = 0 if anywhere is None else mass_sample_every(anywhere)
        reuse = Reuse(tree, PrefixKeys(b"m", 2 * SIZE), anywhere=anywhere, mass_sample_every=weighs)
        self.kv = KVCacheManager(pool, reuse)
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
        runner = ModelledRunner(costs, self.clock, num_layers=4, vocab_size=50)
        self.engine = Engine(Scheduler(self.kv, limits, cache_first), runner, self.clock)

    def run(self) -> list[TokenEvent]:
        events = []
        while self.engine.has_work:
            events += self.engine.step()
            self.engine.check_integrity()
        return events

    def ask(self, name: str, *documents: int, max_tokens: int = 1) -> float:
        """Return the seconds to the first token of a request without others."""
        began = self.clock.now
        self.engine.submit(request(name, *documents, max_tokens=max_tokens))
        return self.run()[0].at - began


def request(name: str, *documents: int, max_tokens: int = 1, question: int = 2, length: int = 4) -> Request:
    segments = [Segment(SegmentKind.SYSTEM, (40,) * 4)]
    segments += [Segment(SegmentKind.CHUNK, (one,) * length, ChunkId(one)) for one in documents]
    prompt = SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, (30,) * question)))
    return Request(request_id=RequestId(name), prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens))


def test_time_of_prefill_decode_and_kept_kv() -> None:
    fixture = ModelledFixture(COSTS, 16)

    assert fixture.ask("a", 1, max_tokens=3) == 12.0
    assert fixture.clock.now == 12.0 + 3.0 + 3.0
    assert fixture.ask("b", 1) == 4.0
    assert fixture.ask("c", 2) == 8.0


def test_document_twice_in_a_waiting_prompt() -> None:
    assert ModelledFixture(COSTS, 16).ask("a", 1, 1) == 2.0 + 14.0


def test_two_requests_share_a_step() -> None:
    fixture = ModelledFixture(COSTS, 16)
    for name, document in (("a", 1), ("b", 2)):
        fixture.engine.submit(request(name, document))

    first, second = fixture.run()

    assert first.at == second.at == 3.0 + 2 * (12.0 - 3.0)


def test_offloads_and_loads_take_the_time_of_their_link() -> None:
    fixture = ModelledFixture(COSTS, 5, TreeOptions(policy=lru, host_bytes=100))

    assert fixture.ask("a", 1) == 12.0
    assert fixture.clock.now == 13.0  # a replica of the system prompt
    assert [fixture.ask(name, document) for name, document in (("b", 2), ("c", 3), ("d", 1))] == [8.0, 8.0, 4.0]
    assert fixture.ask("e", 4) == 1.0 + 8.0  # 2 is offloaded
    assert fixture.ask("f", 2) == 1.0 + 1.0 + 4.0  # 3 is offloaded, 2 is loaded
    assert fixture.clock.now == 13.0 + 20.0 + 9.0 + 6.0


def test_time_of_query_pass_and_recompute() -> None:
    """Half of two documents of four tokens is recomputed after a query pass."""
    fixture = ModelledFixture(COSTS, 32, anywhere=AnywhereOptions(0.5, "question"))
    assert fixture.ask("a", 1, 2) == 2.0 + 14.0

    seconds = fixture.ask("b", 2, 1)

    assert seconds == (2.0 + 2.0) + (2.0 + 4.0 + 2.0)


def test_deviation_pass_runs_two_of_four_layers() -> None:
    fixture = ModelledFixture(COSTS, 32, anywhere=AnywhereOptions(0.5, "deviation"))
    fixture.ask("a", 1, 2)

    assert fixture.ask("b", 2, 1) == (2.0 + 10.0) / 2 + (2.0 + 4.0 + 2.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=5), st.data())
def test_step_time_agrees_with_counting_every_pair(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    entries, expected = [], 1.0 + 0.1 + 0.01 / 2
    for number, (before, count) in enumerate(spans):
        end = before + count
        is_gapped = data.draw(st.booleans())
        behind = data.draw(st.sets(st.integers(0, end - 1), max_size=8)) if is_gapped else set()
        positions = np.array(sorted(behind | {end - 1})) if is_gapped else np.arange(before, end)
        tokens, slots = np.zeros(len(positions), np.int64), np.arange(end)
        placed = positions if is_gapped else None
        entries.append(
            ScheduledSequence(RequestId(str(number)), tokens, int(positions[0]), slots, (), positions=placed)
        )
        pairs = sum(position + 0.5 for position in positions.tolist())
        expected += 0.1 * (len(positions) - 1) + 0.01 * (pairs - 0.5)
    runner = ModelledRunner(_Exact(), VirtualClock())

    slack = 0.01 * sum(entry.num_scheduled_tokens for entry in entries)  # the number of cached tokens is whole
    assert runner.step_seconds(Batch(tuple(entries))) == pytest.approx(expected, abs=0.5 * slack + 1e-9)


class _Exact:
    def prefill_seconds(self, num_cached: int, num_new: int) -> float:
        return 1.0 + 0.1 * num_new + 0.01 * num_new * (num_cached + num_new / 2)


def test_overhead_of_a_step_and_of_a_sequence() -> None:
    one = np.ones(1, dtype=np.int64)
    batch = Batch(tuple(ScheduledSequence(RequestId(name), one, 0, one, ()) for name in "abc"))
    plain = ModelledRunner(COSTS, VirtualClock()).step_seconds(batch)
    with_overhead = ModelledRunner(COSTS, VirtualClock(), step_seconds=5.0, sequence_seconds=0.5).step_seconds(batch)
    assert plain == pytest.approx(3.0) and with_overhead == pytest.approx(3.0 + 5.0 + 2 * 0.5)


def test_tokens_follow_from_seed_and_name_and_avoid_what_is_forbidden() -> None:
    spec = SampleSpec(RequestId("a"), SamplingParams(), 0.0, np.arange(5), 5, forbidden=frozenset(range(49)))
    entry = ScheduledSequence(RequestId("a"), np.arange(5), 0, np.arange(5), (spec,))

    result = ModelledRunner(COSTS, VirtualClock(), vocab_size=50).execute(Batch((entry,)))

    assert result.token_ids == {"a": 49}


def test_even_attention_adds_up() -> None:
    groups = np.array([0, 0, 1, 1, 1, -1, 2, 2])
    entry = ScheduledSequence(RequestId("a"), np.arange(4), 4, np.arange(8), ())
    masses = even_masses(entry, MassRequest(groups, 3, np.array([0, 3])))

    assert masses.own.tolist() == pytest.approx([1 / 5, 1 / 8])
    assert masses.paid[0].tolist() == pytest.approx([2 / 5, 2 / 5, 0])
    assert masses.paid[1].tolist() == pytest.approx([2 / 8, 3 / 8, 1 / 8])
    assert masses.received.tolist() == pytest.approx([1 / 5 + 1 / 8] * 5 + [1 / 8] * 3)


def _soak(seed: int, anywhere: AnywhereOptions | None) -> list[tuple[str, int | None, float]]:
    draw = random.Random(seed)
    fixture = ModelledFixture(PAIRS, 20, TreeOptions(policy=lru, host_bytes=40, disk_bytes=60), anywhere)
    seen: list[TokenEvent] = []
    for number in range(30):
        documents = [draw.randrange(6) for _ in range(draw.randrange(4))]
        one = request(
            f"r{number}",
            *documents,
            max_tokens=draw.randint(1, 4),
            question=draw.choice((1, 5, 9)),
            length=draw.choice((4, 6)),
        )
        fixture.engine.submit(one)
        if draw.random() < 0.1:
            fixture.engine.cancel(one.request_id)
        for _ in range(draw.randrange(4)):
            seen += fixture.engine.step()
            fixture.engine.check_integrity()
        if not fixture.engine.has_work:
            fixture.engine.do_idle_work()
    return [(event.request_id, event.token_id, event.at) for event in [*seen, *fixture.run()]]


@settings(deadline=None, max_examples=15)
@given(
    st.integers(0, 10_000),
    st.sampled_from(
        [
            None,
            AnywhereOptions(0.3, "question"),
            AnywhereOptions(0.3, "deviation"),
            AnywhereOptions(0.3, "context"),
            AnywhereOptions(0.3, "first", alpha=1.0, focus_window=2),
        ]
    ),
)
def test_soak_is_repeatable_and_its_blocks_are_accounted_for(seed: int, anywhere: AnywhereOptions | None) -> None:
    events = _soak(seed, anywhere)

    assert events == _soak(seed, anywhere)
    assert [at for *_, at in events] == sorted(at for *_, at in events)


def test_modelled_runner_needs_no_torch() -> None:
    code = "import sys, stillroom.runner.modelled_runner, stillroom.kvstore.modelled; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

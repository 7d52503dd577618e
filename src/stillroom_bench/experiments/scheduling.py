"""Arms of `stillroom bench structures`: time to schedule a step while many requests wait, by admission order.

Uses the scheduler and the knowledge tree with generated documents and without a model; every sampled token is the same.
RAGCache (7.4, Table 4) reports less than a millisecond per decision.
"""

import time
from collections.abc import Callable

import numpy as np

from stillroom.core.batch import StepResult
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.policy import POLICIES, Policy
from stillroom.scheduler.scheduler import Scheduler
from stillroom_bench.instrument.harness import Arm, Metrics
from stillroom_bench.loads.policy_replay import PROFILE, NoMover

NUM_WAITING = 1000
NUM_STEPS = 100
_NUM_DOCUMENTS = 500
_BLOCK_SIZE = 16


def scheduling_arms(seed: int, num_waiting: int = NUM_WAITING, num_steps: int = NUM_STEPS) -> list[Arm]:
    """Return an arm per admission order; `decision_seconds` is the median over the steps of a run."""
    return [
        Arm(f"scheduling, {num_waiting:,} waiting/{name}", _run(policy, seed, num_waiting, num_steps))
        for name, policy in POLICIES.items()
    ]


def _run(policy: Policy, seed: int, num_waiting: int, num_steps: int) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        draw = np.random.default_rng([seed, repetition + 1000])
        scheduler = _scheduler(policy)
        for number in range(num_waiting):
            scheduler.add(_request(number, draw))
        number, seconds = num_waiting, []
        for _ in range(num_steps):
            start = time.perf_counter()
            batch = scheduler.schedule()
            seconds.append(time.perf_counter() - start)
            assert batch is not None
            sampled = {spec.request_id: 5 for entry in batch.sequences for spec in entry.samples}
            for update in scheduler.update(batch, StepResult(sampled)):
                if update.finish_reason is not None:
                    scheduler.add(_request(number, draw))
                    number += 1
        return {
            "decision_seconds": float(np.median(seconds)),
            "slow_decision_seconds": float(np.quantile(seconds, 0.99)),
            "answered": number - num_waiting,
        }

    return run


def _scheduler(policy: Policy) -> Scheduler:
    pool = BlockPool(4000, _BLOCK_SIZE)
    tree = KnowledgeTree(pool, NoMover(), PROFILE, TreeOptions(bytes_per_token=1, host_bytes=20_000), lambda: 0.0)
    kv = KVCacheManager(pool, Reuse(tree, PrefixKeys(b"", tail_tokens=_BLOCK_SIZE)))
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096)
    return Scheduler(kv, limits, policy)


def _request(number: int, draw: np.random.Generator) -> Request:
    """Make a request for two documents of 256 tokens with Zipf popularity."""
    documents = (draw.zipf(1.2, size=2) - 1) % _NUM_DOCUMENTS
    segments = [Segment(SegmentKind.SYSTEM, (1,) * 64)]
    for document in documents.tolist():
        segments.append(Segment(SegmentKind.CHUNK, (10 + document,) * 256, ChunkId(document)))
    return Request(
        request_id=RequestId(f"r{number}"),
        prompt=SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, (2,) * 16))),
        sampling=SamplingParams(max_tokens=8),
    )

"""Arms of `stillroom bench structures`: time to schedule a step while many requests wait, by admission order.

Uses the scheduler and the knowledge tree with generated documents and without a model; every sampled token is the same.
RAGCache (7.4, Table 4) reports less than a millisecond per decision, llmds (Table 3) 0.157 ms to form a batch of 32
and 0.0038 ms to submit a request.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

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
BATCH = 32
"""Most sequences of a step."""
_NUM_DOCUMENTS = 500
_BLOCK_SIZE = 16


def scheduling_arms(seed: int, num_waiting: int = NUM_WAITING, num_steps: int = NUM_STEPS) -> list[Arm]:
    """Return an arm per admission order, and one that forms batches of 32 new requests (llmds Table 3).

    `decision_seconds` is the median over the steps of a run. CPU seconds are those of the thread, which do not count
    while other processes have the core.
    """
    arms = [
        Arm(f"scheduling, {num_waiting:,} waiting/{name}", _run(_Load(policy), seed, num_waiting, num_steps))
        for name, policy in POLICIES.items()
    ]
    load = _Load(POLICIES["first_come"], step_tokens=BATCH * 1024, max_tokens=1, is_refilled=False)
    run = _run(load, seed, num_waiting, max(1, num_waiting // BATCH))
    return [*arms, Arm(f"scheduling, {num_waiting:,} submitted/batches of {BATCH}", run)]


@dataclass(frozen=True, slots=True)
class _Load:
    policy: Policy
    step_tokens: int = 512
    max_tokens: int = 8
    is_refilled: bool = True
    """Whether a new request comes for each that is answered."""


def _run(load: _Load, seed: int, num_waiting: int, num_steps: int) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        draw = np.random.default_rng([seed, repetition + 1000])
        scheduler = _scheduler(load)
        submits, seconds, cpu_seconds, sizes = [], [], [], []
        for number in range(num_waiting):
            request = _request(number, draw, load.max_tokens)
            start = time.thread_time()
            scheduler.add(request)
            submits.append(time.thread_time() - start)
        num_answered = 0
        for _ in range(num_steps):
            start, cpu_start = time.perf_counter(), time.thread_time()
            batch = scheduler.schedule()
            cpu_seconds.append(time.thread_time() - cpu_start)
            seconds.append(time.perf_counter() - start)
            assert batch is not None
            sizes.append(len(batch.sequences))
            sampled = {spec.request_id: 5 for entry in batch.sequences for spec in entry.samples}
            for update in scheduler.update(batch, StepResult(sampled)):
                if update.finish_reason is not None:
                    if load.is_refilled:
                        scheduler.add(_request(num_waiting + num_answered, draw, load.max_tokens))
                    num_answered += 1
        return {
            "decision_seconds": float(np.median(seconds)),
            "slow_decision_seconds": float(np.quantile(seconds, 0.99)),
            "decision_cpu_seconds": float(np.median(cpu_seconds)),
            "slow_decision_cpu_seconds": float(np.quantile(cpu_seconds, 0.95)),
            "submit_cpu_seconds": float(np.median(submits)),
            "sequences": float(np.median(sizes)),
            "answered": num_answered,
        }

    return run


def _scheduler(load: _Load) -> Scheduler:
    pool = BlockPool(4000, _BLOCK_SIZE)
    tree = KnowledgeTree(pool, NoMover(), PROFILE, TreeOptions(bytes_per_token=1, host_bytes=20_000), lambda: 0.0)
    kv = KVCacheManager(pool, Reuse(tree, PrefixKeys(b"", tail_tokens=_BLOCK_SIZE)))
    limits = SchedulerLimits(max_num_seqs=BATCH, max_num_batched_tokens=load.step_tokens, max_model_len=4096)
    return Scheduler(kv, limits, load.policy)


def _request(number: int, draw: np.random.Generator, max_tokens: int) -> Request:
    """Make a request for two documents of 256 tokens with Zipf popularity."""
    documents = (draw.zipf(1.2, size=2) - 1) % _NUM_DOCUMENTS
    segments = [Segment(SegmentKind.SYSTEM, (1,) * 64)]
    for document in documents.tolist():
        segments.append(Segment(SegmentKind.CHUNK, (10 + document,) * 256, ChunkId(document)))
    return Request(
        request_id=RequestId(f"r{number}"),
        prompt=SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, (2,) * 16))),
        sampling=SamplingParams(max_tokens=max_tokens),
    )

"""An engine without a model, on a virtual clock: every step takes one second."""

from stillroom.core.clock import VirtualClock
from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.manager import KVCacheManager
from stillroom.runner.modelled_runner import ModelledRunner
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.scheduler import Scheduler

NUM_BLOCKS = 64


class _OneSecond:
    def prefill_seconds(self, num_cached: int, num_new: int) -> float:
        return 1.0


def modelled_engine(*, slots: int = 4, timeout: float = 0.0, batch_delay: float = 0.0) -> Engine:
    """Return an engine with 16 tokens per step and KV for 256."""
    clock = VirtualClock()
    limits = SchedulerLimits(
        max_num_seqs=slots, max_num_batched_tokens=16, max_model_len=200, batch_delay_s=batch_delay
    )
    scheduler = Scheduler(KVCacheManager(BlockPool(NUM_BLOCKS, 4)), limits)
    return Engine(scheduler, ModelledRunner(_OneSecond(), clock), clock, timeout)


def ask(name: str, *, num_tokens: int = 4, max_tokens: int = 100, deadline: float | None = None) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=SegmentedPrompt((Segment(SegmentKind.QUESTION, (9,) * num_tokens),)),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline=deadline,
    )

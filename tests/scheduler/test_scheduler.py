"""What runs in which step: exact decisions, without any tensor."""

import pytest

from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import FinishReason, Request, SamplingParams
from stillroom.errors import PromptTooLongError
from stillroom.kvcache.block_pool import BlockPool
from stillroom.kvcache.manager import KVCacheManager
from stillroom.scheduler.scheduler import Scheduler, SchedulerLimits, SequenceUpdate

EOS = 2


def scheduler(num_blocks: int = 64, *, seqs: int = 4, tokens: int = 32, length: int = 100) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length)
    return Scheduler(KVCacheManager(BlockPool(num_blocks, 4)), limits)


def request(name: str, *lengths: int, max_tokens: int = 8) -> Request:
    kinds = [SegmentKind.SYSTEM, *[SegmentKind.CHUNK] * len(lengths)]
    segments = tuple(Segment(kind, (9,) * length) for kind, length in zip(kinds, lengths, strict=False))
    return Request(
        request_id=RequestId(name),
        prompt=SegmentedPrompt(segments),
        sampling=SamplingParams(max_tokens=max_tokens),
        stop_token_ids=frozenset({EOS}),
    )


def shape(batch: Batch | None) -> dict[str, tuple[int, int, bool]]:
    """Per sequence: its first position, its number of tokens, and whether it samples."""
    if batch is None:
        return {}
    return {s.request_id: (s.first_position, s.num_scheduled_tokens, bool(s.samples)) for s in batch.sequences}


def run(one: Scheduler, token: int = 5) -> tuple[dict[str, tuple[int, int, bool]], list[SequenceUpdate]]:
    """One step in which every sampling sequence gets `token`."""
    batch = one.schedule()
    updates = []
    if batch is not None:
        sampled = {s.request_id: token for s in batch.sequences if s.samples}
        updates = one.update(batch, StepResult(sampled))
    one.check_integrity()
    return shape(batch), updates


def test_a_prompt_runs_in_pieces_and_samples_with_its_last() -> None:
    one = scheduler(tokens=10)
    one.add(request("a", 7, 16, max_tokens=2))
    assert run(one)[0] == {"a": (0, 10, False)}
    assert run(one)[0] == {"a": (10, 10, False)}
    assert run(one) == ({"a": (20, 3, True)}, [SequenceUpdate(RequestId("a"), 5, None)])
    assert run(one) == ({"a": (23, 1, True)}, [SequenceUpdate(RequestId("a"), 5, FinishReason.LENGTH)])
    assert run(one) == ({}, []) and not one.has_work


def test_decodes_come_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    one = scheduler(tokens=12)
    one.add(request("a", 8))
    run(one)
    one.add(request("b", 20))
    one.add(request("c", 5))
    assert run(one)[0] == {"a": (8, 1, True), "b": (0, 11, False)}
    assert run(one)[0] == {"a": (9, 1, True), "b": (11, 9, True), "c": (0, 2, False)}
    assert run(one)[0] == {"a": (10, 1, True), "b": (20, 1, True), "c": (2, 3, True)}


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    one = scheduler()
    one.add(request("a", 5))
    assert run(one, EOS)[1] == [SequenceUpdate(RequestId("a"), None, FinishReason.STOP)]
    assert one.kv.pool.num_free == 64


def test_seats_are_limited_and_the_queue_is_first_come_first_served() -> None:
    one = scheduler(seqs=2)
    for name in "abc":
        one.add(request(name, 4, max_tokens=2))
    assert set(run(one)[0]) == {"a", "b"}
    assert set(run(one)[0]) == {"a", "b"}
    assert set(run(one)[0]) == {"c"}


def test_without_blocks_the_youngest_is_preempted_and_runs_again_later() -> None:
    one = scheduler(num_blocks=4, seqs=2)
    one.add(request("old", 7, max_tokens=6))  # 2 blocks, 4 in the end
    one.add(request("young", 7, max_tokens=6))
    run(one)
    assert run(one)[0] == {"old": (7, 1, True), "young": (7, 1, True)}
    assert run(one)[0] == {"old": (8, 1, True)}, "young lost its blocks"
    assert (one.num_running, one.num_waiting) == (1, 1)
    while one.num_running == 1 and one.num_waiting == 1:
        run(one)
    assert run(one)[0] == {"young": (0, 9, True)}, "its prompt and its two tokens so far run as one prompt"


def test_abort_frees_the_blocks_of_running_and_waiting_requests() -> None:
    one = scheduler(seqs=1)
    one.add(request("a", 9))
    one.add(request("b", 9))
    run(one)
    assert one.abort(RequestId("a")) and one.abort(RequestId("b")) and not one.abort(RequestId("a"))
    assert not one.has_work and one.kv.pool.num_free == 64


def test_a_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    with pytest.raises(PromptTooLongError, match=r"98 tokens and max_tokens is 8.*100"):
        scheduler().add(request("a", 98))
    with pytest.raises(PromptTooLongError, match=r"KV pool of 3 blocks of 4 tokens"):
        scheduler(num_blocks=3).add(request("a", 7, max_tokens=6))

"""Exact decisions of the scheduler, step by step, without tensors."""

from dataclasses import replace

import pytest

from stillroom.core.batch import Batch, BlockCopy, StepResult
from stillroom.core.ids import BlockId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Admission, FinishReason, Request, SamplingParams
from stillroom.errors import PromptTooLongError, UsageError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.manager import KVCacheManager
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.scheduler import Scheduler
from stillroom.scheduler.sequence_update import SequenceUpdate

EOS = 2


def scheduler(
    num_blocks: int = 64, *, seqs: int = 4, tokens: int = 32, length: int = 100, delay: float = 0.0
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length, batch_delay_s=delay
    )
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
    """Return first position, number of tokens, and whether it samples, per sequence."""
    if batch is None:
        return {}
    return {s.request_id: (s.first_position, s.num_scheduled_tokens, bool(s.samples)) for s in batch.sequences}


def run(
    one: Scheduler, token: int = 5, now: float = 0.0
) -> tuple[dict[str, tuple[int, int, bool]], list[SequenceUpdate]]:
    """Run one step in which every sample is `token`."""
    batch = one.schedule(now)
    updates = []
    if batch is not None:
        sampled = {spec.request_id: token for s in batch.sequences for spec in s.samples}
        updates = [update._replace(reuse=None, admission=None) for update in one.update(batch, StepResult(sampled))]
    one.check_integrity()
    return shape(batch), updates


def test_prompt_runs_in_pieces_and_samples_with_the_last() -> None:
    one = scheduler(tokens=10)
    one.add(request("a", 7, 16, max_tokens=2))
    assert run(one)[0] == {"a": (0, 10, False)}
    assert run(one)[0] == {"a": (10, 10, False)}
    assert run(one) == ({"a": (20, 3, True)}, [SequenceUpdate(RequestId("a"), 5, None)])
    assert run(one) == ({"a": (23, 1, True)}, [SequenceUpdate(RequestId("a"), 5, FinishReason.LENGTH)])
    assert run(one) == ({}, []) and not one.has_work


def test_decodes_run_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    one = scheduler(tokens=12)
    one.add(request("a", 8))
    run(one)
    one.add(request("b", 20))
    one.add(request("c", 5))
    assert run(one)[0] == {"a": (8, 1, True), "b": (0, 11, False)}
    assert run(one)[0] == {"a": (9, 1, True), "b": (11, 9, True), "c": (0, 2, False)}
    assert run(one)[0] == {"a": (10, 1, True), "b": (20, 1, True), "c": (2, 3, True)}


def test_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    one = scheduler()
    one.add(request("a", 5))
    assert run(one, EOS)[1] == [SequenceUpdate(RequestId("a"), None, FinishReason.STOP)]
    assert one.kv.pool.num_free == 64


def test_running_sequences_are_limited_and_admitted_in_order_of_arrival() -> None:
    one = scheduler(seqs=2)
    for name in "abc":
        one.add(request(name, 4, max_tokens=2))
    assert set(run(one)[0]) == {"a", "b"}
    assert set(run(one)[0]) == {"a", "b"}
    assert set(run(one)[0]) == {"c"}


def test_admission_times_come_with_the_first_token_only() -> None:
    one = scheduler(seqs=2)
    leader = request("a", 4, max_tokens=2)
    one.add(leader, replace(leader, request_id=RequestId("a/1")))
    one.add(request("b", 4, max_tokens=1))
    seen: dict[str, list[Admission | None]] = {"a": [], "a/1": [], "b": []}
    for now in (1.0, 2.0, 3.0):
        batch = one.schedule(now)
        assert batch is not None
        sampled = {spec.request_id: 5 for s in batch.sequences for spec in s.samples}
        for update in one.update(batch, StepResult(sampled), now + 0.5):
            seen[update.request_id].append(update.admission)
    assert seen == {"a": [Admission(1.0, 1.5), None], "a/1": [Admission(1.0, 1.5), None], "b": [Admission(3.0, 3.5)]}


def test_youngest_is_preempted_when_no_block_is_free_and_runs_again() -> None:
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


def test_samples_share_a_prompt_and_copy_its_last_block_when_they_write() -> None:
    one = scheduler()
    one.add(*(request(name, 6, max_tokens=3) for name in "abc"))
    batch = one.schedule()
    assert batch is not None and shape(batch) == {"a": (0, 6, True)}
    assert [spec.request_id for spec in batch.sequences[0].samples] == ["a", "b", "c"]
    updates = one.update(batch, StepResult({RequestId(name): 5 for name in "abc"}))
    assert [update.request_id for update in updates] == ["a", "b", "c"]
    one.check_integrity()
    assert one.kv.pool.num_used == 2 and one.kv.pool.ref_count(BlockId(0)) == 3

    batch = one.schedule()
    assert batch is not None and shape(batch) == dict.fromkeys("abc", (6, 1, True))
    assert batch.copies == (BlockCopy(BlockId(1), BlockId(2)), BlockCopy(BlockId(1), BlockId(3)))
    assert [sequence.slots.tolist() for sequence in batch.sequences] == [
        [0, 1, 2, 3, 8, 9, 10],
        [0, 1, 2, 3, 12, 13, 14],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    one.update(batch, StepResult({RequestId(name): 5 for name in "abc"}))
    one.check_integrity()
    batch = one.schedule()
    assert batch is not None and not batch.copies, "each sample writes to its own block now"


def test_samples_whose_prompt_fills_its_blocks_copy_nothing() -> None:
    one = scheduler()
    one.add(*(request(name, 8, max_tokens=3) for name in "ab"))
    run(one)
    batch = one.schedule()
    assert batch is not None and not batch.copies
    assert [int(sequence.slots[-1]) for sequence in batch.sequences] == [8, 12]


@pytest.mark.parametrize("steps", [0, 1])
def test_cancelled_leader_hands_its_kv_to_the_next_sample(steps: int) -> None:
    one = scheduler(tokens=5)
    one.add(*(request(name, 8, max_tokens=3) for name in "abc"))
    for _ in range(steps):
        assert run(one)[0] == {"a": (0, 5, False)}
    assert one.abort(RequestId("a")) and one.abort(RequestId("c"))
    one.check_integrity()
    if not steps:
        run(one)
    assert run(one) == ({"b": (5, 3, True)}, [SequenceUpdate(RequestId("b"), 5, None)])
    assert one.abort(RequestId("b")) and not one.has_work and one.kv.pool.num_free == 64


def test_group_of_samples_waits_until_all_of_them_fit() -> None:
    one = scheduler(seqs=4)
    one.add(request("a", 4, max_tokens=2))
    one.add(*(request(name, 4, max_tokens=2) for name in "bcde"))
    assert set(run(one)[0]) == {"a"}
    assert set(run(one)[0]) == {"a"}
    assert set(run(one)[0]) == {"b"}
    assert set(run(one)[0]) == set("bcde")
    with pytest.raises(UsageError, match=r"n=5 exceeds the 4 sequences"):
        one.add(*(request(name, 4) for name in "abcde"))


def test_abort_frees_the_blocks_of_running_and_waiting_requests() -> None:
    one = scheduler(seqs=1)
    one.add(request("a", 9))
    one.add(request("b", 9))
    run(one)
    assert one.abort(RequestId("a")) and one.abort(RequestId("b")) and not one.abort(RequestId("a"))
    assert not one.has_work and one.kv.pool.num_free == 64


def test_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    with pytest.raises(PromptTooLongError, match=r"98 tokens and max_tokens is 8.*100"):
        scheduler().add(request("a", 98))
    with pytest.raises(PromptTooLongError, match=r"KV pool of 3 blocks of 4 tokens"):
        scheduler(num_blocks=3).add(request("a", 7, max_tokens=6))


def test_first_request_waits_at_most_batch_delay_while_nothing_runs() -> None:
    one = scheduler(tokens=32, delay=2.0)
    one.add(request("a", 5), now=10.0)
    assert (run(one, now=10.0), one.delayed_until) == (({}, []), 12.0)
    one.add(request("b", 5), now=11.5)
    assert (run(one, now=11.5), one.delayed_until) == (({}, []), 12.0), "a later request does not prolong the delay"
    assert set(run(one, now=12.0)[0]) == {"a", "b"} and one.delayed_until is None
    one.add(request("c", 5), now=12.5)
    assert set(run(one, now=12.5)[0]) == {"a", "b", "c"}, "no delay while a sequence runs"
    for name in "abc":
        one.abort(RequestId(name))
    one.add(request("d", 5), now=20.0)
    assert run(one, now=21.9)[0] == {} and set(run(one, now=22.5)[0]) == {"d"}


def test_batch_delay_ends_when_tokens_or_sequences_are_full() -> None:
    by_tokens, by_seats, by_samples = (scheduler(tokens=16, seqs=3, delay=2.0) for _ in range(3))
    for name, length in (("a", 9), ("b", 7)):
        assert run(by_tokens)[0] == {}
        by_tokens.add(request(name, length))
    assert run(by_tokens)[0] == {"a": (0, 9, True), "b": (0, 7, True)}
    for name in "abc":
        assert run(by_seats)[0] == {}
        by_seats.add(request(name, 1))
    assert set(run(by_seats)[0]) == set("abc")
    by_samples.add(*(request(name, 1) for name in "abc"))
    assert set(run(by_samples)[0]) == {"a"}

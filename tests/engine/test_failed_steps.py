"""A step fails, and the device is not lost: the failing request ends, and no token of others changes."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stillroom.config.settings import ReuseMode, TokenSelector
from stillroom.core.batch import Batch, ScheduledSequence, StepResult
from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.request import FinishReason
from stillroom.engine.audit import Audit
from stillroom.engine.events import TokenEvent
from stillroom.engine.reuse_level import ReuseLevel
from stillroom.errors import EngineError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.models.decoder import Decoder
from tests.engine.engine_fixture import EngineFixture, Oracle, question

BAD = RequestId("bad")
Fault = Callable[[Batch], bool]


def is_bad(entry: ScheduledSequence) -> bool:
    return entry.request_id == BAD


def in_its_prompt(batch: Batch) -> bool:
    return any(is_bad(one) and one.num_scheduled_tokens > 1 for one in batch.sequences)


def in_its_answer(batch: Batch) -> bool:
    return any(is_bad(one) and one.samples and one.num_scheduled_tokens == 1 for one in batch.sequences)


def as_a_sample(batch: Batch) -> bool:
    """Turn a request into a follower that has not forked yet."""
    return any(sample.request_id == BAD for one in batch.sequences for sample in one.samples)


def in_deviation_pass(batch: Batch) -> bool:
    return any(is_bad(one) and one.is_deviation_pass for one in batch.sequences)


def in_query_pass(batch: Batch) -> bool:
    return any(is_bad(one) and one.is_query_pass for one in batch.sequences)


def break_steps(fixture: EngineFixture, is_faulty: Fault) -> None:
    """Make steps fail after all KV of the batch is written."""
    execute = fixture.engine.runner.execute

    def run(batch: Batch) -> StepResult:
        result = execute(batch)
        if is_faulty(batch):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)")
        return result

    fixture.engine.runner.execute = run  # type: ignore[method-assign]


def new_fixture(decoder: Decoder, mode: ReuseMode = "exact", selector: TokenSelector = "question") -> EngineFixture:
    return EngineFixture(decoder, None, blocks=60, host_tokens=200, mode=mode, load="always", token_selector=selector)


@pytest.mark.parametrize(
    ("is_faulty", "mode", "selector"),
    [
        (in_its_prompt, "exact", "question"),
        (in_its_answer, "exact", "question"),
        (as_a_sample, "exact", "question"),
        (in_query_pass, "anywhere", "question"),
        (in_deviation_pass, "anywhere", "deviation"),
    ],
)
def test_failing_request_ends_and_the_others_answer_as_usual(
    decoder: Decoder, is_faulty: Fault, mode: ReuseMode, selector: TokenSelector
) -> None:
    def run(is_faulty: Fault, *, is_sample: bool) -> EngineFixture:
        fixture = new_fixture(decoder, mode, selector)
        fixture.run(question("before", 1, 2, 3))
        break_steps(fixture, is_faulty)
        leader = question("leader", 4, 2, 1)
        sample = replace(leader, request_id=RequestId("leader/1"))
        bad = replace(leader, request_id=BAD) if is_sample else question(BAD, 3, 2, max_tokens=8)
        fixture.submit(question("early", 3, 1, max_tokens=8))
        fixture.step()
        for group in ([leader, bad, sample],) if is_sample else ([leader, sample], [bad]):
            fixture.submit(*group)
        fixture.submit(question("late", 2, 1, 4))
        fixture.finish()
        fixture.tree.clear()
        fixture.engine.check_integrity()
        assert fixture.engine.scheduler.kv.pool.num_used == 0
        return fixture

    is_sample = is_faulty is as_a_sample
    undisturbed, fixture = (run(fault, is_sample=is_sample) for fault in (lambda batch: False, is_faulty))
    last, said = fixture.last[BAD], fixture.tokens.pop(BAD)
    assert isinstance(last.error, EngineError) and "shapes" in str(last.error)
    assert last.finish_reason is FinishReason.ABORTED and bool(said) is (is_faulty is in_its_answer)
    undisturbed.tokens.pop(BAD)
    assert fixture.tokens == undisturbed.tokens
    assert fixture.engine.num_failed_steps >= 1 and fixture.engine.num_device_losses == 0


def test_samples_continue_after_their_leader_failed(decoder: Decoder, oracle: Oracle) -> None:
    fixture = new_fixture(decoder)
    leader = question(BAD, 1, 2)
    samples = [replace(leader, request_id=RequestId(f"s{number}")) for number in range(3)]
    break_steps(fixture, as_a_sample)
    fixture.submit(leader, *samples)
    fixture.finish()
    assert fixture.last[BAD].error is not None and not fixture.tokens[BAD]
    assert all(fixture.tokens[one.request_id] == oracle.answer(leader) for one in samples)


def test_batch_too_large_for_the_memory_runs_one_by_one(decoder: Decoder, oracle: Oracle) -> None:
    fixture = new_fixture(decoder)
    execute = fixture.engine.runner.execute

    def run(batch: Batch) -> StepResult:
        if len(batch.sequences) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return execute(batch)

    fixture.engine.runner.execute = run  # type: ignore[method-assign]
    asked = [question(f"r{number}", number, number + 1, max_tokens=4) for number in range(4)]
    for one in asked:
        fixture.submit(one)
    fixture.finish()
    assert all(fixture.tokens[one.request_id] == oracle.answer(one) for one in asked)


@pytest.mark.parametrize("fails", ["copies", "after copies"])
def test_failed_step_with_copied_blocks_is_not_repeated_on_them(decoder: Decoder, oracle: Oracle, fails: str) -> None:
    """The copies may have been written to since, so these sequences start again from their tokens."""
    fixture = new_fixture(decoder)
    num_failed = 0
    execute = fixture.engine.runner.execute

    def run(batch: Batch) -> StepResult:
        nonlocal num_failed
        if batch.copies and num_failed < 1:
            num_failed += 1
            if fails == "after copies":
                execute(batch)
                for copy in batch.copies:  # as if the source of the copy had changed since
                    at = slice(copy.target * 8, copy.target * 8 + 8)
                    fixture.cache.device.k_LSGD[:, at] = float("nan")
            raise RuntimeError("something else")
        return execute(batch)

    fixture.engine.runner.execute = run  # type: ignore[method-assign]
    leader = question("leader", 1, 2, max_tokens=8)
    asked = [leader, *(replace(leader, request_id=RequestId(f"s{number}")) for number in range(3))]
    fixture.submit(*asked)
    fixture.finish()
    assert num_failed == 1
    assert all(fixture.tokens[one.request_id] == oracle.answer(leader) for one in asked)


def test_kv_of_a_failed_step_is_not_kept(decoder: Decoder, oracle: Oracle) -> None:
    fixture = new_fixture(decoder)
    break_steps(fixture, in_its_prompt)
    fixture.submit(question(BAD, 1, 2))
    fixture.finish()
    assert len(fixture.tree) == 0
    good, reuse = fixture.run(question("good", 1, 2))
    assert good == oracle.answer(question("good", 1, 2)) and reuse.num_cached_tokens == 0


def test_audit_that_cannot_run_ends_alone(decoder: Decoder, oracle: Oracle) -> None:
    fixture = audited(decoder)
    break_steps(fixture, lambda batch: any(one.request_id.startswith("audit-") for one in batch.sequences))
    fixture.run(question("a", 1, 2))
    fixture.run(question("b", 2))
    while fixture.engine.do_idle_work():
        fixture.finish()
    assert fixture.engine.auditing.audit is not None and fixture.engine.auditing.audit.stats.num_audited == 0
    assert set(fixture.last) == {"a", "b"} and not fixture.engine.has_work
    assert fixture.run(question("c", 3))[0] == oracle.answer(question("c", 3))


def test_failure_of_the_audit_stops_auditing_and_no_answer(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = audited(decoder)

    def broken(event: TokenEvent) -> bool:
        raise ImportError("no module named scipy")

    monkeypatch.setattr(fixture.engine.auditing.audit, "observe", broken)
    one, other = question("one", 1, 2), question("other", 3)
    fixture.submit(one)
    fixture.submit(other)
    fixture.finish()
    assert [fixture.tokens[each.request_id] for each in (one, other)] == [oracle.answer(each) for each in (one, other)]
    assert fixture.engine.auditing.audit is None


def audited(decoder: Decoder) -> EngineFixture:
    fixture = new_fixture(decoder, "anywhere")
    level = ReuseLevel(AnywhereOptions(1.0, "question"), lambda changed: None, 0.5)
    fixture.engine.auditing.audit = Audit(level, share=1.0, randomness=random.Random(1))
    return fixture


def test_failed_idle_work_ends_no_request(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = EngineFixture(decoder, tmp_path)
    fixture.run(question("a", 1))
    assert fixture.cache.tiers is not None

    def broken(*_: object) -> bool:
        raise OSError("no more files")

    with monkeypatch.context() as patch:
        patch.setattr(fixture.cache.tiers, "store", broken)
        with pytest.raises(OSError):  # the engine's thread writes it to the log
            fixture.engine.do_idle_work()
        fixture.engine.check_integrity()
    assert fixture.run(question("b", 1, 2))[0] == oracle.answer(question("b", 1, 2))
    fixture.cache.close()
    assert EngineFixture(decoder, tmp_path).tree.num_nodes(Tier.DISK) > 0

"""A step that fails for another reason than the device: the request at fault ends, and no token of others changes."""

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
from stillroom.errors import EngineError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.models.decoder import Decoder
from tests.engine.test_reuse import House, Oracle, question


@pytest.fixture(scope="module")
def oracle(decoder: Decoder) -> Oracle:
    return Oracle(decoder)


BAD = RequestId("bad")
Fault = Callable[[Batch], bool]


def is_bad(entry: ScheduledSequence) -> bool:
    return entry.request_id == BAD


def in_its_prompt(batch: Batch) -> bool:
    return any(is_bad(one) and one.num_scheduled_tokens > 1 for one in batch.sequences)


def in_its_answer(batch: Batch) -> bool:
    return any(is_bad(one) and one.samples and one.num_scheduled_tokens == 1 for one in batch.sequences)


def as_a_sample(batch: Batch) -> bool:
    """A follower, before it has a sequence of its own."""
    return any(sample.request_id == BAD for one in batch.sequences for sample in one.samples)


def in_its_probe(batch: Batch) -> bool:
    return any(is_bad(one) and one.is_deviation_pass for one in batch.sequences)


def in_its_look(batch: Batch) -> bool:
    return any(is_bad(one) and one.is_query_pass for one in batch.sequences)


def break_steps(house: House, is_faulty: Fault) -> None:
    """Steps at fault fail when all KV of the batch is written: half-way, as far as anybody else can tell."""
    execute = house.engine.runner.execute

    def run(batch: Batch) -> StepResult:
        result = execute(batch)
        if is_faulty(batch):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)")
        return result

    house.engine.runner.execute = run  # type: ignore[method-assign]


def new_house(decoder: Decoder, mode: ReuseMode = "exact", selector: TokenSelector = "question") -> House:
    return House(decoder, None, blocks=60, host_tokens=200, mode=mode, load="always", token_selector=selector)


@pytest.mark.parametrize(
    ("is_faulty", "mode", "selector"),
    [
        (in_its_prompt, "exact", "question"),
        (in_its_answer, "exact", "question"),
        (as_a_sample, "exact", "question"),
        (in_its_look, "anywhere", "question"),
        (in_its_probe, "anywhere", "deviation"),
    ],
)
def test_the_request_at_fault_ends_and_the_others_answer_as_ever(
    decoder: Decoder, is_faulty: Fault, mode: ReuseMode, selector: TokenSelector
) -> None:
    def run(is_faulty: Fault, *, is_sample: bool) -> House:
        house = new_house(decoder, mode, selector)
        house.run(question("before", 1, 2, 3))
        break_steps(house, is_faulty)
        leader = question("leader", 4, 2, 1)
        sample = replace(leader, request_id=RequestId("leader/1"))
        bad = replace(leader, request_id=BAD) if is_sample else question(BAD, 3, 2, max_tokens=8)
        house.submit(question("early", 3, 1, max_tokens=8))
        house.step()
        for group in ([leader, bad, sample],) if is_sample else ([leader, sample], [bad]):
            house.submit(*group)
        house.submit(question("late", 2, 1, 4))
        house.finish()
        house.tree.clear()
        house.engine.check_integrity()
        assert house.engine.scheduler.kv.pool.num_used == 0
        return house

    is_sample = is_faulty is as_a_sample
    undisturbed, house = (run(fault, is_sample=is_sample) for fault in (lambda batch: False, is_faulty))
    last, said = house.last[BAD], house.tokens.pop(BAD)
    assert isinstance(last.error, EngineError) and "shapes" in str(last.error)
    assert last.finish_reason is FinishReason.ABORTED and bool(said) is (is_faulty is in_its_answer)
    undisturbed.tokens.pop(BAD)
    assert house.tokens == undisturbed.tokens
    assert house.engine.num_failed_steps >= 1 and house.engine.num_device_losses == 0


def test_a_leader_at_fault_leaves_its_samples_to_go_on(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder)
    leader = question(BAD, 1, 2)
    samples = [replace(leader, request_id=RequestId(f"s{number}")) for number in range(3)]
    break_steps(house, as_a_sample)
    house.submit(leader, *samples)
    house.finish()
    assert house.last[BAD].error is not None and not house.tokens[BAD]
    assert all(house.tokens[one.request_id] == oracle.answer(leader) for one in samples)


def test_a_batch_that_is_too_large_for_the_memory_runs_one_by_one(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder)
    execute = house.engine.runner.execute

    def run(batch: Batch) -> StepResult:
        if len(batch.sequences) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return execute(batch)

    house.engine.runner.execute = run  # type: ignore[method-assign]
    asked = [question(f"r{number}", number, number + 1, max_tokens=4) for number in range(4)]
    for one in asked:
        house.submit(one)
    house.finish()
    assert all(house.tokens[one.request_id] == oracle.answer(one) for one in asked)


@pytest.mark.parametrize("fails", ["copies", "after copies"])
def test_a_step_that_fails_over_copied_blocks_is_not_repeated_over_them(
    decoder: Decoder, oracle: Oracle, fails: str
) -> None:
    """What was copied may have been written to since, so these sequences start again from their tokens."""
    house = new_house(decoder)
    num_failed = 0
    execute = house.engine.runner.execute

    def run(batch: Batch) -> StepResult:
        nonlocal num_failed
        if batch.copies and num_failed < 1:
            num_failed += 1
            if fails == "after copies":
                execute(batch)
                for copy in batch.copies:  # as if it had been copied from a block that has another content by now
                    at = slice(copy.target * 8, copy.target * 8 + 8)
                    house.cache.device.k_LSGD[:, at] = float("nan")
            raise RuntimeError("something else")
        return execute(batch)

    house.engine.runner.execute = run  # type: ignore[method-assign]
    leader = question("leader", 1, 2, max_tokens=8)
    asked = [leader, *(replace(leader, request_id=RequestId(f"s{number}")) for number in range(3))]
    house.submit(*asked)
    house.finish()
    assert num_failed == 1
    assert all(house.tokens[one.request_id] == oracle.answer(leader) for one in asked)


def test_kv_of_a_step_that_failed_is_not_kept(decoder: Decoder, oracle: Oracle) -> None:
    house = new_house(decoder)
    break_steps(house, in_its_prompt)
    house.submit(question(BAD, 1, 2))
    house.finish()
    assert len(house.tree) == 0
    good, reuse = house.run(question("good", 1, 2))
    assert good == oracle.answer(question("good", 1, 2)) and reuse.num_cached_tokens == 0


def test_an_audit_that_cannot_run_ends_alone(decoder: Decoder, oracle: Oracle) -> None:
    house = audited(decoder)
    break_steps(house, lambda batch: any(one.request_id.startswith("audit-") for one in batch.sequences))
    house.run(question("a", 1, 2))
    house.run(question("b", 2))
    while house.engine.do_idle_work():
        house.finish()
    assert house.engine.audit is not None and house.engine.audit.stats.num_audited == 0
    assert set(house.last) == {"a", "b"} and not house.engine.has_work
    assert house.run(question("c", 3))[0] == oracle.answer(question("c", 3))


def test_an_audit_that_fails_itself_is_over_and_answers_go_on(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = audited(decoder)

    def broken(event: TokenEvent) -> bool:
        raise ImportError("no module named scipy")

    monkeypatch.setattr(house.engine.audit, "observe", broken)
    one, other = question("one", 1, 2), question("other", 3)
    house.submit(one)
    house.submit(other)
    house.finish()
    assert [house.tokens[each.request_id] for each in (one, other)] == [oracle.answer(each) for each in (one, other)]
    assert house.engine.audit is None


def audited(decoder: Decoder) -> House:
    house = new_house(decoder, "anywhere")
    options = AnywhereOptions(1.0, "question")
    house.engine.audit = Audit(
        options, lambda changed: None, share=1.0, max_disagreement=0.5, randomness=random.Random(1)
    )
    return house


def test_idle_work_that_fails_ends_nothing(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(decoder, tmp_path)
    house.run(question("a", 1))
    assert house.cache.tiers is not None

    def broken(*_: object) -> bool:
        raise OSError("no more files")

    with monkeypatch.context() as patch:
        patch.setattr(house.cache.tiers, "store", broken)
        with pytest.raises(OSError):  # the engine's thread writes it to the log
            house.engine.do_idle_work()
        house.engine.check_integrity()
    assert house.run(question("b", 1, 2))[0] == oracle.answer(question("b", 1, 2))
    house.cache.close()
    assert House(decoder, tmp_path).tree.num_nodes(Tier.DISK) > 0

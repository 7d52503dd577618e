"""A device that is lost at any time: no token changes, and its memory is not used as KV afterwards.

The runner, the stores and the model are real. An `Outage` makes one of their calls fail once, as CUDA does: with the
exception and the message of torch, and with the device's memory lost.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.request import FinishReason, Request
from stillroom.engine.recovery import FIRST_PAUSE, LONGEST_PAUSE, MAX_LOSSES
from stillroom.errors import DeviceLostError
from stillroom.models.decoder import Decoder
from stillroom.runner import torch_runner
from stillroom.runner.decode_graphs import StaticDecoding
from stillroom.runner.torch_runner import TorchRunner
from tests.engine.engine_fixture import EngineFixture, Oracle, question

ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in the CUDA documentation for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


def cuda_error() -> Exception:
    """Return the error as this version of torch raises it."""
    return getattr(torch, "AcceleratorError", RuntimeError)(ILLEGAL_ACCESS)


@dataclass
class Outage:
    """Makes calls of one method fail, by number."""

    fixture: EngineFixture
    fails: Callable[[int], bool]
    error: Callable[[], Exception] = cuda_error
    num_calls: int = 0
    num_failed: int = 0

    def put_into(self, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
        real = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if not self.fails(self.num_calls):
                return real(*args, **kwargs)
            self.num_failed += 1
            for kv in (self.fixture.cache.device.k_LSGD, self.fixture.cache.device.v_LSGD):
                kv.fill_(float("nan"))
            raise self.error()

        monkeypatch.setattr(owner, method, call)


def runner_of(fixture: EngineFixture) -> TorchRunner:
    assert isinstance(fixture.engine.runner, TorchRunner)
    return fixture.engine.runner


def with_static_decoding(fixture: EngineFixture) -> StaticDecoding:
    """Decode from fixed addresses, as CUDA graphs do."""
    runner = runner_of(fixture)
    runner.decoding = StaticDecoding(runner.decoder, runner.store)
    return runner.decoding


Owner = Callable[[EngineFixture], Any]
PHASES: dict[str, tuple[Owner, str]] = {
    # the owner and the name of the method that fails
    "packing": (runner_of, "_pack"),
    "hidden states": (lambda fixture: runner_of(fixture).decoder, "hidden_states"),
    "logits": (lambda fixture: runner_of(fixture).decoder, "logits"),
    "sampling": (lambda fixture: torch_runner, "sample"),
    "a layer's KV": (lambda fixture: fixture.cache.device, "layer"),
    "block copies": (lambda fixture: fixture.cache.device, "copy_blocks"),
    "offloading and storing": (lambda fixture: fixture.cache.device, "gather"),
    "loading": (lambda fixture: fixture.cache.device, "scatter"),
    "decoding from fixed addresses": (with_static_decoding, "logits"),
}


def traffic(fixture: EngineFixture, oracle: Oracle) -> None:
    """Run requests in every state at once (decoding, in their prompts, forked, waiting); each answers as the oracle."""
    asked: list[Request] = []

    def submit(*group: Request) -> None:
        asked.extend(group)
        fixture.submit(*group)
        fixture.step()

    submit(question("first", 1, 2, max_tokens=8))
    fixture.step()
    for number, documents in enumerate([(3, 4, 5), (2, 1), (5, 3), (1, 2)]):
        one = question(f"r{number}", *documents, tail=1 + 9 * (number % 2), max_tokens=3 + number % 3)
        one = replace(one, cache_salt="other" if number == 1 else "")
        submit(one, *([replace(one, request_id=RequestId(f"r{number}/1"))] if number % 2 == 0 else []))
    fixture.finish()
    while fixture.engine.do_idle_work():
        fixture.engine.check_integrity()
    for one in asked:
        assert fixture.tokens[one.request_id] == oracle.answer(one), one.request_id
        assert fixture.last[one.request_id].error is None


@pytest.mark.parametrize("phase", PHASES)
def test_device_lost_in_any_phase_changes_no_token(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, phase: str
) -> None:
    """The tiers are so small that requests offload, load, store and preempt each other."""
    owner, method = PHASES[phase]

    def run(folder: Path, fails: Callable[[int], bool]) -> Outage:
        fixture = EngineFixture(decoder, folder, blocks=16, host_tokens=60, disk_records=40)
        outage = Outage(fixture, fails)
        with pytest.MonkeyPatch.context() as patch:
            outage.put_into(patch, owner(fixture), method)
            traffic(fixture, oracle)
        assert outage.num_failed == fixture.engine.num_device_losses and fixture.engine.num_failed_steps == 0
        return outage

    calls = range(1, run(tmp_path / "whole", lambda number: False).num_calls + 1)
    assert calls, "this phase does not occur in the traffic"
    for number in random.Random(phase).sample(calls, min(4, len(calls))):
        assert run(tmp_path / str(number), number.__eq__).num_failed == 1, number


@pytest.mark.parametrize("phase", ["placing", "query pass or recompute", "deviation pass"])
def test_device_lost_during_recompute_changes_no_token(decoder: Decoder, tmp_path: Path, phase: str) -> None:
    """Copies on disk are placed again. Answers that have begun end: their tokens depend on the first placing."""
    selector = "deviation" if phase == "deviation pass" else "question"
    changes: dict[str, Any] = {"mode": "anywhere", "load": "always", "token_selector": selector, "host_tokens": 400}
    before = EngineFixture(decoder, tmp_path / "before", **changes)
    before.run(question("before", 1, 2, 3))
    before.cache.close()

    def run(name: str, fails: Callable[[int], bool]) -> tuple[EngineFixture, Outage]:
        shutil.copytree(tmp_path / "before", tmp_path / name)
        fixture = EngineFixture(decoder, tmp_path / name, **changes)
        outage = Outage(fixture, fails)
        owner: Any = {"placing": fixture.cache.device, "deviation pass": runner_of(fixture)}.get(phase, decoder)
        method = {"placing": "place", "deviation pass": "_run_deviation_pass"}.get(phase, "hidden_states")
        with pytest.MonkeyPatch.context() as patch:
            outage.put_into(patch, owner, method)
            fixture.submit(question("one", 3, 2), replace(question("one", 3, 2), request_id=RequestId("one/1")))
            fixture.step()
            fixture.submit(question("two", 2, 3, 1))
            fixture.finish()
        assert fixture.reuse[RequestId("one")].has_placed and fixture.reuse[RequestId("two")].has_placed
        return fixture, outage

    whole, undisturbed = run("whole", lambda number: False)
    calls = range(1, undisturbed.num_calls + 1)
    for number in random.Random(phase).sample(calls, min(3, len(calls))):
        fixture, outage = run(str(number), number.__eq__)
        assert outage.num_failed == fixture.engine.num_device_losses == 1
        for name, tokens in whole.tokens.items():
            if fixture.last[name].error is None:
                assert fixture.tokens[name] == tokens, number
                continue
            assert isinstance(fixture.last[name].error, DeviceLostError) and "ask again" in str(
                fixture.last[name].error
            )
            assert fixture.tokens[name] and fixture.tokens[name] == tokens[: len(fixture.tokens[name])]


class UnrecoverableRunner:
    """A device that is lost at its next step, and fails to recover a number of times."""

    def __init__(self, fixture: EngineFixture, patch: pytest.MonkeyPatch, num_failing: int) -> None:
        """Args: num_failing: attempts to recover that fail."""
        self.attempts: list[float] = []
        self.fixture = fixture
        self._recover = fixture.engine.runner.recover
        self._num_failing = num_failing
        Outage(fixture, (1).__eq__).put_into(patch, fixture.engine.runner, "execute")
        patch.setattr(fixture.engine.runner, "recover", self.recover)

    def recover(self) -> None:
        self.attempts.append(self.fixture.clock.now)
        if len(self.attempts) <= self._num_failing:
            raise cuda_error()
        self._recover()


def test_unrecoverable_device_refuses_requests_and_is_retried_at_a_bounded_rate(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = EngineFixture(decoder, None, blocks=9)
    one, other, later = question("one", 1, 2), question("other", 3, 4), question("later", 1, 2)
    fixture.run(question("before", 1))
    lost = UnrecoverableRunner(fixture, monkeypatch, num_failing=9)
    fixture.submit(one)
    fixture.submit(other, replace(other, request_id=RequestId("other/1")))
    fixture.step()

    assert not fixture.engine.has_work
    for name in ("one", "other", "other/1"):
        error = fixture.last[RequestId(name)].error
        assert isinstance(error, DeviceLostError) and "illegal memory access" in str(error)
        assert (
            fixture.last[RequestId(name)].finish_reason is FinishReason.ABORTED and not fixture.tokens[RequestId(name)]
        )
    assert "restart Stillroom" in str(fixture.engine.device_problem)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        fixture.engine.submit(later)
    assert fixture.engine.scheduler.num_waiting == 0

    while fixture.engine.retry_in is not None:
        fixture.clock.advance(0.25)
        fixture.engine.do_idle_work()
        fixture.engine.check_integrity()
    pauses = [after - before for before, after in zip(lost.attempts, lost.attempts[1:], strict=False)]
    assert pauses == [FIRST_PAUSE * 2**n for n in range(6)] + [LONGEST_PAUSE] * 3
    assert fixture.engine.retry_in is None and fixture.run(later)[0] == oracle.answer(later)


def test_requests_with_tokens_end_with_an_error_if_the_device_cannot_be_recovered(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = EngineFixture(decoder, None)
    one = question("one", 1)
    fixture.submit(one)
    while not fixture.tokens[one.request_id]:
        fixture.step()
    UnrecoverableRunner(fixture, monkeypatch, num_failing=99)
    fixture.step()
    assert isinstance(fixture.last[one.request_id].error, DeviceLostError)
    assert fixture.engine.scheduler.kv.pool.num_used == 0


def test_repeatedly_lost_device_counts_as_unusable(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost between steps, so that no request is a suspect."""
    fixture = EngineFixture(decoder, None)
    with monkeypatch.context() as patch:
        outage = Outage(fixture, lambda number: True)
        outage.put_into(patch, fixture.engine.scheduler.kv, "try_admit")
        fixture.submit(question("one", 1))
        fixture.finish()
        assert outage.num_failed == MAX_LOSSES + 1
    assert (
        isinstance(fixture.last[RequestId("one")].error, DeviceLostError) and fixture.engine.device_problem is not None
    )
    fixture.clock.advance(FIRST_PAUSE)
    assert fixture.engine.do_idle_work()
    two = question("two", 1)
    assert fixture.run(two)[0] == oracle.answer(two)


def test_request_that_repeatedly_loses_the_device_ends_alone(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = EngineFixture(decoder, None, host_tokens=100)
    poison, others = question("poison", 3, 4, 5), [question("early", 1, 2, max_tokens=8), question("late", 5, 1)]
    execute = fixture.engine.runner.execute

    def lose(batch: Batch) -> StepResult:
        result = execute(batch)
        if any(entry.request_id == poison.request_id for entry in batch.sequences):
            fixture.cache.device.lose()
            raise cuda_error()
        return result

    monkeypatch.setattr(fixture.engine.runner, "execute", lose)
    fixture.submit(others[0])
    fixture.step()
    fixture.submit(poison)
    fixture.submit(others[1])
    fixture.finish()
    error = fixture.last[poison.request_id].error
    assert isinstance(error, DeviceLostError) and "twice" in str(error)
    assert [fixture.tokens[one.request_id] for one in others] == [oracle.answer(one) for one in others]
    assert fixture.engine.num_device_losses == 2 and fixture.engine.device_problem is None


def test_recovery_allocates_new_kv_memory_and_checks_the_model(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = EngineFixture(decoder, None)
    runner, device = runner_of(fixture), fixture.cache.device
    decoding, before = with_static_decoding(fixture), device.k_LSGD
    addresses = decoding._input
    device.lose()
    runner.recover()
    assert not is_lost(fixture) and device.k_LSGD is not before and device.k_LSGD.shape == before.shape
    assert decoding._input is not addresses, "a graph would read from freed memory"

    device.lose()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing(torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(torch.OutOfMemoryError):
            runner.recover()
    assert is_lost(fixture)
    with monkeypatch.context() as patch:
        logits = decoder.logits
        patch.setattr(decoder, "logits", lambda hidden: logits(hidden) * float("nan"))
        with pytest.raises(DeviceLostError, match="weights"):
            runner.recover()
    runner.recover()
    assert not is_lost(fixture)


def is_lost(fixture: EngineFixture) -> bool:
    return fixture.cache.device.is_lost


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def records(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.kv"))}


def test_device_lost_while_closing_stores_only_host_copies(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = EngineFixture(decoder, tmp_path)
    fixture.run(question("a", 1, 2))
    assert fixture.tree.num_nodes(Tier.HOST) == 1 < fixture.tree.num_nodes(Tier.DEVICE)
    outage = Outage(fixture, lambda number: True)
    outage.put_into(monkeypatch, fixture.cache.device, "gather")
    fixture.cache.close()
    assert outage.num_failed == 1 and len(records(tmp_path)) == 1

    again = EngineFixture(decoder, tmp_path)  # the lock is free
    tokens, reuse = again.run(question("b", 1, 2))
    assert tokens == oracle.answer(question("b", 1, 2)) and reuse.num_tokens_from(Tier.DISK) == 5


def test_device_kv_of_a_failed_engine_is_not_stored(decoder: Decoder, tmp_path: Path) -> None:
    fixture = EngineFixture(decoder, tmp_path)
    fixture.run(question("a", 1, 2))
    fixture.cache.close(keeps_device=False)
    assert not records(tmp_path)
    assert EngineFixture(decoder, tmp_path).run(question("b", 1))[1].num_cached_tokens == 0


@pytest.mark.parametrize("is_noticed", [True, False])
def test_closing_reads_nothing_from_a_device_that_is_lost(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    fixture = EngineFixture(decoder, tmp_path)
    fixture.run(question("a", 1, 2))
    fixture.cache.device.lose()
    if is_noticed:
        monkeypatch.setattr(fixture.engine.runner, "recover", failing(cuda_error()))
        fixture.submit(question("b", 3))
        fixture.finish()
        assert fixture.engine.device_problem is not None
    fixture.cache.close()
    assert len(records(tmp_path)) == 1

"""A device that fails in the middle of anything: no token changes, and nothing on it is taken for KV afterwards.

The runner, the stores and the model are real. An `Outage` lets one of their calls fail once, as CUDA does: with the
exception and the message of torch, and with everything on the device gone.
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
from tests.engine.test_reuse import House, Oracle, question

ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in the CUDA documentation for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


def cuda_error() -> Exception:
    """Return the error as this version of torch raises it."""
    return getattr(torch, "AcceleratorError", RuntimeError)(ILLEGAL_ACCESS)


@pytest.fixture(scope="module")
def oracle(decoder: Decoder) -> Oracle:
    return Oracle(decoder)


@dataclass
class Outage:
    """Lets the calls of one method fail that `fails` names by number."""

    house: House
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
            for kv in (self.house.cache.device.k_LSGD, self.house.cache.device.v_LSGD):
                kv.fill_(float("nan"))
            raise self.error()

        monkeypatch.setattr(owner, method, call)


def runner_of(house: House) -> TorchRunner:
    assert isinstance(house.engine.runner, TorchRunner)
    return house.engine.runner


def with_static_decoding(house: House) -> StaticDecoding:
    """Decode from fixed addresses, as CUDA graphs do."""
    runner = runner_of(house)
    runner.decoding = StaticDecoding(runner.decoder, runner.store)
    return runner.decoding


Owner = Callable[[House], Any]
PHASES: dict[str, tuple[Owner, str]] = {
    # what fails: whose method, and its name
    "packing": (runner_of, "_pack"),
    "hidden states": (lambda house: runner_of(house).decoder, "hidden_states"),
    "logits": (lambda house: runner_of(house).decoder, "logits"),
    "sampling": (lambda house: torch_runner, "sample"),
    "a layer's KV": (lambda house: house.cache.device, "layer"),
    "block copies": (lambda house: house.cache.device, "copy_blocks"),
    "offloading and storing": (lambda house: house.cache.device, "gather"),
    "loading": (lambda house: house.cache.device, "scatter"),
    "decoding from fixed addresses": (with_static_decoding, "logits"),
}


def traffic(house: House, oracle: Oracle) -> None:
    """Requests in every state at once: decoding, in their prompts, forked, waiting; each answers as the oracle."""
    asked: list[Request] = []

    def submit(*group: Request) -> None:
        asked.extend(group)
        house.submit(*group)
        house.step()

    submit(question("first", 1, 2, max_tokens=8))
    house.step()
    for number, documents in enumerate([(3, 4, 5), (2, 1), (5, 3), (1, 2)]):
        one = question(f"r{number}", *documents, tail=1 + 9 * (number % 2), max_tokens=3 + number % 3)
        one = replace(one, cache_salt="other" if number == 1 else "")
        submit(one, *([replace(one, request_id=RequestId(f"r{number}/1"))] if number % 2 == 0 else []))
    house.finish()
    while house.engine.do_idle_work():
        house.engine.check_integrity()
    for one in asked:
        assert house.tokens[one.request_id] == oracle.answer(one), one.request_id
        assert house.last[one.request_id].error is None


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_lost_at_any_phase_costs_no_token(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, phase: str
) -> None:
    """The tiers are so small that requests offload, load, store and preempt each other."""
    owner, method = PHASES[phase]

    def run(folder: Path, fails: Callable[[int], bool]) -> Outage:
        house = House(decoder, folder, blocks=16, host_tokens=60, disk_records=40)
        outage = Outage(house, fails)
        with pytest.MonkeyPatch.context() as patch:
            outage.put_into(patch, owner(house), method)
            traffic(house, oracle)
        assert outage.num_failed == house.engine.num_device_losses and house.engine.num_failed_steps == 0
        return outage

    calls = range(1, run(tmp_path / "whole", lambda number: False).num_calls + 1)
    assert calls, "nothing of this phase happens in the traffic"
    for number in random.Random(phase).sample(calls, min(4, len(calls))):
        assert run(tmp_path / str(number), number.__eq__).num_failed == 1, number


@pytest.mark.parametrize("phase", ["placing", "a look or a repair", "a probe"])
def test_a_device_lost_while_chunks_are_repaired_costs_no_token(decoder: Decoder, tmp_path: Path, phase: str) -> None:
    """Their copies are on disk, from where they are placed again. Only answers that have begun cannot go on: their
    tokens were computed from what was placed, and chosen to be repaired, at the time."""
    selector = "deviation" if phase == "a probe" else "question"
    changes: dict[str, Any] = {"mode": "anywhere", "load": "always", "token_selector": selector, "host_tokens": 400}
    before = House(decoder, tmp_path / "before", **changes)
    before.run(question("before", 1, 2, 3))
    before.cache.close()

    def run(name: str, fails: Callable[[int], bool]) -> tuple[House, Outage]:
        shutil.copytree(tmp_path / "before", tmp_path / name)
        house = House(decoder, tmp_path / name, **changes)
        outage = Outage(house, fails)
        owner: Any = {"placing": house.cache.device, "a probe": runner_of(house)}.get(phase, decoder)
        method = {"placing": "place", "a probe": "_probe"}.get(phase, "hidden_states")
        with pytest.MonkeyPatch.context() as patch:
            outage.put_into(patch, owner, method)
            house.submit(question("one", 3, 2), replace(question("one", 3, 2), request_id=RequestId("one/1")))
            house.step()
            house.submit(question("two", 2, 3, 1))
            house.finish()
        assert house.reuse[RequestId("one")].has_placed and house.reuse[RequestId("two")].has_placed
        return house, outage

    whole, undisturbed = run("whole", lambda number: False)
    calls = range(1, undisturbed.num_calls + 1)
    for number in random.Random(phase).sample(calls, min(3, len(calls))):
        house, outage = run(str(number), number.__eq__)
        assert outage.num_failed == house.engine.num_device_losses == 1
        for name, tokens in whole.tokens.items():
            if house.last[name].error is None:
                assert house.tokens[name] == tokens, number
                continue
            assert isinstance(house.last[name].error, DeviceLostError) and "ask again" in str(house.last[name].error)
            assert house.tokens[name] and house.tokens[name] == tokens[: len(house.tokens[name])]


class Lost:
    """A device that is lost at its next step, and cannot be recovered for a while."""

    def __init__(self, house: House, patch: pytest.MonkeyPatch, num_failing: int) -> None:
        """Args: num_failing: attempts to recover that fail."""
        self.attempts: list[float] = []
        self.house = house
        self._recover = house.engine.runner.recover
        self._num_failing = num_failing
        Outage(house, (1).__eq__).put_into(patch, house.engine.runner, "execute")
        patch.setattr(house.engine.runner, "recover", self.recover)

    def recover(self) -> None:
        self.attempts.append(self.house.clock.now)
        if len(self.attempts) <= self._num_failing:
            raise cuda_error()
        self._recover()


def test_while_a_device_cannot_be_recovered_requests_are_refused_and_it_is_tried_at_a_bounded_pace(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(decoder, None, blocks=9)
    one, other, later = question("one", 1, 2), question("other", 3, 4), question("later", 1, 2)
    house.run(question("before", 1))
    lost = Lost(house, monkeypatch, num_failing=9)
    house.submit(one)
    house.submit(other, replace(other, request_id=RequestId("other/1")))
    house.step()

    assert not house.engine.has_work
    for name in ("one", "other", "other/1"):
        error = house.last[RequestId(name)].error
        assert isinstance(error, DeviceLostError) and "illegal memory access" in str(error)
        assert house.last[RequestId(name)].finish_reason is FinishReason.ABORTED and not house.tokens[RequestId(name)]
    assert "restart Stillroom" in str(house.engine.device_problem)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        house.engine.submit(later)
    assert house.engine.scheduler.num_waiting == 0

    while house.engine.retry_in is not None:
        house.clock.advance(0.25)
        house.engine.do_idle_work()
        house.engine.check_integrity()
    pauses = [after - before for before, after in zip(lost.attempts, lost.attempts[1:], strict=False)]
    assert pauses == [FIRST_PAUSE * 2**n for n in range(6)] + [LONGEST_PAUSE] * 3
    assert house.engine.retry_in is None and house.run(later)[0] == oracle.answer(later)


def test_requests_that_have_sent_tokens_end_clearly_where_the_device_cannot_be_recovered(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(decoder, None)
    one = question("one", 1)
    house.submit(one)
    while not house.tokens[one.request_id]:
        house.step()
    Lost(house, monkeypatch, num_failing=99)
    house.step()
    assert isinstance(house.last[one.request_id].error, DeviceLostError)
    assert house.engine.scheduler.kv.pool.num_used == 0


def test_a_device_that_is_lost_again_and_again_is_not_taken_for_recovered(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps, so that no request is to blame."""
    house = House(decoder, None)
    with monkeypatch.context() as patch:
        outage = Outage(house, lambda number: True)
        outage.put_into(patch, house.engine.scheduler.kv, "try_admit")
        house.submit(question("one", 1))
        house.finish()
        assert outage.num_failed == MAX_LOSSES + 1
    assert isinstance(house.last[RequestId("one")].error, DeviceLostError) and house.engine.device_problem is not None
    house.clock.advance(FIRST_PAUSE)
    assert house.engine.do_idle_work()
    two = question("two", 1)
    assert house.run(two)[0] == oracle.answer(two)


def test_a_request_that_loses_the_device_again_and_again_ends_alone(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(decoder, None, host_tokens=100)
    poison, others = question("poison", 3, 4, 5), [question("early", 1, 2, max_tokens=8), question("late", 5, 1)]
    execute = house.engine.runner.execute

    def lose(batch: Batch) -> StepResult:
        result = execute(batch)
        if any(entry.request_id == poison.request_id for entry in batch.sequences):
            house.cache.device.lose()
            raise cuda_error()
        return result

    monkeypatch.setattr(house.engine.runner, "execute", lose)
    house.submit(others[0])
    house.step()
    house.submit(poison)
    house.submit(others[1])
    house.finish()
    error = house.last[poison.request_id].error
    assert isinstance(error, DeviceLostError) and "twice" in str(error)
    assert [house.tokens[one.request_id] for one in others] == [oracle.answer(one) for one in others]
    assert house.engine.num_device_losses == 2 and house.engine.device_problem is None


def test_recovering_gives_kv_new_memory_and_tries_the_model(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(decoder, None)
    runner, device = runner_of(house), house.cache.device
    decoding, before = with_static_decoding(house), device.k_LSGD
    addresses = decoding._input
    device.lose()
    runner.recover()
    assert not is_lost(house) and device.k_LSGD is not before and device.k_LSGD.shape == before.shape
    assert decoding._input is not addresses, "a graph would read from memory that is gone"

    device.lose()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing(torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(torch.OutOfMemoryError):
            runner.recover()
    assert is_lost(house)
    with monkeypatch.context() as patch:
        logits = decoder.logits
        patch.setattr(decoder, "logits", lambda hidden: logits(hidden) * float("nan"))
        with pytest.raises(DeviceLostError, match="weights"):
            runner.recover()
    runner.recover()
    assert not is_lost(house)


def is_lost(house: House) -> bool:
    return house.cache.device.is_lost


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def records(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.kv"))}


def test_a_device_lost_while_closing_stores_what_the_host_has_and_nothing_else(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(decoder, tmp_path)
    house.run(question("a", 1, 2))
    assert house.tree.num_nodes(Tier.HOST) == 1 < house.tree.num_nodes(Tier.DEVICE)
    outage = Outage(house, lambda number: True)
    outage.put_into(monkeypatch, house.cache.device, "gather")
    house.cache.close()
    assert outage.num_failed == 1 and len(records(tmp_path)) == 1

    again = House(decoder, tmp_path)  # the lock is free
    tokens, reuse = again.run(question("b", 1, 2))
    assert tokens == oracle.answer(question("b", 1, 2)) and reuse.num_tokens_from(Tier.DISK) == 5


def test_what_an_engine_that_failed_has_on_its_device_is_not_stored(decoder: Decoder, tmp_path: Path) -> None:
    house = House(decoder, tmp_path)
    house.run(question("a", 1, 2))
    house.cache.close(keeps_device=False)
    assert not records(tmp_path)
    assert House(decoder, tmp_path).run(question("b", 1))[1].num_cached_tokens == 0


@pytest.mark.parametrize("is_noticed", [True, False])
def test_closing_reads_nothing_from_a_device_that_is_lost(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    house = House(decoder, tmp_path)
    house.run(question("a", 1, 2))
    house.cache.device.lose()
    if is_noticed:
        monkeypatch.setattr(house.engine.runner, "recover", failing(cuda_error()))
        house.submit(question("b", 3))
        house.finish()
        assert house.engine.device_problem is not None
    house.cache.close()
    assert len(records(tmp_path)) == 1

"""Events on their way to a front: few lines for many tokens, none lost, an end for each sample, signs of life."""

import asyncio
import json
from threading import Thread

import pytest

from stillroom.cluster.wire import WireEvent, events_from_json
from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, FinishReason, LookupCounts
from stillroom.engine.events import TokenEvent
from stillroom.errors import EngineClosedError, EngineError, UsageError
from stillroom.server.engine import event_lines
from stillroom.server.engine.event_lines import EventBuffer

NAME = RequestId("r")


def token(token_id: int, at: float = 1.0, admission: Admission | None = None) -> TokenEvent:
    return TokenEvent(NAME, token_id, None, at, admission=admission, lookup=LookupCounts(token_id, 1))


def last(reason: FinishReason = FinishReason.LENGTH, error: Exception | None = None) -> TokenEvent:
    return TokenEvent(NAME, None, reason, 9.0, error)


async def read(buffer: EventBuffer) -> list[tuple[WireEvent, ...]]:
    return [events_from_json(json.loads(line)) async for line in buffer.lines() if line != b"\n"]


def test_the_first_token_is_sent_at_once_and_later_ones_together() -> None:
    async def run() -> list[tuple[WireEvent, ...]]:
        buffer = EventBuffer(1, 10.0, lambda: True)
        listen = buffer.listener(0)
        reading = asyncio.ensure_future(read(buffer))
        listen(token(5, 12.0, Admission(10.5, 11.0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        def generate() -> None:
            for token_id in range(500):
                listen(token(token_id))
            listen(last())

        thread = Thread(target=generate)
        thread.start()
        lines = await reading
        thread.join()
        return lines

    lines = asyncio.run(run())
    assert len(lines) <= 4, "500 tokens within milliseconds"
    [first] = lines[0]
    assert first.first is not None and (first.first.admitted, first.first.began, first.first.computed) == (
        0.5,
        1.0,
        2.0,
    )
    events = [event for line in lines for event in line]
    assert [token_id for event in events for token_id in event.tokens] == [5, *range(500)]
    assert [event.end for event in events if event.end] == [FinishReason.LENGTH]
    assert [event.first is not None for event in events] == [True] + [False] * (len(events) - 1)
    assert max((event.lookup for event in events if event.lookup), key=lambda one: one.num_proposed) == LookupCounts(
        499, 1
    )


def test_every_sample_has_its_own_end() -> None:
    async def run() -> list[tuple[WireEvent, ...]]:
        buffer = EventBuffer(3, 0.0, lambda: True)
        buffer.end(2, FinishReason.STOP)
        for sample in (1, 0):
            buffer.listener(sample)(token(sample))
            buffer.listener(sample)(last())
        return await read(buffer)

    [line] = asyncio.run(run())
    assert sorted((event.sample, event.tokens, str(event.end)) for event in line) == [
        (0, (0,), "length"),
        (1, (1,), "length"),
        (2, (), "stop"),
    ]


def test_silence_is_broken_by_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_lines, "HEARTBEAT_SECONDS", 0.001)

    async def run() -> list[bytes]:
        buffer, lines = EventBuffer(1, 0.0, lambda: True), []
        async for line in buffer.lines():
            lines.append(line)
            if len(lines) == 3:
                buffer.listener(0)(last())
        return lines

    *empty, end = asyncio.run(run())
    assert set(empty) == {b"\n"} and len(empty) >= 3 and b"length" in end


@pytest.mark.parametrize(
    ("error", "is_alive", "kind", "may_move"),
    [
        (EngineError("generation failed"), True, "engine", False),
        (EngineError("the engine has failed"), False, "closed", True),
        (EngineClosedError("closed"), False, "closed", True),
        (UsageError("too complex"), False, "usage", False),
    ],
)
def test_another_engine_may_go_on_only_where_this_one_is_at_fault(
    error: Exception, is_alive: bool, kind: str, may_move: bool
) -> None:
    async def run() -> list[tuple[WireEvent, ...]]:
        buffer = EventBuffer(1, 0.0, lambda: is_alive)
        buffer.listener(0)(last(FinishReason.ABORTED, error))
        return await read(buffer)

    [[event]] = asyncio.run(run())
    assert event.failure is not None and (event.failure.kind, event.failure.may_move) == (kind, may_move)

"""Drives a stepped engine with prompts at their arrival times (open loop) and measures time to first token.

The engine and its clock may be real or simulated. Imports nothing of Stillroom: the reuse benchmark loads this file
in Pythons without it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

FirstToken = tuple[int, list[int]]
"""Number of a request, and the prompt tokens whose KV came from device, host and disk."""
Stepped = tuple[list[FirstToken], list[int]]
"""First tokens of one step, and the numbers of the requests that it completed."""


class DrivenRuntime(Protocol):
    """An engine stepped by its caller; decodes greedily. A prompt is a list of parts, each a list of token ids."""

    def reset(self) -> None:
        """Drop all kept KV."""
        ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None: ...

    def step(self) -> Stepped:
        """Run one step."""
        ...

    def do_idle_work(self) -> bool:
        """Do one piece of idle work; return False if there is none."""
        ...


def drive(
    runtime: DrivenRuntime,
    prompts: Sequence[Sequence[Sequence[int]]],
    dues: Sequence[float] | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Submit every prompt at its arrival time, and wait until all are answered.

    Args:
        dues: arrival times in seconds from now, ascending; None submits each when the previous one is answered.

    Returns:
        For each request: `seconds` from arrival to first token, `response_seconds` to the last one, and `cached` tokens
        by tier. `wall_seconds` until all were answered.
    """
    sent: list[float] = []
    seconds, cached = [0.0] * len(prompts), [[0, 0, 0] for _ in prompts]
    response_seconds = [0.0] * len(prompts)
    began = clock()
    while len(sent) < len(prompts) or runtime.has_work:
        now = clock() - began
        while len(sent) < len(prompts) and (dues[len(sent)] <= now if dues else not runtime.has_work):
            runtime.submit(len(sent), prompts[len(sent)])
            sent.append(dues[len(sent)] if dues else now)
        if runtime.has_work:
            firsts, ended = runtime.step()
            now = clock() - began
            for number, kept in firsts:
                seconds[number], cached[number] = now - sent[number], kept
            for number in ended:
                response_seconds[number] = now - sent[number]
        elif dues and not runtime.do_idle_work():
            sleep(max(0.0, dues[len(sent)] - (clock() - began)))
    wall_seconds = clock() - began
    while runtime.do_idle_work():  # after the measurement, so that the next one does not pay for it
        pass
    return {
        "seconds": seconds,
        "response_seconds": response_seconds,
        "cached": cached,
        "wall_seconds": wall_seconds,
    }

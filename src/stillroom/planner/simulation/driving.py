"""Sends prompts to an engine stepped by hand when they are due, whether or not the ones before have been answered (open
loop), and times each from that moment to its first token. The engine and its clock may be real or simulated.

Imports nothing of Stillroom: the reuse benchmark loads this file under Pythons without Stillroom.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

FirstToken = tuple[int, list[int]]
"""Number of the request, and how many tokens of its prompt were kept on device, host and disk."""
Stepped = tuple[list[FirstToken], list[int]]
"""Whose first tokens came in a step, and the numbers of those whose answers are complete."""


class DrivenRuntime(Protocol):
    """Prompts are lists of parts, which are lists of token ids; answers are greedy."""

    def reset(self) -> None:
        """Forget everything that was kept."""
        ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None: ...

    def step(self) -> Stepped:
        """Go on for a moment."""
        ...

    def do_idle_work(self) -> bool:
        """Something useful in an idle moment; False if there is nothing."""
        ...


def drive(
    runtime: DrivenRuntime,
    prompts: Sequence[Sequence[Sequence[int]]],
    dues: Sequence[float] | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Send every prompt when it is due and wait until all are answered.

    Args:
        dues: seconds from now, ascending; None sends each when the one before is answered.

    Returns:
        `seconds` from due to first token, `response_seconds` to the last one, and `cached` tokens by tier, of each
        request; `wall_seconds` until all were answered.
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
    while runtime.do_idle_work():  # nobody waits; what comes next does not pay for it
        pass
    return {
        "seconds": seconds,
        "response_seconds": response_seconds,
        "cached": cached,
        "wall_seconds": wall_seconds,
    }

"""Asks a real Stillroom the questions of a workload at their arrival times: `stillroom plan --validate`."""

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.core.clock import Clock
from stillroom.planner.workload import PlannedWorkload
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Measured times of a workload's requests, in their order."""

    seconds: NDArray[np.float64]
    """From arrival to the first token: [n]."""
    search_seconds: NDArray[np.float64]
    kept_share: float
    """Share of prompt tokens whose KV was reused."""

    def percentile(self, percent: float) -> float:
        """Return a percentile of the time to first token, in seconds."""
        return float(np.percentile(self.seconds, percent))

    def as_json(self) -> dict[str, float]:
        return {
            "p50_seconds": self.percentile(50),
            "p95_seconds": self.percentile(95),
            "p99_seconds": self.percentile(99),
            "mean_search_seconds": float(self.search_seconds.mean()),
            "kept_share": self.kept_share,
        }


def measure(
    stillroom: Stillroom,
    texts: tuple[str, ...],
    workload: PlannedWorkload,
    answer_tokens: int,
    clock: Clock,
    *,
    prepares: bool,
) -> Measured:
    """Ask the warm-up questions one by one, then each question at its arrival time (open loop).

    Args:
        prepares: prepare documents before these.

    Raises:
        StillroomError: as `Stillroom.ask`.
    """
    stillroom.warm_up()
    options = AskOptions(max_tokens=answer_tokens, min_tokens=answer_tokens)
    for number in workload.warm:
        stillroom.ask(texts[number], options)
    if prepares:
        stillroom.prepare()
    return asyncio.run(_measure(stillroom, texts, workload, options, clock))


async def _measure(
    stillroom: Stillroom, texts: tuple[str, ...], workload: PlannedWorkload, options: AskOptions, clock: Clock
) -> Measured:
    began = clock.monotonic()

    async def ask(number: int, due: float) -> tuple[float, float, int, int]:
        await asyncio.sleep(max(0.0, due - (clock.monotonic() - began)))
        late = clock.monotonic() - began - due  # the event loop may wake it later
        stream = await stillroom.astream(texts[number], options)
        async for _ in stream:
            pass
        answer = stream.answer
        timing, reuse = answer.timing, answer.reuse
        return (
            late + timing.ttft_seconds,
            timing.retrieval_seconds,
            reuse.num_cached_tokens,
            reuse.num_prompt_tokens,
        )

    asked = zip(workload.asked, workload.dues, strict=True)
    found = np.array(await asyncio.gather(*(ask(number, due) for number, due in asked)))
    return Measured(found[:, 0], found[:, 1], float(found[:, 2].sum() / max(1.0, found[:, 3].sum())))

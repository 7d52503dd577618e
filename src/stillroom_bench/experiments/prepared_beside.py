"""How much preparing slows the questions that interrupt it: the last part of `stillroom bench prepared`.

Every second question arrives while the engine prepares a document, at a random moment; the others find it idle. This is
the worst case: in a server, questions that follow each other within `prepare.idle_s` interrupt nothing.
"""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.events import TokenEvent
from stillroom_bench.experiments.anywhere_engine import BenchEngine, chunk, question, system
from stillroom_bench.experiments.experiment_options import AnywhereBenchOptions
from stillroom_bench.instrument.statistics import Interval, ratio_of_medians

IDLE, PREPARING = "the engine is idle", "a document is prepared"
_FIRST_NEW_CHUNK = 1_000_000
_WINDOW_CHUNKS = 5
_NUM_RESAMPLES = 5000


def beside_preparing(
    engine: BenchEngine,
    prompts: AnywhereBenchOptions,
    prompt_of: Callable[[int], Sequence[Segment]],
    num_questions: int,
    idle_seconds: float,
) -> list[dict[str, Any]]:
    """Ask questions in pairs, one of each kind in random order; return a row per kind with its times to first token.

    Args:
        engine: with prepared documents; its thread starts and ends here.
        prompt_of: the prompt of the n-th question.
        idle_seconds: after which the engine begins to prepare.
    """
    rng = np.random.default_rng(prompts.seed)
    seconds: dict[str, list[float]] = {IDLE: [], PREPARING: []}
    with AsyncEngine(engine.engine) as running:
        for number in range(num_questions):
            for kind in rng.permutation(list(seconds)).tolist():
                name = RequestId(f"beside {number}")
                if kind == PREPARING:
                    running.prepare(_window(prompts, number, name), _ignore)
                time.sleep(idle_seconds + rng.uniform(0.05, 0.25))
                seconds[kind].append(_ttft(running, prompt_of(number), f"{kind} {number}"))
                running.cancel_preparing(name)
                running.run(lambda one: one.scheduler.kv.forget_chunks(_old_chunks))
    return _rows(seconds)


def _window(prompts: AnywhereBenchOptions, number: int, name: RequestId) -> Request:
    first = _FIRST_NEW_CHUNK + number * _WINDOW_CHUNKS
    chunks = range(first, first + _WINDOW_CHUNKS)
    return Request(
        request_id=name,
        prompt=SegmentedPrompt((system(prompts), *(chunk(prompts, one) for one in chunks), question(prompts, 0))),
        sampling=SamplingParams(max_tokens=1),
        prepares=frozenset(map(ChunkId, chunks)),
    )


def _ignore(error: Exception | None, *, is_computed: bool) -> None:
    """Every window is cancelled."""


def _old_chunks(chunk_ids: set[ChunkId]) -> set[ChunkId]:
    return {one for one in chunk_ids if one < _FIRST_NEW_CHUNK}


def _ttft(running: AsyncEngine, prompt: Sequence[Segment], name: str) -> float:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    start = time.perf_counter()
    running.submit(
        Request(
            request_id=RequestId(name), prompt=SegmentedPrompt(tuple(prompt)), sampling=SamplingParams(max_tokens=1)
        ),
        events.put,
    )
    events.get()
    return time.perf_counter() - start


def _rows(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for kind, found in seconds.items():
        row = {"when the question arrives": kind, "questions": len(found)}
        row |= {f"p{q}, ms": f"{1000 * np.percentile(found, q):.1f}" for q in (50, 95)}
        is_baseline = kind == IDLE
        row["ratio of p50"] = "" if is_baseline else str(ratio_of_medians(found, seconds[IDLE]))
        row["ratio of p95"] = "" if is_baseline else str(_ratio_of_p95(found, seconds[IDLE]))
        rows.append(row)
    return rows


def _ratio_of_p95(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The ratio of two p95 with a percentile bootstrap interval over pairs."""
    a, b = np.asarray(numerator), np.asarray(denominator)
    rows = np.random.default_rng(0).integers(0, a.size, size=(_NUM_RESAMPLES, a.size))
    ratios = np.percentile(a[rows], 95, axis=1) / np.percentile(b[rows], 95, axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(np.percentile(a, 95) / np.percentile(b, 95)), float(low), float(high))

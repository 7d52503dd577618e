"""Forecasts what preparing documents gains, by budget: `stillroom plan`'s section on prepared KV (docs/planning.md).

Every second question, by its text, tells which documents are asked for; the others are simulated, from an engine that
has kept nothing but what was prepared. So no simulated question has decided what is prepared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import ReuseMode
from stillroom.core.ids import ChunkId
from stillroom.planner.documents import PreparedDocuments
from stillroom.planner.forecast import Forecast, Forecaster, Variation
from stillroom.planner.inputs import PlanInputs
from stillroom.planner.splits import Split
from stillroom.planner.workload import PlannedWorkload

_SHARES = (0.0, 0.05, 0.25, 1.0)
"""Of all chunks."""
NUM_SIMULATIONS = len(_SHARES) + 2
_ENOUGH = 0.9
"""Share of the largest gain with which the smallest budget is recommended."""
_LEAST_GAIN = 0.05
"""A smaller gain is none."""
_NOTHING = Variation(prepared_chunks=0)


@dataclass(frozen=True, slots=True)
class PreparingRow:
    """A budget, and the forecast of it."""

    share: float | None
    """Of all chunks; None: as configured (`prepare.disk_bytes`)."""
    prepared: PreparedDocuments
    all_covered: float
    """Share of first questions all of whose chunks are prepared; 0 without first questions."""
    partly_covered: float
    """Share of first questions of which some chunks are prepared, and not all."""
    first_seconds: float | None
    """Mean time to first token of first questions, search included; None without any."""
    later_seconds: float | None
    """Mean of the other questions; None without any."""
    seconds: float
    """Mean of all questions."""

    def as_json(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "chunks": self.prepared.num_chunks,
            "bytes": self.prepared.num_bytes,
            "idle_seconds": self.prepared.seconds,
            "first_questions_covered": self.all_covered,
            "first_questions_partly_covered": self.partly_covered,
            "mean_first_seconds": self.first_seconds,
            "mean_later_seconds": self.later_seconds,
            "mean_seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class PreparingPlan:
    """What preparing takes and gains, by budget."""

    mode: ReuseMode
    """Configured."""
    refusal: str
    """Why the model cannot use prepared KV at any place; empty if it can."""
    num_documents: int
    num_chunks: int
    num_requests: int
    num_first: int
    """First questions: requests that need a chunk which no earlier one has needed."""
    search_seconds: float | None
    """Mean time of their searches; None without any."""
    today: PreparingRow
    """The configured mode, with nothing prepared."""
    rows: tuple[PreparingRow, ...]
    """With `reuse.mode = "prepared"`; empty if the model refuses it. The last one is the configured budget."""

    @property
    def advice(self) -> PreparingRow | None:
        """The smallest budget with nearly the largest gain, over all questions; None if there is no gain."""
        today = self.today.seconds
        most = max((today - row.seconds for row in self.rows), default=0.0)
        if most < _LEAST_GAIN * today:
            return None
        enough = (row for row in self.rows if today - row.seconds >= _ENOUGH * most)
        return min(enough, key=lambda row: row.prepared.num_bytes)

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "refusal": self.refusal or None,
            "documents": self.num_documents,
            "chunks": self.num_chunks,
            "requests": self.num_requests,
            "first_questions": self.num_first,
            "mean_first_search_seconds": self.search_seconds,
            "today": self.today.as_json(),
            "budgets": [row.as_json() for row in self.rows],
            "advice": None if self.advice is None else self.advice.as_json(),
        }


def plan_preparing(inputs: PlanInputs, split: Split, step: Callable[[], None] = lambda: None) -> PreparingPlan:
    """Simulate questions that were never asked before, by budget of prepared KV.

    Args:
        step: called after each simulation.
    """
    held_out = replace(inputs, workload=held_out_workload(inputs.workload))
    forecaster, documents = Forecaster(held_out), inputs.documents
    asked = [frozenset(inputs.found[number].chunk_ids) for number in held_out.workload.asked]
    is_first = first_questions(asked)

    def row(share: float | None, variation: Variation) -> PreparingRow:
        found = _row(share, forecaster.forecast(split, variation), asked, is_first)
        step()
        return found

    today = row(0.0, _NOTHING)
    rows: list[PreparingRow] = []
    if documents.num_chunks and not documents.refusal:
        for share in _SHARES:
            num_chunks = round(share * documents.num_chunks)
            rows.append(row(share, Variation(reuse="prepared", prepared_chunks=num_chunks)))
        rows.append(row(None, Variation(reuse="prepared")))
    return PreparingPlan(
        inputs.policy.reuse.mode,
        documents.refusal,
        len(documents.documents),
        documents.num_chunks,
        len(asked),
        int(is_first.sum()),
        _mean(forecaster.forecast(split, _NOTHING).search_seconds[is_first]),
        today,
        tuple(rows),
    )


def held_out_workload(workload: PlannedWorkload) -> PlannedWorkload:
    """Return the requests for every second question at the workload's rate, without warm-up; searches for the other
    questions come before."""
    drawn = (*workload.warm, *workload.asked)
    asked = tuple(number for number in drawn if number % 2 == 0)[: len(workload.dues)]
    searched = tuple(number for number in drawn if number % 2)
    return PlannedWorkload((), asked, workload.dues[: len(asked)], workload.rate, searched)


def first_questions(asked: Sequence[frozenset[ChunkId]]) -> NDArray[np.bool_]:
    """Return which requests need a chunk that no earlier one has needed: [n].

    Args:
        asked: chunks of each request, in their order.
    """
    seen: set[ChunkId] = set()
    found = []
    for chunk_ids in asked:
        found.append(not seen.issuperset(chunk_ids))
        seen |= chunk_ids
    return np.array(found, dtype=np.bool_)


def _row(
    share: float | None, forecast: Forecast, asked: Sequence[frozenset[ChunkId]], is_first: NDArray[np.bool_]
) -> PreparingRow:
    prepared = forecast.prepared.chunk_ids
    firsts = [chunk_ids for chunk_ids, first in zip(asked, is_first.tolist(), strict=True) if first]
    num_all = sum(chunk_ids <= prepared for chunk_ids in firsts)
    num_some = sum(not chunk_ids.isdisjoint(prepared) for chunk_ids in firsts)
    num_first = max(1, len(firsts))
    first_seconds, later_seconds = (_mean(forecast.seconds[which]) for which in (is_first, ~is_first))
    return PreparingRow(
        share,
        forecast.prepared,
        num_all / num_first,
        (num_some - num_all) / num_first,
        first_seconds,
        later_seconds,
        float(forecast.seconds.mean()),
    )


def _mean(seconds: NDArray[np.float64]) -> float | None:
    return float(seconds.mean()) if len(seconds) else None

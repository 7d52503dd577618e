"""Forecasts what preparing documents gains, by budget: `stillroom plan`'s section on prepared KV (docs/planning.md).

Every second question, by its text, tells which documents are asked for; the others are simulated, from an engine that
has kept nothing but what was prepared. So no simulated question has decided what is prepared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.edit import SettingChange
from stillroom.config.settings import PrepareConfig, ReuseMode
from stillroom.core.ids import ChunkId
from stillroom.planner.documents import PreparedDocuments, whole_windows
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
LEAST_FIRST = 25
"""With fewer first questions the 95 % interval of a share of them reaches over 0.2 to each side (at 0.5), which is as
far as the budgets of 5 % and 25 % are apart."""
_MIB = 1024**2
_NOTHING = Variation(prepared_chunks=0)


@dataclass(frozen=True, slots=True)
class PreparingRow:
    """A budget, and the forecast of it."""

    share: float | None
    """Of all chunks; None: as configured (`prepare.disk_bytes`)."""
    prepared: PreparedDocuments
    needed_bytes: int
    """Least `prepare.disk_bytes` that prepares as many chunks: windows are prepared whole or not at all."""
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
            "needed_bytes": self.needed_bytes,
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
    num_repeated: int
    """Requests for a question that an earlier request has asked."""
    search_seconds: float | None
    """Mean time of the searches of first questions; None without any."""
    today: PreparingRow
    """The configured mode, with nothing prepared."""
    rows: tuple[PreparingRow, ...]
    """With `reuse.mode = "prepared"`; empty if the model refuses it. The last one is the configured budget. Of the
    shares, those that prepare more chunks than the share before."""
    config: PrepareConfig
    split: Split
    """The plan's."""
    system_bytes: int
    """Of the system message's record on disk."""

    @property
    def has_few_first(self) -> bool:
        """Whether chance decides the shares and times of first questions."""
        return self.num_first < LEAST_FIRST

    @property
    def advice(self) -> PreparingRow | None:
        """The smallest budget with nearly the largest gain, over all questions; None if there is no gain. The
        configured budget comes before a share of the same size."""
        today = self.today.seconds
        most = max((today - row.seconds for row in self.rows), default=0.0)
        if most < _LEAST_GAIN * today:
            return None
        enough = (row for row in self.rows if today - row.seconds >= _ENOUGH * most)
        return min(enough, key=lambda row: (row.prepared.num_bytes, row.share is not None))

    @property
    def changes(self) -> list[SettingChange]:
        """Settings that the advice needs changed, after the plan's split is applied; sizes in whole MiB."""
        advice = self.advice
        if advice is None:
            return []
        found = [] if self.mode == "prepared" else [SettingChange("reuse.mode", self.mode, "prepared")]
        if advice.share is None:
            return found
        num_bytes, disk_kv = advice.needed_bytes, self.split.disk_kv
        if self.config.disk_bytes < num_bytes:
            found.append(SettingChange("prepare.disk_bytes", self.config.disk_bytes, _whole_mib(num_bytes)))
        num_bytes += self.system_bytes
        if disk_kv < num_bytes:
            found.append(SettingChange("reuse.disk_bytes", disk_kv, _whole_mib(disk_kv + num_bytes)))
        return found

    @property
    def host_limit(self) -> tuple[str, int] | None:
        """The setting that keeps a part of the advised KV out of host memory, and its bytes; None if none does."""
        own, all_kv = self.config.host_bytes, self.split.host_kv
        name, num_bytes = ("prepare.host_bytes", own) if own <= all_kv else ("reuse.host_bytes", all_kv)
        return (name, num_bytes) if self.advice and num_bytes < self.advice.prepared.num_bytes else None

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "refusal": self.refusal or None,
            "documents": self.num_documents,
            "chunks": self.num_chunks,
            "requests": self.num_requests,
            "first_questions": self.num_first,
            "has_few_first_questions": self.has_few_first,
            "repeated_requests": self.num_repeated,
            "mean_first_search_seconds": self.search_seconds,
            "today": self.today.as_json(),
            "budgets": [row.as_json() for row in self.rows],
            "advice": self._advice_json(),
        }

    def _advice_json(self) -> dict[str, Any] | None:
        if self.advice is None:
            return None
        settings = [{"setting": one.path, "before": one.before, "after": one.after} for one in self.changes]
        limit = self.host_limit and {"setting": self.host_limit[0], "bytes": self.host_limit[1]}
        return self.advice.as_json() | {"settings": settings, "host_limit": limit}


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
        forecast = forecaster.forecast(split, variation)
        step()
        needed = whole_windows(forecaster.windows(split.device_kv), forecast.prepared.num_chunks)
        return _row(share, needed.num_bytes, forecast, asked, is_first)

    today = row(0.0, _NOTHING)
    rows: list[PreparingRow] = []
    if documents.num_chunks and not documents.refusal:
        for share in _SHARES:
            num_chunks = round(share * documents.num_chunks)
            found = row(share, Variation(reuse="prepared", prepared_chunks=num_chunks))
            if not rows or found.prepared.num_chunks > rows[-1].prepared.num_chunks:
                rows.append(found)
        rows.append(row(None, Variation(reuse="prepared")))
    return PreparingPlan(
        inputs.policy.reuse.mode,
        documents.refusal,
        len(documents.documents),
        documents.num_chunks,
        len(asked),
        int(is_first.sum()),
        len(asked) - len(set(held_out.workload.asked)),
        _mean(forecaster.forecast(split, _NOTHING).search_seconds[is_first]),
        today,
        tuple(rows),
        inputs.policy.prepare,
        split,
        forecaster.system_bytes,
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
    share: float | None,
    needed_bytes: int,
    forecast: Forecast,
    asked: Sequence[frozenset[ChunkId]],
    is_first: NDArray[np.bool_],
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
        needed_bytes,
        num_all / num_first,
        (num_some - num_all) / num_first,
        first_seconds,
        later_seconds,
        float(forecast.seconds.mean()),
    )


def _whole_mib(num_bytes: int) -> int:
    """Round up, so that a setting in MiB holds it."""
    return -(-num_bytes // _MIB) * _MIB


def _mean(seconds: NDArray[np.float64]) -> float | None:
    return float(seconds.mean()) if len(seconds) else None

"""The rows of a paper after some of its commands ran again: paper's number, committed number, this run's, verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stillroom_bench.papers.agreement import Agreement, ResultAgreement, compare_results
from stillroom_bench.papers.page import Claim
from stillroom_bench.papers.repeat import Ended, ReportRun, committed_result, read_result


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """One report and, if its command has finished on this machine, how far both agree."""

    run: ReportRun
    state: str
    """`finished`, or why there is no new result."""
    committed_on: str
    """Processor of the committed result."""
    now_on: str
    agreement: ResultAgreement | None

    def as_json(self) -> dict[str, Any]:
        found = {
            "report": self.run.report,
            "state": self.state,
            "command": self.run.line if self.run.arguments else None,
            "without": list(self.run.without),
            "minutes": self.run.minutes,
            "result": str(self.run.result) if self.run.is_finished else None,
            "committed_on": self.committed_on,
            "now_on": self.now_on,
        }
        if self.agreement is None:
            return found
        counts = {verdict: self.agreement.count(verdict) for verdict in ("agrees", "differs", "absent")}
        changed = [asdict(one) for one in self.agreement.changed]
        return found | {"figures": counts, "cells": self.agreement.num_cells, "changed_cells": changed}


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """One claim."""

    claim: Claim
    numbers: tuple[Agreement, ...]
    """The quoted intervals, beside those of this run."""
    reports: tuple[ReportOutcome, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim.claim,
            "paper": self.claim.paper,
            "ours": self.claim.ours,
            "verdict_of_the_page": self.claim.verdict,
            "reports": [one.run.report for one in self.reports],
            "numbers": [asdict(number) for number in self.numbers],
        }


def outcomes(
    claims: Sequence[Claim], runs: Sequence[ReportRun], ended: Mapping[str, Ended], checkout: Path
) -> tuple[list[RowOutcome], list[ReportOutcome]]:
    """Compare all finished results with the committed ones."""
    reports = {run.report: _report_outcome(run, ended.get(run.report), checkout) for run in runs}
    rows = []
    for claim in claims:
        own = tuple(reports[report] for report in claim.reports if report in reports)
        found = (_number(interval, own) for interval in dict.fromkeys(claim.intervals))
        rows.append(RowOutcome(claim, tuple(one for one in found if one is not None), own))
    return rows, list(reports.values())


def _number(interval: str, reports: Sequence[ReportOutcome]) -> Agreement | None:
    """Return a quoted interval with its figure; None if no report of its row has been repeated, or none has it."""
    found = (one.agreement.quoted(interval) for one in reports if one.agreement is not None)
    return next((one for one in found if one is not None), None)


def _report_outcome(run: ReportRun, ended: Ended | None, checkout: Path) -> ReportOutcome:
    committed, now = committed_result(run.report, checkout), read_result(run.result)
    agreement = compare_results(committed, now) if committed and now else None
    return ReportOutcome(
        run, _state(run, ended, is_read=now is not None), _machine(committed), _machine(now), agreement
    )


def _state(run: ReportRun, ended: Ended | None, *, is_read: bool) -> str:
    if is_read:
        return "finished"
    if run.is_finished:
        return f"{run.result} is no result; remove it to run the command again"
    if ended is not None:
        return f"{ended.status} {ended.detail}".rstrip()
    return f"needs {', '.join(run.missing)}" if run.missing else "not run yet"


def _machine(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    environment = result["environment"]
    return f"{environment['processor']}, {environment['num_threads']} threads"

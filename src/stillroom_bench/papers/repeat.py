"""Runs the commands of the papers' reports again, one after the other, and keeps what has finished."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.errors import UsageError
from stillroom_bench.papers.page import Claim, report_command

_DATA = "../shared/data"
"""Folder of data in the committed command lines."""
_WORK = "WORK"
"""The work folder in the committed command lines."""
_MADE_BY = {"reuse-questions.jsonl": "reuse-questions", "split.jsonl": "split-questions"}
"""Files of questions in the work folder, and the commands of `python -m training microworld` that write them."""
_NOT_KEPT = ("microworld.jsonl",)
"""Files of questions whose seed is not known."""
_GRACE_SECONDS = 20.0
"""Given to a command that is stopped to end its own workers."""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders, and Pythons of other runtimes."""

    checkout: Path
    data: Path | None
    work_dir: Path
    results: Path
    """Keeps NAME.json and NAME.md of each finished report."""
    peers: dict[str, str]
    """Name of a runtime -> Python that has it installed."""


@dataclass(frozen=True, slots=True)
class ReportRun:
    """The command of one report, for this machine."""

    report: str
    """Path of the committed report below the checkout."""
    arguments: tuple[str, ...]
    """Of `stillroom`; empty if the report names no command."""
    missing: tuple[str, ...]
    """What the command needs and this machine lacks; it does not run then."""
    without: tuple[str, ...]
    """Runtimes that are left out of the comparison."""
    minutes: float | None
    """Expected; None if the committed result does not record it."""
    result: Path
    sampled_seconds: float = 0.0
    """Sum of the committed samples that are times; the command takes longer. Orders commands of unknown duration."""

    @property
    def name(self) -> str:
        return Path(self.report).stem

    @property
    def is_finished(self) -> bool:
        return self.result.is_file()

    @property
    def line(self) -> str:
        """The command as it would be typed."""
        quoted = (f"'{word}'" if " " in word else word for word in self.arguments)
        return " ".join(("stillroom", *quoted))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    status: str
    """`finished`, `stopped` at the end of the time, or `failed`."""
    detail: str = ""


def runs_of(claims: Iterable[Claim], places: Places) -> list[ReportRun]:
    """Return one run for each report of these rows, in their order."""
    reports = dict.fromkeys(report for claim in claims for report in claim.reports)
    return [_run_of(report, places) for report in reports]


def chosen_runs(runs: Sequence[ReportRun], names: Sequence[str]) -> list[ReportRun]:
    """Return the runs of these reports; all without names.

    Raises:
        UsageError: no report of the paper has one of the names.
    """
    known = [run.name for run in runs]
    for name in names:
        if name not in known:
            raise UsageError(f"no row of this paper links to a report {name}; it has {', '.join(known)}")
    return [run for run in runs if not names or run.name in names]


def read_result(path: Path) -> dict[str, Any] | None:
    """Read a result file; None if it is missing or no result."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if {"arms", "tables"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def committed_result(report: str, checkout: Path) -> dict[str, Any] | None:
    """Read the JSON beside a committed report; None if there is none."""
    return read_result((checkout / report).with_suffix(".json"))


def in_order(runs: Sequence[ReportRun]) -> list[ReportRun]:
    """Order the runs that can start: those of known duration first, each kind from short to long."""
    ready = [run for run in runs if not run.missing and not run.is_finished]
    return sorted(ready, key=lambda run: (run.minutes is None, run.minutes or run.sampled_seconds))


def run_report(run: ReportRun, places: Places, seconds: float | None) -> Ended:
    """Run one command; its result appears in `places.results` only when it has finished.

    Args:
        seconds: the command is stopped after them; None: it may take as long as it takes.

    Raises:
        KeyboardInterrupt: the command was stopped by Ctrl-C; the results of earlier ones stay.
    """
    places.results.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "stillroom.cli.main", *run.arguments]
    report = run.result.with_suffix(".md")
    with report.with_suffix(".md.tmp").open("wb") as out, report.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, cwd=places.checkout, stdout=out, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            _stop(process)
            return Ended("stopped", f"after {(seconds or 0.0) / 60:.3g} minutes")
        except BaseException:
            _stop(process)
            raise
    if code or not run.is_finished:
        return Ended("failed", f"exit code {code}; see {report.with_suffix('.log')}")
    Path(out.name).replace(report)
    return Ended("finished")


def run_all(
    runs: Sequence[ReportRun],
    places: Places,
    minutes: float | None,
    say: Callable[[str], None],
    ended: dict[str, Ended],
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Run what is not finished and fits the time.

    A command that is known to take longer than the rest of the time is not started; one of unknown duration is started
    and stopped when the time is over.

    Args:
        ended: gets the end of each command that was started, by report; also if Ctrl-C stops the next one.
    """
    end = None if minutes is None else now() + 60 * minutes
    for run in in_order(runs):
        left = None if end is None else end - now()
        if left is not None and (left <= 0 or 60 * (run.minutes or 0.0) > left):
            say(f"{run.name}: not started; {_expected(run)}, and {max(0.0, left) / 60:.3g} are left")
            continue
        say(f"{run.name}: running; {_expected(run)}: {run.line}")
        ended[run.report] = run_report(run, places, left)
        say(f"{run.name}: {ended[run.report].status} {ended[run.report].detail}".rstrip())


def _expected(run: ReportRun) -> str:
    return "its duration is not known" if run.minutes is None else f"about {run.minutes:.3g} minutes"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a command and its workers."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(timeout=_GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        break


def _run_of(report: str, places: Places) -> ReportRun:
    result = places.results / f"{Path(report).stem}.json"
    given = report_command(places.checkout / report)
    committed = committed_result(report, places.checkout)
    if given is None or committed is None:
        return ReportRun(report, (), ("a command that made the report",), (), None, result)
    missing, without = list[str](), list[str]()
    arguments = list[str]()
    words = iter(given)
    for word in words:
        if word in ("--output", "-o", "--peer"):
            value = next(words, "")
            if word == "--peer" and (name := value.partition("=")[0]) in places.peers:
                arguments += [word, f"{name}={places.peers[name]}"]
            elif word == "--peer":
                without.append(name)
        elif word not in ("--quiet", "-q"):
            value, lacking = _here(word, places)
            arguments.append(value)
            missing += [lacking] if lacking else []
    arguments += ["--output", str(result)]
    needed = tuple(dict.fromkeys(missing))
    return ReportRun(report, tuple(arguments), needed, tuple(without), _minutes(committed), result, _sampled(committed))


def _minutes(committed: dict[str, Any]) -> float | None:
    seconds = committed.get("seconds")
    return None if seconds is None else float(seconds) / 60


def _sampled(committed: dict[str, Any]) -> float:
    timed = (
        found["samples"]
        for metrics in committed["arms"].values()
        for metric, found in metrics.items()
        if metric.endswith("seconds")
    )
    return float(sum(sample or 0.0 for samples in timed for sample in samples))


def _here(word: str, places: Places) -> tuple[str, str]:
    """Return a word of a committed command line for this machine, and what is missing for it."""
    if word.startswith(_DATA):
        below = word.removeprefix(_DATA).lstrip("/")
        if places.data is None:
            return word, "data (--data DIR)"
        path = places.data / below
        return str(path), "" if path.exists() else f"{path}"
    if word == _WORK:
        return str(places.work_dir), ""
    if word.startswith(f"{_WORK}/"):
        path = places.work_dir / word.removeprefix(f"{_WORK}/")
        return str(path), "" if path.exists() else f"{path}{_how_to_make(path)}"
    return word, ""


def _how_to_make(path: Path) -> str:
    if path.name in _MADE_BY:
        return f" (python -m training microworld {_MADE_BY[path.name]} --out {path})"
    return ", which was not kept and cannot be made again" if path.name in _NOT_KEPT else ""

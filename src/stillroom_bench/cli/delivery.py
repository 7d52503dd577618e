"""Delivers a benchmark's result: prints it, writes JSON and HTML, compares it with an earlier result."""

import tempfile
import time
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli.console import line, note, print_json
from stillroom.cli.options import expanded
from stillroom.errors import UsageError
from stillroom.telemetry.cpu_times import CpuTimes
from stillroom_bench.instrument.noise import noise_note

if TYPE_CHECKING:
    from stillroom_bench.instrument.bench_report import BenchResult
    from stillroom_bench.instrument.comparison import MetricChange, ResultComparison

_began: ContextVar[tuple[CpuTimes | None, float] | None] = ContextVar("began", default=None)
"""CPU times of the machine, and the time, when the command began."""


def _writable(given: Path | None) -> Path | None:
    """Check an output path before the benchmark runs; `~` is the user's folder.

    Raises:
        UsageError: the path is a folder or cannot be written.
    """
    path = expanded(given)
    if path is not None:
        if path.is_dir():
            raise UsageError(f"{path} is a folder; name a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error}") from error
    return path


OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=_writable,
        help="Write the result with every sample to this JSON file.",
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", callback=_writable, help="Write a self-contained HTML page with tables and plots."
    ),
]


def _comparable(context: typer.Context, old: Path | None) -> Path | None:
    """Check the earlier result before the benchmark runs.

    A command with several benchmarks, selected by a flag, checks the flag later with `must_compare`.
    """
    if old is not None:
        from stillroom_bench.instrument.comparison import check_benchmark, load_earlier

        found = load_earlier(old)
        if not context.command_path.endswith(found.benchmark.partition(" --")[0]):
            check_benchmark(found, context.command_path)
    return old


def must_compare(old: Path | None, benchmark: str) -> None:
    """Check that the earlier result is of this benchmark.

    Raises:
        UsageError: it is of another benchmark.
    """
    if old is not None:
        from stillroom_bench.instrument.comparison import check_benchmark, load_earlier

        check_benchmark(load_earlier(old), benchmark)


CompareOption = Annotated[
    Path | None,
    typer.Option(
        "--compare",
        metavar="OLD.json",
        exists=True,
        dir_okay=False,
        callback=_comparable,
        help="Report the changes since an earlier result.",
    ),
]


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outputs of a result."""

    as_json: bool = False
    output: Path | None = None
    html: Path | None = None
    compare: Path | None = None


def begin() -> None:
    """Record CPU times and time at the start of a benchmark."""
    _began.set((CpuTimes.now(), time.monotonic()))


def deliver(result: "BenchResult", to: Delivery) -> None:
    """Print the result as Markdown or JSON, and write the requested files.

    Raises:
        UsageError: the earlier result is of another benchmark.
        OSError: a file could not be written; the result is then saved in the system's temporary folder.
    """
    from stillroom_bench.instrument.comparison import compare, load_earlier

    cpu_times, began = _began.get() or (None, None)
    result.notes.extend(noise_note(cpu_times, CpuTimes.now()))
    if began is not None:
        result = replace(result, seconds=round(time.monotonic() - began, 1))
    comparison = None
    try:
        comparison = compare(result, load_earlier(to.compare)) if to.compare is not None else None
        _print(result, to, comparison)
    finally:  # the result is saved even if printing fails
        _write(result, to, comparison)


def _print(result: "BenchResult", to: Delivery, comparison: "ResultComparison | None") -> None:
    from stillroom_bench.instrument.bench_report import to_markdown

    if to.as_json:
        print_json(result.to_json() | _as_json(comparison), indent=None)
        return
    line(to_markdown(result))
    if comparison is not None:
        _show_changes(comparison, to.compare)


def _write(result: "BenchResult", to: Delivery, comparison: "ResultComparison | None") -> None:
    from stillroom_bench.instrument.bench_report import save
    from stillroom_bench.instrument.html_report import to_html

    if to.output is not None:
        try:
            save(result, to.output)
        except OSError:
            rescued = Path(tempfile.mkdtemp(prefix="stillroom-bench-")) / to.output.name
            save(result, rescued)
            note(f"{to.output} cannot be written; the result is saved in {rescued}")
            raise
        note(f"result saved in {to.output}")
    if to.html is not None:
        to.html.write_text(to_html(result, comparison), encoding="utf-8")
        note(f"HTML page saved in {to.html}")


def _as_json(comparison: "ResultComparison | None") -> dict[str, object]:
    if comparison is None:
        return {"changes": [], "warnings": []}
    return {"changes": [_change_json(one) for one in comparison.changes], "warnings": comparison.warnings}


def _change_json(change: "MetricChange") -> dict[str, object]:
    ratio = change.ratio
    return {
        "arm": change.arm,
        "metric": change.metric,
        "then": change.then,
        "now": change.now,
        "ratio": ratio and ratio.value,
        "low": ratio and ratio.low,
        "high": ratio and ratio.high,
        "adjusted_p": change.adjusted_p,
        "is_significant": change.is_significant,
        "is_regression": change.is_regression,
        "verdict": change.verdict,
    }


def _show_changes(comparison: "ResultComparison", old: Path | None) -> None:
    from stillroom_bench.instrument.bench_report import format_value

    changes = comparison.changes
    significant = [change for change in changes if change.is_significant]
    line(f"Against {old}: {len(significant)} of {len(changes)} figures differ significantly.")
    for verdict, number in Counter(change.verdict for change in changes if not change.is_significant).items():
        line(f"  {number}: {verdict}")
    for warning in comparison.warnings:
        line(f"  note: {warning}")
    for change in significant:
        then, now = format_value(change.metric, change.then), format_value(change.metric, change.now)
        ratio = "" if change.ratio is None else f"  x {change.ratio}"
        line(f"  {change.verdict:11}  {change.arm}  {change.metric}  {then} -> {now}{ratio}")

"""Renders a result as a self-contained HTML page with tables and plots, without scripts or network access."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stillroom_bench.instrument.bench_report import BenchResult, format_value, rows
from stillroom_bench.instrument.comparison import MetricChange, ResultComparison

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #8884; white-space: nowrap; }
.flaky { color: #b3261e; font-weight: 600; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6; } .flaky { color: #ff8a80; } }
"""
_WIDTH, _LEFT, _ROW = 860, 200, 30


def to_html(result: BenchResult, comparison: ResultComparison | None = None) -> str:
    """Return the HTML page."""
    environment = result.environment
    facts = {
        "Command": environment.command,
        "Commit": environment.commit,
        "Processor": f"{environment.processor}, {environment.num_cpus} CPUs, {environment.num_threads} threads",
        "Versions": ", ".join(f"{k} {v}" for k, v in {"Python": environment.python, **environment.versions}.items()),
        "Parameters": ", ".join(f"{key} = {value}" for key, value in result.parameters.items()),
    }
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(result.benchmark)}</title>",
        f"<style>{_STYLE}</style><h1>{_text(result.benchmark)}</h1>",
        "<table>" + "".join(f"<tr><th>{_text(k)}<td>{_text(v)}" for k, v in facts.items()) + "</table>",
        "".join(f"<p>{_text(note)}" for note in result.notes),
        _table(rows(result)),
        f"<p>{_text(result.footnote)}",
    ]
    if comparison is not None:
        parts += ["<h2>Against the earlier run</h2>", *(f"<p>{_text(warning)}." for warning in comparison.warnings)]
        parts.append(_table([_change_row(change) for change in comparison.changes]))
    parts += [f"<h2>{_text(name)}</h2>{_table(table)}" for name, table in result.tables.items()]
    metrics = dict.fromkeys(metric for arm in result.samples.values.values() for metric in arm)
    parts += [_plot(result, metric) for metric in metrics]
    return "\n".join(parts)


def _change_row(change: MetricChange) -> dict[str, str]:
    return {
        "arm": change.arm,
        "metric": change.metric,
        "then": format_value(change.metric, change.then),
        "now": format_value(change.metric, change.now),
        "now / then": "" if change.ratio is None else str(change.ratio),
        "adjusted p": f"{change.adjusted_p:.3g}",
        "verdict": change.verdict,
    }


def _text(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _table(table: Sequence[Mapping[str, Any]]) -> str:
    if not table:
        return ""
    head = "<tr>" + "".join(f"<th>{_text(name)}" for name in table[0])
    body = "".join("<tr>" + "".join(_table_cell(value) for value in row.values()) for row in table)
    return f"<table>{head}{body}</table>"


def _table_cell(value: Any) -> str:
    text = _text(value)
    return f"<td class=flaky>{text}" if "(!)" in text or text == "regression" else f"<td>{text}"


def _plot(result: BenchResult, metric: str) -> str:
    """Return an SVG plot: samples as dots, the mean with its interval as a bar, one row per arm, axis from 0."""
    samples = {
        arm: [value for value in metrics[metric] if math.isfinite(value)]
        for arm, metrics in result.samples.values.items()
        if metric in metrics
    }
    top = max((value for values in samples.values() for value in values), default=0.0)
    if top <= 0:
        return ""

    def x(value: float) -> float:
        return _LEFT + max(0.0, value) / top * (_WIDTH - _LEFT - 20)

    height = _ROW * len(samples) + 30
    marks = []
    for index, (arm, values) in enumerate(samples.items()):
        y, summary = _ROW * index + 20, result.summary(arm, metric)
        marks.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end">{_text(arm)}</text>')
        for value in values:
            marks.append(f'<circle cx="{x(value):.1f}" cy="{y}" r="3" fill="#4285f4" fill-opacity=".35"/>')
        if math.isfinite(summary.ci_low):
            marks.append(
                f'<path d="M{x(summary.ci_low):.1f} {y}H{x(summary.ci_high):.1f}M{x(summary.mean):.1f} {y - 8}v16" '
                'stroke="#d93025" stroke-width="2" fill="none"/>'
            )
    axis = "".join(
        f'<text x="{x(top * part):.0f}" y="{height - 2}" text-anchor="middle">{format_value(metric, top * part)}</text>'
        for part in (0.0, 0.5, 1.0)
    )
    return (
        f"<figure><figcaption>{_text(metric)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH + 20} {height}" role="img" aria-label="{_text(metric)} by arm">'
        f"{''.join(marks)}{axis}</svg></figure>"
    )

"""The result of a benchmark: samples, summaries and ratios; its JSON file and its Markdown report.

The JSON file holds every sample.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from stillroom_bench.instrument.environment import Environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import (
    DEFAULT_FLAKY_CV,
    Interval,
    Summary,
    ratio_of_means,
    ratio_of_medians,
    summarise,
    summarise_shares,
)

FORMAT = 1

SampleOf = Literal["run", "request", "question"]
"""Unit of a sample. For `question`, samples with the same index are of the same question in every arm and run."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run of one benchmark."""

    benchmark: str
    environment: Environment
    parameters: dict[str, Any]
    """Options of the run: sizes, seeds, datasets, repetitions."""
    samples: Samples
    baseline: str | None = None
    """Arm that the others are compared with. Arms named `group/arm` are compared within their group."""
    flaky_cv: float = DEFAULT_FLAKY_CV
    notes: list[str] = field(default_factory=list)
    """Notes for the reader, such as missing peers or omitted arms."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Results that are not repeated measurements, such as quality per dataset: table name -> rows."""
    sample_of: SampleOf = "run"
    seconds: float | None = None
    """Wall time of the whole command, by which `stillroom bench papers` plans; None if it was not taken."""

    def summary(self, arm: str, metric: str) -> Summary:
        samples = self.samples.of(arm, metric)
        return summarise_shares(samples) if self.is_share(metric) else summarise(samples)

    def is_share(self, metric: str) -> bool:
        """Return whether all samples are between 0 and 1, and of questions, as for right answers; times are not."""
        if self.sample_of != "question" or metric.endswith("seconds"):
            return False
        return all(0.0 <= value <= 1.0 for arm in self.samples.values.values() for value in arm.get(metric, ()))

    def ratio(self, arm: str, metric: str) -> Interval | None:
        """Return the ratio of this arm's median to the baseline's; of means if samples are paired questions.

        None for the baseline itself, without a baseline, and if the ratio is not finite.
        """
        if self.baseline is None:
            return None
        group, separator, _ = arm.rpartition("/")
        baseline = f"{group}{separator}{self.baseline}"
        if arm == baseline or metric not in self.samples.values.get(baseline, {}):
            return None
        own, other = self.samples.of(arm, metric), self.samples.of(baseline, metric)
        is_paired = self.sample_of == "question" and len(own) == len(other)
        found = ratio_of_means(own, other, block=1) if is_paired else ratio_of_medians(own, other)
        return found if found.is_finite else None

    def reproducibility(self, summary: Summary) -> str:
        """Return the reproducibility class, marked if flaky; empty for questions, whose spread is not noise."""
        if self.sample_of == "question":
            return ""
        return summary.reproducibility.value + (" (!)" if summary.is_flaky(self.flaky_cv) else "")

    @property
    def footnote(self) -> str:
        """Explains the table of `rows`."""
        if self.sample_of == "question":
            return (
                "Intervals: 95 %. Those of shares, whose samples are between 0 and 1, stay there: Wilson's if all "
                "samples are 0 or 1."
            )
        return f"(!) flaky: CV above {self.flaky_cv:.0%}."

    def to_json(self) -> dict[str, Any]:
        """Return the result with its summaries as JSON; infinite values and NaN become None."""
        arms = {
            arm: {metric: self._metric_json(arm, metric) for metric in metrics}
            for arm, metrics in self.samples.values.items()
        }
        content = {
            "format": FORMAT,
            "benchmark": self.benchmark,
            "environment": asdict(self.environment),
            "parameters": self.parameters,
            "baseline": self.baseline,
            "flaky_cv": self.flaky_cv,
            "sample_of": self.sample_of,
            "seconds": self.seconds,
            "notes": self.notes,
            "arms": arms,
            "tables": self.tables,
        }
        found: dict[str, Any] = finite(content)
        return found

    def _metric_json(self, arm: str, metric: str) -> dict[str, Any]:
        summary, ratio = self.summary(arm, metric), self.ratio(arm, metric)
        return {
            "samples": self.samples.of(arm, metric),
            "summary": asdict(summary),
            "reproducibility": None if self.sample_of == "question" else summary.reproducibility.value,
            "is_flaky": self.sample_of != "question" and summary.is_flaky(self.flaky_cv),
            "ratio_to_baseline": None if ratio is None else asdict(ratio),
        }


def finite(content: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by None."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def save(result: BenchResult, path: Path) -> None:
    """Write the result file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def format_value(metric: str, value: float) -> str:
    """Format a value with the unit of its metric."""
    if not math.isfinite(value):
        return "-"
    if metric.endswith("_seconds"):
        scale, unit = (1e6, "us") if abs(value) < 1e-3 else (1e3, "ms") if abs(value) < 1 else (1.0, "s")
        return f"{value * scale:.4g} {unit}"
    if metric.endswith("_bytes"):
        return f"{value / 2**20:.4g} MiB"
    return f"{value:.4g}"


def share_name(share: float) -> str:
    """Format a share for the name of an arm; different shares have different names."""
    return f"{100 * share:g}%"


def rows(result: BenchResult) -> list[dict[str, str]]:
    """Return the table of the report: one row per arm and metric. A share has a mean and no spread, one sample has
    neither interval nor spread."""
    table = []
    for arm, metrics in result.samples.values.items():
        for metric in metrics:
            summary, ratio = result.summary(arm, metric), result.ratio(arm, metric)

            is_share = result.is_share(metric)

            def show(value: float, metric: str = metric) -> str:
                return format_value(metric, value)

            spread = {"p50": summary.p50, "p95": summary.p95, "p99": summary.p99, "std": summary.std}
            is_one = summary.num_samples < 2
            shown = {name: "" if is_share or is_one else show(value) for name, value in spread.items()}
            interval = "" if is_one else f" [{show(summary.ci_low)}, {show(summary.ci_high)}]"
            table.append(
                {
                    "arm": arm,
                    "metric": metric,
                    **{name: shown[name] for name in ("p50", "p95", "p99")},
                    "mean": show(summary.mean) + interval,
                    "std": shown["std"],
                    "CV": "" if is_share or is_one else f"{summary.cv:.1%}" if math.isfinite(summary.cv) else "-",
                    "class": result.reproducibility(summary),
                    "x baseline": "" if ratio is None else str(ratio),
                }
            )
    return table


def to_markdown(result: BenchResult) -> str:
    """Return the report as Markdown."""
    environment = result.environment
    lines = [
        f"# {result.benchmark}",
        "",
        f"`{environment.command}` at commit `{environment.commit}`; {environment.processor}, "
        f"{environment.num_cpus} CPUs, {environment.num_threads} threads; Python {environment.python}, "
        + ", ".join(f"{name} {version}" for name, version in environment.versions.items()),
        "",
        *(f"- {note}" for note in result.notes),
        *([""] if result.notes else []),
    ]
    if result.samples.values:
        lines += [*markdown_table(rows(result)), "", result.footnote, ""]
    for name, table in result.tables.items():
        lines += [f"## {name}", "", *markdown_table(table), ""]
    return "\n".join(lines)


def markdown_table(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table; the first row gives the columns."""
    if not table:
        return []
    heads = list(table[0])
    body = ["| " + " | ".join(_cell(row.get(head, "")) for head in heads) + " |" for row in table]
    return ["| " + " | ".join(map(_cell, heads)) + " |", "|" + "---|" * len(heads), *body]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())

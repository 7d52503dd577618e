"""Writes the evaluation as JSON and as the tables of the model card."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stillroom_bench.instrument.environment import record_environment
from training.evaluation.score import Figure

REPORT = "evaluation.json"


def as_json(model: str, found: Sequence[Figure]) -> dict[str, Any]:
    """Return the report as JSON."""
    return {
        "model": Path(model).name,
        "environment": asdict(record_environment()),
        "figures": [
            {
                "name": one.name,
                "value": round(one.interval.value, 4),
                "low": round(one.interval.low, 4),
                "high": round(one.interval.high, 4),
                "questions": one.num_questions,
                "groups": one.num_groups,
                "target": one.target,
                "is reached": one.is_reached,
            }
            for one in found
        ],
    }


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    lines = ["| questions | share | 95 % interval | number | target |", "|---|---|---|---|---|"]
    for row in report["figures"]:
        target = "" if row["target"] is None else f"{row['target']:.2f}, {'reached' if row['is reached'] else 'missed'}"
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(f"| {row['name']} | {row['value']:.3f} | {interval} | {row['questions']} | {target} |")
    return "\n".join(lines) + "\n"

"""Writes the evaluation as JSON and as the tables of the model card."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from stillroom.answer_quality.asking import QuestionOutcome
from stillroom_bench.instrument.environment import record_environment
from training.evaluation.score import Figure

REPORT = "evaluation.json"


def as_json(
    model: str, found: Sequence[Figure], reuse: Mapping[str, Mapping[str, Sequence[QuestionOutcome]]]
) -> dict[str, Any]:
    """Return the report as JSON.

    Args:
        reuse: set -> way of reuse -> outcomes.
    """
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
        "reuse": {name: [_reuse_row(arm, outcomes) for arm, outcomes in arms.items()] for name, arms in reuse.items()},
    }


def _reuse_row(arm: str, outcomes: Sequence[QuestionOutcome]) -> dict[str, Any]:
    row: dict[str, Any] = {"way": arm, "questions": len(outcomes)}
    for name in ("is_right", "f1", "agrees", "recomputed"):
        value = fmean(getattr(one, name) for one in outcomes)
        row[name.replace("_", " ")] = None if math.isnan(value) else round(value, 4)
    return row


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    lines = ["| questions | share | 95 % interval | number | target |", "|---|---|---|---|---|"]
    for row in report["figures"]:
        target = "" if row["target"] is None else f"{row['target']:.2f}, {'reached' if row['is reached'] else 'missed'}"
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(f"| {row['name']} | {row['value']:.3f} | {interval} | {row['questions']} | {target} |")
    for name, rows in report["reuse"].items():
        lines += ["", f"Reusing KV, {name}:", ""]
        lines += ["| way | exact match | F1 | same answer as in full | computed again |", "|---|---|---|---|---|"]
        for row in rows:
            cells = [row["way"], *(f"{row[key]:.3f}" for key in ("is right", "f1", "agrees", "recomputed"))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"

"""Reads the lengths of recorded requests: prompt and answer tokens (Cache-Craft Figure 1).

CSV with the columns `ContextTokens` and `GeneratedTokens`, as the Azure traces, or JSON lines with `input_length` and
`output_length`, as the Mooncake traces.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.errors import UsageError
from stillroom_bench.instrument.statistics import ratio_of_means, wilson

Lengths = Sequence[tuple[int, int]]
"""Prompt and answer tokens of each request, in order of arrival."""
_COLUMNS = (("ContextTokens", "GeneratedTokens"), ("input_length", "output_length"))


def read_lengths(path: Path) -> Lengths:
    """Read all requests of a trace.

    Raises:
        UsageError: the file is not such a trace, or is empty; the message names the row.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows: Iterable[Mapping[str, Any]] = (
                csv.DictReader(lines) if path.suffix == ".csv" else map(json.loads, lines)
            )
            found = list(_pairs(rows))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a trace of lengths: {error}") from error
    if not found:
        raise UsageError(f"{path} is not a trace of lengths: it has no requests")
    return found


def _pairs(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    for number, row in enumerate(rows, start=1):
        names = next((names for names in _COLUMNS if set(names) <= row.keys()), None)
        if names is None:
            wanted = " or ".join(f"{prompt} and {answer}" for prompt, answer in _COLUMNS)
            raise ValueError(f"row {number} has no {wanted}")
        pair = int(row[names[0]]), int(row[names[1]])
        if min(pair) < 0:
            raise ValueError(f"row {number} has a negative length")
        yield pair


def length_row(name: str, lengths: Lengths) -> dict[str, Any]:
    """Return percentiles of both lengths, and how much longer prompts are than answers."""
    prompts, answers = (np.array([pair[place] for pair in lengths], dtype=float) for place in (0, 1))
    row: dict[str, Any] = {"trace": name, "requests": len(lengths)}
    for title, values in (("prompt", prompts), ("answer", answers)):
        row |= {f"{title} tokens, p{percent}": round(float(np.percentile(values, percent))) for percent in (5, 50, 95)}
    row["prompt / answer tokens"] = str(ratio_of_means(prompts.tolist(), answers.tolist()))
    return row | {"prompts longer than their answer": str(wilson(int((prompts > answers).sum()), len(lengths)))}

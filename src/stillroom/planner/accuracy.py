"""What a plan's times are good for: how far an earlier `stillroom plan --validate` on this machine was from them."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stillroom.planner.forecast import Forecast
from stillroom.planner.validation import Measured

GOOD_FACTOR = 1.5
"""Times within this factor of the measured ones may be used as times; others only order choices."""
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Measured times divided by predicted ones."""

    p50_factor: float
    p95_factor: float
    num_requests: int
    rate: float
    """Requests per second."""

    @property
    def is_good(self) -> bool:
        """Whether both percentiles were within `GOOD_FACTOR`, to either side."""
        return all(1 / GOOD_FACTOR <= factor <= GOOD_FACTOR for factor in (self.p50_factor, self.p95_factor))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"good_for": "times" if self.is_good else "order"}


def accuracy_of(predicted: Forecast, measured: Measured, rate: float) -> Accuracy:
    """Compare a validation's times with the predicted ones."""
    p50, p95 = (measured.percentile(one) / max(predicted.percentile(one), 1e-9) for one in (50, 95))
    return Accuracy(p50, p95, len(measured.seconds), rate)


def accuracy_file(profile: Path) -> Path:
    """Return the file beside the cost profile of a model on this machine."""
    return profile.with_suffix(".plan.json")


def save_accuracy(path: Path, accuracy: Accuracy) -> None:
    """Write the file atomically, in place of an earlier validation's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": _FORMAT, **asdict(accuracy)}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def load_accuracy(path: Path) -> Accuracy | None:
    """Read the file; None if it is missing or invalid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            return None
        factors = (float(content["p50_factor"]), float(content["p95_factor"]))
        return Accuracy(*factors, int(content["num_requests"]), float(content["rate"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

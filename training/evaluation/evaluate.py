"""`python -m training evaluate`: runs every question set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.data.shards import verified_digest
from training.evaluation.ask import ask, load_set
from training.evaluation.report import as_json
from training.evaluation.score import figures
from training.evaluation.sets import SETS


def evaluate(model: str, data: Path, *, limit: int | None, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Evaluate a model and return the report.

    Args:
        model: checkpoint folder, or `bundled:NAME`.
        data: folder that `python -m training data` wrote.
        limit: questions per set; None: all.

    Raises:
        FileNotFoundError: there is no data.
        ValueError: the data are incomplete.
        ModelError: Stillroom cannot load the checkpoint.
    """
    digest = verified_digest(data)
    found = []
    for name in SETS:
        say(f"{name}: answering")
        found += figures(name, ask(model, load_set(data / "eval" / f"{name}.jsonl", limit), device=device))
        for one in found:
            say(f"  {one.name}: {one.interval.value:.3f}")
    return {"data": digest, **as_json(model, found)}

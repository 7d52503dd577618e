"""`python -m training evaluate`: runs every question set, and a part of each with KV reuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.data.shards import verified_digest
from training.evaluation.ask import ask, ask_with_reuse, load_set
from training.evaluation.report import as_json
from training.evaluation.score import figures
from training.evaluation.sets import SETS


def evaluate(
    model: str, data: Path, *, limit: int | None, num_reused: int, device: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Evaluate a model and return the report.

    Args:
        model: checkpoint folder, or `bundled:NAME`.
        data: folder that `python -m training data` wrote.
        limit: questions per set; None: all.
        num_reused: questions per set that also run with reuse, on a CPU; 0: none.

    Raises:
        FileNotFoundError: there is no data.
        ValueError: the data are incomplete.
        ModelError: Stillroom cannot load the checkpoint.
    """
    digest = verified_digest(data)
    found = []
    reuse = {}
    for name in SETS:
        path = data / "eval" / f"{name}.jsonl"
        say(f"{name}: answering")
        found += figures(name, ask(model, load_set(path, limit), device=device))
        for one in found:
            say(f"  {one.name}: {one.interval.value:.3f}")
        if num_reused:
            say(f"{name}: answering {num_reused} with reuse")
            reuse[name] = ask_with_reuse(model, path, num_reused)
    return {"data": digest, **as_json(model, found, reuse)}

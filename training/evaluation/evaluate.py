"""`python -m training evaluate`: every set of questions, and a part of each with KV reuse."""

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
    """The report.

    Args:
        model: a checkpoint's folder, or `bundled:NAME`.
        data: the folder that `python -m training data` wrote.
        limit: questions of each set; None: all.
        num_reused: questions of each set that are also asked with reuse, on a CPU; 0: none.

    Raises:
        FileNotFoundError: there is no data.
        ValueError: the data are not whole.
        ModelError: Stillroom cannot use the checkpoint.
    """
    digest = verified_digest(data)
    found = []
    reuse = {}
    for name in SETS:
        path = data / "eval" / f"{name}.jsonl"
        say(f"{name}: asking")
        found += figures(name, ask(model, load_set(path, limit), device=device))
        for one in found:
            say(f"  {one.name}: {one.interval.value:.3f}")
        if num_reused:
            say(f"{name}: asking {num_reused} again, with reuse")
            reuse[name] = ask_with_reuse(model, path, num_reused)
    return {"data": digest, **as_json(model, found, reuse)}

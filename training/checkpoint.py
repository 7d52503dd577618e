"""Checkpoint and log of a run: the checkpoint is written atomically, the log is cut back to it on resume."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from training.data.shards import verified_digest
from training.recipe import Recipe

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


class ResumeError(Exception):
    """The checkpoint belongs to another recipe or to other data."""


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, so that a crash leaves the previous one."""
    folder.mkdir(parents=True, exist_ok=True)
    path, scratch = folder / CHECKPOINT, folder / f"{CHECKPOINT}.tmp"
    with scratch.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the checkpoint's state; None if the run has none."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def identity_of(recipe: Recipe, data: Path) -> dict[str, str]:
    """Return the recipe and the data's digest, which identify a run. Raises as `verified_digest`."""
    return {"recipe": repr(recipe.as_json()), "data": verified_digest(data)}


def check_identity(folder: Path, state: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    """Check that a checkpoint is of this recipe and data; raises ResumeError otherwise."""
    for part, name in wanted.items():
        if state["identity"][part] != name:
            raise ResumeError(
                f"the {part} differs from that of the run in {folder}; use the same {part}, or another folder"
            )


class Log:
    """Log of a run as JSON lines. Lines after the resumed checkpoint are dropped, because those steps run again."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOG
        kept = [line for line in read_log(folder) if line.get("step", 0) <= step] if step else []
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's log; a line truncated by a crash is skipped."""
    path = folder / LOG
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found

"""Helpers that declare a benchmark's options once: a field of its option class is parameter, default and flag."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stillroom.errors import UsageError

REQUIRED: Any = object()
"""Marks a field without a default."""

PathKind = Literal["file", "folder", "any"]


@dataclass(frozen=True, slots=True)
class Flag:
    """The command-line flag of a field. The flag of a tuple can be repeated."""

    help: str
    name: str | None = None
    """Name such as `--lists`; None: the field's name with dashes."""
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    path: PathKind = "any"
    """Kind of path that must exist, if the field is a path."""


def flag(  # noqa: PLR0913  one parameter per attribute of a flag
    default: Any,
    help: str,
    name: str | None = None,
    *,
    metavar: str | None = None,
    min: float | None = None,
    max: float | None = None,
    path: PathKind = "any",
) -> Any:
    """Return a field of an option class with a flag; the default `REQUIRED` makes the flag mandatory."""
    metadata = {"flag": Flag(help, name, metavar, min, max, path)}
    return field(metadata=metadata) if default is REQUIRED else field(default=default, metadata=metadata)


def seed_flag() -> Any:
    return flag(0, "Seed of all random choices.", min=0)


def device_flag() -> Any:
    return flag("cpu", "Device of the model: cpu or cuda.")


def size_flag() -> Any:
    """Return the field `size`: a name of `quality.runtime.SHAPES`."""
    return flag("135m", "Parameters of the model with random weights: 135m or 1.5b.")


def repeat_flag(default: int, help: str = "Runs per arm, after one warm-up run.") -> Any:
    return flag(default, help, min=1)


def datasets_flag() -> Any:
    """Return the field `datasets`: at least one folder in BEIR layout."""
    return flag(REQUIRED, "A data set in BEIR layout.", "--dataset", path="folder")


def dataset_flag() -> Any:
    """Return the field `dataset`: a folder in BEIR layout, or None."""
    help = "Data set in BEIR layout that supplies documents and questions; without it, they are random."
    return flag(None, help, "--dataset", path="folder")


def model_flag() -> Any:
    """Return the field `model`: a checkpoint folder, or None."""
    help = "A checkpoint folder, run in bfloat16; without it, a Llama with 135 million random weights."
    return flag(None, help, path="folder")


def companions_flag(default: str) -> Any:
    """Return the field `companions`: which documents follow the first one of a prompt."""
    help = "Documents after the first: drawn independently, or a fixed list per first document."
    return flag(default, help, metavar="drawn|fixed")


def peers_flag(names: str = "llama.cpp or vllm") -> Any:
    """Return the field `peers`: runtimes to compare with, each written `NAME=PYTHON`."""
    return flag((), f"{names}, and the Python that has it installed.", "--peer", metavar="NAME=PYTHON")


def named_pythons(peers: Sequence[str]) -> dict[str, str]:
    """Return the Python executable of each peer.

    Raises:
        UsageError: a peer is not written as NAME=PYTHON.
    """
    found = {}
    for peer in peers:
        name, separator, python = peer.partition("=")
        if not separator or not python:
            raise UsageError(f"--peer {peer} names no Python; write it as --peer {name}=PATH/bin/python")
        found[name] = python
    return found

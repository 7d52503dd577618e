"""Declares a benchmark's options once: a field of its option class is its parameter, its default and its flag."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stillroom.errors import UsageError

REQUIRED: Any = object()
"""Default of a field that has none."""

PathKind = Literal["file", "folder", "any"]


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field is given on the command line. A field that is a tuple can be given several times."""

    help: str
    name: str | None = None
    """Such as `--lists`; None: the field's name with dashes."""
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    path: PathKind = "any"
    """What must exist, if the field is a path."""


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
    """A field of an option class, with its default (`REQUIRED`: none) and its flag."""
    metadata = {"flag": Flag(help, name, metavar, min, max, path)}
    return field(metadata=metadata) if default is REQUIRED else field(default=default, metadata=metadata)


def seed_flag() -> Any:
    """The field `seed`."""
    return flag(0, "Seed of everything that is drawn.", min=0)


def repeat_flag(default: int, help: str = "Runs per arm, after one to warm up.") -> Any:
    """The field `repeat`."""
    return flag(default, help, min=1)


def datasets_flag() -> Any:
    """The field `datasets`: at least one folder in BEIR layout."""
    return flag(REQUIRED, "A data set.", "--dataset", path="folder")


def dataset_flag() -> Any:
    """The field `dataset`: a folder in BEIR layout that documents and questions come from, or None."""
    help = "Where documents and questions come from; without it, they are drawn."
    return flag(None, help, "--dataset", path="folder")


def model_flag() -> Any:
    """The field `model`: a checkpoint's folder, or None."""
    help = "A checkpoint's folder, run in bfloat16; without it, random weights of a Llama of 135 million parameters."
    return flag(None, help, path="folder")


def companions_flag(default: str) -> Any:
    """The field `companions`: which documents follow the first one of a prompt."""
    help = "Documents after the first: each drawn, or the same list whenever the first is the same."
    return flag(default, help, metavar="drawn|fixed")


def peers_flag(names: str = "llama.cpp or vllm") -> Any:
    """The field `peers`: runtimes to measure beside ours, each written `NAME=PYTHON`."""
    return flag((), f"{names}, and the Python that has it.", "--peer", metavar="NAME=PYTHON")


def named_pythons(peers: Sequence[str]) -> dict[str, str]:
    """The Python of each peer.

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

"""What is said about a document in or beside its file: front matter, names with texts, a file beside it.

Whatever is malformed in the text itself is no metadata and no error: the document is read all the same. The file beside
it is there for nothing else, so what cannot be read in it is an error.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stillroom.core.metadata import Metadata, MetaValue, Scalar, clean_metadata, typed
from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.loaders.source import opened

Said = Mapping[str, MetaValue | None]
"""Of a file by whoever adds it; None takes back what was said before."""

SIDECAR = ".metadata.json"
"""Beside `report.pdf`: `report.pdf.metadata.json`."""

_MAX_FRONT_MATTER_CHARS = 65_536
_MAX_SIDECAR_BYTES = 1 << 20
_FRONT_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Without merge keys (`<<`), by which a few lines can say more than memory holds."""

    def flatten_mapping(self, node: Any) -> None:
        """Leaves a merge key as it is, and no value is made of one."""


def front_matter(text: str) -> tuple[str, Metadata]:
    """Title, or "", and metadata of a YAML block. Where it is not YAML, a line `title: ...` still gives the title."""
    found: Any = None
    if len(text) <= _MAX_FRONT_MATTER_CHARS:
        try:
            found = yaml.load(text, _Loader)  # a SafeLoader
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # an impossible date is a ValueError
            found = None
    if not isinstance(found, dict):
        title = _FRONT_TITLE.search(text)
        return _unquoted(title.group(1).strip()) if title else "", {}
    name = found.pop("title", None)
    title_text = " ".join(str(name).split()) if isinstance(name, (str, int, float)) else ""
    return title_text, clean_metadata(found)


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


def named_texts(pairs: Iterable[tuple[str, str]]) -> Metadata:
    """Of formats that know texts only: numbers and truth values are recognised, and a name that comes again makes a
    list."""
    found: dict[str, list[Scalar]] = {}
    for name, text in pairs:
        if text.strip():
            found.setdefault(name, []).append(typed(text))
    return clean_metadata({name: values[0] if len(values) == 1 else values for name, values in found.items()})


def sidecar_of(path: Path) -> Path:
    """Where the metadata of a file would lie."""
    return path.with_name(path.name + SIDECAR)


def is_sidecar(path: Path) -> bool:
    """Whether a file is there to describe another one."""
    return path.name.endswith(SIDECAR) and os.path.exists(path.with_name(path.name.removesuffix(SIDECAR)))


def sidecar_metadata(path: Path) -> Metadata:
    """What the file beside a file says of it; nothing where there is none. An object within `metadataAttributes`, as
    other systems write it, counts as the object itself.

    Raises:
        DocumentError: it cannot be read or is no JSON object.
    """
    beside = sidecar_of(path)
    try:
        if not os.path.lexists(beside):
            return {}
        with opened(beside) as (stream, _):
            found = json.loads(stream.read(_MAX_SIDECAR_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{beside}: cannot be read as JSON: {error}; repair or remove it") from error
    if isinstance(found, dict) and isinstance(found.get("metadataAttributes"), dict):
        found = found["metadataAttributes"]
    if not isinstance(found, dict):
        raise DocumentError(f'{beside}: is no JSON object such as {{"team": "legal"}}; repair or remove it')
    return clean_metadata(found)


def said_metadata(metadata: Mapping[str, object]) -> Said:
    """Metadata as a caller gives it.

    Raises:
        UsageError: a value is none, or a name.
    """
    taken_back = {name for name, value in metadata.items() if value is None}
    kept = clean_metadata({name: value for name, value in metadata.items() if value is not None})
    if kept.keys() | taken_back != metadata.keys():
        odd = sorted(map(str, metadata.keys() - kept.keys() - taken_back))
        raise UsageError(
            f"metadata {', '.join(odd)}: a name is a short text without quotation marks, and a value a text, a number, "
            "a date, true or false, or a list of those"
        )
    return {**kept, **dict.fromkeys(taken_back)}

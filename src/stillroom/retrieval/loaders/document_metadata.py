"""Metadata of documents: front matter, name-text pairs, sidecar files, and metadata given by the caller.

Malformed metadata inside a document is ignored and the document is read. A malformed sidecar file is an error.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stillroom.core.metadata import Metadata, MetaValue, Scalar, clean_metadata, parse_scalar
from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.loaders.source import opened

GivenMetadata = Mapping[str, MetaValue | None]
"""Metadata that the caller of `add` gives for a file; None removes a field given before."""

SIDECAR = ".metadata.json"
"""Suffix of the sidecar: `report.pdf.metadata.json` describes `report.pdf`."""

_MAX_FRONT_MATTER_CHARS = 65_536
_MAX_SIDECAR_BYTES = 1 << 20
_FRONT_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML loader without merge keys (`<<`), which can expand a few lines beyond any memory."""

    def flatten_mapping(self, node: Any) -> None:
        """Leave merge keys as they are."""


def front_matter(text: str) -> tuple[str, Metadata]:
    """Return title (or "") and metadata of a YAML block. In a block that is not YAML, a line `title: ...` gives the
    title."""
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


def text_metadata(pairs: Iterable[tuple[str, str]]) -> Metadata:
    """Return metadata from pairs of name and text. Numbers and booleans are recognised; repeated names make a list."""
    found: dict[str, list[Scalar]] = {}
    for name, text in pairs:
        if text.strip():
            found.setdefault(name, []).append(parse_scalar(text))
    return clean_metadata({name: values[0] if len(values) == 1 else values for name, values in found.items()})


def sidecar_of(path: Path) -> Path:
    """Return the path of a file's sidecar, whether or not it exists."""
    return path.with_name(path.name + SIDECAR)


def is_sidecar(path: Path) -> bool:
    """Return whether a file is the sidecar of an existing file."""
    return path.name.endswith(SIDECAR) and os.path.exists(path.with_name(path.name.removesuffix(SIDECAR)))


def sidecar_metadata(path: Path) -> Metadata:
    """Return the metadata in a file's sidecar, or {} without one. An object in `metadataAttributes`, the layout of
    other systems, counts as the object itself.

    Raises:
        DocumentError: The sidecar cannot be read or is not a JSON object.
    """
    sidecar = sidecar_of(path)
    try:
        if not os.path.lexists(sidecar):
            return {}
        with opened(sidecar) as (stream, _):
            found = json.loads(stream.read(_MAX_SIDECAR_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{sidecar}: cannot be read as JSON: {error}; repair or remove it") from error
    if isinstance(found, dict) and isinstance(found.get("metadataAttributes"), dict):
        found = found["metadataAttributes"]
    if not isinstance(found, dict):
        raise DocumentError(f'{sidecar}: not a JSON object such as {{"team": "legal"}}; repair or remove it')
    return clean_metadata(found)


def given_metadata(metadata: Mapping[str, object]) -> GivenMetadata:
    """Check the metadata that a caller gives.

    Raises:
        UsageError: A name or a value is not allowed.
    """
    removed = {name for name, value in metadata.items() if value is None}
    kept = clean_metadata({name: value for name, value in metadata.items() if value is not None})
    if kept.keys() | removed != metadata.keys():
        invalid = sorted(map(str, metadata.keys() - kept.keys() - removed))
        raise UsageError(
            f"metadata {', '.join(invalid)}: a name must be a short text without quotation marks, and a value a text, "
            "a number, a date, true or false, or a list of those"
        )
    return {**kept, **dict.fromkeys(removed)}


def with_given(metadata: Metadata, given: GivenMetadata) -> Metadata:
    """Merge metadata; `given` wins, and None removes a field."""
    merged = {**metadata, **given}
    return {name: value for name, value in sorted(merged.items()) if value is not None}

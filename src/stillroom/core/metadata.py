"""Metadata of documents: names with plain values that filters compare.

A value is a text, a number, a boolean, or a list of these; a date is a text in ISO 8601. `clean_metadata` brings
metadata of files and callers into this form once, so that equal metadata has equal JSON.
"""

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

Scalar = str | int | float | bool
MetaValue = Scalar | tuple[Scalar, ...]
Metadata = Mapping[str, MetaValue]

MAX_FIELDS = 256
MAX_NAME_CHARS = 200
MAX_VALUE_CHARS = 10_000
MAX_ITEMS = 1000
_MAX_DEPTH = 8
_MAX_VISITED = 4096
MAX_INTEGER = 2**63 - 1
"""Largest integer that SQLite compares exactly; larger ones are kept as floats."""


def clean_metadata(raw: Mapping[Any, object]) -> Metadata:
    """Return the fields of `raw` that can be kept, sorted by name.

    A nested mapping becomes dotted names (`author.name`), and dates become ISO 8601. Null, blank, non-finite and far
    too long values are left out.
    """
    found: dict[str, MetaValue] = {}
    for name, value in islice(_flat(raw, "", 0), _MAX_VISITED):
        kept = _value(value)
        if kept is not None and 0 < len(name) <= MAX_NAME_CHARS and len(found) < MAX_FIELDS:
            found[name] = kept
    return dict(sorted(found.items()))


def metadata_to_json(metadata: Metadata) -> str:
    """Return JSON; equal metadata gives equal text."""
    return json.dumps(metadata, sort_keys=True, ensure_ascii=False, allow_nan=False)


def metadata_from_json(text: str) -> Metadata:
    """Parse the output of `metadata_to_json`."""
    found = json.loads(text)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _flat(raw: Mapping[Any, object], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    for key, value in raw.items():
        name = prefix + _name(str(key)[: MAX_NAME_CHARS + 1])
        yield name, value  # mappings too, so that the caller can stop at _MAX_VISITED
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            yield from _flat(value, f"{name}.", depth + 1)


def _value(value: object) -> MetaValue | None:
    if isinstance(value, (list, tuple, set, frozenset)):
        items: Sequence[object] = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        kept = tuple(item for item in (_scalar(item) for item in items[:MAX_ITEMS]) if item is not None)
        return kept or None
    return _scalar(value)


def _scalar(value: object) -> Scalar | None:
    match value:
        case bool():
            return value
        case int():
            return value if abs(value) <= MAX_INTEGER else float(value) if value.bit_length() < 1000 else None
        case float():
            return value if math.isfinite(value) else None
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case str():
            return clean_text(value).strip()[:MAX_VALUE_CHARS].rstrip() or None
        case _:
            return None


def parse_scalar(text: str) -> Scalar:
    """Convert a text that is written as a boolean or a number; `007`, `1e400` and integers that SQLite cannot hold stay
    texts."""
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?(0|[1-9][0-9]{0,18})", text):
        return int(text) if abs(int(text)) <= MAX_INTEGER else text
    if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,20}", text):
        return float(text)
    return text


def _name(text: str) -> str:
    """Return the printable part on one line, without quotes and backslashes, which a JSON path cannot quote."""
    kept = (one for one in clean_text(text) if one.isspace() or (one.isprintable() and one not in '"\\'))
    return " ".join("".join(kept).split())


def clean_text(value: str) -> str:
    """Replace lone surrogates, which JSON and PDF can hold but UTF-8 cannot, and remove NUL, where SQLite ends a
    text."""
    return value.encode("utf-8", "replace").decode().replace("\0", "")

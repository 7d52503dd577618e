"""Metadata of any kind becomes plain values, deterministically."""

import datetime
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stillroom.core.metadata import (
    MAX_FIELDS,
    MAX_VALUE_CHARS,
    Scalar,
    clean_metadata,
    metadata_from_json,
    metadata_to_json,
    parse_scalar,
)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.dates(), st.datetimes(), st.times(), st.binary()
)
ANYTHING = st.dictionaries(
    st.text(max_size=8),
    st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner), max_leaves=8),
    max_size=6,
)


@given(ANYTHING)
@example({"0 \x7f 0": False})
@example({"a": "x" * (MAX_VALUE_CHARS - 1) + " y"})
def test_cleaned_metadata_survives_json_unchanged(raw: dict[str, object]) -> None:
    kept = clean_metadata(raw)
    text = metadata_to_json(kept)
    assert metadata_from_json(text) == kept
    assert clean_metadata(json.loads(text)) == kept
    text.encode()


def test_values_of_every_type_are_cleaned() -> None:
    raw = {
        "year": 2024,
        "author": {"name": " Ada ", "born": datetime.date(1815, 12, 10)},
        "tags": ["x", None, 2, {"no": "value"}],
        "is_draft": False,
        "nothing": None,
        "blank": "  ",
        "infinite": float("inf"),
        3: "three",
    }
    assert clean_metadata(raw) == {
        "3": "three",
        "author.born": "1815-12-10",
        "author.name": "Ada",
        "is_draft": False,
        "tags": ("x", 2),
        "year": 2024,
    }


def test_fields_depth_and_integers_are_limited() -> None:
    assert len(clean_metadata({str(number): number for number in range(1000)})) == MAX_FIELDS
    nested: dict[str, object] = {"x": 1}
    for _ in range(100):
        nested = {"x": nested}
    assert clean_metadata(nested) == {}
    assert clean_metadata({"n": 2**70, "m": 2**5000}) == {"n": float(2**70)}


@pytest.mark.parametrize(
    ("text", "value"),
    [("2021", 2021), (" -3 ", -3), ("TRUE", True), ("007", "007"), ("1e400", "1e400")]
    + [(str(2**63 - 1), 2**63 - 1), (str(2**63), str(2**63)), ("0.50", 0.5)],
)
def test_text_written_as_a_number_becomes_one(text: str, value: Scalar) -> None:
    assert parse_scalar(text) == value

"""Translates a filter into an SQLite condition on a row `d` of `documents`. Text of the filter is passed as parameters.

A test of a list holds if it holds for one of its values, so `!=` means that no value is equal. A missing field equals
nothing. A document's own metadata takes precedence over a built-in field of the same name.
"""

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.retrieval.filters.language import AllOf, AnyOf, FieldComparison, Filter, Not, Value
from stillroom.retrieval.filters.values import Span, contains, instant_in, number_in, number_of, span_of, truth_of

BUILT_IN = {
    "path": "SELECT 'text' AS type, d.path AS atom",
    "title": "SELECT 'text' AS type, d.title AS atom",
    "type": "SELECT 'text' AS type, stillroom_type(d.path) AS atom",
    "added": "SELECT 'instant' AS type, CAST(d.added_at * 1000000 AS INTEGER) AS atom",
}
"""Fields that every document has: queries for rows of type and value."""

_EQUAL_PATHS = (
    "SELECT 'text' AS type, d.path AS atom UNION ALL SELECT 'text', d.document_id UNION ALL SELECT 'text', d.public_id"
)
"""Values that `path =` is compared with."""
_PUBLIC_PATHS = (
    "SELECT 'text' AS type, d.public_id AS atom UNION ALL SELECT 'text', d.path WHERE substr(d.path, 1, 1) <> '/'"
)
"""Values that `path` is compared with where a filter must not reveal folders of the machine."""

_RUN = 100

_VALUES = "SELECT type, atom FROM json_tree(d.metadata, ?) WHERE type NOT IN ('array', 'object')"
_NUMBER = "CASE WHEN type IN ('integer', 'real') THEN atom WHEN type = 'text' THEN stillroom_number(atom) END"
_INSTANT = "CASE type WHEN 'instant' THEN atom WHEN 'text' THEN stillroom_instant(atom) END"


@dataclass(frozen=True, slots=True)
class Condition:
    """An SQL expression and its parameters, in order."""

    sql: str
    parameters: tuple[object, ...] = ()


def register(connection: sqlite3.Connection) -> None:
    """Add the functions that conditions call to a connection."""
    connection.create_function("stillroom_type", 1, _type, deterministic=True)
    connection.create_function("stillroom_number", 1, number_in, deterministic=True)
    connection.create_function("stillroom_instant", 1, instant_in, deterministic=True)
    connection.create_function("stillroom_contains", 2, _contains, deterministic=True)


def condition_of(where: Filter, *, hides_folders: bool = False) -> Condition:
    """Translate a filter.

    Args:
        hides_folders: compare `path` with the document's public id (`core.ids.public_id`), so no folder is revealed.
    """
    match where:
        case FieldComparison():
            return _test(where, hides_folders)
        case Not(inner):
            found = condition_of(inner, hides_folders=hides_folders)
            return Condition(f"NOT {found.sql}", found.parameters)
        case AllOf(parts) | AnyOf(parts):
            conditions = [condition_of(part, hides_folders=hides_folders) for part in parts]
            return _joined("AND" if isinstance(where, AllOf) else "OR", conditions)


def _test(test: FieldComparison, hides_folders: bool) -> Condition:
    if test.operator == "!=":
        equal = _test(FieldComparison(test.field, "=", test.values), hides_folders)
        return Condition(f"NOT {equal.sql}", equal.parameters)
    if '"' in test.field or "\\" in test.field:  # no document has such a field, and a JSON path cannot name it
        return Condition("0")
    values = test.values if hides_folders else _as_printed(test)
    holds = _joined("OR", [_holds(test.operator, value) for value in values])
    path = f'$."{test.field}"'
    own = Condition(f"EXISTS (SELECT 1 FROM ({_VALUES}) WHERE {holds.sql})", (path, *holds.parameters))
    if test.field not in BUILT_IN:
        return own
    ours = f"EXISTS (SELECT 1 FROM ({_built_in(test, hides_folders)}) WHERE {holds.sql})"
    return Condition(
        f"CASE WHEN json_type(d.metadata, ?) IS NULL THEN {ours} ELSE {own.sql} END",
        (path, *holds.parameters, *own.parameters),
    )


def _built_in(test: FieldComparison, hides_folders: bool) -> str:
    """Return the query for the values of a built-in field."""
    if test.field == "path" and hides_folders:
        return _PUBLIC_PATHS
    return _EQUAL_PATHS if test.field == "path" and test.operator == "=" else BUILT_IN[test.field]


def _as_printed(test: FieldComparison) -> tuple[Value, ...]:
    """Return the values, for `path =` also as absolute paths: `stillroom list` prints relative ones."""
    if test.field != "path" or test.operator != "=":
        return test.values
    absolute = (Value(os.path.abspath(value.text), is_quoted=True) for value in test.values)
    return (*test.values, *absolute)


def _joined(operator: str, conditions: Sequence[Condition]) -> Condition:
    """Join in groups of groups: SQLite limits both the depth and the length of an expression."""
    while len(conditions) > 1:
        runs = [conditions[start : start + _RUN] for start in range(0, len(conditions), _RUN)]
        conditions = [
            Condition(
                f"({f' {operator} '.join(one.sql for one in run)})",
                tuple(parameter for one in run for parameter in one.parameters),
            )
            for run in runs
        ]
    return conditions[0]


def _holds(operator: str, value: Value) -> Condition:
    """Return the condition on one value of a field, given as columns `type` and `atom`."""
    if operator == "~":
        return Condition("(type IN ('text', 'integer', 'real') AND stillroom_contains(atom, ?))", (value.text,))
    span, number = span_of(value), number_of(value)
    cases: list[Condition] = []
    if number is not None:
        cases.append(Condition(f"{_NUMBER} {operator} ?", (number,)))
    if span is not None:
        cases.append(_in_time(operator, span))
    if operator == "=":
        cases += _same(value)
    elif not cases:
        cases.append(Condition(f"(type = 'text' AND atom {operator} ?)", (value.text,)))
    return _joined("OR", cases)  # NULL counts as false within EXISTS


def _same(value: Value) -> list[Condition]:
    truth = truth_of(value)
    if truth is None:
        return [Condition("(type = 'text' AND atom = ?)", (value.text,))]
    word = "true" if truth else "false"
    return [Condition("type = ?", (word,)), Condition("(type = 'text' AND lower(atom) = ?)", (word,))]


def _in_time(operator: str, span: Span) -> Condition:
    match operator:
        case "=":
            return Condition(f"({_INSTANT} >= ? AND {_INSTANT} < ?)", (span.start, span.end))
        case "<" | ">=":
            return Condition(f"{_INSTANT} {operator} ?", (span.start,))
        case "<=":
            return Condition(f"{_INSTANT} < ?", (span.end,))
        case _:
            return Condition(f"{_INSTANT} >= ?", (span.end,))


def _type(path: str) -> str:
    return os.path.splitext(path)[1][1:].lower()


def _contains(text: object, part: str) -> bool:
    return contains(str(text), part)

"""Filters: parsing, positions of errors, and their meaning against an evaluator in Python."""

import dataclasses
import datetime
import math
import re
import sqlite3
import typing
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.cli.console import short_path
from stillroom.core.ids import public_id
from stillroom.core.metadata import Metadata, clean_metadata
from stillroom.errors import FilterError, UsageError
from stillroom.retrieval.filters.language import AllOf, AnyOf, FieldComparison, Filter, Not, Value, parse_filter
from stillroom.retrieval.filters.sql import condition_of
from stillroom.retrieval.hybrid import FilteredChunks
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.examples import most_examples
from tests.retrieval.test_corpus import stored


def test_filter_is_parsed_to_a_tree() -> None:
    team, year = FieldComparison("team", "=", (Value("legal"),)), FieldComparison("year", ">=", (Value("2020"),))
    assert parse_filter("team=legal and year>=2020") == AllOf((team, year))
    assert parse_filter("not team == legal OR (year >= 2020 AND team=legal)") == AnyOf((Not(team), AllOf((year, team))))
    assert parse_filter("team=legal or team=legal and year>=2020") == AnyOf((team, AllOf((team, year))))
    assert parse_filter(r"""`my  field` ~ "say \"hi\" \\ and go" """) == FieldComparison(
        "my field", "~", (Value('say "hi" \\ and go', True),)
    )
    assert parse_filter("tag not in (a, 'b c')") == Not(FieldComparison("tag", "=", (Value("a"), Value("b c", True))))
    assert parse_filter("article:published_time<2021-03-04T10:00:00+02:00").operator == "<"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "place", "complaint"),
    [
        ("", "at its end", "a field is missing"),
        ("year >= ", "at its end", "a value is missing"),
        ("year >= )", 'at character 9, before ")"', "a value is missing"),
        ("year 2020", 'at character 6, before "2020"', "a comparison"),
        ("(a=1 and b=2", "at its end", '")" is missing'),
        ("a=1 b=2", 'at character 5, before "b=2"', '"and" or "or" is missing'),
        ("a=1)", 'at character 4, before ")"', '"and" or "or" is missing'),
        ("a = 'open", 'at character 5, before "\'open"', "never closed"),
        ("a in 1", 'at character 6, before "1"', '"(" is missing after "in"'),
        ("a in (1 2)", 'at character 9, before "2)"', '"," or ")" is missing'),
        ("a not = 1", 'at character 7, before "= 1"', '"in" is missing'),
        ("and = 1", 'at character 1, before "and = 1"', "a field is missing"),
        ("'a' = 1", "at character 1", "a field is missing"),
        ("a ! b", 'at character 3, before "! b"', "not part of the language"),
        ("(" * 60 + "a=1" + ")" * 60, "at character 9", "nested more than 8 levels"),
        ("a in (" + "1," * 1001 + "1)", "at character", "more than 1,000 values"),
        ("a\0 = 1", "at character 2: U+0000", "control character"),
        ("a = '\ud800'", "at character 6: U+D800", "control character"),
        ("`\x1b` = 1", "at character 2: U+001B", "control character"),
    ],
)
def test_malformed_filter_is_refused_with_its_position(text: str, place: str, complaint: str) -> None:
    with pytest.raises(FilterError) as raised:
        parse_filter(text)
    assert place in str(raised.value) and complaint in str(raised.value)
    assert isinstance(raised.value, UsageError)


def test_a_filter_has_a_greatest_length() -> None:
    with pytest.raises(FilterError, match="characters"):
        parse_filter("a=1 and " * 2000 + "a=1")


@given(st.text(st.sampled_from("ab1 =<>!~()\"'`\\,.-:") | st.characters(codec="utf-8"), max_size=40))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        where = parse_filter(text)
    except FilterError:
        return
    database = sqlite3.connect(":memory:")
    condition = condition_of(where)
    assert condition.sql.count("?") == len(condition.parameters)
    assert not re.search(r"[^ -~]", condition.sql), "no text of the filter is in the statement"
    database.close()


# A second, simpler evaluator

FIELDS = ("year", "team", "signed", "odd name", "title", "type", "added")
LITERALS = (
    *("2020", "2021", "2021.5", "-3", "007", "legal", "Legal", "leg", "true", "2021-03", "2021-03-04", "1969", ""),
    *("1234567890123456789", "1234567890123456790", "9223372036854775807", "9223372036854775808", "1" * 5000, "1e999"),
    *(".5", "+5", "5e-1", "1e3", "1000", "True", "TRUE"),
    *("2021-03-04T10:00", "2021-03-04T10:00:00Z", "2021-03-04T12:00:00+02:00", "2021-02-30", "9999-12", "md", "T"),
)
VALUES = st.one_of(
    st.sampled_from(LITERALS),
    st.sampled_from([2020, 2021, 2021.5, -3, 0, 1, True, False, 0.5, 5, 1000, 2**63]),
    st.sampled_from([1234567890123456789, 1234567890123456790, 2**63 - 1]),
    st.text(max_size=3),
)
METADATA = st.dictionaries(st.sampled_from(FIELDS), VALUES | st.lists(VALUES, max_size=3), max_size=4)
TESTS = st.builds(
    lambda field, operator, text, is_quoted: FieldComparison(field, operator, (Value(text, is_quoted),)),
    st.sampled_from(FIELDS),
    st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"]),
    st.sampled_from(LITERALS) | st.text(max_size=3),
    st.booleans(),
) | st.builds(
    lambda field, texts: FieldComparison(field, "=", tuple(map(Value, texts))),
    st.sampled_from(FIELDS),
    st.lists(st.sampled_from(LITERALS), min_size=1, max_size=3),
)
FILTERS: st.SearchStrategy[Filter] = st.recursive(
    TESTS,
    lambda inner: (
        st.builds(Not, inner)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: AllOf(tuple(parts)))
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: AnyOf(tuple(parts)))
    ),
    max_leaves=6,
)
INJECTION = "O'Brien; DROP TABLE chunks"
ADDED = datetime.datetime(2021, 3, 4, 10, 0, 0, tzinfo=datetime.UTC)


def holds(where: Filter, document: Mapping[str, object]) -> bool:
    match where:
        case Not(inner):
            return not holds(inner, document)
        case AllOf(parts):
            return all(holds(part, document) for part in parts)
        case AnyOf(parts):
            return any(holds(part, document) for part in parts)
    found = document.get(where.field)
    values = found if isinstance(found, tuple) else () if found is None else (found,)
    if where.operator == "!=":
        return not any(compares("=", value, where.values[0]) for value in values)
    return any(compares(where.operator, value, literal) for value in values for literal in where.values)


def compares(operator: str, value: object, literal: Value) -> bool:
    if operator == "~":
        return isinstance(value, (str, int, float)) and not isinstance(value, bool) and (
            literal.text.casefold() in str(value).casefold()
        )  # fmt: skip
    told = False
    number = None if literal.is_quoted else word_number(literal.text)
    if number is not None:
        own = value if isinstance(value, (int, float)) and not isinstance(value, bool) else plain_number(value)
        told |= own is not None and ordered(operator, own, number, number)
    interval = period(literal)
    if interval is not None:
        own_time = value if isinstance(value, datetime.datetime) else moment(value)
        told |= own_time is not None and ordered(operator, own_time, *interval)
    if operator == "=":
        told |= isinstance(value, str) and value == literal.text
        is_truth = not literal.is_quoted and literal.text.lower() in ("true", "false")
        told |= is_truth and isinstance(value, (bool, str)) and str(value).lower() == literal.text.lower()
    elif number is None and interval is None and isinstance(value, str):
        told |= ordered(operator, value, literal.text, literal.text)
    return bool(told)


def ordered(operator: str, own: typing.Any, first: typing.Any, last: typing.Any) -> bool:
    """Compare a value with the span of a literal."""
    match operator:
        case "=":
            return bool(first <= own <= last)
        case "<":
            return bool(own < first)
        case "<=":
            return bool(own <= last)
        case ">":
            return bool(own > last)
        case _:
            return bool(own >= first)


def plain_number(text: object) -> float | None:
    """Parse a number of metadata."""
    if not isinstance(text, str) or not re.fullmatch(r"-?(0|[1-9][0-9]{0,18})(\.[0-9]+)?", text.strip()):
        return None
    number = float(text) if "." in text else int(text)
    return number if abs(number) < 2**63 else None


def word_number(text: str) -> float | None:
    """Parse a number of a filter: Python's syntax without leading zeros, underscores and non-finite values."""
    if not re.fullmatch(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?", text.strip()) or re.match(r"[+-]?0[0-9]", text.strip()):
        return None
    try:
        number: float = int(text)
    except ValueError:
        number = 0
    try:
        number = number if 0 < abs(number) < 2**63 else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and not text.strip().endswith(".") else None


def moment(text: object) -> datetime.datetime | None:
    """Parse a time of metadata with at least a month."""
    if not isinstance(text, str) or not re.match(r"[0-9]{4}-[0-9]{2}", text.strip()):
        return None
    try:
        found = datetime.datetime.fromisoformat(text.strip() + ("-01" if len(text.strip()) == 7 else ""))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def period(literal: Value) -> tuple[datetime.datetime, datetime.datetime] | None:
    """Return the first and last moment of a literal."""
    text = literal.text
    if re.fullmatch(r"[0-9]{4}", text) and not literal.is_quoted and text != "0000":
        year = int(text)
        return datetime.datetime(year, 1, 1, tzinfo=datetime.UTC), last_of(year, 12)
    start = moment(text)
    if start is None:
        return None
    match len(text):
        case 7:
            return start, last_of(start.year, start.month)
        case 10:
            return start, start + datetime.timedelta(days=1, microseconds=-1)
        case 16:
            return start, start + datetime.timedelta(minutes=1, microseconds=-1)
        case _:
            return start, start + datetime.timedelta(seconds=1, microseconds=-1)


def last_of(year: int, month: int) -> datetime.datetime:
    day = 31
    while True:
        try:
            return datetime.datetime(year, month, day, 23, 59, 59, 999_999, tzinfo=datetime.UTC)
        except ValueError:
            day -= 1


@settings(max_examples=most_examples(150), deadline=None)
@given(FILTERS, st.lists(METADATA, min_size=1, max_size=4))
def test_sqlite_finds_what_the_evaluator_finds(
    tmp_path_factory: pytest.TempPathFactory, where: Filter, given_metadata: list[dict[str, object]]
) -> None:
    corpus = SqliteCorpus(tmp_path_factory.getbasetemp() / f"{np.random.default_rng().integers(2**62)}.sqlite3")
    expected: set[int] = set()
    for number, raw in enumerate(given_metadata):
        metadata: Metadata = clean_metadata(raw)
        document = dataclasses.replace(
            stored(f"/x/{number}.MD", "one", "two"), metadata=metadata, added_at=ADDED.timestamp()
        )
        corpus.commit([document])
        if holds(where, {"title": "T", "type": "md", "added": ADDED, **metadata}):
            expected |= {int(chunk.chunk_id) for chunk in document.chunks}
    generation, found = corpus.matching(condition_of(where))
    corpus.close()
    assert generation == len(given_metadata)
    assert found.tolist() == sorted(expected)


@pytest.fixture
def corpus(tmp_path: Path) -> SqliteCorpus:
    made = SqliteCorpus(tmp_path / "corpus.sqlite3")
    said: Metadata = {
        "team": "legal",
        "tags": ("x", 3),
        "n": "12",
        "id": 1234567890123456789,
        "half": 0.5,
        "ok": "True",
    }
    made.commit(
        [
            dataclasses.replace(stored("/docs/a.pdf", "one"), metadata=said),
            dataclasses.replace(stored("/docs/b.md", "two"), metadata={"team": INJECTION, "path": "own"}),
        ]
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("team=legal", "a"),
        ("team!=legal", "b"),
        ("nothing!=legal", "ab"),
        ("tags=x and tags=3", "a"),
        ("tags!=x", "b"),
        ("n>2 and n<100", "a"),
        ("id = 1234567890123456789 and id < 1234567890123456790", "a"),
        ("id = 1234567890123456788", ""),
        ("half = .5 and half > 1e-3 and tags = +3", "a"),
        ("ok = true and ok = TRUE", "a"),
        ("ok = 'true'", ""),
        ("type in (pdf, md)", "ab"),
        ("path ~ docs/A", "a"),
        ("path = own", "b"),
        (f'team = "{INJECTION}"', "b"),
        ("""`x" OR 1=1 --` = 1 or team=nobody""", None),
        ("nothing=legal or nothing<5", None),
        ("team=nobody", ""),
        ("path = /docs/a.pdf", "a"),
        ("title = T and added < 1971", "ab"),
    ],
)
def test_examples(corpus: SqliteCorpus, where: str, names: str | None) -> None:
    if names is None:
        with pytest.raises(FilterError, match="no document"):
            FilteredChunks(corpus).allowed(where)
        return
    ids = FilteredChunks(corpus).allowed(where).ids.tolist()
    found = {Path(chunk.document_id).stem for chunk in corpus.chunks(ids).values()}
    assert found == set(names)
    assert corpus.num_chunks == 2
    corpus.close()


@pytest.mark.parametrize(
    "where",
    [
        "(a = 1 or b = 1 and " * 7 + "type in (1, md)" + ")" * 7,
        "(not a = 1 or b = 1 and " * 6 + "not type in (" + "2021, " * 900 + "md)" + ")" * 6,
        "not " * 7 + "type = md",
        "(a != 1 and not (b != 2 or " * 2 + "type = md" + "))" * 2,
        "type in (" + "2021, " * 900 + "md)",
        "type = md or " * 700 + "title = x",
    ],
)
def test_every_accepted_filter_can_be_searched(corpus: SqliteCorpus, where: str) -> None:
    assert corpus.matching(condition_of(parse_filter(where)))[0] == 1
    corpus.close()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("taem = legal", "none has the field 'taem'; did you mean team?"),
        ("type = md and (not teem = x and halb = 1)", "any of the fields 'halb', 'teem'; did you mean half or team?"),
        ("zzz = 1", "known fields are path, title, type, added, half, id, n, ok, path, tags"),
    ],
)
def test_unknown_field_of_an_empty_result_is_named(corpus: SqliteCorpus, where: str, message: str) -> None:
    filters = FilteredChunks(corpus)
    for _ in range(2):
        with pytest.raises(FilterError, match=re.escape(message)):
            filters.allowed(where)
    corpus.commit([dataclasses.replace(stored("/docs/c.md", "three"), metadata={"taem": "legal", "zzz": 1})])
    assert len(filters.allowed("taem = legal or zzz = 1")) == 1
    corpus.close()


def test_an_empty_knowledge_base_has_no_fields_to_miss(tmp_path: Path) -> None:
    with closing(SqliteCorpus(tmp_path / "corpus.sqlite3")) as corpus:
        assert len(FilteredChunks(corpus).allowed("team = legal")) == 0


def test_a_path_is_found_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`list` and sources name documents by `short_path`: relative to the current folder where that is shorter."""
    monkeypatch.chdir(tmp_path)
    names = [str(tmp_path / "docs" / "a.md"), f"{tmp_path / 'docs' / 'b.jsonl'}#7", "uploads/c.md"]
    with closing(SqliteCorpus(tmp_path / "corpus.sqlite3")) as corpus:
        for name in names:
            path = name.partition("#")[0]
            corpus.commit([dataclasses.replace(stored(name, name), path=path)])
        filters = FilteredChunks(corpus)
        for name in names:
            printed = short_path(name)
            assert printed == name or not printed.startswith("/")
            for operator in (f"path = '{printed}'", f"path in ('{printed}', other)"):
                [chunk] = corpus.chunks(filters.allowed(operator).ids.tolist()).values()
                assert chunk.document_id == name
            assert len(filters.allowed(f"path != '{printed}'")) == 2
            assert len(filters.allowed(f"path = '{public_id(name)}'")) == 1, "as a server names it"
        assert len(filters.allowed("path = docs/b.jsonl")) == 1, "all records of a file"


def test_allowed_chunks_are_cached_per_generation(corpus: SqliteCorpus) -> None:
    filters = FilteredChunks(corpus)
    first = filters.allowed("team=legal")
    assert filters.allowed("team=legal") is first
    corpus.commit([dataclasses.replace(stored("/docs/c.md", "three"), metadata={"team": "legal"})])
    assert len(filters.allowed("team=legal")) == 2 and len(first) == 1
    assert first.has([*first.ids.tolist(), 5]).tolist() == [True, False]
    corpus.close()

"""Conversions of filter values and metadata to numbers, truth values and times.

A time is microseconds since 1970 in UTC. A date, month or year in a filter stands for its whole span: `< 2021` means
before it begins, `<= 2021` before it ends.
"""

import datetime
import math
import re
from dataclasses import dataclass

from stillroom.core.metadata import MAX_INTEGER, parse_scalar
from stillroom.retrieval.filters.language import Value

_TIME = re.compile(
    r"(?P<year>\d{4})(?:-(?P<month>\d\d)(?:-(?P<day>\d\d)(?P<clock>[T ]\d\d:\d\d(?P<second>:\d\d(?:\.\d{1,6})?)?"
    r"(?:Z|[+-]\d\d:?\d\d)?)?)?)?",
    re.ASCII,
)
_NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*|(?=\.))(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_DIGITS = 20
"""Digits and sign of the longest integer that SQLite holds."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_END_OF_TIME = 2**62


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open interval of time, in microseconds."""

    start: int
    end: int


def number_of(value: Value) -> int | float | None:
    """Return an unquoted value as a number, None if it is none; `.5`, `1e3` and `+5` are numbers."""
    text = value.text.strip()
    if value.is_quoted or not _NUMBER.fullmatch(text):
        return None
    if text.lstrip("+-").isdecimal() and len(text) <= _MAX_DIGITS and abs(int(text)) <= MAX_INTEGER:
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else None


def number_in(text: str) -> int | float | None:
    """Return a metadata text as a number, None if it is none."""
    found = parse_scalar(text)
    return None if isinstance(found, (str, bool)) else found


def truth_of(value: Value) -> bool | None:
    """Return an unquoted `true` or `false`, None for other values."""
    found = None if value.is_quoted else parse_scalar(value.text)
    return found if isinstance(found, bool) else None


def span_of(value: Value) -> Span | None:
    """Return the span of a date, month, time or unquoted year, None for other values."""
    match = _TIME.fullmatch(value.text.strip())
    if match is None or (match["month"] is None and value.is_quoted):
        return None
    start = _start(match)
    if start is None:
        return None
    if match["clock"]:
        step = 1_000_000 if match["second"] else 60_000_000
        return Span(start, start + (1 if "." in (match["second"] or "") else step))
    year, month = int(match["year"]), int(match["month"] or 0)
    if match["day"]:
        return Span(start, start + 86_400_000_000)
    year, month = (year + 1, 1) if month in (0, 12) else (year, month + 1)
    end = _END_OF_TIME if year > datetime.MAXYEAR else _micros(datetime.datetime(year, month, 1, tzinfo=datetime.UTC))
    return Span(start, end)


def instant_in(text: str) -> int | None:
    """Return the start of the time that a metadata text names; None unless it has at least a year and a month."""
    match = _TIME.fullmatch(text.strip())
    return None if match is None or match["month"] is None else _start(match)


def contains(text: str, part: str) -> bool:
    """Whether a text contains a part, ignoring case."""
    return part.casefold() in text.casefold()


def _start(match: "re.Match[str]") -> int | None:
    year, month, day = (int(match[name] or 1) for name in ("year", "month", "day"))
    try:
        if not match["clock"]:
            return _micros(datetime.datetime(year, month, day, tzinfo=datetime.UTC))
        found = datetime.datetime.fromisoformat(match.group())
        return _micros(found if found.tzinfo else found.replace(tzinfo=datetime.UTC))
    except (ValueError, OverflowError):  # the 30th of February
        return None


def _micros(when: datetime.datetime) -> int:
    return (when - _EPOCH) // datetime.timedelta(microseconds=1)

"""What the values of filters and of metadata mean beside each other: as numbers, as truth values, as times.

A time is a number of microseconds since 1970 in UTC. A date, a month or a year in a filter is all of it: `< 2021` is
before its beginning, `<= 2021` before its end.
"""

import datetime
import math
import re
from dataclasses import dataclass

from stillroom.core.metadata import MAX_INTEGER, typed
from stillroom.retrieval.filters.language import Value

_TIME = re.compile(
    r"(?P<year>\d{4})(?:-(?P<month>\d\d)(?:-(?P<day>\d\d)(?P<clock>[T ]\d\d:\d\d(?P<second>:\d\d(?:\.\d{1,6})?)?"
    r"(?:Z|[+-]\d\d:?\d\d)?)?)?)?",
    re.ASCII,
)
_NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*|(?=\.))(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_DIGITS = 20
"""Of an integer that SQLite may hold, with its sign."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_END_OF_TIME = 2**62


@dataclass(frozen=True, slots=True)
class Span:
    """From a time to before another."""

    start: int
    end: int


def number_of(value: Value) -> int | float | None:
    """A word that is written as a number, as people write them: `.5`, `1e3` and `+5`, too."""
    text = value.text.strip()
    if value.is_quoted or not _NUMBER.fullmatch(text):
        return None
    if text.lstrip("+-").isdecimal() and len(text) <= _MAX_DIGITS and abs(int(text)) <= MAX_INTEGER:
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else None


def number_in(text: str) -> int | float | None:
    """The number that a text of metadata is."""
    found = typed(text)
    return None if isinstance(found, (str, bool)) else found


def truth_of(value: Value) -> bool | None:
    """`true` or `false` as a word."""
    found = None if value.is_quoted else typed(value.text)
    return found if isinstance(found, bool) else None


def span_of(value: Value) -> Span | None:
    """A date, a month, a time or, as a word, a year."""
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
    """When a text of metadata is, which has at least year and month; the beginning of what it names."""
    match = _TIME.fullmatch(text.strip())
    return None if match is None or match["month"] is None else _start(match)


def contains(text: str, part: str) -> bool:
    """Whether a text holds a part, whatever the size of letters."""
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

"""Parser of the filter language (`year >= 2020 and team = legal`): text to a tree, or an error with its position.

    filter = both { "or" both }
    both   = unary { "and" unary }
    unary  = "not" unary | "(" filter ")" | test
    test   = field op value | field [ "not" ] "in" "(" value { "," value } ")"
    op     = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"
    field  = word | "`" any name "`"
    value  = word | '"' text '"' | "'" text "'"

A word holds no spaces, quotes or signs of the grammar. Within quotes a backslash escapes the next character. Length and
depth are limited; control characters other than tabs and line ends are refused. docs/filters.md defines what a test
means.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from stillroom.errors import FilterError

MAX_CHARS = 10_000
_MAX_DEPTH = 8
"""Each level takes up to six of the 100 entries of SQLite's parser stack."""
_MAX_VALUES = 1000

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "~"]


@dataclass(frozen=True, slots=True)
class Value:
    """A literal of a filter."""

    text: str
    is_quoted: bool = False
    """A quoted value is a text or a date, never a number or truth value."""


@dataclass(frozen=True, slots=True)
class FieldComparison:
    """Compares a field with a value; with several values, one of them must be equal."""

    field: str
    operator: Operator
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Not:
    inner: "Filter"


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple["Filter", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple["Filter", ...]


Filter = FieldComparison | Not | AllOf | AnyOf


def fields_of(where: Filter) -> set[str]:
    """Return the names of all fields that a filter compares."""
    match where:
        case FieldComparison(field):
            return {field}
        case Not(inner):
            return fields_of(inner)
        case AllOf(parts) | AnyOf(parts):
            return set().union(*map(fields_of, parts))


_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<sign><=|>=|!=|==|[=<>~(),])
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<name>`[^`]+`)
    |(?P<word>[^\s()=!<>~,"'`]+)""",
    re.VERBOSE | re.DOTALL,
)
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_KEYWORDS = frozenset({"and", "or", "not", "in"})


@dataclass(frozen=True, slots=True)
class _Token:
    kind: Literal["sign", "text", "name", "word", "keyword", "end"]
    text: str
    at: int


@lru_cache(maxsize=256)
def parse_filter(text: str) -> Filter:
    """Parse a filter.

    Raises:
        FilterError: the text is not a filter; the message names the position and the problem.
    """
    if len(text) > MAX_CHARS:
        raise FilterError(f"the filter has {len(text):,} characters; the limit is {MAX_CHARS:,}")
    if odd := _NO_TEXT.search(text):
        raise FilterError(
            f"the filter cannot be read at character {odd.start() + 1}: U+{ord(odd.group()):04X} is a control "
            "character or half of a surrogate pair; remove it"
        )
    return _Parser(text).parse()


class _Parser:
    """Recursive-descent parser of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenize()
        self._at = 0
        self._depth = 0
        self._num_values = 0

    def parse(self) -> Filter:
        found = self._any()
        if self._token.kind != "end":
            raise self._error_here('"and" or "or" is missing')
        return found

    def _any(self) -> Filter:
        parts = [self._all()]
        while self._take("keyword", "or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _all(self) -> Filter:
        parts = [self._unary()]
        while self._take("keyword", "and"):
            parts.append(self._unary())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _unary(self) -> Filter:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error_here(f"it is nested more than {_MAX_DEPTH} levels deep")
        try:
            if self._take("keyword", "not"):
                return Not(self._unary())
            if self._take("sign", "("):
                inner = self._any()
                self._expect("sign", ")", '")" is missing')
                return inner
            return self._test()
        finally:
            self._depth -= 1

    def _test(self) -> Filter:
        field = self._field()
        if self._take("keyword", "not"):
            self._expect("keyword", "in", '"in" is missing after "not"')
            return Not(self._members(field))
        if self._take("keyword", "in"):
            return self._members(field)
        token = self._token
        if token.kind != "sign" or token.text in "(),":
            raise self._error_here("a comparison (= != < <= > >= ~ in) is missing")
        self._at += 1
        operator: Operator = "=" if token.text == "==" else token.text  # type: ignore[assignment]
        return FieldComparison(field, operator, (self._value(),))

    def _members(self, field: str) -> FieldComparison:
        self._expect("sign", "(", '"(" is missing after "in"')
        values = [self._value()]
        while self._take("sign", ","):
            values.append(self._value())
        self._expect("sign", ")", '"," or ")" is missing')
        return FieldComparison(field, "=", tuple(values))

    def _field(self) -> str:
        token = self._token
        if token.kind not in ("word", "name"):
            raise self._error_here("a field is missing")
        self._at += 1
        return " ".join(token.text.strip("`").split())

    def _value(self) -> Value:
        token = self._token
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise self._error_here(f"it has more than {_MAX_VALUES:,} values")
        if token.kind == "text":
            self._at += 1
            return Value(re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL), True)
        if token.kind != "word":
            raise self._error_here("a value is missing")
        self._at += 1
        return Value(token.text)

    # Tokens

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, kind: str, text: str) -> bool:
        is_there = (self._token.kind, self._token.text) == (kind, text)
        self._at += is_there
        return is_there

    def _expect(self, kind: str, text: str, complaint: str) -> None:
        if not self._take(kind, text):
            raise self._error_here(complaint)

    def _tokenize(self) -> list[_Token]:
        found: list[_Token] = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                is_open = self._text[at] in "\"'`"
                raise self._error(
                    "this quotation mark is never closed" if is_open else "this character is not part of the language",
                    at,
                )
            if match.lastgroup == "word" and match.group().lower() in _KEYWORDS:
                found.append(_Token("keyword", match.group().lower(), at))
            elif match.lastgroup != "space":
                found.append(_Token(match.lastgroup, match.group(), at))  # type: ignore[arg-type]
            at = match.end()
        return [*found, _Token("end", "", len(self._text))]

    def _error_here(self, complaint: str) -> FilterError:
        return self._error(complaint, self._token.at)

    def _error(self, complaint: str, at: int) -> FilterError:
        rest = self._text[at : at + 20]
        place = f'at character {at + 1}, before "{rest}"' if rest else "at its end"
        return FilterError(f"the filter cannot be read {place}: {complaint}; an example: year >= 2020 and team = legal")

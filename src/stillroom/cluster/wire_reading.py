"""Reads JSON strictly: every value has a type and a range, every field is known, and an error names its place."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from stillroom.core.ids import ChunkId, format_chunk_id
from stillroom.errors import WireError

T = TypeVar("T")
D = TypeVar("D")
Reader = Callable[[Any, str], T]
"""Reads a value; its second argument names the place for errors. Raises WireError."""

MAX_INTEGER = 2**63 - 1
MAX_TOKEN = 2**31 - 1
_SHOWN_CHARACTERS = 60


def parse(data: bytes | str, where: str) -> Any:
    """Parse JSON; NaN and Infinity are refused.

    Raises:
        WireError: it is not JSON.
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{where} is not JSON: {error}") from None


def dump(value: object) -> bytes:
    """Write JSON on one line. Precondition: its numbers are finite."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Fields:
    """Fields of a JSON object. Call `close` after the last `read`: it refuses fields that were not read."""

    def __init__(self, value: Any, where: str) -> None:
        self._left: dict[str, Any] = dict(_of_type(value, dict, where, "an object"))
        self._where = where

    def read(self, name: str, reader: Reader[T]) -> T:
        """Read a field that must be there."""
        if name not in self._left:
            raise WireError(f"{self._where} has no {name!r}")
        return reader(self._left.pop(name), f"{self._where}.{name}")

    def read_or(self, name: str, reader: Reader[T], default: D) -> T | D:
        """Read a field; absent or null gives the default."""
        value = self._left.pop(name, None)
        return default if value is None else reader(value, f"{self._where}.{name}")

    def close(self) -> None:
        if self._left:
            raise WireError(f"{self._where} has the unknown field {shown(min(self._left))}")


def items(reader: Reader[T], *, most: int = MAX_INTEGER, least: int = 0) -> Reader[tuple[T, ...]]:
    """Return the reader of a list."""

    def read(value: Any, where: str) -> tuple[T, ...]:
        found = _of_type(value, list, where, "a list")
        if not least <= len(found) <= most:
            raise WireError(f"{where} has {len(found)} entries; it must have {least} to {most}")
        return tuple(reader(one, f"{where}[{index}]") for index, one in enumerate(found))

    return read


def row(value: Any, where: str, length: int) -> list[Any]:
    """Return a list of this length."""
    found: list[Any] = _of_type(value, list, where, "a list")
    if len(found) != length:
        raise WireError(f"{where} has {len(found)} entries; it must have {length}")
    return found


def text(value: Any, where: str, most: int = 1000) -> str:
    found: str = _of_type(value, str, where, "text")
    if len(found) > most:
        raise WireError(f"{where} has {len(found)} characters; it must have at most {most}")
    return found


def long_text(value: Any, where: str) -> str:
    return text(value, where, 2_000_000)


def flag(value: Any, where: str) -> bool:
    found: bool = _of_type(value, bool, where, "true or false")
    return found


def integer(value: Any, where: str) -> int:
    """Read a whole number in [-2**63, 2**63)."""
    if type(value) is not int or not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise WireError(f"{where} is {shown(value)}; it must be a whole number")
    return value


def count(value: Any, where: str) -> int:
    """Read a whole number of at least 0."""
    if integer(value, where) < 0:
        raise WireError(f"{where} is {value}; it must be at least 0")
    return int(value)


def number(value: Any, where: str) -> float:
    """Read a finite number."""
    if type(value) not in (int, float) or not abs(value) <= 1e300:
        raise WireError(f"{where} is {shown(value)}; it must be a number")
    return float(value)


def seconds(value: Any, where: str) -> float:
    """Read a number of at least 0."""
    if (found := number(value, where)) < 0:
        raise WireError(f"{where} is {found}; it must be at least 0")
    return found


def tokens(value: Any, where: str) -> tuple[int, ...]:
    """Read a list of token ids, empty or not."""
    found: list[Any] = _of_type(value, list, where, "a list")
    for index, one in enumerate(found):
        if type(one) is not int or not 0 <= one <= MAX_TOKEN:
            raise WireError(f"{where}[{index}] is {shown(one)}; it must be a token id")
    return tuple(found)


def chunk_id(value: Any, where: str) -> ChunkId:
    """Read 16 hexadecimal digits, as `format_chunk_id` writes them."""
    try:
        found = ChunkId(int(text(value, where), 16))
        if format_chunk_id(found) == value and found <= MAX_INTEGER:
            return found
    except ValueError:
        pass
    raise WireError(f"{where} is {shown(value)}; it must be a chunk id, 16 hexadecimal digits below 2**63")


def hexadecimal(value: Any, where: str) -> bytes:
    try:
        return bytes.fromhex(text(value, where))
    except ValueError:
        raise WireError(f"{where} is {shown(value)}; it must be hexadecimal") from None


def one_of(choices: Callable[[Any], T]) -> Reader[T]:
    """Return the reader of a member of an enumeration, by its value."""

    def read(value: Any, where: str) -> T:
        try:
            return choices(text(value, where))
        except ValueError:
            raise WireError(f"{where} is {shown(value)}, which is unknown") from None

    return read


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return "a huge number"
    found = repr(value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value)
    return found if len(found) <= _SHOWN_CHARACTERS else found[:_SHOWN_CHARACTERS] + "..."


def _of_type(value: Any, expected: type[T], where: str, name: str) -> T:
    if type(value) is not expected:
        raise WireError(f"{where} is {shown(value)}; it must be {name}")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")

"""Checks of arguments: a wrong type is refused by the name of its argument."""

from collections.abc import Collection
from numbers import Real
from operator import index

from stillroom.errors import UsageError


def integer(name: str, value: object) -> int:
    """Return a whole number, Python's or numpy's, as int. Raises UsageError for others, True and 3.0 included."""
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise UsageError(f"{name}={value!r}; it must be a whole number")


def number(name: str, value: object) -> float:
    """Return a number, Python's or numpy's, as float; NaN and infinity pass. Raises UsageError for others."""
    try:
        if not isinstance(value, bool) and isinstance(value, Real):
            return float(value)
    except OverflowError:
        pass
    raise UsageError(f"{name}={value!r}; it must be a number")


def text(name: str, value: object) -> str:
    """Return text that UTF-8 can encode. Raises UsageError for other types and for lone surrogates."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is of the type {type(value).__name__}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} holds {value[error.start]!r}, half of a surrogate pair, which UTF-8 cannot encode"
        ) from None
    return value


def one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise UsageError if the value is not one of these."""
    if value not in allowed:
        raise UsageError(f"unknown {name} {value!r}; use one of {', '.join(allowed)}")

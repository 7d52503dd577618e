"""What a caller gives is checked where it comes in: a wrong type is refused by name, before a step stumbles on it."""

from collections.abc import Collection
from numbers import Real
from operator import index

from stillroom.errors import UsageError


def integer(name: str, value: object) -> int:
    """A whole number as Python's int, also one of numpy's. Raises UsageError: it is none; True and 3.0 are none."""
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]  # it says so itself
    except TypeError:
        pass
    raise UsageError(f"{name}={value!r}; it must be a whole number")


def number(name: str, value: object) -> float:
    """A number as Python's float, also one of numpy's; NaN and infinity are some. Raises UsageError: it is none."""
    try:
        if not isinstance(value, bool) and isinstance(value, Real):
            return float(value)
    except OverflowError:
        pass
    raise UsageError(f"{name}={value!r}; it must be a number")


def text(name: str, value: object) -> str:
    """Text that has a UTF-8 form. Raises UsageError: it is none, or holds half of a surrogate pair."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is of the type {type(value).__name__}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} holds {value[error.start]!r}, half of a surrogate pair, which is no text") from None
    return value


def one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raises UsageError: it is none of these."""
    if value not in allowed:
        raise UsageError(f"unknown {name} {value!r}; use one of {', '.join(allowed)}")

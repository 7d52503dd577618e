"""What PDF and Office files say of themselves, without what programs put there unasked; and how numbers read."""

from typing import Any

_FIELDS = ("title", "author", "creator", "subject", "keywords", "category", "language", "created", "modified")
_MADE_UP = frozenset(
    {"powerpoint presentation", "presentation", "word document", "python-docx", "openpyxl", "untitled", "anonymous"}
    | {"unspecified", "(anonymous)", "(unspecified)", "unknown", "microsoft office user"}
)


def core_metadata(properties: Any) -> dict[str, object]:
    """The core properties that are set."""
    found: dict[str, object] = {}
    for name in _FIELDS:
        try:
            value = getattr(properties, name, None)
        except (ValueError, TypeError):  # a date that is none
            continue
        if isinstance(value, str):
            value = " ".join(value.split())
        if value and not is_made_up(str(value)):
            found["author" if name == "creator" else name] = value
    return found


def number_text(value: float) -> str:
    """As Office shows it: of 17 digits that a float may have in full, the last two are noise of its binary form."""
    return f"{value:.15g}"


def is_made_up(value: str) -> bool:
    """Whether nobody wrote that."""
    return value.lower() in _MADE_UP

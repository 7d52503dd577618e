"""Explains a tool call whose arguments do not fit, in sentences from which a model can correct its call."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

_MAX_SHOWN = 60
"""Most characters of a wrong value that are repeated."""
_KINDS = {"integer": "a whole number", "string": "a text", "number": "a number", "boolean": "true or false"}


def unknown_arguments(tool: str, given: Iterable[str], schema: Mapping[str, Any]) -> str | None:
    """Return what is wrong if a call has arguments that the tool does not have, else None.

    Args:
        schema: JSON schema of the tool's arguments.
    """
    known = schema.get("properties", {})
    unknown = [name for name in given if name not in known]
    if not unknown:
        return None
    return f"{tool} has no argument {unknown[0]!r}; it has {', '.join(known) or 'none'}"


def wrong_arguments(error: ValidationError, schema: Mapping[str, Any]) -> str:
    """Return one sentence for each wrong argument.

    Args:
        schema: JSON schema of the tool's arguments.
    """
    return " ".join(_sentence(one, schema.get("properties", {})) for one in error.errors(include_url=False))


def _sentence(error: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    argument = known.get(name, {})
    meaning = f" It means: {argument['description']}" if "description" in argument else ""
    if error["type"] == "missing":
        return f"The argument {name!r} is missing; send {_KINDS.get(argument.get('type'), 'it')}.{meaning}"
    value = repr(error["input"])
    shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
    return f"{name}={shown} does not fit; send {_wanted(argument)}.{meaning}"


def _wanted(argument: Mapping[str, Any]) -> str:
    kind = _KINDS.get(argument.get("type", ""), "another value")
    least, most = argument.get("minimum"), argument.get("maximum")
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    return f"{kind} of at least {least}" if least is not None else kind

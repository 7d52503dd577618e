"""Removal of the server's folders from messages and model names that clients see."""

import re

_PATH = re.compile(
    r"""(?<![\w./:~<\-])/  # the server's own routes stay:
        (?!v1/|v1\b|healthz|readyz|metrics|console/|(?:de)?tokenize(?![\w/]))
        (?:[^\s/'"`;,:()]+/)*([^\s/'"`;,:()]+)""",
    re.VERBOSE,
)


def without_folders(message: str) -> str:
    """Replace each absolute path in a message by its last part. Routes of the server stay."""
    return _PATH.sub(r"\1", message)


def served_name(model: str) -> str:
    """Return a model's name for clients: the last part of an absolute path, else the name."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model

"""What a client may see of places on the server: names, no folders."""

import re

_PATH = re.compile(
    r"""(?<![\w./:~<\-])/(?!v1/|v1\b|healthz|readyz|metrics|console/)  # none of the server's own routes
        (?:[^\s/'"`;,:()]+/)*([^\s/'"`;,:()]+)""",
    re.VERBOSE,
)


def without_folders(message: str) -> str:
    """A message in which each absolute path is the name of its file alone; the routes of the server stay."""
    return _PATH.sub(r"\1", message)


def served_name(model: str) -> str:
    """A model's name for clients: of an absolute folder its last part."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model

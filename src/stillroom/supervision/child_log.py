"""Passes the log of a child process, JSON lines, on to the log of this process."""

import json
import logging

logger = logging.getLogger(__name__)


def log_again(name: str, line: str) -> None:
    """Log a line of a child's stderr with the child's name before it.

    Args:
        name: of the child, such as `engine 1`.
        line: a record or an error as Stillroom writes them with `--json`; or any text, such as a library's.
    """
    line = line.rstrip()
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        if line:
            logger.warning("%s: %s", name, line)
        return
    if isinstance(error := entry.get("error"), dict):  # why a command ended
        logger.error("%s: %s", name, error.get("message"), extra={"fields": {"process": name}})
        return
    level = logging.getLevelNamesMapping().get(str(entry.pop("level", "")), logging.WARNING)
    source = logging.getLogger(str(entry.pop("logger", __name__)))
    message = str(entry.pop("message", line))
    source.log(level, "%s: %s", name, message, extra={"fields": {**entry, "process": name}})

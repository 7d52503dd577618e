"""The log of a child process in the log of its parent."""

import json
import logging

import pytest

from stillroom.supervision.child_log import log_again


def record(**fields: object) -> str:
    return json.dumps({"time": "2026-01-31T12:00:00.000Z", "level": "INFO", "logger": "stillroom.rag", **fields}) + "\n"


def test_record_keeps_level_logger_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_again("engine 2", record(message="100 % of %s", status=200, traceback="Traceback ..."))
    (found,) = caplog.records
    assert (found.name, found.levelname) == ("stillroom.rag", "INFO")
    assert found.getMessage() == "engine 2: 100 % of %s"
    fields = found.__dict__["fields"]
    assert fields["process"] == "engine 2" and fields["status"] == 200 and fields["traceback"] == "Traceback ..."
    assert fields["time"] == "2026-01-31T12:00:00.000Z"


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        (json.dumps({"error": {"type": "ModelError", "message": "no such model"}}), "ERROR", "no such model"),
        ("a library's warning \n", "WARNING", "a library's warning"),
        ("[1, 2]", "WARNING", "[1, 2]"),
        (record(message="odd", level="critical mass"), "WARNING", "odd"),
        (record(message=None, level="ERROR", logger=None), "ERROR", "None"),
    ],
)
def test_anything_else_is_logged_too(line: str, level: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    log_again("engine 1", line)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [(level, f"engine 1: {message}")]


def test_empty_line_is_no_record(caplog: pytest.LogCaptureFixture) -> None:
    log_again("engine 1", "\n")
    assert not caplog.records

"""Every log record is one line on stderr."""

import json
import logging
from collections.abc import Iterator

import pytest

from stillroom.telemetry.logs import configure_logging

logger = logging.getLogger("stillroom.test_logs")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield
    configure_logging("WARNING")


def test_text_is_one_line_even_with_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO")
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        logger.exception("two\nlines of %s", "message")

    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert " ERROR stillroom.test_logs: two\\nlines of message [ValueError: bad\\nvalue (test_logs.py:" in line


def test_json_holds_the_stack_trace(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", as_json=True)
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed")

    [line] = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("ERROR", "stillroom.test_logs", "failed")
    assert entry["traceback"].startswith("Traceback")
    assert entry["time"].endswith("Z")


def test_configuring_twice_does_not_double_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("DEBUG")
    configure_logging("WARNING")
    logger.info("too low")
    logger.warning("once")

    assert len(capsys.readouterr().err.splitlines()) == 1


def test_libraries_log_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO")
    logging.getLogger("httpx").info("HTTP Request: GET ...")
    logging.getLogger("httpx").warning("this matters")

    assert len(capsys.readouterr().err.splitlines()) == 1


def test_debug_level_includes_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("DEBUG")
    logging.getLogger("httpx").info("HTTP Request: GET ...")

    assert "HTTP Request" in capsys.readouterr().err


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("LOUD")


@pytest.mark.parametrize("as_json", [False, True])
def test_control_characters_in_records_are_escaped(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    configure_logging("INFO", as_json=as_json)
    logger.info("a file named %s", "\x1b[2J\x9b2J\r\x07.md")

    [line] = capsys.readouterr().err.split("\n")[:-1]
    assert line.isprintable() and "\\u009b2J" in line and ("\\u001b[2J" in line)

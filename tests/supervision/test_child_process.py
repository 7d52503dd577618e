"""A child process is known when it is ready, and ends with its parent."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from stillroom.supervision.child_process import ChildProcess, described_end
from tests.supervision.children import PROGRAM, child, url_of

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 20.0


def test_child_tells_its_address_and_ends_when_asked() -> None:
    process = child()
    assert process.wait_until_ready() and process.url == url_of(process) and process.is_running
    assert process.stop(GRACE_S) == process.wait() == process.stop(GRACE_S) == 0
    process.terminate()


def test_lines_of_the_log_are_passed_on_until_the_end() -> None:
    lines: list[str] = []
    process = child("fails", lines.append)
    assert not process.wait_until_ready() and process.reap() == 2
    assert lines == ["no such model\n"]


def test_child_that_fails_is_not_ready_and_tells_its_exit_code() -> None:
    process = child("fails")
    assert not process.wait_until_ready()
    assert process.reap() == 2


def test_child_that_closes_its_stdout_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.supervision.child_process._END_SECONDS", 0.01)
    process = child("mute")
    assert not process.wait_until_ready()
    assert process.reap() == -signal.SIGKILL


def test_waiting_for_a_loading_child_has_a_limit() -> None:
    process = child("loading")
    assert not process.wait_until_ready(0.01) and process.is_running
    process.stop(GRACE_S)


def test_child_that_ignores_the_request_is_killed() -> None:
    process = child("deaf")
    assert process.wait_until_ready()
    process.stop(0.01)
    assert process.wait() == -signal.SIGKILL


def test_variables_are_added_to_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "1")
    show = "import json, os; print(json.dumps({'url': os.environ['INHERITED'] + os.environ['GIVEN']}), flush=True)"
    process = ChildProcess([], {"GIVEN": "2"}, (sys.executable, "-S", "-E", "-c", show))
    assert process.wait_until_ready() and process.url == "12"
    assert process.wait() == 0
    process.stop(GRACE_S)


def test_child_ends_when_its_parent_is_killed() -> None:
    parent = f"""
from stillroom.supervision.child_process import ChildProcess
process = ChildProcess(["ready"], {{}}, {PROGRAM!r})
assert process.wait_until_ready()
print(process.pid, flush=True)
process.wait()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=ROOT) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        os.kill(pid, 0)
        killed.kill()
        assert wait_for_end(pid)


def wait_for_end(pid: int) -> bool:
    """Wait for the end of a process that is no child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], GRACE_S)[0])
    finally:
        os.close(descriptor)


WAITS_FOR_EVER = """
import signal, sys, threading
from stillroom.cli.child import end_with_parent

signal.signal(signal.SIGTERM, {handler})
threading.Thread(target=end_with_parent, args=({seconds},), daemon=True).start()
print("begun", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("handler", "seconds", "code"), [("lambda *_: sys.exit(7)", GRACE_S, 7), ("signal.SIG_IGN", 0.01, 1)]
)
def test_command_is_asked_to_stop_when_stdin_ends_and_ended_if_it_does_not(
    handler: str, seconds: float, code: int
) -> None:
    program = WAITS_FOR_EVER.format(handler=handler, seconds=seconds)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.stdin.close()
        assert process.wait(GRACE_S) == code


@pytest.mark.slow
def test_server_ends_with_its_parent_in_order(tmp_path: Path) -> None:
    process = ChildProcess(["serve", "--json", "--port", "0", "--kb", str(tmp_path / "kb")], {})
    assert process.wait_until_ready() and process.url is not None
    assert httpx.get(f"{process.url}/readyz").status_code == 200
    stdin = process._process.stdin
    assert stdin is not None
    stdin.close()  # as the system does when this process is killed
    assert process.wait() == 0


def test_ends_are_described() -> None:
    assert described_end(2) == "exit code 2"
    assert described_end(-9) == "signal SIGKILL"
    assert described_end(-64) in ("signal SIGRTMAX", "signal -64", "signal 64")

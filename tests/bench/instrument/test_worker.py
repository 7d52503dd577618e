"""Tests worker processes: stopped between requests, ended with their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.instrument.worker import WorkerProcess

ECHO = (
    'import json, sys\nprint(json.dumps({"load_seconds": 0.5}), flush=True)\n'
    'for line in sys.stdin: print(json.dumps({"peak_rss_bytes": 7, "heard": json.loads(line)}), flush=True)\n'
)


def state_of(process: int) -> str:
    """Return the state of a process: `T` stopped, `Z` zombie, and so on; empty if it does not exist."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def becomes(process: int, *states: str) -> bool:
    ends = time.monotonic() + 20
    while state_of(process) not in states and time.monotonic() < ends:
        time.sleep(0.02)
    return state_of(process) in states


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess("echo", [sys.executable, "-c", ECHO], tmp_path / "log")
    yield worker
    worker.close()


def test_worker_answers_and_reports_memory(worker: WorkerProcess) -> None:
    assert worker.wait() == 0.5
    assert worker.ask({"a": 1})["heard"] == {"a": 1} and worker.peak_rss_bytes == 7
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(UsageError, match="echo stopped"):
        worker.ask({})


def test_missing_command_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vllm cannot be started: there is no /nowhere/python"):
        WorkerProcess("vllm", ["/nowhere/python"], tmp_path / "log")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot ask to die with its parent")
def test_stopped_worker_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom stillroom_bench.instrument.worker import WorkerProcess\n"
        "worker = WorkerProcess('echo', [sys.executable, '-c', sys.argv[1]], Path(sys.argv[2]))\n"
        "worker.wait()\nprint(worker._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, ECHO, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        started = int(bench.stdout.readline())
        try:
            assert becomes(started, "T"), "the worker is stopped between requests"
            os.kill(bench.pid, signal.SIGKILL)
            assert becomes(started, "Z", "")
        finally:
            if state_of(started) not in ("", "Z"):
                os.kill(started, signal.SIGKILL)

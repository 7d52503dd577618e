"""Worker process with a measured runtime, stopped by signal while other arms run.

The process runs a worker script of this package under the Python that has the runtime installed, in its own process
group. It reports when it has loaded, then answers one JSON line per request line.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stillroom.errors import UsageError

_LAUNCHER = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG, which lasts beyond exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program that makes the command end with the thread that started it (Linux), then executes the command.

A stopped process cannot detect that its parent has ended. A `preexec_fn` could hang if other threads run.
"""


class WorkerProcess:
    """A process that runs only while it answers a request.

    Precondition: the thread that creates it lives as long as the process; on Linux the process ends with the thread.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start loading; call `wait` before the first request.

        Raises:
            UsageError: the command does not exist.
        """
        if shutil.which(command[0]) is None:
            raise UsageError(f"{name} cannot be started: there is no {command[0]}")
        self.name = name
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _LAUNCHER, str(os.getpid()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ
            | {"PYTHONSAFEPATH": "1"},  # or this folder's `statistics` would shadow the standard library's
        )
        self.peak_rss_bytes = 0
        self.version = ""
        """Of the runtime, if it said so when it had loaded."""

    def wait(self) -> float:
        """Wait until the process has loaded, and return its load time in seconds.

        Raises:
            UsageError: loading failed.
        """
        loaded = self._answer()
        self._signal(signal.SIGSTOP)
        self.version = str(loaded.get("version", ""))
        return float(loaded["load_seconds"])

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply; updates `peak_rss_bytes`.

        Raises:
            UsageError: the process ended.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # `_answer` then raises
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        self.peak_rss_bytes = int(answer["peak_rss_bytes"])
        return answer

    def close(self) -> None:
        """End the process group. Idempotent."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self._process:
            pass  # waits for the process and closes the pipes
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UsageError(f"{self.name} stopped; see {self._log.name}")
        found: dict[str, Any] = json.loads(line)
        return found

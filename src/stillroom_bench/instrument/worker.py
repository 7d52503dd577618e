"""A runtime that a benchmark measures, in a process group of its own: stopped while others take their turn.

The process runs one of the worker scripts of this package under whatever Python has the runtime. It says when it has
loaded, then answers each JSON line with one.
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
    sys.exit("nobody waits for this any more")
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the command, which then dies with the thread that started it (Linux): a stopped process cannot notice by
itself that nobody will ever wake it. Not a `preexec_fn`, which may hang where other threads run."""


class WorkerProcess:
    """One of the things compared. It computes only while it has a question to answer.

    To be made by a thread that lives as long as it is needed: on Linux it ends with that.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start loading; `wait` until it is done.

        Raises:
            UsageError: there is no such command.
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
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # our `statistics` is not the library's
        )
        self.peak_rss_bytes = 0

    def wait(self) -> float:
        """Seconds that loading took.

        Raises:
            UsageError: it failed.
        """
        seconds = float(self._answer()["load_seconds"])
        self._signal(signal.SIGSTOP)
        return seconds

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, which also says how much memory the process has needed so far.

        Raises:
            UsageError: the process died.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # there will be no answer either
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        self.peak_rss_bytes = int(answer["peak_rss_bytes"])
        return answer

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self._process:
            pass  # waits, and closes the pipes
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

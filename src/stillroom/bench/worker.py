"""A runtime that a benchmark measures, in a process group of its own: stopped while others take their turn.

The process runs one of the worker scripts of this package under whatever Python has the runtime. It says when it has
loaded, then answers each JSON line with one.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stillroom.errors import UsageError


class WorkerProcess:
    """One of the things compared. It computes only while it has a question to answer."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start loading; `wait` until it is done."""
        self.name = name
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command,
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

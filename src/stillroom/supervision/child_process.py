"""One server of Stillroom as a child process, which ends with this process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

PROGRAM = (sys.executable, "-m", "stillroom.cli.child")

_END_SECONDS = 5.0
"""Time for the end of a process that has closed its stdout, or was killed."""


class ChildProcess:
    """A running `stillroom serve --json` or `stillroom engine --json`. Thread-safe.

    The child has a session of its own, so that Ctrl-C reaches this process only, which then ends its children in order.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        program: Sequence[str] = PROGRAM,
        on_log: Callable[[str], None] | None = None,
    ) -> None:
        """Start it.

        Args:
            arguments: of the program; with `--json` it prints one JSON object with its `url` when it is ready.
            environment: variables beside those of this process.
            program: reads stdin, and ends when that ends.
            on_log: called with each line of the child's stderr, in a thread; None: it is this process's.
        """
        self._process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if on_log is None else subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.url: str | None = None
        """Where it listens; None until it is ready."""
        self._is_decided = threading.Event()
        """Set when it is ready or has closed its stdout."""
        threading.Thread(target=self._read, name="child-output", daemon=True).start()
        self._log: threading.Thread | None = None
        if on_log is not None:
            self._log = threading.Thread(target=_read_log, args=(self._process.stderr, on_log), daemon=True)
            self._log.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the child is ready, or has ended: False then, and after the timeout."""
        self._is_decided.wait(timeout_s)
        return self.url is not None

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait for the end of the child; return its exit code, or minus the number of the signal that killed it."""
        code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._log is not None:
            self._log.join(_END_SECONDS)  # its last lines say why it ended
        return code

    def reap(self) -> int:
        """Wait for the end of a child that closed its stdout, and kill it if it does not end; return as `wait`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        return self.wait()

    def terminate(self) -> None:
        """Ask it to stop: no new requests, running ones end. No effect if it has ended."""
        self._process.terminate()

    def stop(self, timeout_s: float) -> int:
        """Ask it to stop, and kill it if it has not ended in time; return as `wait`. Idempotent."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        return self.wait()

    def _read(self) -> None:
        """Take the address from the child's stdout, and read the rest so that the child never waits for it."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if self.url is None and (found := _url_in(line)):
                    self.url = found
                    self._is_decided.set()
        self._is_decided.set()


def _read_log(lines: IO[bytes], on_log: Callable[[str], None]) -> None:
    with lines:
        for line in lines:
            on_log(line.decode(errors="backslashreplace"))


def described_end(code: int) -> str:
    """Return how a process ended, for messages, from its exit code or minus the number of a signal."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _url_in(line: bytes) -> str | None:
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("url"), str):
            return str(found["url"])
    return None

"""Several engines on this machine: started together, started again when they end, ended together.

Each engine chooses a free port. The addresses of those that are ready stand in a file, which the front reads as any
list of engines (`cluster/directory.py`).
"""

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from stillroom.core.clock import Clock
from stillroom.errors import EngineError
from stillroom.supervision.child_process import ChildProcess, described_end
from stillroom.supervision.restarts import MAX_ENDS, WINDOW_SECONDS, Restarts

logger = logging.getLogger(__name__)

Launch = Callable[[int], ChildProcess]
"""Starts the engine of a number, from 0."""


class Replicas:
    """Engines 1 to N. Close it, or use it as a context manager."""

    def __init__(self, launch: Launch, num_engines: int, clock: Clock, stop_seconds: float) -> None:
        """Make the file of addresses; `start` starts the engines.

        Args:
            stop_seconds: that an engine may take to end its requests.
        """
        self._launch = launch
        self._clock = clock
        self._stop_seconds = stop_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="stillroom-engines-")
        self._file = Path(self._folder.name) / "engines"
        self._file.touch()
        self._changed = threading.Condition()
        self._running: list[ChildProcess | None] = [None] * num_engines
        self._failure: str | None = None
        """Why an engine could not be started for the first time."""
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=(number,), name=f"engine-{number + 1}", daemon=True)
            for number in range(num_engines)
        ]

    @property
    def address(self) -> str:
        """Address of the list of engines, for `engine.urls`."""
        return self._file.as_uri()

    @property
    def num_ready(self) -> int:
        return len(self._ready())

    @property
    def num_starting(self) -> int:
        """Engines that are not ready and not given up: they load, or wait to be started again."""
        return max(0, sum(thread.is_alive() for thread in self._threads) - self.num_ready)

    def start(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Start all engines; return when all are ready.

        The first one starts alone: it compiles kernels and downloads files, which the others then find.

        Args:
            progress: called with a text that says how many are ready.

        Raises:
            EngineError: an engine ended before it was ready. The others are ended too.
        """
        self._start(self._threads[:1], progress)
        self._start(self._threads[1:], progress)

    def _start(self, threads: Sequence[threading.Thread], progress: Callable[[str], None]) -> None:
        wanted = self.num_ready + len(threads)
        for thread in threads:
            thread.start()
        with self._changed:
            while self._failure is None and self.num_ready < wanted:
                if self._closing.is_set():
                    self._failure = "the engines were ended before all of them were ready"
                    break
                progress(f"starting engines: {self.num_ready} of {len(self._running)} are ready")
                self._changed.wait()
        if self._failure is not None:
            self.close()
            raise EngineError(self._failure)

    def terminate(self) -> None:
        """Ask all engines to end, and start none again. Idempotent."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
            for one in self._running:
                if one is not None:
                    one.terminate()

    def close(self) -> None:
        """End all engines, and wait for it. Idempotent."""
        self.terminate()
        with self._changed:
            running = [one for one in self._running if one is not None]
        end = self._clock.monotonic() + self._stop_seconds
        for one in running:
            one.stop(max(0.0, end - self._clock.monotonic()))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._folder.cleanup()

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, number: int) -> None:
        """Run one engine, again and again, until it is given up or all are ended."""
        restarts, has_been_ready = Restarts(), False
        while not self._closing.is_set():
            end, was_ready = self._run(number)
            has_been_ready |= was_ready
            if self._closing.is_set():
                return
            if not has_been_ready:
                self._fail(f"{end}; the log has its message")
                return
            if not self._pauses(end, restarts.pause_after_end(self._clock.monotonic())):
                return

    def _run(self, number: int) -> tuple[str, bool]:
        """Run one engine until it ends; return how it ended, in words, and whether it was ready before."""
        name = f"engine {number + 1}"
        try:
            engine = self._started(number)
        except OSError as error:
            return f"{name} could not be started ({error.strerror or error})", False
        if engine is None:
            return "", False
        was_ready = engine.wait_until_ready()
        if was_ready:
            logger.info("%s is ready at %s (process %d)", name, engine.url, engine.pid)
            self._note_change()
        code = engine.wait() if was_ready else engine.reap()
        with self._changed:
            self._running[number] = None
        self._note_change()
        end = f"{name} (process {engine.pid}) ended with {described_end(code)}"
        return end if was_ready else f"{end} before it was ready", was_ready

    def _started(self, number: int) -> ChildProcess | None:
        """Start an engine; None if all are being ended."""
        with self._changed:
            if self._closing.is_set():
                return None
            engine = self._running[number] = self._launch(number)
            return engine

    def _pauses(self, end: str, pause: float | None) -> bool:
        """Log the end of an engine and wait; False if it shall not be started again."""
        if pause is None:
            logger.error(
                "%s; after more than %d ends within %g minutes it is not started again: repair what its messages name, "
                "and start the server again. %d of %d engines are ready",
                end,
                MAX_ENDS,
                WINDOW_SECONDS / 60,
                self.num_ready,
                len(self._running),
            )
            return False
        logger.warning("%s; it is started again in %g s", end, pause)
        return not self._closing.wait(pause)

    def _fail(self, message: str) -> None:
        with self._changed:
            self._failure = self._failure or message
            self._changed.notify_all()

    def _note_change(self) -> None:
        """Write the addresses of the ready engines to the file, and wake `start`."""
        with self._changed:
            temporary = self._file.with_suffix(".new")
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                temporary.write_text("".join(f"{url}\n" for url in self._ready()), encoding="utf-8")
                os.replace(temporary, self._file)
            self._changed.notify_all()

    def _ready(self) -> list[str]:
        return [one.url for one in self._running if one is not None and one.url is not None]

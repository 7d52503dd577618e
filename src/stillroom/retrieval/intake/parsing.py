"""Files parsed in processes of their own: several at a time, and what goes wrong in one of them is that file's failure.

A parser may crash, hang or take all memory; then its process ends, the file has a reason, and the next file gets a new
process. Nothing of this process is inherited by them, neither threads nor models, and they end when it does.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document
from stillroom.errors import DocumentError, ReaderUnavailableError
from stillroom.retrieval.intake.wire import OUT_OF_MEMORY, document_from_wire

_MAX_AUTOMATIC_WORKERS = 8
_START_TIMEOUT_S = 120.0
"""For a process to be there; more than a busy machine needs."""
_END_TIMEOUT_S = 10.0
"""For a process to end that has hung up."""
_MAX_FILES_EACH = 200
"""A process that has read so many makes place for a new one: what parsers leave behind does not add up."""


_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class ParserPool:
    """Parses files side by side. Processes start with the first file; `close` ends them whatever they do."""

    def __init__(self, config: DocumentsConfig) -> None:
        self.num_workers = config.num_workers or min(os.cpu_count() or 1, _MAX_AUTOMATIC_WORKERS)
        self._config = config
        # a thread for each process: it waits for the answer, and for no more than a file's time
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="stillroom-parse")
        self._lock = Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._is_closed = False

    def submit(self, path: Path) -> "Future[Document]":
        """The document in a file, some time; a DocumentError where there is none, a ReaderUnavailableError where no
        process could look."""
        return self._threads.submit(self._parse, path)

    def close(self) -> None:
        """End all processes; files that are being parsed have no result. Idempotent."""
        with self._lock:
            self._is_closed = True
            for process in self._all:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._all:
            process.close()
        self._all.clear()

    def _parse(self, path: Path) -> Document:
        process = self._take()
        try:
            answer = process.ask(path)
            document = None if "error" in answer else document_from_wire(answer)
        except DocumentError:
            self._discard(process)
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._discard(process)
            raise DocumentError(f"{path}: its reader gave no sensible answer; please report the file") from error
        if process.num_files < _MAX_FILES_EACH:
            with self._lock:
                self._idle.append(process)
        else:
            self._discard(process)
        if document is None:
            raise DocumentError(str(answer["error"]))
        return document

    def _take(self) -> "_Process":
        with self._lock:
            if self._is_closed:
                raise ReaderUnavailableError("reading was stopped")
            if self._idle:
                return self._idle.pop()
            try:
                process = _Process(self._config)
            except OSError as error:
                raise ReaderUnavailableError(
                    f"no process could be started to read it: {error}; add it again"
                ) from error
            self._all.add(process)
            return process

    def _discard(self, process: "_Process") -> None:
        with self._lock:
            self._all.discard(process)
        process.kill()
        process.close()


class _Process:
    """One parsing process and the connection to it. Used by one thread at a time; any thread may kill it."""

    def __init__(self, config: DocumentsConfig) -> None:
        self.num_files = 0
        self._config = config
        self._max_answer_bytes = 16 * config.max_text_bytes + (1 << 24)  # a character is up to six in JSON
        self._is_ready = False
        self._connection, theirs = Pipe()
        with theirs:
            try:
                self._popen = _start(theirs.fileno())
            except OSError:
                self._connection.close()
                raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, path: Path) -> dict[str, object]:
        """What the process makes of a file.

        Raises:
            DocumentError: it took too long, or the process ended.
            ReaderUnavailableError: and the process had not even been ready.
        """
        self.num_files += 1
        try:
            if self.num_files == 1:
                # not when it is made: a process may have ended by now, and that has one way to be told, this one
                self._connection.send_bytes(json.dumps(dataclasses.asdict(self._config)).encode())
            if not self._is_ready and self._connection.poll(_START_TIMEOUT_S):
                self._connection.recv_bytes()
                self._is_ready = True
            self._connection.send_bytes(os.fsencode(path))
            limit_s = self._config.timeout_s
            if not self._connection.poll(limit_s):
                raise self._failure(
                    f"{path}: took longer than documents.timeout_s ({limit_s:g} s); split it or raise the limit"
                )
            answer: dict[str, object] = json.loads(self._connection.recv_bytes(self._max_answer_bytes))
        except (EOFError, OSError) as error:
            raise self._failure(f"{path}: {self._how_it_ended()}") from error
        return answer

    def _failure(self, reason: str) -> DocumentError:
        """The file's own if the process was ready for it."""
        return DocumentError(reason) if self._is_ready else ReaderUnavailableError(reason)

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """After `kill`, when nobody asks any more."""
        self._popen.wait()
        self._connection.close()

    def _how_it_ended(self) -> str:
        try:
            code = self._popen.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its reader ended without an answer; please report the file"
        if code == OUT_OF_MEMORY:
            return "needs more memory than documents.max_reader_bytes; split it or raise the limit"
        if code >= 0:
            return f"the process that read it ended (exit code {code}); please report the file"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"its reader crashed ({name}): the file is damaged, or needs more memory than documents.max_reader_bytes"


def _start(descriptor: int) -> "subprocess.Popen[bytes]":
    """A parsing process that talks over an open descriptor of ours. Raises OSError where the machine has no more."""
    return subprocess.Popen(
        # -P: no module of the working folder comes in between
        [sys.executable, "-P", "-m", "stillroom.retrieval.intake.parse_worker", str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env=_environment(),
        start_new_session=True,  # Ctrl-C is for us; we end it
    )


def _environment() -> dict[str, str]:
    """Of a parsing process: what Python needs to start, and no keys."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

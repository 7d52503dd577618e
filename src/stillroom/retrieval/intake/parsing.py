"""Pool of parsing processes: parses several files at a time and turns a crash into the failure of one file.

If a loader crashes, hangs or exhausts its memory, its process is ended, the file fails with a reason, and the next file
gets a new process. The processes inherit neither threads nor models, and end with this process.
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
from stillroom.retrieval.intake.parse_worker import OUT_OF_MEMORY, decode_document
from stillroom.retrieval.intake.process_limits import has_used_memory

_MAX_AUTOMATIC_WORKERS = 8
_START_TIMEOUT_S = 120.0
_TOO_LARGE = "needs more memory than documents.max_reader_bytes; split it or raise the limit"
_END_TIMEOUT_S = 10.0
"""Time for a process to exit after it has closed its connection."""
_MAX_FILES_EACH = 200
"""After this number of files a process is replaced, so that memory leaks of parsers do not add up."""
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class ParserPool:
    """Parses files in parallel. Processes start with the first file; `close` kills them."""

    def __init__(self, config: DocumentsConfig) -> None:
        self.num_workers = config.num_workers or min(os.cpu_count() or 1, _MAX_AUTOMATIC_WORKERS)
        self._config = config
        # a thread per process waits for its reply
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="stillroom-parse")
        self._lock = Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._is_closed = False

    def submit(self, path: Path) -> "Future[Document]":
        """Parse a file. The future raises DocumentError if the file cannot be parsed, ReaderUnavailableError if no
        process could be started."""
        return self._threads.submit(self._parse, path)

    def close(self) -> None:
        """Kill all processes; files that are being parsed have no result. Idempotent."""
        with self._lock:
            self._is_closed = True
            for process in self._all:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._all:
            process.close()
        self._all.clear()

    def _parse(self, path: Path) -> Document:
        process = self._idle_process()
        try:
            answer = process.parse(path)
            document = None if "error" in answer else decode_document(answer)
        except DocumentError:
            self._discard(process)
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._discard(process)
            raise DocumentError(f"{path}: its reader sent an invalid reply; please report the file") from error
        if process.num_files < _MAX_FILES_EACH:
            with self._lock:
                self._idle.append(process)
        else:
            self._discard(process)
        if document is None:
            raise DocumentError(str(answer["error"]))
        return document

    def _idle_process(self) -> "_Process":
        """Take an idle process or start one."""
        with self._lock:
            if self._is_closed:
                raise ReaderUnavailableError("reading was stopped")
            if self._idle:
                return self._idle.pop()
            try:
                process = _Process(self._config)
            except OSError as error:
                raise ReaderUnavailableError(f"no parsing process could be started: {error}; add it again") from error
            self._all.add(process)
            return process

    def _discard(self, process: "_Process") -> None:
        with self._lock:
            self._all.discard(process)
        process.kill()
        process.close()


class _Process:
    """One parsing process and its connection. One thread at a time uses it; any thread may kill it."""

    def __init__(self, config: DocumentsConfig) -> None:
        self.num_files = 0
        self._config = config
        self._max_answer_bytes = 16 * config.max_text_bytes + (1 << 24)  # JSON escapes take up to six bytes
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

    def parse(self, path: Path) -> dict[str, object]:
        """Send a path and return the reply.

        Raises:
            DocumentError: The process took longer than `documents.timeout_s` or `ocr_page_timeout_s`, or ended.
            ValueError: The reply is invalid.
            ReaderUnavailableError: The process ended before it was ready.
        """
        self.num_files += 1
        try:
            if self.num_files == 1:  # here and not in the constructor, so that a dead process is reported in one way
                self._connection.send_bytes(json.dumps(dataclasses.asdict(self._config)).encode())
            if not self._is_ready and self._connection.poll(_START_TIMEOUT_S):
                self._connection.recv_bytes()
                self._is_ready = True
            self._connection.send_bytes(os.fsencode(path))
            return self._answer(path)
        except (EOFError, OSError) as error:
            raise self._failure(f"{path}: {self._exit_reason()}") from error

    def _answer(self, path: Path) -> dict[str, object]:
        """Wait for the reply. Pages read by OCR have time limits of their own, and their number is limited."""
        limit_s = self._config.timeout_s
        too_slow = f"took longer than documents.timeout_s ({limit_s:g} s); split it or raise the limit"
        for _ in range(self._config.ocr_max_pages + 1):
            if not self._connection.poll(limit_s):
                # Python may try for ever to raise an error for which there is no memory
                reason = _TOO_LARGE if has_used_memory(self.pid) else too_slow
                raise self._failure(f"{path}: {reason}")
            answer: dict[str, object] = json.loads(self._connection.recv_bytes(self._max_answer_bytes))
            if "page" not in answer:
                return answer
            limit_s = self._config.ocr_page_timeout_s
            too_slow = (
                f"OCR of page {answer['page']} took longer than documents.ocr_page_timeout_s ({limit_s:g} s); "
                "raise the limit"
            )
        raise ValueError("more pages than documents.ocr_max_pages")

    def _failure(self, reason: str) -> DocumentError:
        return DocumentError(reason) if self._is_ready else ReaderUnavailableError(reason)

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """Precondition: the process was killed and no thread uses it."""
        self._popen.wait()
        self._connection.close()

    def _exit_reason(self) -> str:
        try:
            code = self._popen.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its reader closed the connection without a reply; please report the file"
        if code == OUT_OF_MEMORY:
            return _TOO_LARGE
        if code >= 0:
            return f"its reader ended (exit code {code}); please report the file"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"its reader crashed ({name}): the file is damaged, or needs more memory than documents.max_reader_bytes"


def _start(descriptor: int) -> "subprocess.Popen[bytes]":
    """Start a parsing process with an open descriptor of this process. Raises OSError if the system refuses."""
    return subprocess.Popen(
        # -P: modules of the working folder are not imported
        [sys.executable, "-P", "-m", "stillroom.retrieval.intake.parse_worker", str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env=worker_environment(),
        start_new_session=True,  # Ctrl-C reaches only the parent, which ends the process
    )


def worker_environment() -> dict[str, str]:
    """Return the environment of a parsing process: only what Python needs to start, no API keys."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    kept |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # their buffers would count as memory of the reader
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

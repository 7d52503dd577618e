"""Pictures of PDF pages, each drawn by a process of its own (`page_worker`) with limits on time and memory.

The process gets the open file, not its path, so that it draws the file that the caller has checked.
"""

import signal
import subprocess
import sys
import time
from io import BufferedReader

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.cancellation import Cancellation
from stillroom.errors import DocumentError, ReaderUnavailableError, UnknownDocumentError, UsageError
from stillroom.retrieval.intake.page_worker import DAMAGED, NO_SUCH_PAGE, OUT_OF_MEMORY
from stillroom.retrieval.intake.parsing import worker_environment

PDF = ".pdf"
MIN_WIDTH, MAX_WIDTH = 64, 2400
"""Pixels."""
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_PNG_BYTES = 1 << 26
_CHECK_SECONDS = 0.1
"""Interval of cancellation checks while the process draws."""


def check_width(width: int) -> None:
    """Raises UsageError if the width of a picture is out of range."""
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise UsageError(f"width={width} is out of range; use {MIN_WIDTH} to {MAX_WIDTH} pixels")


def page_image(stream: BufferedReader, page: int, width: int, config: DocumentsConfig, stop: Cancellation) -> bytes:
    """Return a page of an open PDF as PNG.

    Args:
        page: From 1.
        width: In pixels.

    Raises:
        UnknownDocumentError: There is no such page.
        DocumentError: The page is damaged, or took more time or memory than `documents` allows.
        ReaderUnavailableError: No process could be started.
        ChangeCancelledError: `stop` was cancelled.
    """
    arguments = (stream.fileno(), page, width, config.max_reader_bytes, int(config.timeout_s) + 10)
    try:
        process = subprocess.Popen(
            # -P: modules of the working folder are not imported
            [sys.executable, "-P", "-m", "stillroom.retrieval.intake.page_worker", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(stream.fileno(),),
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends the process
        )
    except OSError as error:
        raise ReaderUnavailableError(f"no process could be started: {error}; try again") from error
    with process:
        try:
            output = _output(process, config.timeout_s, stop)
        finally:
            process.kill()
    if process.returncode == 0 and output.startswith(_PNG):
        return output
    raise _failure(process.returncode, page)


def _output(process: "subprocess.Popen[bytes]", timeout_s: float, stop: Cancellation) -> bytes:
    end = time.monotonic() + timeout_s
    while True:
        stop.check()
        try:
            output, _ = process.communicate(timeout=max(0.0, min(_CHECK_SECONDS, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() > end:
                raise DocumentError(
                    f"the page took longer than documents.timeout_s ({timeout_s:g} s); raise the limit"
                ) from None
            continue
        if len(output) > _MAX_PNG_BYTES:
            raise DocumentError("the picture of the page is too large; ask for a smaller width")
        return output


def _failure(code: int, page: int) -> DocumentError | UnknownDocumentError:
    if code == NO_SUCH_PAGE:
        return UnknownDocumentError(f"page {page} does not exist in this PDF")
    if code == DAMAGED:
        return DocumentError(f"page {page} is damaged and cannot be drawn")
    if code in (OUT_OF_MEMORY, -signal.SIGABRT):
        return DocumentError(f"page {page} needs more memory than documents.max_reader_bytes; raise the limit")
    return DocumentError(f"the process that draws page {page} ended with code {code}; please report the file")

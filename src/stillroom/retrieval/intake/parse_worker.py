"""A process that parses files: `python -m stillroom.retrieval.intake.parse_worker FD`, started by `parsing`.

It talks over one socket in JSON, for what a damaged file makes of this process must not reach further. Paths come in,
a document or a reason goes out, until the other end is closed.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.errors import DocumentError
from stillroom.retrieval.intake.wire import OUT_OF_MEMORY, document_to_wire
from stillroom.retrieval.loaders.load import load

READY = b"ready"


def main() -> None:
    """Serve until nobody asks any more."""
    connection = Connection(int(sys.argv[1]))
    config = DocumentsConfig(**json.loads(connection.recv_bytes()))
    _limit(config)
    connection.send_bytes(READY)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            path = Path(os.fsdecode(connection.recv_bytes()))
            # should whoever started us be gone and a reader hang, the system ends us
            signal.setitimer(signal.ITIMER_REAL, 2 * config.timeout_s + 10)
            connection.send_bytes(_answer(path, config))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(path: Path, config: DocumentsConfig) -> bytes:
    try:
        (document,) = load(path, config)
        return document_to_wire(document)
    except DocumentError as error:
        return json.dumps({"error": str(error)}).encode()


def _limit(config: DocumentsConfig) -> None:
    """No core files; and no more memory than allowed, where the system knows how much there is already."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + config.max_reader_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        # the next file gets a new process: what this one has left here it might not give back
        os._exit(OUT_OF_MEMORY)

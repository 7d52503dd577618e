"""Runs a command as a child process that ends with its parent: `python -m stillroom.cli.child engine ...`.

The parent keeps the child's stdin open and writes nothing. Its end means that the parent is gone, also after a kill,
and the command is asked to stop as by SIGTERM.
"""

import os
import signal
import threading

from stillroom.cli.main import main

MAX_SECONDS = 120.0
"""Time for an orderly end; then the process ends at once."""


def end_with_parent(max_seconds: float = MAX_SECONDS) -> None:
    """Wait for the end of stdin, then end this process."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(max_seconds)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    main()

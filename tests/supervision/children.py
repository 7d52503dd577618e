"""Real child processes that behave as a test needs; they start in some hundredths of a second."""

import sys
from collections.abc import Callable

from stillroom.supervision.child_process import ChildProcess

_PROGRAM = """
import json, os, signal, sys

kind = sys.argv[1]
if kind == "fails":
    print("no such model", file=sys.stderr)
    sys.exit(2)
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if kind == "mute":
    os.close(1)
elif kind != "loading":
    print("a line of a library", flush=True)
    print(json.dumps({"url": f"http://127.0.0.1:{os.getpid()}", "port": 0}), flush=True)
    print("x" * 200_000, flush=True)
while os.read(0, 4096):
    pass
os._exit(3)
"""
PROGRAM = (sys.executable, "-S", "-E", "-c", _PROGRAM)


def child(kind: str = "ready", on_log: Callable[[str], None] | None = None) -> ChildProcess:
    """Start a child.

    Args:
        kind: `ready`; `deaf` to SIGTERM; `loading` for ever; `mute`: closes its stdout and lives on; `fails` at once.
    """
    return ChildProcess([kind], {}, PROGRAM, on_log)


def url_of(process: ChildProcess) -> str:
    return f"http://127.0.0.1:{process.pid}"

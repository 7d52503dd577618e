"""Starts Python programs without importing what they need: a process that has imported it forks them.

Importing the commands and a fake `Stillroom` takes a second, and the tests start such programs by the dozen.

`command(modules)` replaces `[sys.executable, "-c"]`. The program has the arguments, environment, folder, standard
streams and signals of a new interpreter, and ends like one. Between it and the test stands a process, which passes
on signals and the exit code, so that `subprocess` works as ever. A program with a closed standard stream needs a real
interpreter, and so does a test of what is gone when the process has ended.
"""

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]

_CLIENT = """
import array, json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
asked = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
fds = array.array("i", [0, 1, 2])
connection.sendmsg([len(asked).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
connection.sendall(asked)
def number():
    told = connection.recv(4, socket.MSG_WAITALL)
    if len(told) < 4:
        sys.exit("the process that keeps the program has gone")
    return int.from_bytes(told, "big", signed=True)
pid = number()
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(one, lambda one, _: os.kill(pid, one))
code = number()
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def command(*modules: str) -> list[str]:
    """Return a command that a program's text and its arguments complete.

    Args:
        modules: what most of the programs import.
    """
    if not hasattr(os, "pidfd_open"):
        return [sys.executable, "-c"]
    return [sys.executable, "-S", "-E", "-c", _CLIENT, _server(modules)]


@functools.cache
def _server(modules: tuple[str, ...]) -> str:
    """Start the process that forks, once for these modules. Returns the address of its socket."""
    address = str(Path(tempfile.mkdtemp(prefix="forked-")) / "socket")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    program = [sys.executable, "-m", "tests.forked", address, *modules]
    pipe = subprocess.PIPE
    process = subprocess.Popen(program, stdin=pipe, stdout=pipe, cwd=ROOT, env=environment, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()

    def end() -> None:
        process.communicate()
        Path(address).unlink()
        Path(address).parent.rmdir()

    atexit.register(end)
    return address


def serve(address: str, modules: list[str]) -> str:
    """Fork for each connection until stdin ends. Returns the program to run, in the forked process."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready\n")
        keepers: list[int] = []
        while 0 not in select.select([listener.fileno(), 0], [], [])[0]:
            connection = listener.accept()[0]
            keepers = [pid for pid in keepers if not os.waitpid(pid, os.WNOHANG)[0]]
            keepers.append(os.fork())
            if not keepers[-1]:
                break
            connection.close()
        else:
            for pid in keepers:
                os.waitpid(pid, 0)
            os._exit(0)
    (arguments, environment, folder), descriptors = _received(connection)
    pid = os.fork()
    for number, descriptor in enumerate(descriptors):
        if not pid:
            os.dup2(descriptor, number)
        os.close(descriptor)
    if pid:
        _keep(connection, pid)
    connection.close()
    return _begin(arguments, environment, folder)


def _received(connection: socket.socket) -> tuple[Any, list[int]]:
    size, [(_, _, content)], *_ = connection.recvmsg(4, socket.CMSG_LEN(12))
    descriptors = array.array("i", content)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(size, "big"))), list(descriptors)


def _keep(connection: socket.socket, pid: int) -> NoReturn:
    """Tell the client the program's process and its exit code; kill it if the client was killed."""
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(pid.to_bytes(4, "big", signed=True))
    if connection.fileno() in select.select([connection.fileno(), os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _begin(arguments: list[str], environment: dict[str, str], folder: str) -> str:
    """Be what a new interpreter is to this program."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    encoding, _, errors = environment.get("PYTHONIOENCODING", sys.stdout.encoding).partition(":")
    options: dict[str, Any] = {"encoding": encoding, "errors": errors or "strict", "closefd": False}
    sys.stdin, sys.stdout = os.fdopen(0, "r", **options), os.fdopen(1, "w", **options)
    sys.stderr = os.fdopen(2, "w", 1, **options | {"errors": "backslashreplace"})
    program, sys.argv = arguments[0], ["-c", *arguments[1:]]
    return program


if __name__ == "__main__":
    exec(compile(serve(sys.argv[1], sys.argv[2:]), "<string>", "exec"), {"__name__": "__main__"})

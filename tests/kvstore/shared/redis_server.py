"""A real server for the tests of the shared tier: redis-server or valkey-server from the PATH."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stillroom.config.tier_address import TierAddress, parse_tier_address
from stillroom.kvstore.shared.resp import Argument, Reply, RespConnection

PROGRAM = os.environ.get("STILLROOM_REDIS_SERVER") or shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(PROGRAM is None, reason="needs redis-server or valkey-server on the PATH")


class RedisServer:
    """A server in memory, on a free port of this machine."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        assert PROGRAM is not None
        self.port = port or free_port()
        own = f"--port {self.port} --bind 127.0.0.1 --appendonly no --dir {folder}".split()
        self._process = subprocess.Popen([PROGRAM, *own, "--save", "", *options], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert any(b"Ready to accept connections" in line for line in self._process.stdout), "the server did not start"

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def address(self) -> TierAddress:
        return parse_tier_address("tier", self.url)

    def call(self, *command: Argument) -> Reply:
        connection = RespConnection(self.address, 5.0)
        try:
            return connection.call(*command)
        finally:
            connection.close()

    def names(self, pattern: str = "*") -> list[str]:
        found = self.call("KEYS", pattern)
        assert isinstance(found, list)
        return sorted(bytes(name).decode() for name in found)

    def stop_answering(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def answer_again(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def redis_server(folder: Path, *options: str, port: int = 0) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options, port=port)
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

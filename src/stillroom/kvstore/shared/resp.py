"""A client of servers that speak the Redis protocol (RESP2), for large values. Standard library only.

redis-py with hiredis takes 2 to 3 times the processor time for values of 2 MiB, without hiredis 12 times
(docs/kv-tier.md), and holds Python's global lock meanwhile, so that the engine's thread waits. Here a value is received
into its own buffer, outside the lock.
"""

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from stillroom.config.tier_address import TierAddress
from stillroom.kvstore.record import Buffer

Argument = Buffer | str | int

_LINE_BYTES = 64 * 1024
_DEADLINE_TIMEOUTS = 5
"""A call that gets bytes now and then takes at most so many timeouts."""


class ReplyError(Exception):
    """An error that the server replied, such as `OOM command not allowed`."""


Reply = bytearray | int | str | list[Any] | ReplyError | None
"""Lists hold replies."""


class ProtocolError(OSError):
    """The other side does not speak the protocol."""


class RespConnection:
    """One connection, used by one thread at a time. After an OSError it must be closed."""

    def __init__(self, address: TierAddress, timeout_seconds: float) -> None:
        """Connect and log in.

        Raises:
            OSError: the server cannot be reached, or refuses.
        """
        self._timeout = timeout_seconds
        self._received = bytearray()
        self._at = 0
        self._until = time.monotonic() + _DEADLINE_TIMEOUTS * timeout_seconds
        self._socket: socket.socket = socket.create_connection((address.host, address.port), timeout_seconds)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.uses_tls:
                self._socket = _tls_context(address).wrap_socket(self._socket, server_hostname=address.host)
            self._log_in(address)
        except BaseException:
            self._socket.close()
            raise

    def _log_in(self, address: TierAddress) -> None:
        commands: list[list[Argument]] = []
        if address.password:
            user = [address.user] if address.user else []
            commands.append(["AUTH", *user, address.password])
        if address.database:
            commands.append(["SELECT", address.database])
        commands = commands or [["PING"]]
        for reply in self.pipeline(commands):
            if isinstance(reply, ReplyError):
                raise PermissionError(f"the server refuses the connection: {reply}")

    def call(self, *command: Argument, max_bytes: int = 2**29) -> Reply:
        """Send a command and return its reply.

        Args:
            max_bytes: of a value; a longer one is an error.

        Raises:
            OSError: the connection fails, or the reply takes too long.
        """
        return self.pipeline([command], max_bytes)[0]

    def pipeline(self, commands: Sequence[Sequence[Argument]], max_bytes: int = 2**29) -> list[Reply]:
        """Send commands together and return their replies; an error of one is its reply. As `call`."""
        self._until = time.monotonic() + _DEADLINE_TIMEOUTS * self._timeout
        small = bytearray()
        for command in commands:
            small += b"*%d\r\n" % len(command)
            for argument in command:
                part = str(argument).encode() if isinstance(argument, str | int) else argument
                small += b"$%d\r\n" % len(part)
                if len(part) > _LINE_BYTES:  # sent without a copy
                    self._send(small)
                    self._send(part)
                    small = bytearray()
                else:
                    small += part
                small += b"\r\n"
        self._send(small)
        return [self._reply(max_bytes) for _ in commands]

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            self._set_timeout()
            rest = rest[self._socket.send(rest) :]

    def _set_timeout(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server is too slow")
        self._socket.settimeout(min(left, self._timeout))

    def _reply(self, max_bytes: int, depth: int = 0) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode(errors="replace")
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        try:
            number = int(rest)
        except ValueError:
            raise ProtocolError("the server does not speak the Redis protocol") from None
        if kind == b":":
            return number
        if kind == b"$":
            return None if number < 0 else self._value(number, max_bytes)
        if kind == b"*" and depth < 4:
            return None if number < 0 else [self._reply(max_bytes, depth + 1) for _ in range(number)]
        raise ProtocolError("the server does not speak the Redis protocol")

    def _value(self, size: int, max_bytes: int) -> bytearray:
        if size > max_bytes:
            raise ProtocolError(f"the server sends a value of {size} bytes where at most {max_bytes} are expected")
        value = bytearray(size)
        ready = min(size, len(self._received) - self._at)
        value[:ready] = self._received[self._at : self._at + ready]
        self._at += ready
        view = memoryview(value)[ready:]
        while view:
            self._set_timeout()
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionError("the server has closed the connection")
            view = view[count:]
        if self._line() != b"":
            raise ProtocolError("the server does not speak the Redis protocol")
        return value

    def _line(self) -> bytes:
        while (end := self._received.find(b"\r\n", self._at)) < 0:
            if len(self._received) - self._at > _LINE_BYTES:
                raise ProtocolError("the server does not speak the Redis protocol")
            del self._received[: self._at]
            self._at = 0
            self._set_timeout()
            data = self._socket.recv(_LINE_BYTES)
            if not data:
                raise ConnectionError("the server has closed the connection")
            self._received += data
        line = bytes(self._received[self._at : end])
        self._at = end + 2
        return line


def _tls_context(address: TierAddress) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=address.ca_file or None)
    except OSError as error:  # also of a file without certificates
        reason = error.strerror or str(error)
        raise OSError(f"the file of certificates ca={address.ca_file} cannot be used: {reason}") from None

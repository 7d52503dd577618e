"""Run the application: bind first, so that a taken port is known before a model loads; listen when all is warm.

The process's signals stop it gracefully (`draining`); a second one ends the grace.
"""

import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from stillroom.config.settings import ServerConfig
from stillroom.errors import ConfigError, ServerError
from stillroom.ops.teams import quick_handovers
from stillroom.server.connections import ConnectionLimits, protocol_of
from stillroom.server.draining import Draining

_CLOSING_SECONDS = 5
"""For connections to be closed when nothing runs any more."""


class HttpServer:
    """One listening address. `run` blocks until `stop`, SIGINT or SIGTERM."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the address; port 0 picks a free one.

        Raises:
            ConfigError: the host is no address of this machine.
            ServerError: the port is taken or may not be used.
        """
        self._host = host
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server: _DrainingServer | None = None
        self._is_stopping = False

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{self.port}"

    def run(self, app: FastAPI, on_ready: Callable[[], None], settings: ServerConfig | None = None) -> None:
        """Serve until stopped; `on_ready` is called when connections are accepted.

        Args:
            app: of `create_app`.
            settings: limits of connections; None takes the defaults.

        Raises:
            ServerError: another process took the port in the meantime.
        """
        limits = ConnectionLimits.of(settings or ServerConfig())
        config = uvicorn.Config(
            app,
            http=protocol_of(limits),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSING_SECONDS,
            server_header=False,
        )
        self._server = _DrainingServer(config, on_ready, app.state.draining)
        self._server.should_exit = self._is_stopping
        try:
            with self._signals(), quick_handovers():
                try:
                    self._server.run(sockets=[self._socket])
                finally:
                    app.state.workers.close()  # a signal that came here would unwind the process under running threads
        except OSError as error:
            if self._server.started:
                raise
            raise _explain(error, self._host, self.port) from error
        finally:
            self.close()

    def stop(self) -> None:
        """Ask `run` to return; may be called from any thread, also before `run`. A second time ends the grace."""
        if self._server is not None:
            self._server.stop()
        self._is_stopping = True

    def close(self) -> None:
        """Give the address back, if `run` has not."""
        self._socket.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        # until uvicorn has them: a signal that comes while it starts must stop it too
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _DrainingServer(uvicorn.Server):
    """Says when it accepts connections, and goes on for a while when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], draining: Draining) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._draining = draining
        self._is_hurrying = False

    def stop(self) -> None:
        """From any thread, or a signal; a second time ends the grace."""
        self._is_hurrying |= self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """While it runs the signals are uvicorn's, whose own would end nothing earlier the second time."""
        self.stop()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) and self._draining.is_over(hurry=self._is_hurrying)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"server.host={host!r} is not an address or host name: {error.strerror}") from error
    family, kind, _, _, address = found[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _explain(error, host, port) from error
    return bound


def _explain(error: OSError, host: str, port: int) -> ServerError | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ServerError(f"port {port} on {host} is taken; choose another with --port, or --port 0 for a free one")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"server.host={host!r} is not an address of this machine; 0.0.0.0 means all of them")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ServerError(f"port {port} needs privileges; choose one above 1023 with --port")
    return ServerError(f"cannot listen on {host} port {port}: {error.strerror or error}")

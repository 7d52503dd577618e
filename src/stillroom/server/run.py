"""The listening socket, the server loop and its signals.

The server listens before the model loads, so that a taken port is an error at once and probes are answered meanwhile
(`loading`). SIGINT and SIGTERM stop it gracefully (`draining`); a second one ends the grace period.
"""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from stillroom.config.settings import ServerConfig
from stillroom.errors import ConfigError, ServerError
from stillroom.ops.thread_pools import short_switch_interval
from stillroom.server.auth.cors import origins_of
from stillroom.server.limits.connections import ConnectionLimits, protocol_of
from stillroom.server.limits.draining import Draining
from stillroom.server.loading import Loading, LoadingApp

_CLOSING_SECONDS = 5
"""Time for connections to close once no request runs."""


class HttpServer:
    """One listening address. `run` blocks until `stop`, SIGINT or SIGTERM."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the address; port 0 picks a free one.

        Raises:
            ConfigError: the host is not an address of this machine.
            ServerError: the port is taken or may not be used.
        """
        self._host = host
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server: _DrainingServer | None = None
        self._is_stopping = False

    @property
    def url(self) -> str:
        """Address for clients on this machine."""
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{self.port}"

    @property
    def is_loading(self) -> bool:
        """Whether `load` is still running. Its thread may outlive `run`."""
        return self._server is not None and self._server.is_loading

    def run(
        self, load: Callable[[Loading], FastAPI], on_ready: Callable[[], None], settings: ServerConfig | None = None
    ) -> None:
        """Accept connections, load the application, and serve until stopped.

        Args:
            load: returns the result of `create_app`. Runs in its own thread, which is not joined if the server is
                stopped meanwhile (`is_loading`).
            on_ready: called once the application answers.
            settings: connection limits and allowed origins; None takes the defaults.

        Raises:
            ServerError: another process took the port in the meantime.
            BaseException: raised by `load` or `on_ready`.
        """
        settings = settings or ServerConfig()
        loading = Loading()
        loading_app = LoadingApp(loading, origins_of(settings.allowed_origins))
        limits = ConnectionLimits.of(settings)
        config = uvicorn.Config(
            loading_app,
            http=protocol_of(limits),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSING_SECONDS,
            server_header=False,
        )
        self._server = _DrainingServer(config, loading_app, partial(load, loading), on_ready)
        self._server.should_exit = self._is_stopping
        try:
            with self._signals(), short_switch_interval():
                try:
                    self._server.run(sockets=[self._socket])
                finally:
                    if self._server.app is not None:  # a signal handled here would unwind the process while threads run
                        self._server.app.state.workers.close()
        except OSError as error:
            if self._server.started:
                raise
            raise _explain(error, self._host, self.port) from error
        finally:
            self.close()
        if self._server.failure is not None:
            raise self._server.failure

    def stop(self) -> None:
        """Ask `run` to return. Any thread; also before `run`. A second call ends the grace period."""
        if self._server is not None:
            self._server.stop()
        self._is_stopping = True

    def close(self) -> None:
        """Close the socket, if `run` has not."""
        self._socket.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        # until uvicorn installs its handlers: a signal during startup must stop the server too
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
    """Loads the application once it accepts connections, and drains requests when asked to stop."""

    def __init__(
        self, config: uvicorn.Config, loading_app: LoadingApp, load: Callable[[], FastAPI], on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._frontage = loading_app
        self._load = load
        self._on_ready = on_ready
        self._is_hurrying = False
        self.is_loading = False
        self.app: FastAPI | None = None
        """None until it is loaded."""
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """Begin to stop. Any thread or signal handler; a second call ends the grace period."""
        self._is_hurrying |= self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replace uvicorn's handler, which does not shorten the grace period at a second signal."""
        self.stop()

    async def on_tick(self, counter: int) -> bool:
        if not await super().on_tick(counter):
            return False
        draining: Draining | None = None if self.app is None else self.app.state.draining
        return draining is None or draining.is_over(hurry=self._is_hurrying)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if not self.should_exit:
            self.is_loading = True
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._load_in_thread, args=(loop,), name="stillroom-loading", daemon=True).start()

    def _load_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            ended = partial(self._begin, self._load())
        except BaseException as error:  # raised again by `run`
            ended = partial(self._fail, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server was stopped meanwhile
            loop.call_soon_threadsafe(ended)

    def _begin(self, app: FastAPI) -> None:
        self.is_loading = False
        self.app = self._frontage.app = app
        if self.should_exit:  # stopped while it was loading
            return
        try:
            app.state.begin()
            self._on_ready()
        except BaseException as error:  # such as an error on stdout
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.is_loading = False
        self.failure = error
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"server.host={host!r} is not an address or host name: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    # with the protocol named, asyncio sends each event of a stream at once: without, up to 40 ms after the one before
    bound = socket.socket(family, kind, protocol)
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

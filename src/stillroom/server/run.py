"""Run the application: bind and listen first, so that a taken port is known before a model loads and probes are
answered while it does (`loading`).

The process's signals stop it gracefully (`draining`); a second one ends the grace.
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
from stillroom.ops.thread_pools import quick_handovers
from stillroom.server.limits.connections import ConnectionLimits, protocol_of
from stillroom.server.limits.draining import Draining
from stillroom.server.loading import Frontage, Loading

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

    @property
    def is_loading(self) -> bool:
        """Whether `load` of `run_loading` has not returned. It goes on in its thread if `run_loading` has."""
        return self._server is not None and self._server.is_loading

    def run(self, app: FastAPI, on_ready: Callable[[], None], settings: ServerConfig | None = None) -> None:
        """`run_loading` for an application of `create_app` that is loaded."""
        self.run_loading(lambda _: app, on_ready, settings)

    def run_loading(
        self, load: Callable[[Loading], FastAPI], on_ready: Callable[[], None], settings: ServerConfig | None = None
    ) -> None:
        """Accept connections, load the application, and serve until stopped.

        Args:
            load: returns what `create_app` made. Runs in a thread of its own, and is not waited for if the server is
                stopped meanwhile (`is_loading`).
            on_ready: called once the application answers.
            settings: limits of connections; None takes the defaults.

        Raises:
            ServerError: another process took the port in the meantime.
            BaseException: whatever `load` or `on_ready` raised.
        """
        loading = Loading()
        frontage = Frontage(loading)
        limits = ConnectionLimits.of(settings or ServerConfig())
        config = uvicorn.Config(
            frontage,
            http=protocol_of(limits),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSING_SECONDS,
            server_header=False,
        )
        self._server = _DrainingServer(config, frontage, partial(load, loading), on_ready)
        self._server.should_exit = self._is_stopping
        try:
            with self._signals(), quick_handovers():
                try:
                    self._server.run(sockets=[self._socket])
                finally:
                    if self._server.app is not None:  # a signal that came here would unwind the process under threads
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
    """Loads the application when it accepts connections, and goes on for a while when it is asked to stop."""

    def __init__(
        self, config: uvicorn.Config, frontage: Frontage, load: Callable[[], FastAPI], on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._frontage = frontage
        self._load = load
        self._on_ready = on_ready
        self._is_hurrying = False
        self.is_loading = False
        self.app: FastAPI | None = None
        """None until it is loaded."""
        self.failure: BaseException | None = None
        """Of loading it."""

    def stop(self) -> None:
        """From any thread, or a signal; a second time ends the grace."""
        self._is_hurrying |= self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """While it runs the signals are uvicorn's, whose own would end nothing earlier the second time."""
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
        except BaseException as error:  # raised again where the server was started
            ended = partial(self._fail, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server was stopped meanwhile
            loop.call_soon_threadsafe(ended)

    def _begin(self, app: FastAPI) -> None:
        self.is_loading = False
        self.app = self._frontage.app = app
        try:
            app.state.begin()
            self._on_ready()
        except BaseException as error:  # on stdout, say
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

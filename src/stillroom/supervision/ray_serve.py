"""Lets Ray Serve run, heal and scale engines: `serve run stillroom.supervision.ray_serve:app model=/srv/model`.

A replica runs one engine process and registers its address; fronts read the list of addresses over HTTP, and send their
requests to the engines, not through Ray. How to use it: docs/front-and-engines.md. Needs `stillroom[cluster]`.
"""

import asyncio
import contextlib
import time
from typing import Any

import ray
from ray import serve
from starlette.responses import PlainTextResponse

from stillroom.supervision.registrations import CHECK_SECONDS, Registrations
from stillroom.supervision.served_process import Options, ServedProcess

STOP_SECONDS = 90.0
"""For an engine to end its requests; more than `server.grace_s`."""

_HEALTH = {"health_check_period_s": CHECK_SECONDS, "graceful_shutdown_timeout_s": STOP_SECONDS + 5}


class EngineList:
    """The engines that registered lately."""

    def __init__(self) -> None:
        self._engines = Registrations(time.monotonic())

    def register(self, url: str) -> None:
        self._engines.register(url, time.monotonic())

    def leave(self, url: str) -> None:
        self._engines.leave(url)

    def reply(self) -> tuple[str, int]:
        return self._engines.reply(time.monotonic())


class Engine:
    """One engine. Ray replaces it when its process has ended."""

    def __init__(self, options: Options, engines: Any) -> None:
        self._list = engines
        host = ray.util.get_node_ip_address() if options.host == "node" else options.host
        self._served = ServedProcess(options.command("engine", "--host", host, "--port", "0"))
        self._url = self._served.ready_url()

    async def check_health(self) -> None:
        self._served.check()
        await self._tell(self._list.register)

    async def __del__(self) -> None:
        """Called by Ray Serve before it ends the replica; requests that run go on."""
        await self._tell(self._list.leave)
        await asyncio.to_thread(self._served.stop, STOP_SECONDS)

    async def _tell(self, method: Any) -> None:
        with contextlib.suppress(Exception):  # the list is being replaced; the next check registers again
            await asyncio.wait_for(method.remote(self._url), CHECK_SECONDS)


class Entry:
    """Replies with the list over HTTP, and runs the front if it has a port."""

    def __init__(self, options: Options, engines: Any, running: Any) -> None:
        """
        Args:
            running: the engines, which Ray starts because they are named here.
        """
        self._list = engines
        self._front: ServedProcess | None = None
        where = ["--port", str(options.front_port), "--engines", f"list+{options.list_url}"]
        self._command = options.command("serve", *where) if options.front_port else None

    async def check_health(self) -> None:
        if self._front is not None:
            self._front.check()
        elif self._command is not None and (await self._list.reply.remote())[0]:  # there is an engine
            self._front = ServedProcess(self._command)

    async def __call__(self) -> PlainTextResponse:
        text, status = await self._list.reply.remote()
        return PlainTextResponse(text, status)

    async def __del__(self) -> None:
        if self._front is not None:
            await asyncio.to_thread(self._front.stop, STOP_SECONDS)


def app(options: Options) -> Any:
    """Build the application."""
    no_processor = {"num_cpus": 0}
    engines = serve.deployment(ray_actor_options=no_processor)(EngineList).bind()
    resources = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    watched = serve.deployment(num_replicas=options.engines, ray_actor_options=resources, **_HEALTH)
    entry = serve.deployment(ray_actor_options=no_processor, **_HEALTH)(Entry)
    return entry.bind(options, engines, watched(Engine).bind(options, engines))

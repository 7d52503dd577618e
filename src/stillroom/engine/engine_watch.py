"""Watches a front's engines: where they are, what they are, what they hold, and whether they answer."""

import asyncio
import contextlib
import logging

import httpx

from stillroom.cluster.directory import EngineDirectory
from stillroom.cluster.front_engines import FrontEngines
from stillroom.cluster.wire_state import EngineInfo
from stillroom.core.clock import Clock
from stillroom.engine.cluster_client import ClusterClient
from stillroom.errors import EngineError, EngineRefusedError, EngineUnavailableError, WireError

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
"""Between two requests for an engine's state."""
LOST_AFTER_SECONDS = 10.0
"""An engine that has not answered for so long is lost. One that misses a report gets no request until the next."""
LOOK_SECONDS = 2.0
"""Between two looks at where the engines are."""


class EngineWatch:
    """Keeps `FrontEngines` up to date. All calls must come from one event loop, but for `infos`."""

    def __init__(self, engines: FrontEngines, client: ClusterClient, directory: EngineDirectory, clock: Clock) -> None:
        self.infos: tuple[EngineInfo, ...] = ()
        """Of the engines in use, or used last."""
        self._engines = engines
        self._client = client
        self._directory = directory
        self._clock = clock
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        """Set and replaced with each news of an engine."""

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in self._watching.values():
                task.cancel()
            await asyncio.gather(*self._watching.values(), return_exceptions=True)
            await self._directory.close()

    async def ready(self, wait_s: float) -> None:
        """Wait for an engine that takes requests; if it has another model, until all were asked, within `wait_s`.

        Raises:
            EngineUnavailableError: there was none in time.
            EngineRefusedError: every engine was reached, and none fits this front.
        """
        until = self._clock.monotonic() + wait_s
        while not (self._engines.num_alive and self._engines.is_model_chosen):
            if self._engines.are_misfits:
                raise EngineRefusedError("; ".join(self._engines.problems.values()))
            if not await self.changed(until):
                if self._engines.num_alive:
                    return
                problems = "; ".join(f"{address}: {one}" for address, one in self._engines.problems.items())
                raise EngineUnavailableError(
                    f"no engine took requests within {wait_s:g} s (engine.wait_s): "
                    + (problems or "engine.urls names none now")
                )

    async def changed(self, until: float) -> bool:
        """Wait for news of an engine; returns False if there was none until this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock.monotonic())):
                await self._changed.wait()
                return True
        return False

    async def _look(self) -> None:
        """Update the set of engines, and the task for each that watches it."""
        try:
            found = sorted(await self._directory.look())
        except Exception:
            logger.exception("the engines' addresses cannot be found")
            return
        self._engines.set_addresses(found)
        for address in [one for one in self._watching if one not in found]:
            self._watching.pop(address).cancel()
        for address in found:
            if address not in self._watching:
                self._watching[address] = asyncio.create_task(self._watch(address))

    async def _watch(self, address: str) -> None:
        heard_at = self._clock.monotonic()
        while True:
            try:
                await self._ask(address)
                heard_at = self._clock.monotonic()
            except (EngineRefusedError, WireError) as error:
                self._engines.on_misfit(address, str(error))
            except EngineError as error:
                is_late = isinstance(error.__cause__, httpx.TimeoutException)
                if is_late and self._clock.monotonic() - heard_at < LOST_AFTER_SECONDS:
                    self._engines.on_silent(address, str(error))
                else:
                    self._engines.on_lost(address, str(error))
            except Exception:
                logger.exception("the engine at %s cannot be watched", address)
                self._engines.on_lost(address, "it cannot be watched")
            self.infos = tuple(self._engines.infos) or self.infos
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(REPORT_SECONDS)

    async def _ask(self, address: str) -> None:
        asks = self._engines.asks(address)
        if asks is None:
            self._engines.on_info(address, await self._client.info(address))
            asks = self._engines.asks(address)
        if asks is not None:
            asked_at = self._clock.monotonic()
            state = await self._client.state(address, *asks, self._engines.preparing)
            self._engines.on_state(address, state, asked_at)

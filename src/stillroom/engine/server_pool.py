"""The servers of a remote engine: a request goes to the one that will answer first, or to another if that fails.

A request is sent again only before the first text of its answer, and only after a failure of the server: no connection,
HTTP 429 or 5xx, or a reply that is no answer. At once where another server is available, else after a pause. Which
server: `cluster/server_beliefs.py`.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from threading import Lock
from typing import Any

from stillroom.cluster.front_engines import engine_name
from stillroom.cluster.routed_request import RoutedRequest
from stillroom.cluster.server_beliefs import FIRST_WAIT_S, ServerBeliefs, ServerState
from stillroom.config.settings import EngineConfig
from stillroom.core.clock import Clock
from stillroom.engine.events import Route
from stillroom.engine.openai_client import OpenAIClient, ServerFailure
from stillroom.engine.openai_protocol import EventDelta, ServerChoice
from stillroom.errors import EngineRefusedError, EngineUnavailableError

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]
Random = Callable[[], float]
"""A number in [0, 1)."""


class ServerPool:
    """The servers of `engine.base_url`. Coroutines must run on one event loop; the other methods are thread-safe."""

    def __init__(
        self, config: EngineConfig, clock: Clock, *, sleep: Sleep = asyncio.sleep, uniform: Random = random.random
    ) -> None:
        self.has_extra_sampling = config.extra_sampling
        self.urls = config.base_urls
        self._clients = {url: OpenAIClient(url, config, clock) for url in self.urls}
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._beliefs = ServerBeliefs(self.urls, config.max_retry_wait_s)
        self._lock = Lock()
        """Guards the beliefs."""
        self._numbers = count()
        self._model = ""
        self._unchecked: set[str] = set()
        """Servers that could not be asked for their models at the start."""

    def choose(self, requests: Mapping[str, RoutedRequest]) -> str:
        """Return the address of the server for a request, given as each server would get it."""
        with self._lock:
            return self._beliefs.choose(requests, self._now())

    def states(self) -> list[ServerState]:
        with self._lock:
            return self._beliefs.states(self._now())

    async def find_model(self, name: str) -> str:
        """Return the named model, or else the first that the first reachable server lists. A server that cannot be
        reached is checked before its first request.

        Raises:
            EngineUnavailableError: no server can be reached.
            EngineRefusedError: a server refuses the key, lists no model, or lacks the model.
        """
        num_failed = 0
        while True:
            replies = dict(zip(self.urls, await asyncio.gather(*map(self._listed, self.urls)), strict=True))
            failures = {url: one for url, one in replies.items() if isinstance(one, ServerFailure)}
            if len(failures) < len(replies):
                break
            asked_s = min(one.retry_after_s for one in failures.values())
            await self._pause(_together(list(failures.values())), num_failed, num_failed, asked_s)
            num_failed += 1
        found = {url: one for url, one in replies.items() if not isinstance(one, ServerFailure)}
        self._model = model = name or _first_model(found)
        for url, names in found.items():
            _check_model(url, model, names)
        for url, failure in failures.items():
            self._unchecked.add(url)
            self._note_failed_probe(url, failure)
            logger.warning("%s; it gets requests when it answers", failure.error)
        return model

    async def watch(self) -> None:
        """Probe servers that failed, so that they count as alive again without a request. Runs until it is
        cancelled."""
        while True:
            await self._sleep(FIRST_WAIT_S)
            try:
                await self.probe()
            except Exception:
                logger.exception("probing the servers failed")

    async def probe(self) -> None:
        """Ask the servers that failed and are no longer avoided for their models, which costs no tokens."""
        with self._lock:
            urls = self._beliefs.to_probe(self._now())
        await asyncio.gather(*map(self._probe, urls))

    async def stream(self, path: str, body: dict[str, Any], choice: ServerChoice) -> AsyncGenerator[EventDelta, None]:
        """Yield the events of one answer.

        Raises:
            EngineError: no server can be reached, or one refuses the request or breaks off.
            PromptTooLongError: the prompt exceeds the server's context.
        """
        num_failed = num_pauses = 0
        hopeless = set[str]()
        """Servers that would answer this request no better after a pause."""
        request = replace(choice.request, number=next(self._numbers))
        url = self._first(choice, request)
        while True:
            url = await self._permitted(url, request)
            with self._lock:
                expected = self._beliefs.on_sent(url, request, self._now())
            route = Route(engine_name(url), None, expected, num_failed)
            try:
                async with contextlib.aclosing(self._attempt(url, path, body, request.number)) as events:
                    async for progress in events:
                        yield replace(progress, route=route)
                return
            except ServerFailure as failure:
                hopeless |= set() if failure.is_passing else {url}
                if await self._pauses(failure, num_failed, num_pauses, may_wait=len(hopeless) < len(self.urls)):
                    num_pauses += 1
                num_failed += 1
                url = self._another(request)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _attempt(
        self, url: str, path: str, body: dict[str, Any], number: int
    ) -> AsyncGenerator[EventDelta, None]:
        """Yield the events of one answer of one server. Raises ServerFailure if another attempt may succeed, else as
        `stream`."""
        num_characters, beliefs = 0, self._beliefs
        try:
            await self._check(url, str(body["model"]))
            async with contextlib.aclosing(self._clients[url].events(path, body)) as events:
                async for progress in events:
                    if num_characters == 0 and (progress.text or progress.finish_reason):
                        with self._lock:
                            beliefs.on_first_token(url, number)
                    num_characters += len(progress.text)
                    yield progress
        except ServerFailure as failure:
            with self._lock:
                failure.is_repeated = beliefs.on_failure(
                    url,
                    number,
                    self._now(),
                    retry_after_s=failure.retry_after_s,
                    is_lost=failure.is_lost,
                    is_sure=not failure.may_be_request,
                )
            if not failure.may_retry or (num_characters and not failure.is_lost):
                raise failure.error from failure.__cause__
            if num_characters:
                raise EngineUnavailableError(
                    f"{url} broke off after {num_characters} characters of the answer; ask again"
                ) from failure.__cause__
            raise
        finally:
            with self._lock:
                beliefs.on_end(url, number)

    async def _probe(self, url: str) -> None:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._models(url)
        except (ServerFailure, TimeoutError) as failure:
            self._note_failed_probe(url, failure)
            return
        with self._lock:
            self._beliefs.on_probed(url, self._now())
        logger.info("%s answers again", url)

    async def _models(self, url: str) -> None:
        """Raises ServerFailure: the server does not answer, or lacks the model."""
        if url in self._unchecked:
            await self._check(url, self._model)
        else:
            with contextlib.suppress(EngineRefusedError):  # it answers; a request will tell what is wrong
                await self._clients[url].models()

    def _note_failed_probe(self, url: str, failure: ServerFailure | TimeoutError) -> None:
        is_lost, retry_after_s = False, 0.0
        if isinstance(failure, ServerFailure):
            is_lost, retry_after_s = failure.is_lost, failure.retry_after_s
        with self._lock:
            self._beliefs.on_failed_probe(url, self._now(), retry_after_s=retry_after_s, is_lost=is_lost)

    async def _check(self, url: str, model: str) -> None:
        """Check the models of a server that could not be asked before."""
        if url in self._unchecked:
            try:
                _check_model(url, model, await self._clients[url].models())
            except EngineRefusedError as error:
                raise ServerFailure(error) from None
            self._unchecked.discard(url)

    async def _listed(self, url: str) -> list[str] | ServerFailure:
        try:
            return await self._clients[url].models()
        except ServerFailure as failure:
            return failure

    def _first(self, choice: ServerChoice, request: RoutedRequest) -> str:
        """Return the server that was chosen with the order of the documents, unless it is avoided or full by now."""
        with self._lock:
            if choice.server and self._beliefs.may_take(choice.server, self._now()):
                return choice.server
        return self._another(request)

    async def _permitted(self, url: str, request: RoutedRequest) -> str:
        """Return the server, once it wants requests: if all asked for a pause (`Retry-After`), wait for the first.

        Raises:
            EngineUnavailableError: that takes longer than `engine.max_retry_wait_s`.
        """
        while asked_s := self._asked_seconds():
            if asked_s > self._config.max_retry_wait_s:
                servers = ", ".join(self.urls)
                raise EngineUnavailableError(
                    f"{servers}: no requests wanted for {asked_s:.0f} s; ask again then", asked_s
                )
            await self._sleep(asked_s)
            url = self._another(request)
        return url

    def _asked_seconds(self) -> float:
        with self._lock:
            return self._beliefs.asked_seconds(self._now())

    def _another(self, request: RoutedRequest) -> str:
        return self.choose(dict.fromkeys(self.urls, request))

    async def _pauses(self, failure: ServerFailure, num_failed: int, num_pauses: int, *, may_wait: bool) -> bool:
        """Wait before the next attempt unless another server is available; return whether it waited. Raises the
        failure's error if there is no other attempt."""
        with self._lock:
            has_another = self._beliefs.has_available(self._now())
        if not has_another and may_wait:
            await self._pause(failure, num_failed, num_pauses, self._asked_seconds())
            return True
        if not has_another or num_failed == self._config.max_retries:
            raise failure.error from failure.__cause__
        level = logging.INFO if failure.is_repeated else logging.WARNING
        logger.log(level, "%s; trying another server", failure.error)
        return False

    async def _pause(self, failure: ServerFailure, num_failed: int, num_pauses: int, asked_s: float) -> None:
        """Wait until a server may work again; raises the failure's error if there is no other attempt.

        Args:
            asked_s: the shortest wait that a server has asked for.
        """
        longest = self._config.max_retry_wait_s
        if num_failed == self._config.max_retries or asked_s > longest:
            if asked_s and isinstance(failure.error, EngineUnavailableError):
                failure.error.retry_after_seconds = asked_s
            raise failure.error from failure.__cause__
        # jitter spreads the retries of requests that failed together
        wait_s = FIRST_WAIT_S * 2**num_pauses * (0.5 + self._uniform())
        wait_s = min(max(wait_s, asked_s), longest)
        logger.warning("%s; trying again in %.1f s", failure.error, wait_s)
        await self._sleep(wait_s)

    def _now(self) -> float:
        return self._clock.monotonic()


def _together(failures: Sequence[ServerFailure]) -> ServerFailure:
    """Return the failures of all servers as one."""
    if len(failures) == 1:
        return failures[0]
    told = "; ".join(map(str, failures))
    return ServerFailure(EngineUnavailableError(f"none of the {len(failures)} servers answers: {told}"))


def _first_model(found: Mapping[str, list[str]]) -> str:
    url, names = next(iter(found.items()))
    if not names:
        raise EngineRefusedError(f"{url} lists no model; name one with --engine-model")
    return names[0]


def _check_model(url: str, model: str, names: list[str]) -> None:
    if model not in names:
        raise EngineRefusedError(
            f"{url} does not serve the model {model!r}, only {', '.join(names) or 'none'}; all servers of "
            "engine.base_url must serve one model under the same name: name another with --engine-model, or leave the "
            "server out"
        )

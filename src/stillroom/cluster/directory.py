"""Where the engines of a front are, asked again and again: engines appear and vanish while the front runs.

A place that cannot be asked keeps its last reply, so that an outage of DNS stops no engine. An engine that vanishes
gets no further requests; those that it has go on. No tensors.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain

import httpx

from stillroom.config.engine_address import EngineAddress, engine_url, parse_engine_address
from stillroom.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Pause between two looks."""
MAX_LOOK_SECONDS = 5.0
"""Longest time that a look waits for a place; a later look uses what it replies then."""

_KEPT = "the engines of its last reply stay in use"
_EMPTY = "it names no engine now"
_UNKNOWN_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host name and port; raises `socket.gaierror`."""


class EngineDirectory:
    """The engines at some addresses. All calls must come from one event loop."""

    def __init__(self, addresses: Iterable[EngineAddress], resolve: Resolve | None = None) -> None:
        """
        Args:
            resolve: None asks the system's resolver.
        """
        self._places = [_Place(address, resolve or _resolve) for address in addresses]

    async def look(self) -> frozenset[str]:
        """Ask every place; return the base URLs of the engines, such as `http://10.0.0.7:9100`.

        A place that fails or does not reply in time counts with its last reply, and the log says so once. Takes at most
        `MAX_LOOK_SECONDS`.
        """
        asked = [task for place in self._places if (task := place.ask()) is not None]
        if asked:
            await asyncio.wait(asked, timeout=MAX_LOOK_SECONDS)
        return frozenset(chain.from_iterable(place.found() for place in self._places))

    async def close(self) -> None:
        """Stop asking."""
        for place in self._places:
            await place.close()


class _Place:
    """One address, its last reply and the question under way."""

    def __init__(self, address: EngineAddress, resolve: Resolve) -> None:
        self._address = address
        self._resolve = resolve
        self._engines = frozenset({address.url} if address.source == "engine" else ())
        self._asking: asyncio.Task[tuple[frozenset[str], str]] | None = None
        self._problem = ""
        """Of the last reply; the log has it."""

    def ask(self) -> "asyncio.Task[tuple[frozenset[str], str]] | None":
        """Begin to ask, unless the last question has no reply yet; None if there is nothing to ask."""
        if self._address.source == "engine":
            return None
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    def found(self) -> frozenset[str]:
        """Return the engines by the last reply."""
        asking = self._asking
        if asking is None:
            return self._engines
        kept = _KEPT if self._engines else "no engine is known from there"
        if not asking.done():
            self._report(f"no reply within {MAX_LOOK_SECONDS:g} s; {kept}")
            return self._engines
        self._asking = None
        try:
            self._engines, problem = asking.result()
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ConfigError, UnicodeDecodeError) as error:
            is_unknown = isinstance(error, socket.gaierror) and error.errno in _UNKNOWN_NAME
            if is_unknown:  # as a service of Kubernetes without ready pods
                self._engines = frozenset()
            reason = str(error) or type(error).__name__
            self._report("the name does not exist, or has no engine now" if is_unknown else f"{reason}; {kept}")
        else:
            self._report(problem or ("" if self._engines else _EMPTY))
        return self._engines

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._asking

    async def _ask(self) -> tuple[frozenset[str], str]:
        """Return the engines, and what is wrong with the reply; empty: nothing."""
        address = self._address
        if address.source == "dns":
            return await self._addresses_of_name(), ""
        if address.file is not None:
            text = await asyncio.to_thread(address.file.read_text, encoding="utf-8")
            return engines_of_list(text)
        async with httpx.AsyncClient(timeout=MAX_LOOK_SECONDS) as client:
            reply = await client.get(address.url)
            reply.raise_for_status()
            return engines_of_list(reply.text)

    async def _addresses_of_name(self) -> frozenset[str]:
        found = await self._resolve(self._address.host, self._address.port)
        # the IPv4 and the IPv6 address of an engine would count as two engines
        chosen = [one for one in found if ":" not in one] or found
        return frozenset(engine_url(one, self._address.port) for one in chosen)

    def _report(self, problem: str) -> None:
        if problem == self._problem:
            return
        before, self._problem = self._problem, problem
        if problem:
            logger.warning("looking for engines at %s: %s", self._address, problem)
        else:
            now = "it names engines now" if before == _EMPTY else "it replies again"
            logger.warning("looking for engines at %s: %s", self._address, now)


def engines_of_list(text: str) -> tuple[frozenset[str], str]:
    """Read a list of engines: an address `http://host:port` a line; empty lines and those after `#` are skipped.

    Returns:
        The engines, and what is wrong with the first line that is something else; empty if all lines are right.

    Raises:
        ConfigError: there is such a line, and no line is right.
    """
    found, problems = set(), []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            found.add(_engine_of_line(f"line {number}", line))
        except ConfigError as error:
            problems.append(error)
    if problems and not found:
        raise problems[0]
    skipped = f"{len(problems)} of {len(found) + len(problems)} lines are skipped: " if problems else ""
    return frozenset(found), skipped + "".join(map(str, problems[:1]))


def _engine_of_line(name: str, line: str) -> str:
    address = parse_engine_address(name, line)
    if address.source != "engine":
        raise ConfigError(f"{name}: a list has addresses of engines only, such as http://10.0.0.7:9100")
    return address.url


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]

"""What a front believes of servers that report nothing: what it sent to them, and how that ended.

Such servers are vLLM, SGLang and others with OpenAI's routes. A server is believed to hold the beginnings of the
prompts that were sent to it most recently, and to have computed none of those without a first token. Beliefs choose a
server, and with it the order of the documents.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from stillroom.cluster.engine_belief import EngineBelief
from stillroom.cluster.placing import within_bound
from stillroom.cluster.prediction import EngineCosts, predict
from stillroom.cluster.routed_request import RoutedRequest
from stillroom.cluster.routers import CostRouter
from stillroom.core.kv import Tier
from stillroom.kvcache.tree.cost_model import linear_profile

FIRST_WAIT_S = 0.5
"""For so long a server is avoided after its first failure; doubled for each further one in a row."""
MAX_NAMES = 32_768
"""Most names of prompt pieces that are remembered for each server. How much a server keeps is not known."""

_COSTS = EngineCosts(profile=linear_profile(0.0, 1e-4, 0.0), bytes_per_token=0)
"""Every token takes the same time on every server. Queues are in the same unit and counted anew for each decision, so
decisions depend on ratios of tokens only, not on this number."""
NUM_FREE = 8
"""Requests that a server answers at the same time without being called loaded: such servers batch them."""
_MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server as seen by its front."""

    url: str
    is_available: bool
    """False while it is avoided after a failure."""
    is_alive: bool
    """False after a failure until it answers a request, or is no longer avoided and answers a probe."""
    num_outstanding: int
    """Requests that were sent and have not ended."""
    num_sent: int
    num_refused: int
    """Requests that failed before their first token: no connection, HTTP 429 or 5xx, a reply that is no answer."""
    num_broken: int
    """Requests whose answer broke off."""


@dataclass(slots=True)
class _Sent:
    at: float
    work_seconds: float
    added: tuple[bytes, ...]
    """Names that the server was not believed to hold before."""
    has_begun: bool = False
    """Whether its first token came."""


@dataclass(slots=True)
class _Server:
    names: OrderedDict[bytes, Tier] = field(default_factory=OrderedDict)
    """Believed to be held; least recently sent first."""
    outstanding: dict[int, _Sent] = field(default_factory=dict)
    num_failures: int = 0
    """In a row."""
    failed_at: float = -inf
    avoided_until: float = -inf
    asked_until: float = -inf
    """The server's own wish, from `Retry-After`."""
    probed_at: float = -inf
    """When it answered a probe after its last failure."""
    trial: int | None = None
    """The one request that finds out whether a server that failed works again."""
    num_sent: int = 0
    num_refused: int = 0
    num_broken: int = 0


class ServerBeliefs:
    """The servers of one front. Pure bookkeeping: methods get the time. Not thread-safe."""

    def __init__(self, urls: Sequence[str], max_wait_s: float, max_names: int = MAX_NAMES) -> None:
        """
        Args:
            max_wait_s: longest time that a server is avoided, unless it asks for more.
        """
        self._servers = {url: _Server() for url in urls}
        self._max_wait_s = max_wait_s
        self._max_names = max_names
        self._router = CostRouter(_COSTS)

    def choose(self, requests: Mapping[str, RoutedRequest], now: float) -> str:
        """Return the server with the least predicted work to the first token. If all are avoided, it is the one that is
        avoided for the shortest time; servers that want no requests yet (`Retry-After`) come last.

        Args:
            requests: the request as each server would get it: its documents may be in another order.
        """
        if not self.has_available(now):
            return min(
                self._servers, key=lambda url: (self._asked_seconds(url, now) > 0, self._servers[url].avoided_until)
            )
        return self._router.choose_among(requests, self._beliefs(now)).engine_id

    def may_take(self, url: str, now: float) -> bool:
        """Return whether a server is available and has room for one more request (`CostRouter.load_factor`)."""
        available = [one for one in self._beliefs(now) if one.is_alive]
        roomy = within_bound(available, self._router.load_factor) if available else []
        return any(one.engine_id == url for one in roomy)

    def on_sent(self, url: str, request: RoutedRequest, now: float) -> int:
        """Note a request that is sent to a server; returns the prompt's tokens that the server is believed to have
        cached."""
        server = self._servers[url]
        server.num_sent += 1
        work = predict(request, server.names, _COSTS)
        added = tuple(piece.key for piece in request.pieces if piece.key not in server.names)
        for piece in reversed(request.pieces):  # so that beginnings are forgotten last
            server.names[piece.key] = Tier.DEVICE
            server.names.move_to_end(piece.key)
        while len(server.names) > self._max_names:
            server.names.popitem(last=False)
        server.outstanding[request.number] = _Sent(now, work.seconds, added)
        if server.num_failures:
            server.trial = request.number
        return work.num_reused_tokens

    def on_first_token(self, url: str, number: int) -> None:
        """Note that a server answers a request. Only the first call for a request has an effect."""
        server = self._servers[url]
        sent = server.outstanding[number]
        if sent.has_begun:
            return
        sent.has_begun = True
        if sent.at >= server.failed_at:
            server.num_failures, server.trial = 0, None

    def on_failure(
        self, url: str, number: int, now: float, *, retry_after_s: float = 0.0, is_lost: bool, is_sure: bool = True
    ) -> bool:
        """Note that a server failed a request, and avoid the server for a while. Returns whether it had failed before
        and not answered since.

        Requests that were sent before a failure and fail after it count as the same failure.

        Args:
            retry_after_s: the server's own wish.
            is_lost: without a connection; a server that comes back holds nothing.
            is_sure: whether it is the server's failure. If the request may be the reason, the server is not avoided for
                longer each time, so that requests of one client cannot keep it from others.
        """
        server = self._servers[url]
        sent, has_failed = server.outstanding[number], server.num_failures > 0
        server.num_broken += sent.has_begun
        server.num_refused += not sent.has_begun
        if sent.at >= server.failed_at:
            server.num_failures = server.num_failures + 1 if is_sure else max(1, server.num_failures)
        self._avoid(server, now, retry_after_s, is_lost=is_lost)
        if not sent.has_begun:
            for name in sent.added:
                server.names.pop(name, None)
        return has_failed

    def to_probe(self, now: float) -> list[str]:
        """Return the servers to probe: they failed, are no longer avoided, and did not answer a probe or request since.
        A server that only probes reach is probed again after the longest wait."""
        return [
            url
            for url, one in self._servers.items()
            if one.num_failures and now >= max(one.avoided_until, one.probed_at + self._max_wait_s)
        ]

    def on_probed(self, url: str, now: float) -> None:
        """Note that a server answered a probe. It gets a request as a trial, as before."""
        self._servers[url].probed_at = now

    def on_failed_probe(self, url: str, now: float, *, retry_after_s: float = 0.0, is_lost: bool) -> None:
        """Note that a server did not answer a probe, and avoid it for a while, as `on_failure`."""
        server = self._servers[url]
        server.num_failures += 1
        self._avoid(server, now, retry_after_s, is_lost=is_lost)

    def on_end(self, url: str, number: int) -> None:
        """Note that a request has ended, in whatever way."""
        server = self._servers[url]
        del server.outstanding[number]
        if server.trial == number:
            server.trial = None

    def has_available(self, now: float) -> bool:
        """Return whether some server is not avoided."""
        return any(self._is_available(one, now) for one in self._servers.values())

    def asked_seconds(self, now: float) -> float:
        """Return the seconds after which the first server wants requests again, by `Retry-After`; 0: now."""
        return min(self._asked_seconds(url, now) for url in self._servers)

    def states(self, now: float) -> list[ServerState]:
        """Return the state of each server, in the order of their addresses in the settings."""
        return [
            ServerState(
                url,
                self._is_available(one, now),
                one.num_failures == 0 or (one.probed_at > -inf and now >= one.avoided_until),
                len(one.outstanding),
                num_sent=one.num_sent,
                num_refused=one.num_refused,
                num_broken=one.num_broken,
            )
            for url, one in self._servers.items()
        ]

    def _asked_seconds(self, url: str, now: float) -> float:
        return max(0.0, self._servers[url].asked_until - now)

    def _avoid(self, server: _Server, now: float, retry_after_s: float, *, is_lost: bool) -> None:
        server.failed_at, server.probed_at = now, -inf
        wait_s = min(FIRST_WAIT_S * 2 ** min(server.num_failures - 1, _MAX_DOUBLINGS), self._max_wait_s)
        server.asked_until = max(server.asked_until, now + retry_after_s)
        server.avoided_until = max(server.avoided_until, now + wait_s, server.asked_until)
        if is_lost:
            server.names.clear()

    def _is_available(self, server: _Server, now: float) -> bool:
        return server.num_failures == 0 or (now >= server.avoided_until and server.trial is None)

    def _beliefs(self, now: float) -> list[EngineBelief]:
        return [
            EngineBelief(
                engine_id=url,
                held=one.names,
                queue_seconds=sum(sent.work_seconds for sent in one.outstanding.values() if not sent.has_begun),
                num_outstanding=max(0, len(one.outstanding) - NUM_FREE),
                is_alive=self._is_available(one, now),
            )
            for url, one in self._servers.items()
        ]

"""ASGI middleware before any route: finds the caller by its key and refuses unknown keys.

With keys, every path needs one but `OPEN_PATHS` and those in `OPEN_FOLDER`. Without keys everybody may ask who reaches
the address, and then other people's web pages must not do it with somebody's browser: a page that sends its own
`Origin`, and a name that somebody has pointed at this address (DNS rebinding), are refused. Whoever passes is
`caller_of(request)`, and his room is open.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stillroom.errors import StillroomError
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import ANYBODY, NO_PLACE, STRANGER, Caller, Tenants
from stillroom.server.errors import error_body, error_response

logger = logging.getLogger(__name__)

OPEN_PATHS: tuple[str, ...] = ("/healthz", "/readyz", "/")
OPEN_FOLDER = "/console/"
"""Need no key: what is there is the same for everybody. The console's files hold nothing of any knowledge base."""
OPERATOR_PATHS: tuple[str, ...] = ("/metrics",)
"""Tell of all tenants."""


class Guard:
    """See the module's docstring."""

    def __init__(
        self, app: ASGIApp, tenants: Tenants, keys: KeyRing | None = None, hosts: Collection[str] | None = None
    ) -> None:
        """
        Args:
            keys: None asks for none.
            hosts: names that a request without a key may be sent to, without ports; None: any.
        """
        self._app = app
        self._tenants = tenants
        self._keys = keys
        self._homeless: set[str] = set()
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._caller(Headers(scope=scope), scope["path"])
        if isinstance(caller, Caller):
            caller = self._forbidden_to(caller, scope["path"]) or caller
        if isinstance(caller, Response):
            await caller(scope, receive, send)
            return
        if caller.tenant and not self._tenants.is_open(caller.tenant):
            try:
                await asyncio.to_thread(self._tenants.stillroom, caller.tenant)
            except StillroomError as error:
                await error_response(error)(scope, receive, send)
                return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, headers: Headers, path: str) -> Caller | Response:
        if self._keys is None:
            return self._foreign(headers) or ANYBODY
        scheme, _, key = headers.get("authorization", "").partition(" ")
        row = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        if row is not None:
            return Caller(row.name, row.tenant, row.is_operator, row)
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return STRANGER
        message = (
            "there is no such API key"
            if scheme
            else "an API key is needed, as a header: Authorization: Bearer sk-stillroom-..."
        )
        body = error_body(message, "authentication_error", code="invalid_api_key")
        return JSONResponse(body, status_code=401, headers={"www-authenticate": "Bearer", "x-should-retry": "false"})

    def _forbidden_to(self, caller: Caller, path: str) -> Response | None:
        """The refusal of what a known caller may not do."""
        if path in OPERATOR_PATHS and not caller.is_operator:
            return _forbidden(
                "this tells of all tenants; it needs a key that was made with --operator", "operator_only"
            )
        tenant = caller.tenant
        if not tenant or self._tenants.has_place(tenant):
            return None
        if tenant not in self._homeless:  # once: whoever asks again fills no log
            self._homeless.add(tenant)
            logger.error("requests of the tenant %r are refused: %s", tenant, NO_PLACE)
        return _forbidden(f"the tenant {tenant!r} has no knowledge base on this server", "tenant_not_served")

    def _foreign(self, headers: Headers) -> Response | None:
        """The refusal of a request that another site's page sent, or that was sent to another name than ours."""
        host = headers.get("host", "")
        if self._hosts is not None and host_name(host) not in self._hosts:
            return _forbidden(
                f"this server does not answer to the name {host_name(host)!r}; add it to server.allowed_hosts, "
                "or use keys: --keys FILE",
                "host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            return _forbidden(f"pages of {origin} may not ask this server without a key", "origin_not_allowed")
        return None


def host_name(host: str) -> str:
    """Of a `Host` header, without the port, in lower case; empty if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _netloc(origin: str) -> str | None:
    """Of an `Origin` header; None if it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_names(host: str, allowed: str) -> frozenset[str] | None:
    """What a server without keys is called: the loopback's names where it listens there, and those that the setting
    allows; None for any name, where it listens elsewhere and nothing is set."""
    extra = {name.strip().lower() for name in allowed.split(",") if name.strip()}
    if is_loopback(host):
        return frozenset({"localhost", "127.0.0.1", "::1", host.lower()} | extra)
    return frozenset(extra) or None


def _forbidden(message: str, code: str) -> Response:
    body = error_body(message, "permission_error", code=code)
    return JSONResponse(body, status_code=403, headers={"x-should-retry": "false"})

"""Authentication: the ASGI middleware that finds the caller of a request, and the checks before the server listens.

With keys, every path needs one except `OPEN_PATHS` and `OPEN_FOLDER`. Without keys, every client that reaches the
address is served; requests that a foreign web page makes through a user's browser are refused, by their `Origin` and,
against DNS rebinding, by their `Host`. An accepted request has a `caller_of(request)`, whose knowledge base is open.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stillroom.config.generation_settings import ONE_TENANT_ONLY
from stillroom.config.settings import EngineConfig, ServerConfig
from stillroom.errors import ConfigError, StillroomError
from stillroom.server.auth.cors import origins_of
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import (
    DEFAULT_TENANT,
    KEYLESS_CALLER,
    NO_TENANTS_FOLDER,
    UNKNOWN_CALLER,
    Caller,
    Tenants,
)
from stillroom.server.error_replies import error_body, error_response

logger = logging.getLogger(__name__)

OPEN_PATHS: tuple[str, ...] = ("/healthz", "/readyz", "/", "/docs")
OPEN_FOLDER = "/console/"
"""Need no key. The console's files and the page of the API hold no content of a knowledge base."""
OPERATOR_PATHS: tuple[str, ...] = ("/metrics",)
"""Need an operator's key, because they cover all tenants."""


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        keys: KeyRing | None = None,
        hosts: Collection[str] | None = None,
        origins: Collection[str] = (),
    ) -> None:
        """
        Args:
            keys: None asks for no key.
            hosts: `Host` names, without ports, that requests without a key may use; None allows any.
            origins: of other sites' pages that may send requests without a key.
        """
        self._app = app
        self._tenants = tenants
        self._keys = keys
        self._unserved_tenants: set[str] = set()
        self._hosts = None if hosts is None else frozenset(hosts)
        self._origins = frozenset(origins)

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
            return self._cross_site_refusal(headers) or KEYLESS_CALLER
        scheme, _, key = headers.get("authorization", "").partition(" ")
        row = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        if row is not None:
            return Caller(row.name, row.tenant, row.is_operator, row)
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return UNKNOWN_CALLER
        message = (
            "there is no such API key"
            if scheme
            else "an API key is needed, as a header: Authorization: Bearer sk-stillroom-..."
        )
        body = error_body(message, "authentication_error", code="invalid_api_key")
        return JSONResponse(body, status_code=401, headers={"www-authenticate": "Bearer", "x-should-retry": "false"})

    def _forbidden_to(self, caller: Caller, path: str) -> Response | None:
        """Return the refusal if a known caller may not do this, else None."""
        if path in OPERATOR_PATHS and not caller.is_operator:
            return _forbidden("this covers all tenants; use a key that was made with --operator", "operator_only")
        tenant = caller.tenant
        if not tenant or self._tenants.is_servable(tenant):
            return None
        if tenant not in self._unserved_tenants:  # logged once per tenant
            self._unserved_tenants.add(tenant)
            logger.error("requests of the tenant %r are refused: %s", tenant, NO_TENANTS_FOLDER)
        return _forbidden(f"the tenant {tenant!r} has no knowledge base on this server", "tenant_not_served")

    def _cross_site_refusal(self, headers: Headers) -> Response | None:
        """Return the refusal of a request from a foreign page or to a foreign host name, else None."""
        host = headers.get("host", "")
        if self._hosts is not None and host_name(host) not in self._hosts:
            return _forbidden(
                f"this server does not answer to the name {host_name(host)!r}; add it to server.allowed_hosts, "
                "or use keys: --keys FILE",
                "host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host and origin not in self._origins:
            return _forbidden(
                f"pages of {origin} may not use this server without a key; serve with --keys FILE, or add the origin "
                "to server.allowed_origins",
                "origin_not_allowed",
            )
        return None


def host_name(host: str) -> str:
    """Return the name in a `Host` header, without port, in lower case; empty if the header is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _netloc(origin: str) -> str | None:
    """Return host and port of an `Origin` header; None if the header is invalid."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listening address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_names(host: str, allowed: str) -> frozenset[str] | None:
    """Return the `Host` names that a server without keys accepts; None accepts any.

    Args:
        host: listening address. On loopback its names are accepted.
        allowed: `server.allowed_hosts`, separated by commas. If empty, a server beyond loopback accepts any name.
    """
    extra = {name.strip().lower() for name in allowed.split(",") if name.strip()}
    if is_loopback(host):
        return frozenset({"localhost", "127.0.0.1", "::1", host.lower()} | extra)
    return frozenset(extra) or None


def _forbidden(message: str, code: str) -> Response:
    body = error_body(message, "permission_error", code=code)
    return JSONResponse(body, status_code=403, headers={"x-should-retry": "false"})


@dataclass(frozen=True, slots=True)
class AccessConfig:
    keys: KeyRing | None
    tenants_folder: Path | None
    warnings: tuple[str, ...] = ()


def check_access(config: ServerConfig, engine: EngineConfig | None = None) -> AccessConfig:
    """Check keys and tenants before the server listens and a model loads.

    Args:
        engine: the engine that answers; None: the built-in one.

    Raises:
        ConfigError: other machines would reach a server without keys, the keys cannot be read, or all belong to
            tenants without a folder, the engine cannot keep tenants apart, or an allowed origin is none.
    """
    origins_of(config.allowed_origins)
    if config.tenants_folder and engine is not None and engine.kind == "openai" and not engine.cache_salt:
        raise ConfigError(f"--tenants (server.tenants_folder) is set, but {ONE_TENANT_ONLY}")
    keys = KeyRing(Path(config.keys_file)) if config.keys_file else None
    folder = Path(config.tenants_folder) if config.tenants_folder else None
    warnings: tuple[str, ...] = ()
    if keys is None and not is_loopback(config.host):
        if not config.insecure:
            raise ConfigError(
                f"other machines can reach {config.host}, and no key would be asked for; make keys (stillroom keys add "
                "NAME --keys keys.json) and serve with --keys keys.json, or, in a protected network, with --insecure"
            )
        warnings = (
            f"every client that reaches {config.host} may ask, add and delete: no key is asked for (--insecure)",
        )
    if folder is None and keys is not None:
        tenants = {row.tenant for row in keys.rows}
        unserved = ", ".join(sorted(tenants - {DEFAULT_TENANT}))
        if unserved and DEFAULT_TENANT not in tenants:
            raise ConfigError(
                f"all keys belong to other tenants than {DEFAULT_TENANT!r} ({unserved}): {NO_TENANTS_FOLDER}"
            )
        if unserved:
            warnings += (f"keys of the tenants {unserved} are refused: {NO_TENANTS_FOLDER}",)
    return AccessConfig(keys, folder, warnings)

"""Who may use an engine: callers with the secret, or without one, programs on this machine.

Without a secret the engine listens on a loopback address only, and refuses requests that a web page makes through a
browser: those with an `Origin`, and against DNS rebinding, those to another `Host` name.
"""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stillroom.config.settings import ClusterConfig
from stillroom.errors import ConfigError
from stillroom.server.auth.guard import host_name, is_loopback, own_names
from stillroom.server.auth.tenants import Caller
from stillroom.server.error_replies import error_body

OPEN_PATHS = ("/healthz", "/readyz")
"""Need no secret."""
SECRET_VARIABLE = "STILLROOM_CLUSTER__SECRET"
_FRONT = Caller("front", "", is_operator=True)
_STRANGER = Caller("stranger", "", is_operator=False)


def check_engine_access(config: ClusterConfig) -> None:
    """Raises ConfigError: other machines would reach an engine without a secret."""
    if not config.secret and not is_loopback(config.host):
        raise ConfigError(
            f"other machines can reach {config.host}, and no secret would be asked for; set {SECRET_VARIABLE} in the "
            "environment of this engine and of its fronts"
        )


class EngineGuard:
    """ASGI middleware that refuses callers without the secret."""

    def __init__(self, app: ASGIApp, config: ClusterConfig) -> None:
        self._app = app
        self._secret = config.secret.encode()
        self._hosts = own_names(config.host, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_open = scope["path"] in OPEN_PATHS
        refusal = None if is_open else self._refusal(Headers(scope=scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = _STRANGER if is_open else _FRONT
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        if not self._secret:
            if "origin" in headers or (
                self._hosts is not None and host_name(headers.get("host", "")) not in self._hosts
            ):
                return _refused(403, "web pages may not use an engine; only fronts may", "origin_not_allowed")
            return None
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(secret.strip().encode(), self._secret):
            return None
        said = "the secret is not that of this engine" if scheme else "the request has no secret"
        message = f"{said}; set {SECRET_VARIABLE} to the same value for the front and the engine"
        return _refused(401, message, "invalid_secret")


def _refused(status: int, message: str, code: str) -> Response:
    kind = "authentication_error" if status == 401 else "permission_error"
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse(error_body(message, kind, code=code), status, headers | {"x-should-retry": "false"})

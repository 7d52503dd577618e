"""What happens around every HTTP request: it gets an id, is counted, and never shows a stack trace."""

import logging
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillroom.server.errors import CLIENT_CLOSED_REQUEST, error_response
from stillroom.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

UNKNOWN_PATH = "other"
"""Stands in the metrics for every path that is not a route, so that a scanner cannot fill them."""


class Observed:
    """ASGI middleware. The id is in the header `x-request-id`, and in the log where something went wrong."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        http_id = uuid.uuid4().hex
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = http_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("%s %s failed, x-request-id %s", scope["method"], scope["path"], http_id)
            if status is not None:  # half a response is out; only closing the connection tells the client
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            path = getattr(scope.get("route"), "path", UNKNOWN_PATH)
            self._metrics.count_http_request(path, status or CLIENT_CLOSED_REQUEST)
            logger.debug("%s %s: %s", scope["method"], scope["path"], status)

"""CORS: which pages of other sites may call the server from a browser, and what they may read of its replies."""

import re
from collections.abc import Sequence
from typing import Any

from stillroom.errors import ConfigError

_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]+)?")
_EXPOSED = (
    "content-disposition",
    "etag",
    "location",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
    "x-should-retry",
    "x-stillroom-job",
)
"""Headers of replies that a page may read; browsers hide others."""


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Return the options of Starlette's `CORSMiddleware` for pages of these origins."""
    return {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": _EXPOSED}


def origins_of(setting: str) -> tuple[str, ...]:
    """Return the origins of `server.allowed_origins`.

    Raises:
        ConfigError: one is no origin of a web page.
    """
    origins = tuple(one.strip() for one in setting.split(",") if one.strip())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"server.allowed_origins: {origin!r} is no origin; write scheme, host and port as a browser sends "
                "them, such as https://chat.example.org or http://localhost:3000"
            )
    return origins

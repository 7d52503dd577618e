"""Settings of the HTTP server.

Users import them from `config.settings`.
"""

from dataclasses import dataclass
from typing import Annotated

from stillroom.config.quantities import AboveZero, AtLeastZero, Range, UserPath


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. The default accepts connections of this machine only."""
    port: Annotated[int, Range(0, 65535)] = 8321
    """TCP port; 0 picks a free one."""
    keys_file: UserPath = ""
    """File of API keys (`stillroom keys`). Empty: no key is needed, and the server listens on a loopback address only,
    unless `insecure` is set. A running server follows changes of the file."""
    tenants_folder: UserPath = ""
    """Folder of the other tenants' knowledge bases, each in a folder of the tenant's name, created at first use. Empty:
    only the tenant `default`, whose knowledge base is `--kb`."""
    insecure: bool = False
    """Allow other machines to connect without keys."""
    max_body_bytes: int = 2 * 1024**2
    """Largest body of a request without documents."""
    max_upload_bytes: int = 64 * 1024**2
    """Largest body of an upload."""
    upload_wait_s: float = 30.0
    """Seconds that a client waits for an upload to be indexed; after that the reply is a job to poll (HTTP 202). A
    request can set its own."""
    requests_per_minute: AtLeastZero = 0
    """Most requests for work (`POST`, `DELETE`) per key and minute, in a burst or spread; further ones are refused
    (HTTP 429). 0: no limit. A key can have its own."""
    max_concurrent: AtLeastZero = 256
    """Most concurrent requests per key; further ones are refused (HTTP 429). 0: no limit. A key can have its own."""
    max_wait_s: float = 60.0
    """Longest expected wait in seconds, by the pace of the last requests; a request that would wait longer is refused
    (HTTP 429). 0: no limit but `runtime.max_waiting`."""
    max_connections: int = 1000
    """Most concurrent connections; further ones get HTTP 503."""
    head_timeout_s: AboveZero = 10.0
    """Seconds for the head of a request to arrive, and for the first byte of a connection."""
    body_timeout_s: AboveZero = 120.0
    """Seconds for the body of a request to arrive after its head."""
    write_timeout_s: AboveZero = 30.0
    """Seconds that a full send buffer (64 KiB) waits for the client; then the connection is closed and its request
    cancelled."""
    grace_s: float = 10.0
    """Seconds that running answers may continue after the server was asked to stop; then they end with the error
    `shutting_down`. New requests are refused meanwhile (HTTP 503)."""
    access_log: bool = True
    """Log one line per request: caller, route, status, duration; never the question or the answer."""
    otlp_endpoint: str = ""
    """Address of an OpenTelemetry collector for traces, such as `http://127.0.0.1:4318`; needs
    `pip install 'stillroom[otel]'`. Empty: no traces."""
    mcp: bool = False
    """Serve the tools of docs/mcp.md at `/mcp`, with the same keys; needs `pip install 'stillroom[mcp]'`."""
    source_events: bool = False
    """Send the sources of streamed answers as events that open-webui shows as citations, instead of annotations
    (docs/open-webui.md). A request can set its own: `stillroom.source_events`."""
    public_url: str = ""
    """Address of this server as browsers reach it, such as `https://answers.example.org`, for links in events. Empty:
    the address that the request was sent to."""
    allowed_origins: str = ""
    """Web pages that may call this server from a browser (CORS), by their origins, separated by commas, such as
    `https://chat.example.org`. Without keys, every such page reads all documents."""
    allowed_hosts: str = ""
    """Host names, separated by commas, that requests may use besides `localhost` and the like if no keys are required,
    for example a proxy's that keeps the `Host` header. Guards against DNS rebinding: pages that point a name of their
    own at this machine."""

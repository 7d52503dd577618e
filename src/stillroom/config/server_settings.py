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
    """Address to listen on; the default is reachable from this machine only."""
    port: Annotated[int, Range(0, 65535)] = 8321
    """TCP port; 0 picks a free one."""
    keys_file: UserPath = ""
    """File of API keys (`stillroom keys`). Empty: nobody is asked for one, and the server listens on an address of this
    machine only, unless `insecure` is set. A running server follows its changes."""
    tenants_folder: UserPath = ""
    """Folder of the other tenants' knowledge bases, each in one of the tenant's name; made when first asked for. Empty:
    only the tenant `default`, whose knowledge base is `--kb`."""
    insecure: bool = False
    """Listen on an address that other machines reach without asking for keys."""
    max_body_bytes: int = 2 * 1024**2
    """Largest body of a request, but for documents."""
    max_upload_bytes: int = 64 * 1024**2
    """Largest body that brings documents."""
    upload_wait_s: float = 30.0
    """Seconds that a client waits for an upload to be indexed; then it is answered with a job to look at (HTTP 202). A
    request can say otherwise."""
    requests_per_minute: AtLeastZero = 0
    """Requests for work (`POST`, `DELETE`) of one key in a minute, which may come at once; one more is refused (HTTP
    429). 0: no limit. A key can have its own."""
    max_concurrent: AtLeastZero = 256
    """Requests of one key at the same time; one more is refused (HTTP 429). 0: no limit. A key can have its own."""
    max_wait_s: float = 60.0
    """A request is refused (HTTP 429) that would wait longer than this, at the pace at which the last ones were served.
    0: no limit but `runtime.max_waiting`."""
    max_connections: int = 1000
    """Connections at the same time; more are told to come back (HTTP 503)."""
    head_timeout_s: AboveZero = 10.0
    """Seconds for the head of a request to arrive, and for a connection to say anything at all."""
    body_timeout_s: AboveZero = 120.0
    """Seconds for the body of a request to arrive after that."""
    write_timeout_s: AboveZero = 30.0
    """Seconds that a full buffer of 64 KiB waits for its reader; then the connection is cut, its request cancelled."""
    grace_s: float = 10.0
    """Seconds that running answers may go on when the server was asked to stop; then they end with the error
    `shutting_down`. Meanwhile it takes on nothing new (HTTP 503)."""
    access_log: bool = True
    """A line of log for each request: who, what, how long; never what was asked or answered."""
    otlp_endpoint: str = ""
    """Address of an OpenTelemetry collector for traces, such as `http://127.0.0.1:4318`; needs
    `pip install 'stillroom[otel]'`. Empty: no traces."""
    allowed_hosts: str = ""
    """Names, with commas between, that requests may be sent to beside `localhost` and the like, where no keys are asked
    for: a proxy's, which keeps the `Host` header. Guards against pages that point a name of their own at this
    machine."""

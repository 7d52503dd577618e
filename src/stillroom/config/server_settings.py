"""Settings of the HTTP server.

Users import them from `config.settings`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: int = 8321
    """TCP port; 0 picks a free one."""
    keys_file: str = ""
    """File of API keys (`stillroom keys`). Empty: nobody is asked for one, and the server listens on an address of this
    machine only, unless `insecure` is set. A running server follows its changes."""
    tenants_folder: str = ""
    """Folder of the other tenants' knowledge bases, each in one of the tenant's name; made when first asked for. Empty:
    only the tenant `default`, whose knowledge base is `--kb`."""
    insecure: bool = False
    """Listen on an address that other machines reach without asking for keys."""
    allowed_hosts: str = ""
    """Names, with commas between, that requests may be sent to beside `localhost` and the like, where no keys are asked
    for: a proxy's, which keeps the `Host` header. Guards against pages that point a name of their own at this
    machine."""

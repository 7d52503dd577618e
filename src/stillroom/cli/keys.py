"""`stillroom keys`: add, list and remove API keys. A running server uses the change from its next request on."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import line, note, print_json
from stillroom.cli.options import ConfigOption, JsonOption, expanded, help_text
from stillroom.config.settings import ServerConfig
from stillroom.errors import ConfigError, UsageError

app = typer.Typer(no_args_is_help=True)

KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", callback=expanded, help="File of keys; default: server.keys_file."),
]

ADD_HELP = help_text(
    "Make an API key and show it once; the file stores only its SHA-256.",
    "Each tenant has its own knowledge base, in server.tenants_folder under the tenant's name; that of the tenant "
    "`default` is `serve --kb`. A name that exists already is refused; remove it first.",
    examples=(
        "stillroom keys add anna --keys keys.json",
        "stillroom keys add anna --tenant legal --keys keys.json --json | jq -r .key",
        "stillroom keys add prometheus --operator --keys keys.json   # may read /metrics",
        "stillroom keys add batch --requests-per-minute 600 --max-concurrent 4 --keys keys.json",
    ),
)
LIST_HELP = help_text(
    "List the names, tenants and dates of the keys; the keys themselves are not stored.",
    examples=("stillroom keys list --keys keys.json", "stillroom keys list --json | jq '.[].name'"),
)
REMOVE_HELP = help_text(
    "Remove a key; the server refuses it from the next request on, and completes running answers.",
    examples=("stillroom keys remove anna --keys keys.json",),
)


@app.command("add", help=ADD_HELP)
def add(  # noqa: PLR0913  one parameter per flag
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, shown in the server's log.")],
    tenant: Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Tenant of the key.")] = "default",
    operator: Annotated[
        bool, typer.Option("--operator", help="Also allow /metrics, which covers all tenants.")
    ] = False,
    requests_per_minute: Annotated[
        int | None, typer.Option("--requests-per-minute", min=0, metavar="N", help="Requests per minute; 0: no limit.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option("--max-concurrent", min=0, metavar="N", help="Concurrent requests; 0: no limit.")
    ] = None,
    keys: KeysOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    from stillroom.server.auth.key_ring import edit_keys, new_key
    from stillroom.server.auth.tenants import DEFAULT_TENANT

    server = opening.load_settings(config).server
    path = _path(keys, server)
    key, row = new_key(
        name, tenant, is_operator=operator, requests_per_minute=requests_per_minute, max_concurrent=max_concurrent
    )
    with edit_keys(path) as rows:
        if name in rows:
            raise UsageError(f"{path} already has a key named {name!r}; remove it first: stillroom keys remove {name}")
        rows[name] = row
    if tenant != DEFAULT_TENANT and not server.tenants_folder:
        note(f"a server refuses keys of the tenant {tenant} unless it has a folder for tenants: serve --tenants DIR")
    if as_json:
        print_json({"key": key, "name": name, "tenant": tenant, "is_operator": operator})
        return
    line(key)
    note(f"store the key now: it is shown only once, and {path} holds only its hash")


@app.command("list", help=LIST_HELP)
def list_(keys: KeysOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    from stillroom.server.auth.key_ring import load_keys

    rows = load_keys(_path(keys, opening.load_settings(config).server))
    if as_json:
        print_json([{name: value for name, value in asdict(row).items() if name != "sha256"} for row in rows])
        return
    for row in rows:
        line(f"{row.name}  tenant {row.tenant}{', operator' if row.is_operator else ''}  since {row.created}")


@app.command("remove", help=REMOVE_HELP)
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key to remove.")],
    keys: KeysOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    from stillroom.server.auth.key_ring import edit_keys

    path = _path(keys, opening.load_settings(config).server)
    with edit_keys(path) as rows:
        if rows.pop(name, None) is None:
            known = ", ".join(rows) or "none"
            raise UsageError(f"{path} has no key named {name!r}; it has: {known}")
    if as_json:
        print_json({"removed": name})
    else:
        line(f"removed {name}")


def _path(keys: Path | None, server: ServerConfig) -> Path:
    if keys is None and not server.keys_file:
        raise ConfigError("no file of keys is set; name it with --keys FILE, or server.keys_file in stillroom.toml")
    return keys or Path(server.keys_file)

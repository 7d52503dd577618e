"""`stillroom engine`: generate answers for fronts in other processes, from binding a port to closing the model."""

import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import note, print_json
from stillroom.cli.options import (
    DEFAULT_KB,
    ConfigOption,
    JsonOption,
    KbOption,
    KvTierOption,
    ModelOption,
    QuietOption,
    ReuseOption,
    help_text,
)
from stillroom.cli.serve import TenantsOption, end_process, ignoring_signals
from stillroom.config.settings import StillroomConfig
from stillroom.errors import UsageError
from stillroom.models.bundled_models import reader_folder, short_name

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stillroom.server.loading import Loading

_NUM_DISK_WRITERS = 16

HELP = help_text(
    "Generate answers for fronts in other processes.",
    "An engine has one model and the KV that it keeps. Fronts (`stillroom serve --engines URL`) search, and send "
    "prompts to the engine that holds most of their documents. Both use the same knowledge base and model.",
    "STILLROOM_CLUSTER__SECRET, in the environment of engine and fronts, is asked of every front; without it the "
    "address must be a loopback address.",
    "The engine accepts connections at once; until the model is loaded, /readyz returns 503 and the loading step. "
    "Ctrl-C or SIGTERM stops it: running answers get `server.grace_s` (10 s) to finish, then fronts continue them on "
    "other engines; a second Ctrl-C ends them at once.",
    "With --json, one object with the address is printed once the engine is ready, and the log is JSON.",
    examples=(
        "stillroom engine --kb ./kb --model ./models/qwen2.5-0.5b",
        "stillroom engine --kb ./kb --model ./models/qwen2.5-0.5b --port 9101    # a second one on this machine",
        "stillroom serve --kb ./kb --model ./models/qwen2.5-0.5b --engines http://127.0.0.1:9100 "
        "--engines http://127.0.0.1:9101",
        "STILLROOM_CLUSTER__SECRET=... stillroom engine --kb 'postgresql://db/stillroom?kb=docs' --host 0.0.0.0 "
        "--model ./models/qwen2.5-0.5b",
        "curl -X POST http://127.0.0.1:9100/engine/v1/drain    # takes no more requests, completes the running ones",
    ),
)


def engine(  # noqa: PLR0913  one parameter per flag
    kb: KbOption = DEFAULT_KB,
    model: ModelOption = None,
    reuse: ReuseOption = None,
    kv_tier: KvTierOption = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, metavar="PORT", help="TCP port; 0 picks a free one; default: 9100."),
    ] = None,
    tenants: TenantsOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    flags: dict[str, object] = {
        "runtime.model": model,
        "reuse.mode": reuse,
        "reuse.kv_tier": kv_tier,
        "engine.kind": "builtin",  # a file of settings may be that of the fronts too
        "cluster.host": host,
        "cluster.port": port,
        "server.tenants_folder": None if tenants is None else str(tenants),
    }
    settings = opening.load_settings(config, flags)
    if reader_folder(settings.runtime.model):
        raise UsageError(
            f"{short_name(settings.runtime.model)} quotes documents and generates no text, so an engine has nothing to "
            "do; name a model that generates, such as --model bundled:microworld for a trial"
        )
    if not settings.reuse.disk_writers:
        settings = replace(settings, reuse=replace(settings.reuse, disk_writers=_NUM_DISK_WRITERS))
    from stillroom.server.engine.engine_guard import check_engine_access
    from stillroom.server.run import HttpServer

    check_engine_access(settings.cluster)
    notify = (lambda text: None) if quiet or as_json else note
    server = HttpServer(settings.cluster.host, settings.cluster.port)  # fails before a model loads
    with contextlib.ExitStack() as opened:
        opened.callback(server.close)
        loaded = _LoadedEngine(kb, settings, opened, notify)

        def announce() -> None:
            notify(f"the engine listens on {server.url} (Ctrl-C stops it)")
            if as_json:
                told = {"url": server.url, "port": server.port, "model": loaded.model_name, "run": loaded.run}
                print_json(told, indent=None)

        if settings.server.access_log:
            logging.getLogger("stillroom.server.access").setLevel(logging.INFO)
        server.run(loaded.load, announce, settings.server)
        if server.is_loading:
            notify("stopped while loading")
            end_process()
        with ignoring_signals():
            opened.close()
        notify("stopped")


class _LoadedEngine:
    """Loads what the engine needs, in the server's loading thread."""

    def __init__(
        self, kb: Path, settings: StillroomConfig, opened: contextlib.ExitStack, notify: Callable[[str], None]
    ) -> None:
        """
        Args:
            opened: closes everything that is opened here.
        """
        self._kb, self._settings, self._opened, self._notify = kb, settings, opened, notify
        self.model_name = ""
        self.run = secrets.token_hex(8)
        """Names this start of the engine."""

    def load(self, loading: "Loading") -> "FastAPI":
        loading.step = "opening the knowledge base"
        from stillroom.backends.local import LocalBackend
        from stillroom.core.clock import SystemClock
        from stillroom.server.auth.tenants import Tenants
        from stillroom.server.engine.engine_app import create_engine_app

        settings = self._settings
        own = self._opened.enter_context(opening.open_stillroom(self._kb, settings))
        own.hide_folders()
        folder = Path(settings.server.tenants_folder) if settings.server.tenants_folder else None
        tenants = Tenants(own, folder, creates=False)
        self._opened.callback(tenants.close)
        self.model_name = own.model_name
        self._notify(f"loading {own.model_name} ...")
        loading.step = "loading the model"
        backend = own.load_backend()
        assert isinstance(backend, LocalBackend)
        return create_engine_app(tenants, backend, self.run, SystemClock())

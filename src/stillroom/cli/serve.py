"""`stillroom serve`: the HTTP server, from binding its port to closing the knowledge base."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from stillroom.cli import opening
from stillroom.cli.console import note, print_json
from stillroom.cli.options import (
    DEFAULT_KB,
    AnnRecallOption,
    BaseUrlOption,
    ConfigOption,
    EngineModelOption,
    EngineOption,
    JsonOption,
    KbOption,
    ModelOption,
    QuietOption,
    ReuseOption,
    SearchBudgetOption,
    engine_settings,
    help_text,
    index_goal,
)
from stillroom.config.settings import StillroomConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stillroom.server.auth.access_config import AccessConfig
    from stillroom.server.loading import Loading

HELP = help_text(
    "Serve the knowledge base over HTTP, with OpenAI's routes.",
    "Connections are accepted at once; until the model is loaded, /readyz says 503 and what is being loaded. Ctrl-C or "
    "SIGTERM stops the server: running answers get "
    "`server.grace_s` (10 seconds) to finish, or a second Ctrl-C.",
    "Without --keys everybody may ask who reaches the address, so it must be one of this machine; --insecure allows "
    "others, for a network that is guarded otherwise.",
    "With --json, one object with the address is printed to stdout once the server is ready, and the log is JSON.",
    examples=(
        "stillroom serve --kb ./kb",
        "stillroom serve --kb ./kb --model ./models/qwen2.5-0.5b --port 9000",
        "stillroom serve --kb ./kb --engine openai --base-url http://127.0.0.1:8000/v1",
        "stillroom serve --kb ./kb --port 0 --json        # any free port",
        "stillroom keys add anna --keys keys.json && stillroom serve --kb ./kb --host 0.0.0.0 --keys keys.json",
    ),
)


def serve(  # noqa: PLR0913  one parameter per flag
    kb: KbOption = DEFAULT_KB,
    model: ModelOption = None,
    engine: EngineOption = None,
    base_url: BaseUrlOption = None,
    engine_model: EngineModelOption = None,
    reuse: ReuseOption = None,
    ann_recall: AnnRecallOption = None,
    search_budget: SearchBudgetOption = None,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, metavar="PORT", help="TCP port; 0 picks a free one.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="FILE", help="Ask for API keys: a file of `stillroom keys`.")
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option("--tenants", metavar="DIR", help="Folder of the other tenants' knowledge bases."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen where other machines reach it, without asking for keys.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    flags: dict[str, object] = {
        "runtime.model": model,
        "reuse.mode": reuse,
        "server.host": host,
        "server.port": port,
        "server.keys_file": None if keys is None else str(keys),
        "server.tenants_folder": None if tenants is None else str(tenants),
        "server.insecure": insecure or None,
    }
    flags |= engine_settings(engine, base_url, engine_model) | index_goal(ann_recall, search_budget)
    settings = opening.load_settings(config, flags)
    say = (lambda text: None) if quiet or as_json else note
    from stillroom.server.auth.access_config import open_doorway
    from stillroom.server.run import HttpServer

    doorway = open_doorway(settings.server)
    for warning in doorway.warnings:
        say(f"warning: {warning}")
    server = HttpServer(settings.server.host, settings.server.port)  # a taken port is known before a model loads
    with contextlib.ExitStack() as opened:
        opened.callback(server.close)
        served = _Served(kb, settings, opened, say)

        def announce() -> None:
            say(f"Stillroom listens on {server.url} (Ctrl-C stops it)")
            if as_json:
                print_json({"url": server.url, "port": server.port, "model": served.model_name}, indent=None)

        if settings.server.access_log:
            logging.getLogger("stillroom.server.access").setLevel(logging.INFO)
        server.run_loading(lambda loading: served.load(doorway, loading), announce, settings.server)
        if server.is_loading:
            say("stopped while loading")
            _end_process()
        with _ignoring_signals():
            opened.close()
        say("stopped")


class _Served:
    """What a server loads."""

    def __init__(
        self, kb: Path, settings: StillroomConfig, opened: contextlib.ExitStack, say: Callable[[str], None]
    ) -> None:
        """`opened`: closes in the end what is opened here."""
        self._kb, self._settings, self._opened, self._say = kb, settings, opened, say
        self.model_name = ""

    def load(self, doorway: "AccessConfig", loading: "Loading") -> "FastAPI":
        """Open the knowledge base, load the model and make the application. Called in a thread of the server."""
        loading.step = "opening the knowledge base"
        from stillroom.server.app import create_app
        from stillroom.server.auth.tenants import Tenants
        from stillroom.telemetry.spans import exporting

        own = self._opened.enter_context(opening.open_stillroom(self._kb, self._settings, create=True))
        house = Tenants(own, doorway.tenants_folder)
        self._opened.callback(house.close)
        self.model_name = own.model_name
        if not own.num_documents:
            self._say(f"{self._kb} has no documents yet: stillroom add PATH --kb {self._kb}, or upload them")
        self._say(f"loading {own.model_name} ...")
        loading.step = "loading the model and the indexes"
        own.warm_up()
        config = self._settings.server
        tracing = self._opened.enter_context(exporting(config.otlp_endpoint))
        return create_app(own, tenants=house, keys=doorway.keys, host=config.host, tracing=tracing)


def _end_process() -> NoReturn:
    """End it now, without unwinding: the loading thread may be in native code, for which the end of the interpreter
    would wait, or abort. The files are as after a kill, which loses nothing (docs/durability.md)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def _ignoring_signals() -> Iterator[None]:
    """After the server has stopped, the rest is short; a signal would unwind it under threads that still run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

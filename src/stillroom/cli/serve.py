"""`stillroom serve`: the HTTP server, from binding its port to closing the knowledge base."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli import room
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

HELP = help_text(
    "Serve the knowledge base over HTTP, with OpenAI's routes.",
    "The model is loaded before connections are accepted. Ctrl-C or SIGTERM stops the server: running answers get "
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
    settings = room.settings(config, flags)
    say = (lambda text: None) if quiet or as_json else note
    from stillroom.server.doorway import open_doorway
    from stillroom.server.run import HttpServer

    doorway = open_doorway(settings.server)
    for warning in doorway.warnings:
        say(f"warning: {warning}")
    server = HttpServer(settings.server.host, settings.server.port)  # a taken port is known before a model loads
    try:
        with contextlib.ExitStack() as ending, room.open_room(kb, settings, create=True) as opened:
            from stillroom.server.app import create_app
            from stillroom.server.tenants import Tenants
            from stillroom.telemetry.spans import exporting

            house = Tenants(opened, doorway.tenants_folder)
            if not opened.num_documents:
                say(f"{kb} has no documents yet: stillroom add PATH --kb {kb}, or upload them")
            say(f"loading {opened.model_name} ...")
            opened.warm_up()

            def announce() -> None:
                say(f"Stillroom listens on {server.url} (Ctrl-C stops it)")
                if as_json:
                    print_json({"url": server.url, "port": server.port, "model": opened.model_name}, indent=None)

            if settings.server.access_log:
                logging.getLogger("stillroom.server.access").setLevel(logging.INFO)
            try:
                with exporting(settings.server.otlp_endpoint) as tracing:
                    app = create_app(
                        opened, tenants=house, keys=doorway.keys, host=settings.server.host, tracing=tracing
                    )
                    server.run(app, announce, settings.server)
            finally:
                ending.enter_context(_ignoring_signals())
                house.close()
            say("stopped")
    finally:
        server.close()


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

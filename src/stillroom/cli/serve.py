"""`stillroom serve`: run the HTTP server, from binding its port to closing the knowledge base."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
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
    EnginesOption,
    JsonOption,
    KbOption,
    KvTierOption,
    ModelOption,
    QuietOption,
    ReuseOption,
    SearchBudgetOption,
    engine_settings,
    help_text,
    index_goal,
)
from stillroom.cli.own_engines import NoEngines, engines_of
from stillroom.config.settings import StillroomConfig
from stillroom.errors import EngineUnavailableError
from stillroom.supervision.replicas import Replicas

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stillroom.rag.stillroom import Stillroom
    from stillroom.server.auth.guard import AccessConfig
    from stillroom.server.loading import Loading

logger = logging.getLogger(__name__)

_BACKGROUND_WORK = (
    "stillroom.cluster.front_engines",
    "stillroom.kvstore.shared.guarded_calls",
    "stillroom.rag.preparing",
    "stillroom.retrieval.reembedding",
    "stillroom.server.limits.draining",
    "stillroom.supervision.replicas",
)
"""Loggers whose records tell what the server itself does and uses; shown without --quiet."""

_FRONT_STEP = "loading the indexes, and waiting for an engine at the addresses in engine.urls; the log names them"
"""Shown to callers without a key, so it holds no address."""

TenantsOption = Annotated[
    Path | None,
    typer.Option("--tenants", metavar="DIR", help="Folder of the knowledge bases of tenants other than `default`."),
]

HELP = help_text(
    "Serve a knowledge base over HTTP, with OpenAI's routes.",
    "The server accepts connections at once; until the model is loaded, /readyz returns 503 and the loading step. "
    "Ctrl-C or SIGTERM stops it: running answers get `server.grace_s` (10 s) to finish; a second Ctrl-C ends them.",
    "Without --keys every client that reaches the address is served, so the address must be a loopback address. "
    "--insecure allows others, for a protected network.",
    "With --json, one object with the address is printed once the server is ready, and the log is JSON.",
    examples=(
        "stillroom serve --kb ./kb",
        "stillroom serve --kb ./kb --model ./models/qwen2.5-0.5b --port 9000",
        "stillroom serve --kb ./kb --engine openai --base-url http://127.0.0.1:8000/v1",
        "stillroom serve --kb ./kb --model ./models/qwen2.5-0.5b --engines http://127.0.0.1:9100",
        "stillroom serve --kb ./kb --model ./models/qwen2.5-0.5b --replicas 2    # its own engines",
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
    engines: EnginesOption = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            min=1,
            max=64,
            metavar="N",
            help="Generate in N engine processes that this server starts, watches and ends; each gets its share of "
            "memory, threads and GPUs (docs/front-and-engines.md).",
        ),
    ] = None,
    reuse: ReuseOption = None,
    kv_tier: KvTierOption = None,
    ann_recall: AnnRecallOption = None,
    search_budget: SearchBudgetOption = None,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, metavar="PORT", help="TCP port; 0 picks a free one.")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys", metavar="FILE", help="File of API keys, made by `stillroom keys`; requests then need a key."
        ),
    ] = None,
    tenants: TenantsOption = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow other machines to connect without keys.")] = False,
    mcp: Annotated[bool, typer.Option("--mcp", help="Also serve the Model Context Protocol, at /mcp.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    flags: dict[str, object] = {
        "server.mcp": mcp or None,
        "runtime.model": model,
        "reuse.mode": reuse,
        "reuse.kv_tier": kv_tier,
        "server.host": host,
        "server.port": port,
        "server.keys_file": None if keys is None else str(keys),
        "server.tenants_folder": None if tenants is None else str(tenants),
        "server.insecure": insecure or None,
    }
    flags |= engine_settings(engine, base_url, engine_model, engines) | index_goal(ann_recall, search_budget)
    settings = opening.load_settings(config, flags)
    notify = (lambda text: None) if quiet or as_json else note
    if settings.server.mcp:
        opening.needs_mcp()
    from stillroom.server.auth.guard import check_access
    from stillroom.server.run import HttpServer

    access = check_access(settings.server, settings.engine)
    for warning in access.warnings:
        notify(f"warning: {warning}")
    server = HttpServer(settings.server.host, settings.server.port)  # fails before a model loads
    with contextlib.ExitStack() as opened:
        opened.callback(server.close)
        own_engines, settings = engines_of(kb, settings, replicas)
        opened.callback(own_engines.close)
        served = _ServedApp(kb, settings, opened, notify, own_engines)

        is_public = settings.server.host in ("0.0.0.0", "::")
        everywhere = f", and on every address of this machine ({settings.server.host})" if is_public else ""

        def announce() -> None:
            notify(f"Stillroom listens on {server.url}{everywhere} (Ctrl-C stops it)")
            if as_json:
                print_json({"url": server.url, "port": server.port, "model": served.model_name}, indent=None)

        if settings.server.access_log:
            logging.getLogger("stillroom.server.access").setLevel(logging.INFO)
        if not quiet:
            for name in _BACKGROUND_WORK:
                logging.getLogger(name).setLevel(logging.INFO)
        server.run(lambda loading: served.load(access, loading), announce, settings.server)
        if server.is_loading:
            own_engines.close()
            notify("stopped while loading")
            end_process()
        if replicas:
            notify(f"waiting for {replicas} engines to end")
        with ignoring_signals():
            own_engines.terminate()
            opened.close()
        notify("stopped")


class _ServedApp:
    """Loads what the server needs, in the server's loading thread."""

    def __init__(
        self,
        kb: Path,
        settings: StillroomConfig,
        opened: contextlib.ExitStack,
        notify: Callable[[str], None],
        engines: Replicas | NoEngines,
    ) -> None:
        """
        Args:
            opened: closes everything that is opened here.
            engines: of its own, to start.
        """
        self._kb, self._settings, self._opened, self._notify, self._engines = kb, settings, opened, notify, engines
        self.model_name = ""

    def load(self, access: "AccessConfig", loading: "Loading") -> "FastAPI":
        loading.step = "opening the knowledge base"
        from stillroom.server.app import create_app
        from stillroom.server.auth.tenants import Tenants
        from stillroom.telemetry.spans import exporting

        own = self._opened.enter_context(opening.open_stillroom(self._kb, self._settings, create=True))
        tenants = Tenants(own, access.tenants_folder)
        self._opened.callback(tenants.close)
        self.model_name = own.model_name
        if not own.num_documents:
            self._notify(f"{self._kb} has no documents yet: stillroom add PATH --kb {self._kb}, or upload them")
        self._notify(f"loading {own.model_name} ...")
        self._engines.start(partial(setattr, loading, "step"))
        is_front = self._settings.engine.kind == "cluster"
        loading.step = _FRONT_STEP if is_front else "loading the model and the indexes"
        self._warm_up(own)
        if isinstance(self._engines, Replicas):
            _wait_for_starts(own, self._engines)
        config = self._settings.server
        tracing = self._opened.enter_context(exporting(config.otlp_endpoint))
        return create_app(own, tenants=tenants, keys=access.keys, host=config.host, tracing=tracing)

    def _warm_up(self, own: "Stillroom") -> None:
        """Load everything. A front waits for its first engine without limit, because both may start in any order."""
        while True:
            try:
                return own.warm_up()
            except EngineUnavailableError as error:
                if self._settings.engine.kind != "cluster":
                    raise
                logger.warning("%s; the server waits for an engine", error)


def _wait_for_starts(own: "Stillroom", engines: Replicas) -> None:
    """Let requests wait for engines that this server is starting again."""
    from stillroom.backends.cluster_backend import ClusterBackend

    backend = own.load_backend()
    assert isinstance(backend, ClusterBackend)
    backend.engine.num_starting = lambda: engines.num_starting


def end_process() -> NoReturn:
    """End the process without unwinding, because the loading thread may be in native code that cannot be interrupted.

    Files are left as after a kill, which loses nothing (docs/durability.md).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM during the short shutdown, in which threads still run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

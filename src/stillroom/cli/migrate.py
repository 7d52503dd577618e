"""`stillroom migrate`: copy a knowledge base from a folder into PostgreSQL, or back."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import count, line, print_json
from stillroom.cli.options import ConfigOption, JsonOption, QuietOption, folder_of, help_text
from stillroom.cli.progress import counting

HELP = help_text(
    "Copy a knowledge base from a folder into PostgreSQL, or back.",
    "Documents, vectors, metadata and uploaded files are copied; nothing is embedded again. SOURCE stays as it is, and "
    "TARGET is made. Both are compared at the end, every chunk and every vector.",
    "Ctrl-C loses the current batch only; the same command does the rest. Request log and kept KV stay where they are.",
    examples=(
        "stillroom migrate ./kb 'postgresql://anna@db/docs?kb=handbook'",
        "stillroom migrate 'postgresql://anna@db/docs?kb=handbook' ./kb --json",
    ),
)

_KINDS = "a folder, or postgresql://user@host/database?kb=name."


def migrate(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", parser=folder_of, help=f"From: {_KINDS}")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", parser=folder_of, help=f"To: {_KINDS}")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.retrieval.knowledge_base import KnowledgeBase
    from stillroom.retrieval.migrating import migrate as run
    from stillroom.retrieval.migrating import side_settings, target_manifest

    settings = opening.load_settings(config)
    shown = counting("copying documents", is_shown=not (quiet or as_json))
    with (
        KnowledgeBase.open(source, side_settings(settings, source)) as opened,
        KnowledgeBase.open(
            target,
            side_settings(settings, target, is_target=True),
            create=target_manifest(opened.manifest, settings.index, target),
        ) as made,
        shown as on_progress,
    ):
        report = run(opened, made, on_progress)
    if as_json:
        print_json(asdict(report))
    else:
        line(
            f"{count(report.num_documents, 'document')}, {count(report.num_chunks, 'chunk')}: "
            f"{report.num_copied:,} copied now, {count(report.num_uploads, 'uploaded file')}; equal by digest"
        )

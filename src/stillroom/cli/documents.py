"""`stillroom remove`, `list` and `digest`: remove and list documents, and hash the knowledge base."""

from datetime import datetime
from typing import Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import count, line, note, print_json, printable_name, short_path, size
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, QuietOption, help_text

REMOVE_HELP = help_text(
    "Remove documents from the knowledge base; your files stay.",
    "A target is a file, a folder (everything in it), or a document as `stillroom list` shows it. An uploaded file is "
    "deleted with its last document. A target without documents is reported and does not stop the others; if no target "
    "has any, that is an error.",
    "After an interruption, the same command does the rest.",
    examples=("stillroom remove docs/old.md --kb ./kb", "stillroom remove docs/archive/"),
)
LIST_HELP = help_text(
    "List the indexed documents.",
    examples=("stillroom list --kb ./kb", "stillroom list --json | jq -r '.documents[].document'"),
)

DIGEST_HELP = help_text(
    "Print a hash of everything that determines rankings.",
    "The same documents, settings and seed give the same digest. If two digests differ, their parts show where.",
    examples=("stillroom digest --kb ./kb", "stillroom digest --json"),
)


def remove(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET", help="Files, folders or documents to remove.")],
    kb: KbOption = DEFAULT_KB,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    with opening.open_stillroom(kb, opening.load_settings(config)) as opened:
        report = opened.remove(*targets)
    if as_json:
        counts = {"num_documents": report.num_documents, "num_chunks": report.num_chunks}
        print_json({**counts, "unknown": list(report.unknown)})
        return
    if not quiet:
        line(f"removed {count(report.num_documents, 'document')} ({count(report.num_chunks, 'chunk')})")
    if report.unknown:
        note(f"no documents for {count(len(report.unknown), 'target')}:")
        for target in report.unknown:
            note(f"  {printable_name(target)}")


def list_(kb: KbOption = DEFAULT_KB, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    with opening.open_stillroom(kb, opening.load_settings(config)) as opened:
        documents = opened.documents()
    if as_json:
        from stillroom.rag.as_json import document_as_json

        print_json({"documents": [document_as_json(info) for info in documents]})
        return
    if not documents:
        note("no documents yet; add some: stillroom add PATH")
        return
    line(f"{'chunks':>8}  {'size':>8}  {'added':<16}  document")
    for info in documents:
        added = datetime.fromtimestamp(info.added_at).strftime("%Y-%m-%d %H:%M")
        line(f"{info.num_chunks:>8,}  {size(info.num_bytes):>8}  {added:<16}  {short_path(info.document_id)}")


def digest(kb: KbOption = DEFAULT_KB, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    with opening.open_stillroom(kb, opening.load_settings(config)) as opened:
        parts = opened.digest().to_json()
    if as_json:
        print_json(parts)
        return
    line(parts.pop("digest"))
    for name, value in parts.items():
        line(f"  {name:<9} {value}")

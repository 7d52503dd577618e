"""`stillroom add`, `remove` and `list`: what the knowledge base holds."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli import room
from stillroom.cli.console import count, duration, line, note, print_json, short_path, size
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, QuietOption, help_text
from stillroom.cli.progress import showing_progress
from stillroom.core.metadata import typed
from stillroom.errors import UsageError

if TYPE_CHECKING:
    from stillroom.retrieval.ingest import AddReport

ADD_HELP = help_text(
    "Index files and folders.",
    "What has not changed since the last time costs nothing, and what is gone from a folder is forgotten. A file that "
    "cannot be read is reported at the end and does not stop the others; the exit code is then 1.",
    "Interrupting loses nothing that was finished: the same command does the rest.",
    examples=(
        "stillroom add docs/ --kb ./kb",
        "stillroom add handbook.md notes/ corpus.jsonl",
        "stillroom add contracts/ --meta team=legal --meta year=2024",
        "stillroom add docs/ --json | jq .failures",
    ),
)
REMOVE_HELP = help_text(
    "Forget documents. The files themselves are not touched.",
    "A target is a file, a folder (everything under it), or a document as `stillroom list` shows it.",
    examples=("stillroom remove docs/old.md --kb ./kb", "stillroom remove docs/archive/"),
)
LIST_HELP = help_text(
    "Show what is indexed.",
    examples=("stillroom list --kb ./kb", "stillroom list --json | jq -r '.documents[].document'"),
)

DIGEST_HELP = help_text(
    "Print a hash of everything that decides rankings.",
    "Same documents, same settings and same seed: same digest. Where two differ, the parts say in what.",
    examples=("stillroom digest --kb ./kb", "stillroom digest --json"),
)


def add(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", exists=True, help="Files and folders.")],
    meta: Annotated[
        list[str] | None,
        typer.Option(
            "--meta",
            metavar="NAME=VALUE",
            help="Metadata of all these files, to filter by; repeat it. It holds until they are removed; NAME= takes "
            "it back.",
        ),
    ] = None,
    kb: KbOption = DEFAULT_KB,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    with (
        room.open_room(kb, room.settings(config), create=True) as opened,
        showing_progress(is_shown=not (quiet or as_json)) as progress,
    ):
        report = opened.add(*paths, progress=progress, metadata=_metadata(meta or []))
    if as_json:
        print_json(_report_payload(report))
    elif not quiet:
        line(
            f"added {report.num_added}, updated {report.num_updated}, unchanged {report.num_unchanged}, "
            f"removed {report.num_removed}: {count(report.num_chunks, 'chunk')} in {duration(report.seconds)}"
        )
    if report.failures:
        if not as_json:
            note(f"{count(len(report.failures), 'file')} could not be read:")
            for path, reason in report.failures:
                note(f"  {short_path(str(path))}: {reason}")
        raise typer.Exit(1)


def _metadata(pairs: list[str]) -> dict[str, object]:
    """What `--meta` says; a name that is there twice has a list.

    Raises:
        UsageError: a pair is none.
    """
    found: dict[str, list[object]] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name.strip():
            raise UsageError(f"--meta {pair}: give NAME=VALUE, such as --meta team=legal")
        found.setdefault(name.strip(), []).append(typed(text) if text.strip() else None)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _report_payload(report: "AddReport") -> dict[str, object]:
    return {
        "num_added": report.num_added,
        "num_updated": report.num_updated,
        "num_unchanged": report.num_unchanged,
        "num_removed": report.num_removed,
        "num_chunks": report.num_chunks,
        "seconds": report.seconds,
        "failures": [{"path": str(path), "reason": reason} for path, reason in report.failures],
    }


def remove(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET", help="Files, folders or documents.")],
    kb: KbOption = DEFAULT_KB,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    with room.open_room(kb, room.settings(config)) as opened:
        report = opened.remove(*targets)
    if as_json:
        print_json({"num_documents": report.num_documents, "num_chunks": report.num_chunks})
    elif not quiet:
        line(f"removed {count(report.num_documents, 'document')} ({count(report.num_chunks, 'chunk')})")


def list_(kb: KbOption = DEFAULT_KB, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    with room.open_room(kb, room.settings(config)) as opened:
        documents = opened.documents()
    if as_json:
        from stillroom.server.payloads import document_payload

        print_json({"documents": [document_payload(info) for info in documents]})
        return
    if not documents:
        note("no documents yet; add some: stillroom add PATH")
        return
    line(f"{'chunks':>8}  {'size':>8}  {'added':<16}  document")
    for info in documents:
        added = datetime.fromtimestamp(info.added_at).strftime("%Y-%m-%d %H:%M")
        line(f"{info.num_chunks:>8,}  {size(info.num_bytes):>8}  {added:<16}  {short_path(info.document_id)}")


def digest(kb: KbOption = DEFAULT_KB, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    with room.open_room(kb, room.settings(config)) as opened:
        parts = opened.digest().to_json()
    if as_json:
        print_json(parts)
        return
    line(parts.pop("digest"))
    for name, value in parts.items():
        line(f"  {name:<9} {value}")

"""`stillroom add`: index files and folders, once, or again whenever they change."""

import os
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import count, duration, line, note, print_json, printable_name, short_path
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, QuietOption, help_text
from stillroom.cli.progress import showing_progress
from stillroom.core.metadata import parse_scalar
from stillroom.errors import IndexUnavailableError, KnowledgeBaseBusyError, StillroomError, StorageError, UsageError

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom
    from stillroom.retrieval.ingest import AddReport

HELP = help_text(
    "Index files and folders.",
    "Reads PDF, DOCX, PPTX, XLSX, EPUB, HTML, Markdown, reStructuredText, text, source code, notebooks, CSV and JSONL, "
    "and scanned pages and pictures with --ocr. "
    "In folders, hidden files, files named by .gitignore or .stillroomignore, and other formats are skipped.",
    "Unchanged files are skipped, and files deleted from a folder are removed from the index. A file that cannot be "
    "read is reported at the end and does not stop the others; the exit code is then 1.",
    "After an interruption, the same command does the rest.",
    examples=(
        "stillroom add docs/ --kb ./kb",
        "stillroom add handbook.pdf notes/ corpus.jsonl",
        "stillroom add . --exclude drafts/ --exclude '*.csv'",
        "stillroom add docs/ --watch",
        "stillroom add contracts/ --meta team=legal --meta year=2024",
        "stillroom add scans/ --ocr",
        "stillroom add docs/ --json | jq .failures",
    ),
)


def add(  # noqa: PLR0913  one parameter per flag
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Files and folders to index.")],
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="Skip files that match, as in .gitignore; repeatable."),
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option(
            "--meta",
            metavar="NAME=VALUE",
            help="Set metadata of these files, for --where filters; repeatable. It stays until they are removed; "
            "NAME= deletes it.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep running and index every change in the folders, until Ctrl-C.")
    ] = False,
    ocr: Annotated[
        bool,
        typer.Option(
            "--ocr", help="Read scanned pages of PDF files, and image files; needs pip install 'stillroom[ocr]'."
        ),
    ] = False,
    kb: KbOption = DEFAULT_KB,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.retrieval.intake.discovery import check_exists
    from stillroom.retrieval.loaders.ocr_use import check_installed

    metadata = _metadata(meta or [])
    for path in paths:
        check_exists(path)  # before creating a knowledge base
    settings = opening.load_settings(config, {"documents.ocr": "on" if ocr else None})
    if settings.documents.ocr == "on":
        check_installed()
    with opening.open_stillroom(kb, settings, create=True) as opened:
        run = _AddRun(opened, paths, exclude or [], metadata, as_json=as_json, quiet=quiet)
        if watch:
            _watch(run, [Path(os.path.abspath(path)) for path in paths], Path(os.path.abspath(kb)))
        else:
            report = run.run()
            run.show(report)
            if report.failures:
                raise typer.Exit(1)


class _AddRun:
    """Runs one `add`, repeatedly with --watch, and prints its reports."""

    def __init__(
        self,
        opened: "Stillroom",
        paths: list[str],
        exclude: list[str],
        metadata: dict[str, object],
        *,
        as_json: bool,
        quiet: bool,
    ) -> None:
        self.is_quiet = quiet or as_json
        self._as_json = as_json
        self._opened = opened
        self._paths = paths
        self._exclude = exclude
        self._given_metadata = metadata

    def run(self) -> "AddReport":
        with showing_progress(is_shown=not self.is_quiet) as progress:
            return self._opened.add(
                *self._paths, progress=progress, metadata=self._given_metadata, exclude=self._exclude
            )

    def show(self, report: "AddReport", *, indent: int | None = 2) -> None:
        if self._as_json:
            print_json(_payload(report), indent=indent)
            return
        if not self.is_quiet:
            line(
                f"added {report.num_added}, updated {report.num_updated}, unchanged {report.num_unchanged}, "
                f"removed {report.num_removed}: {count(report.num_chunks, 'chunk')} in {duration(report.seconds)}"
            )
            _note_skipped(report)
        if report.failures:
            note(f"{count(len(report.failures), 'file')} could not be read:")
            for path, reason in report.failures:
                note(f"  {short_path(str(path))}: {printable_name(reason)}")


def _watch(run: _AddRun, folders: list[Path], kb: Path) -> None:
    """Index changes until Ctrl-C. Prints the first report, and later ones that differ."""
    from stillroom.retrieval.intake.watching import watch_folders

    follower = _Follower(run)
    if not run.is_quiet:
        note(f"watching {', '.join(short_path(str(folder)) for folder in folders)}; press Ctrl-C to stop")
    try:
        watch_folders(folders, follower.follow, Event(), ignored=kb)
    except KeyboardInterrupt:
        if follower.is_adding:
            raise
        if not run.is_quiet:
            note("stopped watching; the same command continues from here")


class _Follower:
    """Indexes changes and prints reports with new information."""

    def __init__(self, run: _AddRun) -> None:
        self.is_adding = False
        self._adding = run
        self._failures: tuple[tuple[str, str], ...] | None = None
        """Failures of the last run."""
        self._is_blocked = False

    def follow(self) -> bool:
        """Index changes. Returns False if it must be tried again."""
        self.is_adding = True
        is_done = self._add_changes()
        self.is_adding = False
        return is_done

    def _add_changes(self) -> bool:
        try:
            report = self._adding.run()
        except KnowledgeBaseBusyError:  # tried again later
            return False
        except (StorageError, IndexUnavailableError) as error:
            if not self._is_blocked:
                note(f"{error}; still watching, and trying again until it succeeds")
            self._is_blocked = True
            return False
        except StillroomError as error:
            note(f"{error}; still watching")
            return True
        if self._is_blocked:
            note("indexing works again")
            self._is_blocked = False
        if report.failures != self._failures or report.num_added + report.num_updated + report.num_removed:
            self._failures = report.failures
            self._adding.show(report, indent=None)
        return not report.is_worth_repeating


def _note_skipped(report: "AddReport") -> None:
    from stillroom.retrieval.loaders.formats import is_image

    skipped = report.skipped
    parts = (
        (skipped.num_hidden, "hidden"),
        (skipped.num_ignored, "ignored"),
        (skipped.num_other, "of an unsupported format"),
    )
    if any(number for number, _ in parts):
        note("skipped: " + ", ".join(f"{number:,} {what}" for number, what in parts if number))
    if skipped.others:
        names = ", ".join(short_path(str(path)) for path in skipped.others)
        more = ", ..." if skipped.num_other > len(skipped.others) else ""
        images = "; --ocr reads pictures" if any(map(is_image, skipped.others)) else ""
        note(f"  {names}{more}: name a text file to add it whatever its format{images}")


def _metadata(pairs: list[str]) -> dict[str, object]:
    """Parse `--meta` pairs. A repeated name gets a list of values, an empty value None.

    Raises:
        UsageError: a pair is not NAME=VALUE.
    """
    found: dict[str, list[object]] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name.strip():
            raise UsageError(f"--meta {pair}: expected NAME=VALUE, such as --meta team=legal")
        found.setdefault(name.strip(), []).append(parse_scalar(text) if text.strip() else None)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _payload(report: "AddReport") -> dict[str, object]:
    skipped = report.skipped
    return {
        "num_added": report.num_added,
        "num_updated": report.num_updated,
        "num_unchanged": report.num_unchanged,
        "num_removed": report.num_removed,
        "num_chunks": report.num_chunks,
        "seconds": report.seconds,
        "failures": [{"path": str(path), "reason": reason} for path, reason in report.failures],
        "skipped": {
            "hidden": skipped.num_hidden,
            "ignored": skipped.num_ignored,
            "other": skipped.num_other,
            "other_files": [str(path) for path in skipped.others],
        },
    }

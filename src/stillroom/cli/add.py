"""`stillroom add`: files and folders into the knowledge base, once, or again whenever they change."""

import os
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import count, duration, line, note, print_json, printable_name, short_path
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, QuietOption, help_text
from stillroom.cli.progress import showing_progress
from stillroom.core.metadata import typed
from stillroom.errors import IndexUnavailableError, KnowledgeBaseBusyError, StillroomError, StorageError, UsageError

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom
    from stillroom.retrieval.ingest import AddReport

HELP = help_text(
    "Index files and folders.",
    "PDF, DOCX, PPTX, XLSX, EPUB, HTML, Markdown, reStructuredText, text, source code, notebooks, CSV and JSONL. In "
    "folders, what is hidden, what .gitignore or .stillroomignore name, and other formats are passed over.",
    "What has not changed since the last time costs nothing, and what is gone from a folder is forgotten. A file that "
    "cannot be read is reported at the end and does not stop the others; the exit code is then 1.",
    "Interrupting loses nothing that was finished: the same command does the rest.",
    examples=(
        "stillroom add docs/ --kb ./kb",
        "stillroom add handbook.pdf notes/ corpus.jsonl",
        "stillroom add . --exclude drafts/ --exclude '*.csv'",
        "stillroom add docs/ --watch",
        "stillroom add contracts/ --meta team=legal --meta year=2024",
        "stillroom add docs/ --json | jq .failures",
    ),
)


def add(  # noqa: PLR0913  one parameter per flag
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Files and folders.")],
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="Pass over what fits, as in .gitignore; repeat it."),
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option(
            "--meta",
            metavar="NAME=VALUE",
            help="Metadata of all these files, to filter by; repeat it. It holds until they are removed; NAME= takes "
            "it back.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on: take over every change in the folders, until Ctrl-C.")
    ] = False,
    kb: KbOption = DEFAULT_KB,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.retrieval.intake.discovery import check_exists

    said = _metadata(meta or [])
    for path in paths:
        check_exists(path)  # before a knowledge base is made for nothing
    with opening.open_stillroom(kb, opening.load_settings(config), create=True) as opened:
        adding = _Adding(opened, paths, exclude or [], said, as_json=as_json, quiet=quiet)
        if watch:
            _watch(adding, [Path(os.path.abspath(path)) for path in paths], Path(os.path.abspath(kb)))
        else:
            report = adding.run()
            adding.show(report)
            if report.failures:
                raise typer.Exit(1)


class _Adding:
    """One `add`, as often as it is needed, and how it is shown."""

    def __init__(
        self,
        opened: "Stillroom",
        paths: list[str],
        exclude: list[str],
        said: dict[str, object],
        *,
        as_json: bool,
        quiet: bool,
    ) -> None:
        self.is_quiet = quiet or as_json
        self._as_json = as_json
        self._opened = opened
        self._paths = paths
        self._exclude = exclude
        self._said = said

    def run(self) -> "AddReport":
        with showing_progress(is_shown=not self.is_quiet) as progress:
            return self._opened.add(*self._paths, progress=progress, metadata=self._said, exclude=self._exclude)

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


def _watch(adding: _Adding, folders: list[Path], kb: Path) -> None:
    """Follow the folders until Ctrl-C. What is shown: the first report, and later ones that say something new."""
    from stillroom.retrieval.intake.watching import watch_folders

    follower = _Follower(adding)
    if not adding.is_quiet:
        note(f"watching {', '.join(short_path(str(folder)) for folder in folders)}; Ctrl-C ends it")
    try:
        watch_folders(folders, follower.follow, Event(), ignored=kb)
    except KeyboardInterrupt:
        if follower.is_adding:
            raise
        if not adding.is_quiet:
            note("stopped watching; nothing is lost, the same command goes on from here")


class _Follower:
    """Takes over what changed, and shows of it what is new."""

    def __init__(self, adding: _Adding) -> None:
        self.is_adding = False
        self._adding = adding
        self._failures: tuple[tuple[str, str], ...] | None = None
        """What could not be read last time."""
        self._is_held_up = False

    def follow(self) -> bool:
        """False where it has to be tried again."""
        self.is_adding = True
        is_done = self._take_over()
        self.is_adding = False
        return is_done

    def _take_over(self) -> bool:
        try:
            report = self._adding.run()
        except KnowledgeBaseBusyError:  # what changed is still there when he is done
            return False
        except (StorageError, IndexUnavailableError) as error:
            if not self._is_held_up:
                note(f"{error}; watching on, and trying again until it works")
            self._is_held_up = True
            return False
        except StillroomError as error:
            note(f"{error}; watching on")
            return True
        if self._is_held_up:
            note("it works again")
            self._is_held_up = False
        if report.failures != self._failures or report.num_added + report.num_updated + report.num_removed:
            self._failures = report.failures
            self._adding.show(report, indent=None)
        return not report.is_worth_repeating


def _note_skipped(report: "AddReport") -> None:
    skipped = report.skipped
    parts = (
        (skipped.num_hidden, "hidden"),
        (skipped.num_ignored, "ignored"),
        (skipped.num_other, "of no format that is read"),
    )
    if any(number for number, _ in parts):
        note("passed over: " + ", ".join(f"{number:,} {what}" for number, what in parts if number))


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
        "skipped": {"hidden": skipped.num_hidden, "ignored": skipped.num_ignored, "other": skipped.num_other},
    }

"""`stillroom verify`: whether SQLite, vectors and postings of a knowledge base are whole and agree. Needs no model."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli import opening
from stillroom.cli.console import count, duration, line, print_json
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, QuietOption, help_text
from stillroom.cli.progress import counting

if TYPE_CHECKING:
    from stillroom.retrieval.verify.report import VerifyReport

HELP = help_text(
    "Check that the knowledge base is whole: SQLite, vectors and postings, and each against the others.",
    "Every text is compared with its checksum, every vector and every word with what the indexes hold, and every "
    "uploaded file with what was indexed of it. Each finding says what it means. Ends with code 1 if there is any, "
    "with --repair too; the next run does not find again what was repaired.",
    "--repair makes SQLite whole first: rows without their other half go, a lost vector is embedded again, and a "
    "document that lost a part is removed, so that adding its file reads it again. Then it makes anew each index that "
    "differs. --kv also sweeps and reads every record of kept KV, as `stillroom cache verify` does.",
    examples=("stillroom verify --kb ./kb", "stillroom verify --repair", "stillroom verify --json | jq .findings"),
)


def verify(
    kb: KbOption = DEFAULT_KB,
    repair: Annotated[bool, typer.Option("--repair", help="Make whole what can be.")] = False,
    kv: Annotated[bool, typer.Option("--kv", help="Check the kept KV, too; damaged records are removed.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    with (
        opening.open_stillroom(kb, opening.load_settings(config)) as opened,
        counting("checking", is_shown=not (quiet or as_json)) as tell,
    ):
        report = opened.verify(repair=repair, progress=tell)
    swept, records = _records(kb, is_quiet=quiet or as_json) if kv else (0, [])
    failures = [failure for one in records for failure in one["failures"]]
    command = _repair_command(kb, config) if report.needs_repair and not repair else None
    if as_json:
        kept = {"kv": records, "num_swept": swept} if kv else {}
        print_json({**report.to_json(), "repair_command": command, **kept})
    else:
        _show(report)
        if command is not None:
            line(f"to repair: {command}")
        for failure in failures:
            line(f"kv: {failure['record']} is damaged: {failure['reason']}")
    if failures or not report.is_clean:
        raise typer.Exit(1)


def _repair_command(kb: Path, config: Path | None) -> str:
    words = ["stillroom", "verify", "--repair", "--kb", str(kb)]
    return shlex.join(words if config is None else [*words, "--config", str(config)])


def _show(report: "VerifyReport") -> None:
    for finding in report.findings:
        line(f"{finding.part}: {finding.problem} ({finding.num:,}){' - repaired' if finding.is_repaired else ''}")
        line(f"  {finding.meaning}")
        if finding.examples:
            line(f"  such as {', '.join(finding.examples)}")
    what = f"{count(report.num_documents, 'document')}, {count(report.num_chunks, 'chunk')}"
    found = "all is well" if report.is_clean else count(len(report.findings), "finding")
    line(f"{what} checked in {duration(report.seconds)}: {found}")


def _records(kb: Path, *, is_quiet: bool) -> tuple[int, list[dict[str, Any]]]:
    """The number of records that a sweep removed, and what checking the others found."""
    from stillroom.cli.cache import show_swept, sweep_records, verify_records

    swept = sweep_records(kb)
    if not is_quiet:
        show_swept(swept)
    return swept.num_removed, verify_records(kb, is_quiet=is_quiet)

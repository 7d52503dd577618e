"""`stillroom verify`: check SQLite, vectors and postings of a knowledge base against each other. Needs no model."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli import opening
from stillroom.cli.console import count, duration, line, print_json
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, QuietOption, help_text
from stillroom.cli.progress import counting

if TYPE_CHECKING:
    from stillroom.retrieval.verify.verify_report import VerifyReport

HELP = help_text(
    "Check the knowledge base: SQLite, vectors and postings, and each against the others.",
    "It compares every text with its checksum, every vector and word with the indexes, and every uploaded file with "
    "its indexed text. Each finding is explained. The exit code is 1 if there are findings, also with --repair; the "
    "next run does not report repaired findings again.",
    "--repair repairs SQLite first: it deletes incomplete rows, embeds lost vectors again, and removes documents that "
    "lost a part, so that adding their files reads them again. Then it rebuilds each index that differs. --kv also "
    "checks every record of kept KV, as `stillroom cache verify` does.",
    examples=("stillroom verify --kb ./kb", "stillroom verify --repair", "stillroom verify --json | jq .findings"),
)


def verify(
    kb: KbOption = DEFAULT_KB,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired.")] = False,
    kv: Annotated[bool, typer.Option("--kv", help="Also check kept KV, and remove damaged records.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    with (
        opening.open_stillroom(kb, opening.load_settings(config)) as opened,
        counting("checking", is_shown=not (quiet or as_json)) as on_progress,
    ):
        report = opened.verify(repair=repair, progress=on_progress)
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
    if (unfinished := report.reembedding) is not None:
        line(
            f"a change of the embedder is not complete: {unfinished.num_done:,} of "
            f"{count(unfinished.num_total, 'chunk')} are embedded with {unfinished.model}; searches use the present "
            f"embedder until `stillroom reembed --model {shlex.quote(unfinished.model)}` has done the rest"
        )
    what = f"{count(report.num_documents, 'document')}, {count(report.num_chunks, 'chunk')}"
    found = "no findings" if report.is_clean else count(len(report.findings), "finding")
    line(f"{what} checked in {duration(report.seconds)}: {found}")


def _records(kb: Path, *, is_quiet: bool) -> tuple[int, list[dict[str, Any]]]:
    """Sweep and check kept KV. Returns the number of swept records, and one report per model."""
    from stillroom.cli.cache import show_swept, sweep_records, verify_records

    swept = sweep_records(kb)
    if not is_quiet:
        show_swept(swept)
    return swept.num_removed, verify_records(kb, is_quiet=is_quiet)

"""`stillroom cache`: show, check or remove the KV that a knowledge base keeps on disk. Needs no model."""

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stillroom.cli.console import count, line, note, print_json, size
from stillroom.cli.options import DEFAULT_KB, JsonOption, KbOption, QuietOption, help_text
from stillroom.cli.progress import counting
from stillroom.errors import KnowledgeBaseNotFoundError, StorageError
from stillroom.kvstore.files import KV_FOLDER, PreparedUsage, clear_all, fingerprints, usage

if TYPE_CHECKING:
    from stillroom.kvstore.sweep import SweepReport

app = typer.Typer(no_args_is_help=True)

STATS_HELP = help_text(
    "Show how much KV is kept on disk for each model, and how much of it was prepared before a question.",
    "KV on device and host belongs to a running server; its /metrics shows it.",
    examples=("stillroom cache stats --kb ./kb", "stillroom cache stats --json | jq .prepared"),
)
CLEAR_HELP = help_text(
    "Remove all KV from disk; answers do not change, but their KV must be computed again.",
    "A running server may stay up: it computes KV that it does not find. Its metrics count such KV until it looks for "
    "it, and what was prepared is prepared again after a restart.",
    examples=("stillroom cache clear --kb ./kb",),
)
VERIFY_HELP = help_text(
    "Check every record of KV on disk against its checksum.",
    "Damaged records are removed; while a server uses the folder they are only reported. Every record is also checked "
    "when it is loaded, so a damaged one is never used. The exit code is 1 if any was damaged.",
    "Records of documents and tenants that no longer exist are removed first, as a server does when it starts.",
    examples=("stillroom cache verify --kb ./kb", "stillroom cache verify --json"),
)


@app.command("stats", help=STATS_HELP)
def stats(kb: KbOption = DEFAULT_KB, as_json: JsonOption = False) -> None:
    found = usage(_folder(kb))
    total = sum(one.num_bytes for one in found)
    if as_json:
        models = [
            {
                "model": one.fingerprint.hex(),
                "num_records": one.num_records,
                "num_bytes": one.num_bytes,
                "prepared": asdict(one.prepared),
            }
            for one in found
        ]
        prepared = asdict(sum((one.prepared for one in found), PreparedUsage()))
        num_records = sum(one.num_records for one in found)
        print_json({"num_records": num_records, "num_bytes": total, "prepared": prepared, "models": models})
        return
    for one in found:
        line(f"{one.fingerprint.hex()[:16]}  {count(one.num_records, 'record'):>14}  {size(one.num_bytes):>10}")
        if one.prepared.num_chunks:
            line(f"  {_described(one.prepared)}")
    line(f"{count(len(found), 'model')}, {size(total)} on disk")


def _described(prepared: PreparedUsage) -> str:
    bits = " or ".join(", ".join(map(str, sorted(prepared.chunks_by_bits))).rsplit(", ", 1))
    return (
        f"prepared: {count(prepared.num_chunks, 'chunk')}, {size(prepared.num_bytes)} in {bits} bits a number, "
        f"{prepared.num_used:,} used by questions"
    )


@app.command("clear", help=CLEAR_HELP)
def clear(kb: KbOption = DEFAULT_KB, as_json: JsonOption = False) -> None:
    removed, failures = clear_all(_folder(kb))
    if as_json:
        print_json({"num_removed": removed, "num_failures": len(failures)})
    else:
        line(f"removed {count(removed, 'record')}")
    if failures:
        raise StorageError(f"{count(len(failures), 'record')} could not be removed; the first: {failures[0]}")


@app.command("verify", help=VERIFY_HELP)
def verify(kb: KbOption = DEFAULT_KB, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    swept = sweep_records(kb)
    reports = verify_records(kb, is_quiet=quiet or as_json)
    failures = [failure for report in reports for failure in report["failures"]]
    if as_json:
        print_json({"models": reports, "num_failures": len(failures), "num_swept": swept.num_removed})
    else:
        show_swept(swept)
        for failure in failures:
            line(f"damaged: {failure['record']}  {failure['reason']}")
        num_records = sum(report["num_records"] for report in reports)
        line(f"{count(num_records, 'record')} checked, {len(failures)} damaged")
    if failures:
        raise typer.Exit(1)


def sweep_records(kb: Path) -> "SweepReport":
    from stillroom.rag.kv_sweep import sweep_kv

    _folder(kb)
    return sweep_kv(kb.absolute()).report


def show_swept(swept: "SweepReport") -> None:
    if swept.num_removed:
        line(f"removed {count(swept.num_removed, 'record')} of documents or tenants that no longer exist")


def verify_records(kb: Path, *, is_quiet: bool) -> list[dict[str, Any]]:
    """Check all KV of a knowledge base; return one report per model."""
    folder = _folder(kb)
    return [_verify_one(folder, fingerprint, is_quiet=is_quiet) for fingerprint in fingerprints(folder)]


def _verify_one(folder: Path, fingerprint: bytes, *, is_quiet: bool) -> dict[str, Any]:
    from stillroom.kvstore.disk import DiskStore

    store = DiskStore(folder, fingerprint)
    try:
        if not store.is_writer and not is_quiet:
            note("damaged records are only reported, because this process cannot remove them")
        with counting("checking", is_shown=not is_quiet) as on_progress:
            report = store.verify(on_progress)
    finally:
        store.close()
    return {
        "model": fingerprint.hex(),
        "num_records": report.num_records + len(report.failures),
        "num_bytes": report.num_bytes,
        "failures": [{"record": key.hex(), "reason": str(defect)} for key, defect in report.failures.items()],
    }


def _folder(kb: Path) -> Path:
    if not kb.is_dir():
        raise KnowledgeBaseNotFoundError(f"there is no knowledge base at {kb}; name its folder with --kb")
    folder = kb / KV_FOLDER
    with contextlib.suppress(FileNotFoundError):
        os.scandir(folder).close()  # raises OSError for an unreadable folder
    return folder

"""`stillroom bench papers`: run the commands of a paper's rows again, and compare with what is committed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stillroom.cli.console import count, line, note, print_json
from stillroom.cli.options import JsonOption, QuietOption, expanded, help_text
from stillroom.config.places import cache_root
from stillroom_bench.cli.flags import WorkDirOption, distinct
from stillroom_bench.instrument.option_flags import named_pythons

if TYPE_CHECKING:
    from stillroom_bench.papers.outcome import ReportOutcome, RowOutcome

FAILED, INTERRUPTED = 1, 130
_SHOWN = 5
"""Most changed cells of a report that are printed."""

HELP = help_text(
    "Run the commands of a paper's claims again, and say whether their figures agree with the committed ones.",
    "The claims are those of docs/papers.md, and the commands those of the reports that it links to, so it runs in a "
    "checkout. Finished results are kept in a folder and not run again; Ctrl-C loses only the command that runs. A "
    "command whose data is missing is skipped, and a runtime that is not named with --peer is left out. A figure "
    "agrees if its new 95 % interval overlaps the committed one. The exit code is 1 if a command failed.",
    examples=(
        "stillroom bench papers --paper ragcache --list",
        "stillroom bench papers --paper cache-craft --data data --minutes 30",
        "stillroom bench papers --paper ragcache --data data --peer vllm=vllm/bin/python",
        "stillroom bench papers --paper llmds --minutes 0 --json | jq '.rows[].numbers'",
    ),
)


def papers(  # noqa: PLR0913  one parameter per flag
    paper: Annotated[
        Literal["ragcache", "cache-craft", "vectorliterag", "llmds"],
        typer.Option("--paper", help="Whose claims."),
    ],
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.0,
            metavar="N",
            help="Stop after these minutes; default: when all have run. 0 runs nothing and shows what has finished.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Folder with the data sets; default: ../shared/data of the checkout, if there is one.",
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME=PYTHON",
            callback=distinct,
            help="A runtime to compare with, and the Python that has it installed; can be repeated.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--report", metavar="NAME", callback=distinct, help="Only this report; can be repeated."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="DIR",
            callback=expanded,
            help="Folder of the finished results; default: papers in the work folder.",
        ),
    ] = None,
    checkout: Annotated[
        Path | None,
        typer.Option(
            "--checkout", metavar="DIR", exists=True, file_okay=False, help="Checkout of Stillroom; default: this one."
        ),
    ] = None,
    is_list: Annotated[bool, typer.Option("--list", help="List the commands and run none.")] = False,
    work_dir: WorkDirOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.papers.outcome import outcomes
    from stillroom_bench.papers.page import PAPERS, claims_of, find_checkout
    from stillroom_bench.papers.repeat import Ended, Places, chosen_runs, run_all, runs_of

    root, folder = find_checkout(checkout).resolve(), (work_dir or cache_root() / "bench").resolve()
    found_data = data or root.parent / "shared" / "data"
    places = Places(
        root,
        found_data.resolve() if found_data.is_dir() else None,
        folder,
        (results or folder / "papers").resolve(),
        named_pythons(peers or ()),
    )
    claims = claims_of((root / "docs" / "papers.md").read_text(encoding="utf-8"), PAPERS[paper])
    runs = chosen_runs(runs_of(claims, places), only or ())
    code, ended = 0, dict[str, Ended]()
    say = (lambda _: None) if quiet else note
    if not is_list:
        try:
            run_all(runs, places, minutes, say, ended)
        except KeyboardInterrupt:
            say(f"stopped; finished results are kept in {places.results}; run the same command again to do the rest")
            code = INTERRUPTED
    rows, reports = outcomes(claims, runs, ended, root)
    code = code or (FAILED if any(one.status == "failed" for one in ended.values()) else 0)
    if as_json:
        shown = [] if is_list else [row.as_json() for row in rows]
        print_json({"paper": PAPERS[paper], "reports": [one.as_json() for one in reports], "rows": shown})
    elif is_list:
        _show_list(reports)
    else:
        _show(rows, reports)
    if code:
        raise typer.Exit(code)


def _show_list(reports: "list[ReportOutcome]") -> None:
    for one in reports:
        minutes = "" if one.run.minutes is None else f", about {one.run.minutes:.3g} minutes"
        line(f"{one.run.name}: {one.state}{minutes}{_without(one)}")
        if one.run.arguments:
            line(f"  {one.run.line}")


def _show(rows: "list[RowOutcome]", reports: "list[ReportOutcome]") -> None:
    for row in rows:
        if not any(one.agreement for one in row.reports):
            continue
        line(row.claim.claim)
        line(f"  paper: {row.claim.paper or '-'}")
        if not row.numbers:
            line(f"  ours: {row.claim.ours}")
            line("  this row quotes no interval; see its report below")
        for number in row.numbers:
            line(f"  committed {number.committed}, now {number.now or '-'}: {number.verdict} ({number.figure})")
        line()
    for one in reports:
        line(f"{one.run.name}: {one.state}{_without(one)}")
        if one.agreement is not None:
            found = one.agreement
            line(
                f"  of {count(len(found.figures), 'figure')} with an interval {found.count('agrees'):,} agree, "
                f"{found.count('differs'):,} differ, {found.count('absent'):,} are absent; of "
                f"{count(found.num_cells, 'table cell')} without one {found.num_same:,} are the same"
            )
            for cell in found.changed[:_SHOWN]:
                line(f"  committed {cell.committed}, now {cell.now or '-'} ({cell.figure})")
            if len(found.changed) > _SHOWN:
                line(f"  and {len(found.changed) - _SHOWN:,} more cells; all with --json")
            line(f"  committed on {one.committed_on}; now on {one.now_on}")


def _without(one: "ReportOutcome") -> str:
    return f"; without {', '.join(one.run.without)} (--peer NAME=PYTHON)" if one.run.without else ""

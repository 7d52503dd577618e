"""`stillroom bench`: measure on one's own machine and documents."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from stillroom.cli import room
from stillroom.cli.bench_report import (
    CompareOption,
    Delivery,
    HtmlOption,
    OutputOption,
    RepeatOption,
    SeedOption,
    deliver,
    show_run,
)
from stillroom.cli.console import count, duration, line, note, print_json
from stillroom.cli.options import ConfigOption, JsonOption, QuietOption, help_text
from stillroom.config.settings import SearchMode
from stillroom.errors import UsageError

if TYPE_CHECKING:
    from stillroom.bench.relevance import RetrievalReport

app = typer.Typer(no_args_is_help=True)

RETRIEVAL_HELP = help_text(
    "Measure how often a search finds what people judged relevant.",
    "A data set is a folder in BEIR layout: corpus.jsonl, queries.jsonl and qrels.tsv. Its index is built by the first "
    "run, which may take minutes, and kept in the work folder for the next ones.",
    "Recall@k is the share of a query's relevant documents that are among the first k, averaged over the queries.",
    examples=(
        "stillroom bench retrieval --dataset data/nfcorpus",
        "stillroom bench retrieval --dataset data/nfcorpus --dataset data/fiqa --mode hybrid --json",
    ),
)

STRUCTURES_HELP = help_text(
    "Measure the heap, the token cache and the sketch beside the usual alternatives.",
    examples=(
        "stillroom bench structures",
        "stillroom bench structures --repeat 30 --output structures.json --html structures.html",
        "stillroom bench structures --compare structures.json",
    ),
)


@app.callback()
def top() -> None:
    """Measure on your own machine and documents."""


@app.command("retrieval", help=RETRIEVAL_HELP)
def retrieval(
    datasets: Annotated[
        list[Path],
        typer.Option("--dataset", metavar="DIR", exists=True, file_okay=False, help="A data set; can be repeated."),
    ],
    modes: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="hybrid|dense|sparse", help="Only this mode; can be repeated."),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option("--work-dir", metavar="DIR", help="Where indexes are kept; without it, the user's cache folder."),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    settings = room.settings(config)
    chosen = [_mode(word) for word in modes or get_args(SearchMode)]
    from stillroom.bench.relevance import run_retrieval

    reports = []
    for dataset in datasets:
        if not quiet:
            note(f"measuring {dataset} ...")
        report = run_retrieval(dataset, work_dir or cache_folder(), settings, chosen)
        reports.append(report)
        if not as_json:
            _show(report)
    if as_json:
        print_json({"reports": [report.to_json() for report in reports]})


@app.command("structures", help=STRUCTURES_HELP)
def structures(  # noqa: PLR0913  one parameter per flag
    repeat: RepeatOption = 10,
    seed: SeedOption = 0,
    operations: Annotated[
        int, typer.Option("--operations", min=1000, metavar="N", help="Operations per run of an arm.")
    ] = 20_000,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.bench.structures import run_structures

    result = run_structures(repeat=repeat, seed=seed, count=operations, on_run=None if quiet else show_run)
    deliver(result, Delivery(as_json, output, html, compare))


def _mode(word: str) -> SearchMode:
    for mode in get_args(SearchMode):
        if word == mode:
            return cast(SearchMode, mode)
    raise UsageError(f"--mode {word}: it must be one of {', '.join(get_args(SearchMode))}")


def cache_folder() -> Path:
    """The user's own cache folder, as the XDG base directory specification names it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stillroom" / "bench"


def _show(report: "RetrievalReport") -> None:
    sizes = ", ".join(
        count(number, noun) for number, noun in ((report.num_documents, "document"), (report.num_chunks, "chunk"))
    )
    queries = f"{report.num_queries:,} {'query' if report.num_queries == 1 else 'queries'}"
    line(f"{report.dataset}: {sizes}, {queries}; index ready in {duration(report.build_seconds)}")
    line("  mode    recall@5  recall@10  mean search  slowest")
    for mode in report.modes:
        line(
            f"  {mode.mode:<6}  {mode.recall_at_5:>8.4f}  {mode.recall_at_10:>9.4f}"
            f"  {duration(mode.mean_search_seconds):>11}  {duration(mode.max_search_seconds):>7}"
        )

"""`stillroom bench filters`: its flags."""

from typing import Annotated

import typer

from stillroom.cli.console import note
from stillroom.cli.options import JsonOption, QuietOption, help_text
from stillroom.config.places import cache_root
from stillroom_bench.cli.delivery import (
    CompareOption,
    DatasetsOption,
    Delivery,
    HtmlOption,
    OutputOption,
    RepeatOption,
    SeedOption,
    WorkDirOption,
    deliver,
)

FILTERS_HELP = help_text(
    "Measure recall and latency of approximate indexes where a filter leaves 50 %, 10 %, 1 % and 0.1 % of the chunks.",
    "Filters leave chunks at random, or those of one subject. Beside what Stillroom chooses run the two ways that it "
    "chooses between: comparing all that is allowed, and walking or scanning the index in any case.",
    examples=(
        "stillroom bench filters --dataset data/nfcorpus",
        "stillroom bench filters --dataset data/nfcorpus --size 200000 --output filters.json",
    ),
)


def filters(  # noqa: PLR0913  one parameter per flag
    datasets: DatasetsOption,
    size: Annotated[int, typer.Option("--size", min=1, metavar="N", help="Vectors in the indexes.")] = 100_000,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.quality.filters import run_filters

    result = run_filters(
        datasets,
        work_dir or cache_root() / "bench",
        size=size,
        repeat=repeat,
        seed=seed,
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html, compare))

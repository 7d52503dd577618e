"""`stillroom bench convergence`: its flags."""

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

CONVERGENCE_HELP = help_text(
    "Measure how early a search in stages shows the documents that it will end with, and what the stages cost.",
    "Dense searches run over real and made vectors, whole ones over the real documents. For each index: after which "
    "share of the stages the first 1, 3 and 5 documents stay as they are, and how often the last list is the plain "
    "search's.",
    examples=(
        "stillroom bench convergence --dataset data/nq-gold",
        "stillroom bench convergence --dataset data/nq-gold --size 50000 --stages 16 --output convergence.json",
    ),
)


def convergence(  # noqa: PLR0913  one parameter per flag
    datasets: DatasetsOption,
    size: Annotated[int, typer.Option("--size", min=100, metavar="N", help="Vectors in the dense indexes.")] = 20_000,
    num_stages: Annotated[int, typer.Option("--stages", min=2, metavar="N", help="Stages of a search.")] = 8,
    repeat: RepeatOption = 7,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.convergence import run_convergence

    result = run_convergence(
        datasets,
        work_dir or cache_root() / "bench",
        size=size,
        num_stages=num_stages,
        repeat=repeat,
        seed=seed,
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html, compare))

"""`stillroom bench pipeline speculation`: its flags."""

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
    distinct,
)

SPECULATION_HELP = help_text(
    "Measure what it gains that the model begins to read the likely documents while the search goes on.",
    "Searches of an IVF-PQ index look at 12.5 to 100 % of its lists; prompts of two documents run on a model of random "
    "weights with 135 million parameters. Compared are: search first, begin early, and begin early where it pays; with "
    "one question at a time, and with four.",
    examples=(
        "stillroom bench pipeline speculation --dataset data/nq-gold",
        "stillroom bench pipeline speculation --dataset data/nq-gold --size 2000000 --output speculation.json",
    ),
)


def speculation(  # noqa: PLR0913  one parameter per flag
    datasets: DatasetsOption,
    size: Annotated[int, typer.Option("--size", min=10_000, metavar="N", help="Vectors in the index.")] = 500_000,
    num_questions: Annotated[
        int, typer.Option("--questions", min=1, metavar="N", help="Questions per run of an arm.")
    ] = 32,
    shares: Annotated[
        list[float] | None,
        typer.Option(
            "--share",
            min=0.001,
            max=1.0,
            metavar="SHARE",
            callback=distinct,
            help="Of the lists, searched; can be repeated.",
        ),
    ] = None,
    num_clients: Annotated[
        list[int] | None,
        typer.Option(
            "--clients", min=1, metavar="N", callback=distinct, help="Questions at the same time; can be repeated."
        ),
    ] = None,
    num_stages: Annotated[int, typer.Option("--stages", min=2, metavar="N", help="Stages of a search.")] = 4,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.speculation import SpeculationScope, run_speculation

    given = SpeculationScope()
    scope = SpeculationScope(
        size=size,
        num_questions=num_questions,
        shares=tuple(shares or given.shares),
        num_clients=tuple(num_clients or given.num_clients),
        num_stages=num_stages,
        repeat=repeat,
        seed=seed,
    )
    result = run_speculation(
        datasets, work_dir or cache_root() / "bench", scope, on_progress=(lambda _: None) if quiet else note
    )
    deliver(result, Delivery(as_json, output, html, compare))

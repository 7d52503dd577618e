"""`stillroom bench simulate`: its flags."""

from typing import TYPE_CHECKING, Annotated, cast

import typer

from stillroom.cli.console import note
from stillroom.cli.options import JsonOption, QuietOption, help_text
from stillroom.config.places import cache_root
from stillroom_bench.cli.delivery import (
    Delivery,
    HtmlOption,
    OutputOption,
    SeedOption,
    WorkDirOption,
    deliver,
    distinct,
    refuse_idle,
)

if TYPE_CHECKING:
    from stillroom_bench.loads.reuse_traffic import Companions

SIMULATE_HELP = help_text(
    "Simulate the papers' experiments at their scale: our engine and policies on modelled machines, in minutes.",
    "RAGCache's Figures 13 to 18 and Tables 2 and 4 and Cache-Craft's Figure 22, as ratios between arms with the "
    "paper's number beside ours. No model runs; what computing and loading cost comes from data files in which every "
    "number has its source. --validate runs one workload on a small model for real and simulated. How to read it: "
    "docs/simulate-bench.md.",
    examples=(
        "stillroom bench simulate",
        "stillroom bench simulate --experiment policies --experiment reordering --output simulate.json",
        "stillroom bench simulate --validate",
    ),
)


def simulate(  # noqa: PLR0913  one parameter per flag
    context: typer.Context,
    experiments: Annotated[
        list[str] | None,
        typer.Option(
            "--experiment",
            metavar="NAME",
            callback=distinct,
            help="overall, top-k, large-models, policies, reordering, speculation, scheduling or cache-craft; can be "
            "repeated. Without it, all of them.",
        ),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Compare the simulation with the runtime on this machine, and nothing else."),
    ] = False,
    requests: Annotated[int, typer.Option("--requests", min=1, metavar="N", help="Requests at each rate.")] = 500,
    warmup: Annotated[int, typer.Option("--warmup", min=1, metavar="N", help="Requests before they count.")] = 1000,
    documents: Annotated[int, typer.Option("--documents", min=1, metavar="N", help="Documents asked for.")] = 1500,
    companions: Annotated[
        str,
        typer.Option(
            "--companions",
            metavar="drawn|fixed",
            help="Documents after the first: each drawn, or the same list whenever the first is the same.",
        ),
    ] = "fixed",
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    say = (lambda _: None) if quiet else note
    if validate:
        from stillroom_bench.experiments.simulate_validation import run_validation

        refuse_idle(context, "with --validate", "experiments", "requests", "warmup", "documents", "companions")
        result = run_validation(work_dir or cache_root() / "bench", seed=seed, on_progress=say)
    else:
        from stillroom_bench.experiments.simulate import run_simulate
        from stillroom_bench.experiments.simulated_cases import SimulateOptions

        options = SimulateOptions(
            experiments=experiments or (),
            num_requests=requests,
            num_warm=warmup,
            num_documents=documents,
            companions=cast("Companions", companions),
            seed=seed,
        )
        result = run_simulate(options, say)
    deliver(result, Delivery(as_json, output, html))

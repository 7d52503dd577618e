"""`stillroom bench tiered`: its flags."""

from typing import Annotated

import typer

from stillroom.cli.console import note
from stillroom.cli.options import JsonOption, QuietOption, help_text
from stillroom.config.places import cache_root
from stillroom.errors import UsageError
from stillroom_bench.cli.delivery import (
    CompareOption,
    Delivery,
    HtmlOption,
    OutputOption,
    RepeatOption,
    SeedOption,
    WorkDirOption,
    deliver,
    distinct,
    must_compare,
    refuse_idle,
)

TIERED_HELP = help_text(
    "Measure what it gains that the hot lists of an IVF-PQ index are in RAM and the others on disk.",
    "Vectors and questions are made; a tenth of the lists takes 40 % or 80 % of the accesses. The pages of the lists "
    "on disk are dropped before each batch, so the work folder should be on the disk in question. With --drift: how "
    "long it takes until the hot lists are in RAM again after a sudden shift of what is asked for. With --predict: how "
    "well throughput is told beforehand, by our model and by VectorLiteRAG's formula (its Figure 8).",
    examples=(
        "stillroom bench tiered",
        "stillroom bench tiered --size 500000 --lists 1024 --share 0.2 --batch 1 --batch 16 --output tiered.json",
        "stillroom bench tiered --drift --size 500000 --lists 1024 --share 0.2 --half-life 500 --half-life 1000",
        "stillroom bench tiered --predict --output tiered-model.json",
        "stillroom bench tiered --answers --probes 256 --repeat 3",
    ),
)

_KINDS = {"drift": "is_drift", "answers": "answers", "predict": "predict"}
_IDLE = {
    "": ("half_lives",),
    " --predict": ("half_lives",),
    " --answers": ("shares", "batch_sizes", "half_lives"),
    " --drift": ("batch_sizes",),
}
"""Parameters that a benchmark of this command has no use for."""


def tiered(  # noqa: PLR0913  one parameter per flag
    context: typer.Context,
    size: Annotated[int, typer.Option("--size", min=1000, metavar="N", help="Vectors, of 384 dimensions.")] = 2_000_000,
    nlist: Annotated[int, typer.Option("--lists", min=16, metavar="N", help="Inverted lists.")] = 4096,
    nprobe: Annotated[int, typer.Option("--probes", min=1, metavar="N", help="Lists that a search looks at.")] = 64,
    shares: Annotated[
        list[float] | None,
        typer.Option(
            "--share",
            min=0.01,
            max=0.99,
            metavar="SHARE",
            callback=distinct,
            help="Of the lists in RAM; can be repeated.",
        ),
    ] = None,
    batch_sizes: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, metavar="N", callback=distinct, help="Questions at a time; can be repeated."),
    ] = None,
    is_drift: Annotated[bool, typer.Option("--drift", help="Shift the topics instead.")] = False,
    half_lives: Annotated[
        list[float] | None,
        typer.Option(
            "--half-life",
            min=1,
            metavar="N",
            callback=distinct,
            help="With --drift: questions after which an access counts half; can be repeated.",
        ),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Predicted beside measured throughput, and nothing else.")
    ] = False,
    answers: Annotated[
        bool,
        typer.Option(
            "--answers",
            help="Times to first token with a model of 135 million parameters behind the search, for several targets.",
        ),
    ] = False,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.retrieval.tiers.search_profile import BATCH_SIZES
    from stillroom_bench.experiments.tiered import TieredScope, run_tiered
    from stillroom_bench.experiments.tiered_model import run_prediction

    kinds = [f" --{name}" for name in ("drift", "answers", "predict") if context.params[_KINDS[name]]]
    kind = "".join(kinds)
    if len(kinds) > 1:
        raise UsageError(f"{' and'.join(kinds).strip()} are different benchmarks; give one of them")
    refuse_idle(context, f"with{kind}" if kind else "without --drift", *_IDLE[kind])
    if is_drift and len(shares or ()) > 1:
        raise UsageError("--drift takes one --share")
    must_compare(compare, f"stillroom bench tiered{kind}")
    given = TieredScope()
    scope = TieredScope(
        size=size,
        nlist=nlist,
        nprobe=nprobe,
        shares=tuple(shares or given.shares),
        batch_sizes=tuple(batch_sizes or (BATCH_SIZES if predict else given.batch_sizes)),
        repeat=repeat,
        seed=seed,
    )
    folder, on_progress = work_dir or cache_root() / "bench", (lambda _: None) if quiet else note
    if is_drift:
        from stillroom_bench.experiments.tiered_drift import DriftScope, run_drift

        share, lives = (shares or [DriftScope().share])[0], tuple(half_lives or DriftScope().half_lives)
        result = run_drift(folder, scope, DriftScope(share=share, half_lives=lives), on_progress)
    elif answers:
        from stillroom_bench.experiments.tiered_answers import AnswerScope, run_answers

        result = run_answers(folder, scope, AnswerScope(), on_progress=on_progress)
    else:
        result = (run_prediction if predict else run_tiered)(folder, scope, on_progress)
    deliver(result, Delivery(as_json, output, html, compare))

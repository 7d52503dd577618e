"""`stillroom bench pipeline reordering`: its flags."""

from typing import TYPE_CHECKING, Annotated, cast

import typer

from stillroom.cli.console import note
from stillroom.cli.options import JsonOption, QuietOption, help_text
from stillroom.config.places import cache_root
from stillroom_bench.cli.delivery import (
    CompanionsOption,
    CompareOption,
    Delivery,
    DrawnFromOption,
    HtmlOption,
    LlamaOption,
    OutputOption,
    SeedOption,
    WorkDirOption,
    deliver,
    distinct,
)

if TYPE_CHECKING:
    from stillroom_bench.loads.reuse_traffic import Companions

REORDERING_HELP = help_text(
    "Measure what the order of admission is worth when requests come faster than they are answered, as in RAGCache's "
    "Figure 18.",
    "The same engine with little room for KV admits in the order of arrival, those first who find most of their prompt "
    "kept, with several starvation windows, or those who have least to compute. Each run is also simulated on the "
    "measured costs. How to read it: docs/reordering-bench.md.",
    examples=(
        "stillroom bench pipeline reordering",
        "stillroom bench pipeline reordering --curve nq --load 1.1 --load 2 --window 8 --window 32 --repeat 5",
    ),
)


def reordering(  # noqa: PLR0913  one parameter per flag
    dataset: DrawnFromOption = None,
    model: LlamaOption = None,
    curve: Annotated[str, typer.Option("--curve", metavar="mmlu|nq", help="How unequal documents are asked for.")] = (
        "mmlu"
    ),
    k: Annotated[int, typer.Option("--k", min=1, metavar="N", help="Documents in a prompt.")] = 2,
    companions: CompanionsOption = "drawn",
    loads: Annotated[
        list[float] | None,
        typer.Option(
            "--load",
            metavar="X",
            callback=distinct,
            help="Request rate, times what the order of arrival manages; can be repeated. Without it, 1.5.",
        ),
    ] = None,
    windows: Annotated[
        list[int] | None,
        typer.Option(
            "--window",
            min=0,
            metavar="N",
            callback=distinct,
            help="Later requests that may be admitted before one that waits; can be repeated. Without it, 1, 8, 32 "
            "and 128.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, metavar="N", help="Requests in a run.")] = 150,
    warmup: Annotated[int, typer.Option("--warmup", min=1, metavar="N", help="Requests before they count.")] = 40,
    documents: Annotated[int, typer.Option("--documents", min=1, metavar="N", help="Most documents.")] = 100,
    device_share: Annotated[
        float,
        typer.Option(
            "--device-share",
            min=0.0,
            metavar="X",
            help="Of all documents' KV, what fits on the device beside what running requests need.",
        ),
    ] = 0.02,
    host_share: Annotated[
        float, typer.Option("--host-share", min=0.0, metavar="X", help="Of all documents' KV, what fits on the host.")
    ] = 0.0,
    repeat: Annotated[int, typer.Option("--repeat", min=1, metavar="N", help="Runs, each with fresh caches.")] = 3,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.reordering import ReorderingOptions, run_reordering

    default = ReorderingOptions()
    options = ReorderingOptions(
        curve=curve,
        k=k,
        companions=cast("Companions", companions),
        loads=loads or default.loads,
        windows=windows or default.windows,
        num_requests=requests,
        num_warm=warmup,
        num_documents=documents,
        device_share=device_share,
        host_share=host_share,
        repeat=repeat,
        seed=seed,
    )
    result = run_reordering(
        work_dir or cache_root() / "bench",
        options=options,
        dataset=dataset,
        model=model,
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html, compare))

"""`stillroom bench reuse`: its flags."""

from pathlib import Path
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
    PeersOption,
    SeedOption,
    WorkDirOption,
    deliver,
    distinct,
    named_pythons,
)

if TYPE_CHECKING:
    from stillroom_bench.loads.reuse_traffic import Companions

REUSE_HELP = help_text(
    "Measure what kept KV saves: time to first token against request rate, as in RAGCache's Figures 13 to 15.",
    "Requests come at random moments, some documents far more often than others. Compared are: no reuse, the least "
    "recently used on the device only (prefix caching), three tiers, and if asked for reuse anywhere; vLLM with its "
    "prefix cache and llama.cpp with its prompt cache get the same prompts at the same moments. How to read it: "
    "docs/reuse-bench.md.",
    examples=(
        "stillroom bench reuse",
        "stillroom bench reuse --dataset data/nq --curve mmlu --curve nq --k 1 --k 2 --peer vllm=vllm/bin/python",
        "stillroom bench reuse --search 1000000 --arm off --arm tiers --peer vllm=vllm/bin/python",
        "stillroom bench reuse --k 5 --arm off --arm lru --arm 'anywhere 15%'",
        "stillroom bench reuse --arm off --arm 'cache first' --max-tokens 16 --slo-ttft 0.5 --arrivals azure_conv.csv",
    ),
)


def reuse(  # noqa: PLR0913  one parameter per flag
    dataset: DrawnFromOption = None,
    model: LlamaOption = None,
    curves: Annotated[
        list[str] | None,
        typer.Option(
            "--curve",
            metavar="mmlu|nq",
            callback=distinct,
            help="How unequal documents are asked for; can be repeated.",
        ),
    ] = None,
    ks: Annotated[
        list[int] | None,
        typer.Option("--k", min=1, metavar="N", callback=distinct, help="Documents in a prompt; can be repeated."),
    ] = None,
    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            metavar="X",
            callback=distinct,
            help="Request rate, times what is served without reuse; can be repeated.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, metavar="N", help="Requests at each rate.")] = 25,
    warmup: Annotated[int, typer.Option("--warmup", min=1, metavar="N", help="Requests before they count.")] = 80,
    documents: Annotated[int, typer.Option("--documents", min=1, metavar="N", help="Most documents.")] = 300,
    companions: CompanionsOption = "drawn",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Tokens of an answer.")] = 1,
    search: Annotated[
        int,
        typer.Option(
            "--search",
            min=0,
            metavar="VECTORS",
            help="Search a FAISS index of so many made vectors before each prompt, in every runtime; peers need "
            "faiss-cpu, too. 0: no search.",
        ),
    ] = 0,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            "--arrivals",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A trace to take the moments of requests from, at the given rates: Azure's .csv or Mooncake's .jsonl; "
            "without it, a Poisson process.",
        ),
    ] = None,
    slo_ttft: Annotated[
        float,
        typer.Option(
            "--slo-ttft", metavar="SECONDS", help="Goodput counts requests whose first token comes within it."
        ),
    ] = 1.0,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="NAME",
            callback=distinct,
            help="off (always needed), lru, pgdsf, tiers, 'cache first', 'anywhere 15%' or 'anywhere 30%'; can be "
            "repeated. Without it, the first four.",
        ),
    ] = None,
    peers: PeersOption = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, metavar="N", help="Runs, each with fresh caches.")] = 2,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.reuse import ReuseOptions, run_reuse

    default = ReuseOptions()
    options = ReuseOptions(
        curves=curves or default.curves,
        ks=ks or default.ks,
        rates=rates or default.rates,
        num_requests=requests,
        num_warm=warmup,
        num_documents=documents,
        companions=cast("Companions", companions),
        max_tokens=max_tokens,
        num_vectors=search,
        slo_ttft=slo_ttft,
        repeat=repeat,
        seed=seed,
        arms=arms or default.arms,
    )
    result = run_reuse(
        work_dir or cache_root() / "bench",
        options=options,
        dataset=dataset,
        model=model,
        arrivals=arrivals,
        peers=named_pythons(peers),
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html, compare))

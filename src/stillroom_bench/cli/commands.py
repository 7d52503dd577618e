"""`stillroom bench`: measure on one's own machine and documents."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import note
from stillroom.cli.options import ConfigOption, JsonOption, QuietOption, help_text
from stillroom.config.places import cache_root
from stillroom_bench.cli.anywhere import (
    ANYWHERE_HELP,
    PRELOADING_HELP,
    QUALITY_HELP,
    anywhere,
    preloading,
    quality,
)
from stillroom_bench.cli.convergence import CONVERGENCE_HELP, convergence
from stillroom_bench.cli.delivery import (
    CompareOption,
    DatasetsOption,
    Delivery,
    HtmlOption,
    OutputOption,
    PeersOption,
    RepeatOption,
    SeedOption,
    WorkDirOption,
    begin,
    deliver,
    distinct,
    named_pythons,
    show_run,
)
from stillroom_bench.cli.filters import FILTERS_HELP, filters
from stillroom_bench.cli.fixed_shapes import FIXED_SHAPES_HELP, fixed_shapes
from stillroom_bench.cli.reordering import REORDERING_HELP, reordering
from stillroom_bench.cli.reuse import REUSE_HELP, reuse
from stillroom_bench.cli.savings import SAVINGS_HELP, savings
from stillroom_bench.cli.simulate import SIMULATE_HELP, simulate
from stillroom_bench.cli.speculation import SPECULATION_HELP, speculation
from stillroom_bench.cli.tiered import TIERED_HELP, tiered

app = typer.Typer(no_args_is_help=True, help="Measure on your own machine and documents.")
pipeline = typer.Typer(no_args_is_help=True)
app.add_typer(pipeline, name="pipeline", help="Measure scheduling, and search that overlaps prefill.")

RETRIEVAL_HELP = help_text(
    "Measure how well searches find what people judged relevant, for every way to fuse dense and sparse results.",
    "A data set is a folder in BEIR layout: corpus.jsonl, queries.jsonl, and qrels/test.tsv or qrels.tsv. Its index is "
    "built by the first run, which may take minutes, and kept in the work folder for the next ones.",
    "Prints nDCG@10, Recall@5, Recall@10, Recall@100 and MRR@10 per set and rule, with significance.",
    examples=(
        "stillroom bench retrieval --dataset data/nfcorpus",
        "stillroom bench retrieval --dataset data/nfcorpus --dataset data/fiqa --output retrieval.json",
    ),
)

INDEX_HELP = help_text(
    "Measure index quality and cost: recall against speed for flat, HNSW and IVF-PQ, hybrid search, BM25.",
    "The data sets give real texts, questions and embeddings; larger corpora are made from them with a seed. faiss is "
    "called directly beside our indexes, and hnswlib, usearch and bm25s where they are installed.",
    examples=(
        "stillroom bench index --dataset data/nfcorpus --dataset data/fiqa",
        "stillroom bench index --dataset data/nfcorpus --size 10000 --size 50000 --repeat 10 --html index.html",
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

QUESTIONS_HELP = help_text(
    "Measure what the query cache saves when some questions are asked often and documents change now and then.",
    "Questions of the data set arrive at random times, popular ones more often. Compares no cache with the cache.",
    examples=(
        "stillroom bench questions --dataset data/nfcorpus",
        "stillroom bench questions --dataset data/nfcorpus --rate 50 --change-every 20 --zipf 1.2",
    ),
)

POLICIES_HELP = help_text(
    "Measure who should leave a full cache of KV: hit rate by policy and capacity, on the real tree without its bytes.",
    "Made workloads have the popularity of documents that the RAGCache paper measured; --data adds recorded traces "
    "(traces/rag_*.json, traces/mooncake_*.jsonl). Belady's offline rule is printed as the yardstick.",
    examples=(
        "stillroom bench policies",
        "stillroom bench policies --data data --output policies.json",
    ),
)

RUNTIME_HELP = help_text(
    "Measure the decoder on random weights of one shape: prefill, decoding, batches, memory, beside other runtimes.",
    "Each peer runs in a process of its own under the Python that has it installed; `transformers` is always measured.",
    examples=(
        "stillroom bench runtime",
        "stillroom bench runtime --peer llama.cpp=llama/bin/python --peer vllm=vllm/bin/python --dtype bfloat16",
    ),
)


@app.callback()
def top() -> None:
    """Measure on your own machine and documents."""
    begin()


@app.command("retrieval", help=RETRIEVAL_HELP)
def retrieval(  # noqa: PLR0913  one parameter per flag
    datasets: DatasetsOption,
    split: Annotated[
        str, typer.Option("--split", metavar="NAME", help="Judgements to use: qrels/NAME.tsv, such as dev.")
    ] = "test",
    work_dir: WorkDirOption = None,
    seed: SeedOption = 0,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    settings = opening.load_settings(config)
    from stillroom_bench.quality.retrieval_quality import run_quality

    on_step = (lambda _: None) if quiet else note
    folder = work_dir or cache_root() / "bench"
    result = run_quality(datasets, folder, settings, split=split, seed=seed, on_step=on_step)
    deliver(result, Delivery(as_json, output, html, compare))


@app.command("index", help=INDEX_HELP)
def index(  # noqa: PLR0913  one parameter per flag
    datasets: DatasetsOption,
    sizes: Annotated[
        list[int] | None,
        typer.Option("--size", min=1, metavar="N", callback=distinct, help="Vectors in a corpus; can be repeated."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME",
            callback=distinct,
            help="A library to measure beside ours; can be repeated. Without it, all known.",
        ),
    ] = None,
    repeat: RepeatOption = 7,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.quality.index import SIZES, run_index
    from stillroom_bench.quality.peers_ann import PEERS

    result = run_index(
        datasets,
        work_dir or cache_root() / "bench",
        sizes=sizes or SIZES,
        peers=peers or PEERS,
        repeat=repeat,
        seed=seed,
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html, compare))


@app.command("structures", help=STRUCTURES_HELP)
def structures(  # noqa: PLR0913  one parameter per flag
    repeat: RepeatOption = 10,
    seed: SeedOption = 0,
    operations: Annotated[
        int, typer.Option("--operations", min=100, metavar="N", help="Operations per run of an arm.")
    ] = 20_000,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.structures import run_structures

    result = run_structures(repeat=repeat, seed=seed, count=operations, on_run=None if quiet else show_run)
    deliver(result, Delivery(as_json, output, html, compare))


@app.command("policies", help=POLICIES_HELP)
def policies(  # noqa: PLR0913  one parameter per flag
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", exists=True, file_okay=False, help="A folder with traces/."),
    ] = None,
    num_asks: Annotated[
        int, typer.Option("--requests", min=10, metavar="N", help="Requests of a workload, at most.")
    ] = 1500,
    top_ks: Annotated[
        list[int] | None,
        typer.Option("--top-k", min=1, metavar="K", callback=distinct, help="Documents of a request; can be repeated."),
    ] = None,
    capacities: Annotated[
        list[float] | None,
        typer.Option(
            "--capacity",
            min=0.001,
            max=1.0,
            metavar="SHARE",
            callback=distinct,
            help="Of all KV, what fits; can be repeated.",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, metavar="N", help="Seeds of the made workloads.")] = 1,
    seed: SeedOption = 0,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.policies import CAPACITIES, PoliciesScope, run_policies

    scope = PoliciesScope(num_asks, tuple(top_ks or (1, 2, 3, 5)), tuple(capacities or CAPACITIES), repeat)
    result = run_policies(scope, data=data, seed=seed, on_progress=(lambda _: None) if quiet else note)
    deliver(result, Delivery(as_json, output, html, compare))


@app.command("questions", help=QUESTIONS_HELP)
def questions(  # noqa: PLR0913  one parameter per flag
    dataset: Annotated[
        Path, typer.Option("--dataset", metavar="DIR", exists=True, file_okay=False, help="A data set.")
    ],
    num_questions: Annotated[
        int, typer.Option("--questions", min=20, metavar="N", help="Questions asked per run.")
    ] = 400,
    rate: Annotated[float, typer.Option("--rate", min=0.1, metavar="R", help="Questions per second, on average.")] = 20,
    change_every: Annotated[
        int, typer.Option("--change-every", min=1, metavar="N", help="Questions between two changes of a document.")
    ] = 50,
    zipf: Annotated[
        float, typer.Option("--zipf", min=0.0, metavar="S", help="How unequal: the n-th question counts 1 / n^S.")
    ] = 1.0,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    settings = opening.load_settings(config)
    from stillroom_bench.quality.hot_questions import HotTraffic, run_questions

    result = run_questions(
        dataset,
        work_dir or cache_root() / "bench",
        settings,
        traffic=HotTraffic(num_questions, rate, change_every, zipf),
        repeat=repeat,
        seed=seed,
        on_run=None if quiet else show_run,
    )
    deliver(result, Delivery(as_json, output, html, compare))


@app.command("runtime", help=RUNTIME_HELP)
def runtime(  # noqa: PLR0913  one parameter per flag
    peers: PeersOption = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option("--dtype", metavar="DTYPE", callback=distinct, help="bfloat16 or float32; can be repeated."),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", min=1, metavar="N", callback=distinct, help="Tokens of a prompt; can be repeated."),
    ] = None,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.quality.runtime import DTYPES, INT8, run_runtime

    result = run_runtime(
        work_dir or cache_root() / "bench",
        peers={INT8: sys.executable, "transformers": sys.executable} | named_pythons(peers),
        dtypes=dtypes or DTYPES,
        lengths=lengths or (256, 1024, 2048),
        repeat=repeat,
        seed=seed,
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html, compare))


app.command("convergence", help=CONVERGENCE_HELP)(convergence)
app.command("filters", help=FILTERS_HELP)(filters)
app.command("fixed-shapes", help=FIXED_SHAPES_HELP)(fixed_shapes)
pipeline.command("speculation", help=SPECULATION_HELP)(speculation)
app.command("reuse", help=REUSE_HELP)(reuse)
pipeline.command("reordering", help=REORDERING_HELP)(reordering)
app.command("simulate", help=SIMULATE_HELP)(simulate)
app.command("quality", help=QUALITY_HELP)(quality)
app.command("anywhere", help=ANYWHERE_HELP)(anywhere)
app.command("savings", help=SAVINGS_HELP)(savings)
app.command("tiered", help=TIERED_HELP)(tiered)
app.command("preloading", help=PRELOADING_HELP)(preloading)

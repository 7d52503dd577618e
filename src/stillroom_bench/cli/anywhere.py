"""`stillroom bench quality`, `stillroom bench anywhere` and `stillroom bench preloading`: their flags."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

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
    named_pythons,
)

if TYPE_CHECKING:
    from stillroom.config.settings import TokenSelector

QUALITY_HELP = help_text(
    "Measure what reuse anywhere costs in answers: exact match and agreement with a full prefill.",
    "Questions come from a JSON-lines file (`chunks`, which are texts, `question`, and if known `answer` and `kind`), "
    "from a JSON list (`ctxs` with `title` and `text`, `question`, `answers`), or from a data set in BEIR layout. The "
    "KV of each chunk is computed behind a chunk of another question, then reused where the question has it, with a "
    "share of its tokens computed again. Compared are all token selectors, a prefix cache, and one that reorders "
    "documents. How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench quality --questions eval.jsonl",
        "stillroom bench quality --questions data/xquad --limit 200 --model ./model --words 60",
        "stillroom bench quality --questions eval.jsonl --selector question --selector context --alpha 1 --focus 2",
        "stillroom bench quality --questions eval.jsonl --model ./model --ratio 0.15 --ratio 0.3 --output quality.json",
    ),
)

ANYWHERE_HELP = help_text(
    "Measure time to first token when documents are reused in another order than before.",
    "A Llama of 135 million random weights; documents come from device, host and disk, at several recompute ratios. "
    "--lasting asks many shuffled questions, to see whether the gain lasts. KVBoost can be measured too. How to read "
    "it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench anywhere",
        "stillroom bench anywhere --lasting 1000 --output anywhere.json",
        "stillroom bench anywhere --chunk-tokens 192 --peer kvboost=kvboost/bin/python",
    ),
)

PRELOADING_HELP = help_text(
    "Measure what loading kept documents adds to the time to first token, and what loading while others compute saves.",
    "The model and prompts of `bench anywhere`; documents on device, host, and disk (files in the system's memory, and "
    "not); with nobody before, and behind another question. How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench preloading",
        "stillroom bench preloading --ratio 0 --repeat 20 --output preloading.json",
    ),
)

RatiosOption = Annotated[
    list[float] | None,
    typer.Option(
        "--ratio",
        min=0.0,
        max=1.0,
        metavar="SHARE",
        callback=distinct,
        help="Of tokens computed again; can be repeated.",
    ),
]


def quality(  # noqa: PLR0913  one parameter per flag
    questions: Annotated[
        Path, typer.Option("--questions", metavar="PATH", exists=True, help="A file of questions, or a data set.")
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="`bundled`, a checkpoint's folder or a hub name.")
    ] = "bundled",
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Questions at most.")] = None,
    num_chunks: Annotated[
        int | None, typer.Option("--chunks", min=1, metavar="N", help="Documents of a question, at most.")
    ] = None,
    max_words: Annotated[
        int | None, typer.Option("--words", min=1, metavar="N", help="Of a document; longer ones are cut.")
    ] = None,
    seed: SeedOption = 0,
    ratios: RatiosOption = None,
    selectors: Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            metavar="NAME",
            callback=distinct,
            help="Of reuse.token_selector; can be repeated. Without it, all.",
        ),
    ] = None,
    alphas: Annotated[
        list[float] | None,
        typer.Option(
            "--alpha",
            min=0.0,
            metavar="X",
            callback=distinct,
            help="Each document's CFO as budget, times this; repeatable.",
        ),
    ] = None,
    focus: Annotated[
        int, typer.Option("--focus", min=0, metavar="LAYERS", help="Also repair only what is in focus; 0: do not.")
    ] = 0,
    unturned: Annotated[bool, typer.Option("--unturned", help="Also with keys that are not turned.")] = False,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="KV of the question's own documents in another order.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Tokens of an answer.")] = 16,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.answer_quality.arms import RATIOS, SELECTORS
    from stillroom.answer_quality.asking import QualityScope, bench_runtime
    from stillroom_bench.quality.answers import run_quality

    def on_progress(done: int, total: int) -> None:
        if not quiet and (done % 25 == 0 or done == total):
            note(f"{done} of {total} questions")

    if unknown := set(selectors or ()) - set(SELECTORS):
        raise UsageError(f"unknown selectors {', '.join(sorted(unknown))}; known are {', '.join(SELECTORS)}")
    scope = QualityScope(
        questions,
        limit,
        bench_runtime(model),
        ratios=tuple(ratios or RATIOS),
        selectors=tuple(cast("list[TokenSelector]", selectors or SELECTORS)),
        alphas=tuple(alphas or ()),
        focus_window=focus,
        has_unturned=unturned,
        context="shuffled" if shuffled else "foreign",
        num_chunks=num_chunks,
        max_words=max_words,
        seed=seed,
        max_tokens=max_tokens,
    )
    deliver(run_quality(scope, on_progress=on_progress), Delivery(as_json, output, html, compare))


def anywhere(  # noqa: PLR0913  one parameter per flag
    ratios: RatiosOption = None,
    num_chunks: Annotated[int, typer.Option("--chunks", min=2, metavar="N", help="Documents in a prompt.")] = 5,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, metavar="N", help="Tokens of each.")] = 200,
    lasting: Annotated[int, typer.Option("--lasting", min=0, metavar="N", help="Shuffled questions; 0: none.")] = 0,
    documents: Annotated[
        int, typer.Option("--documents", min=2, metavar="N", help="Documents that these are over.")
    ] = 300,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME=PYTHON", help="kvboost, and the Python that has it."),
    ] = None,
    repeat: RepeatOption = 10,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.anywhere import run_anywhere
    from stillroom_bench.experiments.anywhere_house import AnywhereScope

    scope = AnywhereScope(
        num_chunks=num_chunks,
        chunk_tokens=chunk_tokens,
        ratios=tuple((0.0, 0.15, 0.3) if ratios is None else ratios),
        num_lasting=lasting,
        num_documents=documents,
        repeat=repeat,
        seed=seed,
    )
    folder = work_dir or cache_root() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    on_progress = (lambda _: None) if quiet else note
    result = run_anywhere(scope, folder, peers=named_pythons(peers), on_progress=on_progress)
    deliver(result, Delivery(as_json, output, html, compare))


def preloading(  # noqa: PLR0913  one parameter per flag
    ratio: Annotated[
        float, typer.Option("--ratio", min=0.0, max=1.0, metavar="SHARE", help="Of tokens computed again.")
    ] = 0.15,
    num_chunks: Annotated[int, typer.Option("--chunks", min=2, metavar="N", help="Documents in a prompt.")] = 5,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, metavar="N", help="Tokens of each.")] = 200,
    repeat: RepeatOption = 10,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.experiments.anywhere_house import AnywhereScope
    from stillroom_bench.experiments.preloading import run_preloading

    scope = AnywhereScope(num_chunks=num_chunks, chunk_tokens=chunk_tokens, ratios=(ratio,), repeat=repeat, seed=seed)
    folder = work_dir or cache_root() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    result = run_preloading(scope, folder, on_progress=(lambda _: None) if quiet else note)
    deliver(result, Delivery(as_json, output, html, compare))

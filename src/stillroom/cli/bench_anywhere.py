"""`stillroom bench quality`, `stillroom bench anywhere` and `stillroom bench preloading`: their flags."""

from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli.bench_report import (
    CompareOption,
    Delivery,
    HtmlOption,
    OutputOption,
    RepeatOption,
    SeedOption,
    WorkDirOption,
    deliver,
)
from stillroom.cli.console import note
from stillroom.cli.options import JsonOption, QuietOption, help_text
from stillroom.config.places import cache_root

QUALITY_HELP = help_text(
    "Measure what reuse anywhere costs in answers: exact match and agreement with a full prefill.",
    "Questions come from a JSON-lines file: `chunks` (texts), `question`, and if known `answer` and `kind`. The KV of "
    "each chunk is computed behind a chunk of another question, then reused where the question has it, with a share "
    "of its tokens computed again. How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench quality --questions eval.jsonl",
        "stillroom bench quality --questions eval.jsonl --model ./model --ratio 0.15 --ratio 0.3 --output quality.json",
    ),
)

ANYWHERE_HELP = help_text(
    "Measure time to first token when documents are reused in another order than before.",
    "A Llama of 135 million random weights; documents come from device, host and disk, at several recompute ratios. "
    "--lasting asks many shuffled questions, to see whether the gain lasts. How to read it: docs/chunk-reuse.md.",
    examples=("stillroom bench anywhere", "stillroom bench anywhere --lasting 1000 --output anywhere.json"),
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
    typer.Option("--ratio", min=0.0, max=1.0, metavar="SHARE", help="Of tokens computed again; can be repeated."),
]


def quality(  # noqa: PLR0913  one parameter per flag
    questions: Annotated[
        Path, typer.Option("--questions", metavar="FILE", exists=True, dir_okay=False, help="A JSON-lines file.")
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="`bundled`, a checkpoint's folder or a hub name.")
    ] = "bundled",
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Questions at most.")] = None,
    ratios: RatiosOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Tokens of an answer.")] = 16,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.bench.quality import RATIOS, Scope, run_quality

    def on_progress(done: int, total: int) -> None:
        if not quiet and (done % 25 == 0 or done == total):
            note(f"{done} of {total} questions")

    scope = Scope(questions, limit, model, ratios=tuple(ratios or RATIOS), max_tokens=max_tokens)
    deliver(run_quality(scope, on_progress=on_progress), Delivery(as_json, output, html, compare))


def anywhere(  # noqa: PLR0913  one parameter per flag
    ratios: RatiosOption = None,
    num_chunks: Annotated[int, typer.Option("--chunks", min=2, metavar="N", help="Documents in a prompt.")] = 5,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, metavar="N", help="Tokens of each.")] = 200,
    lasting: Annotated[int, typer.Option("--lasting", min=0, metavar="N", help="Shuffled questions; 0: none.")] = 0,
    documents: Annotated[
        int, typer.Option("--documents", min=2, metavar="N", help="Documents that these are over.")
    ] = 300,
    repeat: RepeatOption = 10,
    seed: SeedOption = 0,
    work_dir: WorkDirOption = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom.bench.anywhere import Scope, run_anywhere

    scope = Scope(
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
    result = run_anywhere(scope, folder, on_progress=(lambda _: None) if quiet else note)
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
    from stillroom.bench.anywhere import Scope
    from stillroom.bench.preloading import run_preloading

    scope = Scope(num_chunks=num_chunks, chunk_tokens=chunk_tokens, ratios=(ratio,), repeat=repeat, seed=seed)
    folder = work_dir or cache_root() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    result = run_preloading(scope, folder, on_progress=(lambda _: None) if quiet else note)
    deliver(result, Delivery(as_json, output, html, compare))

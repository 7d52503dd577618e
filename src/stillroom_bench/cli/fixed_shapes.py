"""`stillroom bench fixed-shapes`: its flags."""

from typing import Annotated, Literal

import typer

from stillroom.cli.console import note
from stillroom.cli.options import JsonOption, QuietOption, help_text
from stillroom_bench.cli.delivery import (
    CompareOption,
    Delivery,
    HtmlOption,
    OutputOption,
    RepeatOption,
    SeedOption,
    deliver,
)

FIXED_SHAPES_HELP = help_text(
    "Measure what runtime.fixed_shapes gives and costs: answers that reuse of exact prefixes changes, and time.",
    "The same questions over random documents, one at a time, with and without reuse, with and without fixed shapes.",
    examples=(
        "stillroom bench fixed-shapes",
        "stillroom bench fixed-shapes --model ./models/qwen2.5-0.5b --questions 500 --output fixed-shapes.json",
    ),
)


def fixed_shapes(  # noqa: PLR0913  one parameter per flag
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="A folder, a hub name, or bundled.")
    ] = "bundled",
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option("--dtype", help="Of the model.")] = "bfloat16",
    questions: Annotated[int, typer.Option("--questions", min=1, metavar="N", help="Questions of each run.")] = 200,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    output: OutputOption = None,
    html: HtmlOption = None,
    compare: CompareOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.quality.fixed_shapes import run_fixed_shapes

    result = run_fixed_shapes(
        model,
        dtype=dtype,
        num_questions=questions,
        repeat=repeat,
        seed=seed,
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html, compare))

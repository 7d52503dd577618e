"""`stillroom bench savings`: its flags."""

from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli.console import note
from stillroom.cli.options import JsonOption, QuietOption, help_text
from stillroom_bench.cli.delivery import Delivery, HtmlOption, OutputOption, deliver, distinct

SAVINGS_HELP = help_text(
    "Count the prompt tokens that need not be computed when searches find the same passages again.",
    "Compared are prefix caching, the same with passages reordered (Cache-Craft's SET-CACHE), and reuse anywhere, on "
    "the real tree without its bytes. A trace is JSON with `retrieved_docs` (a list of texts per request), or JSON "
    "lines with such a list each. Nothing is timed, so figures repeat. How to read it: docs/chunk-reuse.md.",
    examples=(
        "stillroom bench savings --trace rag.json",
        "stillroom bench savings --trace one.json --trace two.jsonl --capacity 0.2 --ratio 0.15 --output savings.json",
    ),
)


def savings(  # noqa: PLR0913  one parameter per flag
    traces: Annotated[
        list[Path],
        typer.Option(
            "--trace", metavar="FILE", exists=True, dir_okay=False, callback=distinct, help="A trace; can be repeated."
        ),
    ],
    capacities: Annotated[
        list[float] | None,
        typer.Option(
            "--capacity",
            min=0.0,
            max=1.0,
            metavar="SHARE",
            callback=distinct,
            help="Of all distinct passages, what fits beside the longest prompt; can be repeated. Room for all is "
            "always counted too.",
        ),
    ] = None,
    ratios: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio",
            min=0.0,
            max=1.0,
            metavar="SHARE",
            callback=distinct,
            help="Of placed tokens, computed again; can be repeated.",
        ),
    ] = None,
    output: OutputOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from stillroom_bench.quality.savings import CAPACITIES, RATIOS, run_savings

    result = run_savings(
        traces,
        capacities=CAPACITIES if capacities is None else capacities,
        ratios=RATIOS if ratios is None else ratios,
        on_progress=(lambda _: None) if quiet else note,
    )
    deliver(result, Delivery(as_json, output, html))

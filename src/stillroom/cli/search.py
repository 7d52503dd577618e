"""`stillroom search`: print the chunks that match a query, without generating an answer."""

import textwrap
import time
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import as_text, line, note, place, print_json, text_width
from stillroom.cli.options import (
    DEFAULT_KB,
    AnnRecallOption,
    ConfigOption,
    JsonOption,
    KbOption,
    ModeOption,
    SearchBudgetOption,
    TopKOption,
    WhereOption,
    filter_text,
    help_text,
    index_goal,
)

if TYPE_CHECKING:
    from stillroom.core.document import Chunk, ScoredChunk

_SNIPPET_LINES = 3

HELP = help_text(
    "Find the chunks that match a query best.",
    "Mode hybrid fuses dense (meaning) and sparse (words) search. Scores of different modes cannot be compared.",
    examples=(
        "stillroom search 'rotate keys' --kb ./kb",
        "stillroom search 'ERR_4711' --mode sparse -k 3",
        "stillroom search 'notice period' --where 'year >= 2020 and team = legal'",
        "stillroom search 'notice period' --where 'type in (pdf, docx) and not path ~ archive/'",
        "stillroom search 'rotate keys' --json | jq -r '.results[].document'",
        "stillroom search 'rotate keys' --ann-recall 0.99     # for a knowledge base with an approximate index",
    ),
)


def search(  # noqa: PLR0913  one parameter per flag
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words or a question.")],
    kb: KbOption = DEFAULT_KB,
    mode: ModeOption = None,
    top_k: TopKOption = None,
    where: WhereOption = None,
    ann_recall: AnnRecallOption = None,
    search_budget: SearchBudgetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    query, filtered = as_text("the query", query), filter_text(where)
    settings = opening.load_settings(
        config, {"search.mode": mode, "search.top_k": top_k, **index_goal(ann_recall, search_budget)}
    )
    with opening.open_stillroom(kb, settings) as opened:
        opened.avoid_torch()
        started = time.perf_counter()
        found = opened.search(query, mode=mode, top_k=top_k, where=filtered)
        total_seconds = time.perf_counter() - started
    if as_json:
        from stillroom.rag.as_json import search_as_json

        print_json(search_as_json(query, settings.search.mode, found, total_seconds))
        return
    for rank, scored in enumerate(found.results, start=1):
        _show(rank, scored)
    if not found.results:
        note("no chunk was found")


def _show(rank: int, scored: "ScoredChunk") -> None:
    chunk = scored.chunk
    parts = ", ".join(f"{name} {score:.4g}" for name, score in scored.scores.items())
    line(f"{rank}. {_place(chunk)}")
    line(f"   score {scored.score:.4f}" + (f" ({parts})" if parts else ""))
    if chunk.heading:
        line(f"   {chunk.heading}")
    if scored.copies:
        line(f"   also in {', '.join(map(_place, scored.copies))}")
    snippet = textwrap.wrap(
        " ".join(chunk.text.split()), width=text_width() - 5, max_lines=_SNIPPET_LINES, placeholder=" ..."
    )
    for text in snippet:
        line(f"     {text}")
    line()


def _place(chunk: "Chunk") -> str:
    return place(chunk.document_id, (chunk.start_line, chunk.end_line), (chunk.start_page, chunk.end_page))

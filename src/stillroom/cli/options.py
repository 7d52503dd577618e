"""The options that several commands share, and the form of every command's help.

Nothing heavy is imported here or in any module of the commands: what needs PyTorch, FAISS or FastAPI is imported inside
the function that uses it, so `stillroom --help` answers at once.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli.console import as_text
from stillroom.config.quantities import parse_seconds, parse_size
from stillroom.config.settings import EngineKind, ReuseMode, SearchMode
from stillroom.errors import UsageError


def expanded(path: Path | None) -> Path | None:
    """With `~` as the user's folder: no shell expands it after a `=`, nor in a service's environment."""
    return None if path is None else Path(os.path.expanduser(path))  # a user that does not exist is no error


KbOption = Annotated[
    Path,
    typer.Option(
        "--kb",
        envvar="STILLROOM_KB",
        show_envvar=True,
        metavar="DIR",
        callback=expanded,
        help="Folder of the knowledge base.",
    ),
]
DEFAULT_KB = Path("kb")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="STILLROOM_CONFIG",
        show_envvar=True,
        metavar="FILE",
        callback=expanded,
        help="Settings; without it, stillroom.toml of the current folder.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="bundled, a checkpoint's folder, or a hub name."),
]
EngineOption = Annotated[
    EngineKind | None,
    typer.Option(
        "--engine",
        metavar="builtin|openai",
        help="Generate here, or on a server with OpenAI's routes (vLLM, SGLang, llama.cpp); see docs/engines.md.",
    ),
]
BaseUrlOption = Annotated[
    str | None,
    typer.Option("--base-url", metavar="URL", help="That server, such as http://127.0.0.1:8000/v1."),
]
EngineModelOption = Annotated[
    str | None,
    typer.Option("--engine-model", metavar="NAME", help="The model to ask it for; without it, its first."),
]
ReuseOption = Annotated[
    ReuseMode | None,
    typer.Option(
        "--reuse",
        metavar="exact|anywhere|off",
        help="How far kept KV is used: for prompts that begin alike, for documents anywhere in them (answers may "
        "change), or not at all; without it, as configured (exact).",
    ),
]
ModeOption = Annotated[
    SearchMode | None,
    typer.Option("--mode", metavar="hybrid|dense|sparse", help="How to search; without it, as configured (hybrid)."),
]
AnnRecallOption = Annotated[
    float | None,
    typer.Option(
        "--ann-recall",
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Share of the true 10 nearest that an approximate index must find, such as 0.99.",
    ),
]
SearchBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--search-budget",
        metavar="TIME",
        help="Time that 95 % of dense searches may take, such as 2ms; instead of --ann-recall.",
    ),
]
WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="FILTER",
        help="Only documents whose metadata say so, such as 'year >= 2020 and team = legal'; see docs/filters.md.",
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option("--top-k", "-k", min=1, metavar="N", help="How many chunks; without it, as configured (5)."),
]


def index_goal(ann_recall: float | None, search_budget: str | None) -> dict[str, object]:
    """The two flags as settings.

    Raises:
        UsageError: the time is none.
    """
    if search_budget is None:
        return {"index.ann_recall": ann_recall}
    seconds = as_seconds("--search-budget", search_budget)
    return {"index.ann_recall": ann_recall, "index.search_budget_s": seconds}


def filter_text(where: str | None) -> str:
    """What `--where` says; empty where it was not given.

    Raises:
        UsageError: it is blank, as from a variable that was never set, or no text.
    """
    if where is not None and not where.strip():
        raise UsageError("--where '': an empty filter would allow every document; leave it out if that is meant")
    return as_text("--where", where or "")


def as_seconds(flag: str, text: str) -> float:
    """What a flag says, such as `300ms`.

    Raises:
        UsageError: it is no time.
    """
    try:
        return parse_seconds(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: give a time with its unit, such as 300ms, 1.5s or 500us") from None


def as_bytes(flag: str, text: str | None) -> int | None:
    """What a flag says, such as `4GiB`; None where it was not given.

    Raises:
        UsageError: it is no size.
    """
    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError:
        size = -1
    if size < 0:
        raise UsageError(f"{flag} {text}: give a size such as 512MiB or 4GiB, or a share of memory such as 25%")
    return size


def engine_settings(engine: EngineKind | None, base_url: str | None, model: str | None) -> dict[str, object]:
    """The three flags as settings; an address alone means an engine elsewhere."""
    if engine is None and base_url is not None:
        engine = "openai"
    return {"engine.kind": engine, "engine.base_url": base_url, "engine.model": model}


def help_text(summary: str, *paragraphs: str, examples: tuple[str, ...]) -> str:
    """A command's help: a first line, paragraphs that flow, and examples that keep their lines."""
    lines = [summary, "", *(line for paragraph in paragraphs for line in (paragraph, ""))]
    lines += ["\b", "Examples:", *(f"  {example}" for example in examples)]
    return "\n".join(lines)

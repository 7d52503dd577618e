"""Options shared by commands, sampling options, and the layout of help texts.

Modules of commands import PyTorch, FAISS and FastAPI inside the functions that use them, so that `stillroom --help` is
fast.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli.console import as_text
from stillroom.config.quantities import parse_seconds, parse_size
from stillroom.config.settings import EngineKind, ReuseMode, SearchMode
from stillroom.errors import UsageError
from stillroom.retrieval.store.postgresql.address import is_address, local_folder


def expanded(path: Path | None) -> Path | None:
    """Expand `~`, which shells leave alone after `=` and in a service's environment."""
    return None if path is None else Path(os.path.expanduser(path))  # an unknown user stays as written


def folder_of(kb: str | Path) -> Path:
    """Return the folder of a knowledge base; for a URL of PostgreSQL the local folder that stands for it."""
    return local_folder(kb if is_address(kb) else os.path.expanduser(kb))


KbOption = Annotated[
    Path,
    typer.Option(
        "--kb",
        envvar="STILLROOM_KB",
        show_envvar=True,
        metavar="DIR|URL",
        parser=folder_of,
        help="Folder of the knowledge base, or postgresql://user@host/database?kb=name (docs/postgresql.md).",
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
        help="Settings file; default: stillroom.toml of the current folder.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress and notes.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Model that answers: bundled:reader (the default; quotes the documents), a checkpoint's folder, a GGUF "
        "file or a hub name (generates text), or bundled:microworld (shows KV reuse).",
    ),
]
EngineOption = Annotated[
    EngineKind | None,
    typer.Option(
        "--engine",
        metavar="builtin|openai|cluster",
        help="Generate in this process, on a server with OpenAI's routes (vLLM, SGLang, llama.cpp; docs/engines.md), "
        "or on engines of Stillroom in other processes (docs/cluster.md).",
    ),
]
EnginesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engines",
        metavar="URL",
        help="Address of an engine (`stillroom engine`), such as http://127.0.0.1:9100, or of a list of them; "
        "repeatable. Implies --engine cluster.",
    ),
]
BaseUrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--base-url",
        metavar="URL",
        help="Address of that server, such as http://127.0.0.1:8000/v1. Repeat it for several servers of one model.",
    ),
]
EngineModelOption = Annotated[
    str | None,
    typer.Option("--engine-model", metavar="NAME", help="Model to request from that server; default: its first."),
]
ReuseOption = Annotated[
    ReuseMode | None,
    typer.Option(
        "--reuse",
        metavar="exact|anywhere|prepared|off",
        help="Reuse of kept KV: for equal prompt beginnings (exact), for documents at any position (anywhere) or "
        "prepared in advance (prepared), which may change answers, or never (off); default: the setting (exact).",
    ),
]
KvTierOption = Annotated[
    str | None,
    typer.Option(
        "--kv-tier",
        metavar="URL",
        help="Share kept KV with other processes: valkey://host:6379, rediss://user:password@host/0 or "
        "file:///shared/folder; see docs/kv-tier.md.",
    ),
]
ModeOption = Annotated[
    SearchMode | None,
    typer.Option("--mode", metavar="hybrid|dense|sparse", help="Search mode; default: the setting (hybrid)."),
]
AnnRecallOption = Annotated[
    float | None,
    typer.Option(
        "--ann-recall",
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Share of the exact 10 nearest chunks that an approximate index must find, such as 0.99.",
    ),
]
SearchBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--search-budget",
        metavar="TIME",
        help="Time limit for 95 % of dense searches, such as 2ms; replaces --ann-recall.",
    ),
]
WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="FILTER",
        help="Filter on metadata, such as 'year >= 2020 and team = legal'; see docs/filters.md.",
    ),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", "-k", min=1, metavar="N", help="Number of chunks; default: the setting (5).")
]

HopsOption = Annotated[
    int | None,
    typer.Option(
        "--hops",
        min=1,
        max=5,
        metavar="N",
        help="Most searches for a question; each after the first looks for what the documents so far leave open. "
        "Default: the setting (1).",
    ),
]


# sampling options: each has the name of its setting and of its field in `AskOptions`
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=-1, metavar="N", help="Most tokens in an answer; default: the setting (256); -1: no limit."
    ),
]
MinTokensOption = Annotated[int, typer.Option("--min-tokens", min=0, metavar="N", help="Fewest tokens in an answer.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="Sampling temperature; 0 always takes the likeliest token."),
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Sample from the likeliest tokens whose probabilities add up to P."),
]
SampleTopKOption = Annotated[
    int | None,
    typer.Option("--sample-top-k", min=-1, metavar="N", help="Sample from the N likeliest tokens; 0 or -1: all."),
]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Sample from tokens at least P times as likely as the likeliest one."),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", metavar="X", help="Penalty on tokens of prompt and answer; above 1 repeats them less."
    ),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option("--presence-penalty", metavar="X", help="Penalty on tokens of the answer; above 0 repeats them less."),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty", metavar="X", help="Penalty per occurrence in the answer; above 0 repeats tokens less."
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", min=-1, metavar="N", help="Random seed; the same seed and question give the same answer; -1: random."
    ),
]


def index_goal(ann_recall: float | None, search_budget: str | None) -> dict[str, object]:
    """Return the two flags as settings.

    Raises:
        UsageError: `search_budget` is not a time.
    """
    if search_budget is None:
        return {"index.ann_recall": ann_recall}
    seconds = as_seconds("--search-budget", search_budget)
    return {"index.ann_recall": ann_recall, "index.search_budget_s": seconds}


def filter_text(where: str | None) -> str:
    """Return the filter of `--where`; empty if the flag was not given.

    Raises:
        UsageError: it is blank, as from an unset shell variable, or not UTF-8.
    """
    if where is not None and not where.strip():
        raise UsageError(
            "--where '': the filter is empty and would allow every document; write a filter, or leave --where out"
        )
    return as_text("--where", where or "")


def as_seconds(flag: str, text: str) -> float:
    """Parse a time such as `300ms`.

    Raises:
        UsageError: it is not a time.
    """
    try:
        return parse_seconds(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: not a time; give one with its unit, such as 300ms, 1.5s or 500us") from None


def as_bytes(flag: str, text: str | None) -> int | None:
    """Parse a size such as `4GiB`; None if the flag was not given.

    Raises:
        UsageError: it is not a size.
    """
    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError:
        size = -1
    if size < 0:
        raise UsageError(
            f"{flag} {text}: not a size; give one such as 512MiB or 4GiB, or a share of memory such as 25%"
        )
    return size


def engine_settings(
    engine: EngineKind | None, base_urls: list[str] | None, model: str | None, engines: list[str] | None = None
) -> dict[str, object]:
    """Return the four flags as settings; an address alone implies its kind of engine.

    Raises:
        UsageError: two kinds of engine are named.
    """
    base_url = ",".join(base_urls) if base_urls else None
    if base_url is not None and engines:
        raise UsageError("--base-url and --engines name two kinds of engine; leave one out")
    if engine is None and (base_url is not None or engines):
        engine = "cluster" if engines else "openai"
    urls = ",".join(engines) if engines else None
    return {"engine.kind": engine, "engine.base_url": base_url, "engine.model": model, "engine.urls": urls}


def help_text(summary: str, *paragraphs: str, examples: tuple[str, ...]) -> str:
    """Build a command's help: summary line, paragraphs, examples."""
    lines = [summary, "", *(line for paragraph in paragraphs for line in (paragraph, ""))]
    lines += ["\b", "Examples:", *(f"  {example}" for example in examples)]
    return "\n".join(lines)

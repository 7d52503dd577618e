"""The options that several commands share, and the form of every command's help.

Nothing heavy is imported here or in any module of the commands: what needs PyTorch, FAISS or FastAPI is imported inside
the function that uses it, so `stillroom --help` answers at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from stillroom.config.settings import SearchMode

KbOption = Annotated[
    Path,
    typer.Option("--kb", envvar="STILLROOM_KB", show_envvar=True, metavar="DIR", help="Folder of the knowledge base."),
]
DEFAULT_KB = Path("kb")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="STILLROOM_CONFIG",
        show_envvar=True,
        metavar="FILE",
        help="Settings; without it, stillroom.toml of the current folder.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="bundled, a checkpoint's folder, or a hub name."),
]
ModeOption = Annotated[
    SearchMode | None,
    typer.Option("--mode", metavar="hybrid|dense|sparse", help="How to search; without it, as configured (hybrid)."),
]
TopKOption = Annotated[
    int | None,
    typer.Option("--top-k", "-k", min=1, metavar="N", help="How many chunks; without it, as configured (5)."),
]


def help_text(summary: str, *paragraphs: str, examples: tuple[str, ...]) -> str:
    """A command's help: a first line, paragraphs that flow, and examples that keep their lines."""
    lines = [summary, "", *(line for paragraph in paragraphs for line in (paragraph, ""))]
    lines += ["\b", "Examples:", *(f"  {example}" for example in examples)]
    return "\n".join(lines)

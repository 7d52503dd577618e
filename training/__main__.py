"""`python -m training`: makes the bundled models. Each command lists its options with --help.

`reader` has the commands of the bundled reader, and `microworld` those of a microworld of long documents; the others
make a generative model in English.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from training.microworld.commands import app as microworld_app
from training.reader.commands import app as reader_app
from training.reader.commands import needs_large_heap, restart_with_large_heap

if TYPE_CHECKING:
    from training.recipe import Recipe

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.add_typer(reader_app, name="reader")
app.add_typer(microworld_app, name="microworld")

Data = Annotated[Path, typer.Option("--data", help="The folder that `data` wrote.")]


@app.callback()
def main() -> None:
    """Make the bundled models."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # worker processes make the batches


def _recipe(name: str) -> "Recipe":
    from training.recipe import RECIPES

    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known are {', '.join(RECIPES)} (training/recipe.py)")
    return RECIPES[name]


def run_command(arguments: list[str] | None = None) -> None:
    """Run a command; an error of folders or options is printed in one line and exits with 2."""
    from stillroom.errors import StillroomError
    from training.checkpoint import ResumeError

    try:
        app(arguments)
    except (StillroomError, ResumeError, FileNotFoundError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


@app.command()
def data(
    shared: Annotated[Path, typer.Option(help="The folder with the data and the generator of worlds.")] = Path(
        "../shared"
    ),
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("training/build/data"),
    seed: int = 0,
    num_worlds: Annotated[int, typer.Option(help="Generated worlds for training.")] = 60_000,
) -> None:
    """Read, clean and split the texts, make questions, train the tokenizer, and write the evaluation sets."""
    from training.data.prepare import DataRecipe, prepare

    recipe = DataRecipe(seed=seed, num_worlds=num_worlds)
    manifest = prepare(shared, out, recipe, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(manifest["counts"], indent=1))


@app.command()
def train(  # noqa: PLR0913  options of a command
    recipe: Annotated[str, typer.Option(help="Recipe: smoke, 12m or 30m.")] = "30m",
    data: Data = Path("training/build/data"),
    out: Annotated[Path, typer.Option(help="Folder of the run; resumes from its checkpoint.")] = Path(
        "training/build/run"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    minutes: Annotated[float | None, typer.Option(help="Stop with a checkpoint after this many minutes.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that make batches.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    micro_rows: Annotated[int | None, typer.Option(help="Rows per forward pass; fewer need less memory.")] = None,
    compiled: Annotated[bool, typer.Option(help="Use torch.compile on a GPU.")] = True,
    attention: Annotated[str | None, typer.Option(help="mask or flex; default: flex on a GPU, else mask.")] = None,
) -> None:
    """Train until the recipe or the time ends, or until Ctrl-C; the same command resumes.

    Exits with 0 when the run is complete, and with 3 when it can be resumed.
    """
    import torch

    from training.trainer import Run, Trainer

    if threads is not None:
        torch.set_num_threads(threads)
    is_gpu = device.startswith("cuda")
    options = Run(
        device=device,
        dtype="bfloat16" if is_gpu else "float32",
        attention="flex" if (attention or ("flex" if is_gpu else "mask")) == "flex" else "mask",
        is_compiled=compiled and is_gpu,
        micro_rows=micro_rows,
        num_workers=workers,
        minutes=minutes,
    )
    trainer = Trainer(_recipe(recipe), options, data, out)
    outcome = trainer.train(lambda line: typer.echo(_short(line), err=True))
    typer.echo(json.dumps({"step": outcome.step, "done": outcome.is_done, **outcome.scores}))
    raise typer.Exit(0 if outcome.is_done else 3)


def _short(line: dict[str, Any]) -> str:
    names = ("step", "answer loss", "text loss", "grad norm", "tokens/s", "minutes left")
    return "  ".join(f"{name} {line[name]}" for name in names)


@app.command()
def export(
    recipe: Annotated[str, typer.Option(help="The recipe of the run.")] = "30m",
    data: Data = Path("training/build/data"),
    run: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("training/build/run"),
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("training/build/model"),
) -> None:
    """Write the run's weights as a checkpoint for Stillroom and transformers."""
    from training.export import export_run

    typer.echo(str(export_run(run, data, out, _recipe(recipe))))


@app.command()
def evaluate(
    model: Annotated[str, typer.Option(help="A checkpoint folder, or `bundled:NAME`.")] = "training/build/model",
    data: Data = Path("training/build/data"),
    out: Annotated[Path, typer.Option(help="JSON report to write.")] = Path("training/build/evaluation.json"),
    limit: Annotated[int | None, typer.Option(help="Questions per set; default: all.")] = None,
    device: str = "cpu",
) -> None:
    """Answer the held-out questions with Stillroom's engine, and print the tables of the model card."""
    from training.evaluation.evaluate import evaluate as run
    from training.evaluation.report import as_markdown, write_report

    say = lambda line: typer.echo(line, err=True)  # noqa: E731
    report = run(model, data, limit=limit, device=device, say=say)
    write_report(out, report)
    typer.echo(as_markdown(report))


@app.command()
def card(
    name: Annotated[str, typer.Option(help="Name of the model.")],
    data: Data = Path("training/build/data"),
    run: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("training/build/run"),
    model: Annotated[Path, typer.Option(help="The exported folder; its README.md is written.")] = Path(
        "training/build/model"
    ),
    report: Annotated[Path, typer.Option(help="Report that `evaluate` wrote.")] = Path(
        "training/build/evaluation.json"
    ),
) -> None:
    """Write the model card from data, log and report."""
    from training.card import card as written
    from training.checkpoint import read_log
    from training.data.shards import MANIFEST

    manifest = json.loads((data / MANIFEST).read_text(encoding="utf-8"))
    found = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None
    (model / "README.md").write_text(written(name, manifest, read_log(run), found), encoding="utf-8")


@app.command()
def bundle(
    name: Annotated[str, typer.Option(help="Name of the model's folder in the package.")],
    model: Annotated[Path, typer.Option(help="The exported folder with its card.")] = Path("training/build/model"),
) -> None:
    """Copy a finished model into the package."""
    from training.bundle import bundle as copied

    typer.echo(str(copied(model, name)))
    typer.echo("next: name the model in NOTICE and run make test", err=True)


if __name__ == "__main__":
    if needs_large_heap(sys.argv[1:], os.environ):
        restart_with_large_heap()
    run_command()

"""`python -m training`: data, train, export, evaluate, bundle. Each says with --help what it needs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Data = Annotated[Path, typer.Option("--data", help="The folder that `data` wrote.")]


@app.callback()
def main() -> None:
    """Make the bundled model that answers in English."""


@app.command()
def data(
    shared: Annotated[Path, typer.Option(help="The folder with the data and the generator of worlds.")] = Path(
        "../shared"
    ),
    out: Annotated[Path, typer.Option(help="Where to.")] = Path("training/build/data"),
    seed: int = 0,
    num_worlds: Annotated[int, typer.Option(help="Made-up worlds to learn from.")] = 60_000,
) -> None:
    """Read, clean, split and word the texts; train the tokenizer; write the questions of the evaluation."""
    from training.data.prepare import DataRecipe, prepare

    recipe = DataRecipe(seed=seed, num_worlds=num_worlds)
    manifest = prepare(shared, out, recipe, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(manifest["counts"], indent=1))


@app.command()
def train(  # noqa: PLR0913  options of a command
    recipe: Annotated[str, typer.Option(help="Which of recipe.RECIPES: early, smoke, 12m, 30m.")] = "30m",
    data: Data = Path("training/build/data"),
    out: Annotated[Path, typer.Option(help="Of the run; goes on from the checkpoint there.")] = Path(
        "training/build/run"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    minutes: Annotated[float | None, typer.Option(help="Stop with a checkpoint after so long.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that make batches.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads of a CPU.")] = None,
    micro_rows: Annotated[int | None, typer.Option(help="Rows in memory at once; fewer need less.")] = None,
    compiled: Annotated[bool, typer.Option(help="torch.compile.")] = True,
    attention: Annotated[str | None, typer.Option(help="mask or flex; by default flex on a GPU.")] = None,
) -> None:
    """Train until the end of the recipe, of the minutes, or Ctrl-C; the same command goes on.

    Ends with 0 when the run is complete, and with 3 when there is more to do.
    """
    import torch

    from training.recipe import RECIPES
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
    trainer = Trainer(RECIPES[recipe], options, data, out)
    outcome = trainer.train(lambda line: typer.echo(_short(line), err=True))
    typer.echo(json.dumps({"step": outcome.step, "done": outcome.is_done, **outcome.scores}))
    raise typer.Exit(0 if outcome.is_done else 3)


def _short(line: dict[str, Any]) -> str:
    names = ("step", "answer loss", "text loss", "grad norm", "tokens/s", "minutes left")
    return "  ".join(f"{name} {line[name]}" for name in names)


if __name__ == "__main__":
    app()

"""`python -m training microworld`: train, questions, reuse-questions, split-questions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make a microworld of long documents.")

Shared = Annotated[Path, typer.Option(help="The folder with microworld's generator.")]
SHARED, MODEL = Path("../shared"), Path("../shared/models/microworld")
RUN = Path("training/build/microworld")


def _say(line: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(line))


@app.command()
def train(  # noqa: PLR0913  options of a command
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint to start from.")] = MODEL,
    shared: Shared = SHARED,
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint.")] = RUN,
    minutes: Annotated[float, typer.Option(min=0.01, help="Length of the run; the learning rate falls over it.")] = 40,
    learning_rate: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = 0.0015,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the worlds and of the order of the questions.")] = 0,
) -> None:
    """Train microworld further on long documents, until the time ends or until Ctrl-C. Prints JSON lines.

    Ctrl-C and SIGTERM end the run after the current step; the checkpoint is kept.
    """
    import threading

    from training.microworld.train import TrainOptions
    from training.microworld.train import train as run
    from training.signals import stopped_by_signals

    options = TrainOptions(
        model=model,
        shared=shared,
        out=out,
        minutes=minutes,
        learning_rate=learning_rate,
        seed=seed,
        threads=threads,
    )
    stopped = threading.Event()
    with stopped_by_signals(stopped.set):
        folder = run(options, _say, stopped.is_set)
    _say({"folder": str(folder), "done": not stopped.is_set()})


@app.command()
def questions(
    out: Annotated[Path, typer.Option(help="JSON-lines file to write.")],
    shared: Shared = SHARED,
    num_questions: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 600,
    chunks: Annotated[int, typer.Option(min=2, help="Chunks of a search result.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the worlds.")] = 1,
) -> None:
    """Write questions for `stillroom bench contexts`, and print the number of each kind."""
    from training.microworld.train import write_questions

    _say(write_questions(shared, out, num_questions=num_questions, num_chunks=chunks, seed=seed))


@app.command()
def reuse_questions(
    out: Annotated[Path, typer.Option(help="JSON-lines file to write.")],
    shared: Shared = SHARED,
    num_questions: Annotated[int, typer.Option(min=1, help="Number of questions, as many of each kind.")] = 1300,
    seed: Annotated[int, typer.Option(help="Seed of the worlds.")] = 27,
) -> None:
    """Write questions for `stillroom bench quality`, and print the number of each kind."""
    from training.microworld.reuse_questions import write_reuse_questions

    _say(write_reuse_questions(shared, out, num_questions=num_questions, seed=seed))


@app.command()
def split_questions(
    out: Annotated[Path, typer.Option(help="JSON-lines file to write.")],
    shared: Shared = SHARED,
    num_questions: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the worlds.")] = 4242,
) -> None:
    """Write the *split* questions that the selector `question` was designed on, for `stillroom bench quality`."""
    from training.microworld.reuse_questions import write_split_questions

    _say(write_split_questions(shared, out, num_questions=num_questions, seed=seed))

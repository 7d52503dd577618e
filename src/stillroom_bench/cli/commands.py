"""Entry point that adds `stillroom bench` to the command `stillroom`."""

import typer

from stillroom_bench.cli import experiments, papers, quality
from stillroom_bench.cli.delivery import begin

app = typer.Typer(no_args_is_help=True, help="Measure on your own machine and documents.")
pipeline = typer.Typer(no_args_is_help=True)


@app.callback()
def top() -> None:
    """Measure on your own machine and documents."""
    begin()


quality.add_commands(app)
experiments.add_commands(app, pipeline)
app.command("papers", help=papers.HELP)(papers.papers)
app.add_typer(pipeline, name="pipeline", help="Measure request scheduling, and prefill that overlaps search.")

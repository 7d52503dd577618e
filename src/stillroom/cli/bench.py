"""`stillroom bench`: measure on one's own machine and documents."""

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def top() -> None:
    """Measure on your own machine and documents."""

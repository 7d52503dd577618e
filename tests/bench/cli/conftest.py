"""Command lines of `stillroom bench`, run inside the test."""

from tests.cli.conftest import clean_environment, run

__all__ = ["clean_environment", "run"]

"""Fixtures that run command lines of `stillroom bench` in the test process."""

from tests.cli.conftest import clean_environment, run

__all__ = ["clean_environment", "run"]

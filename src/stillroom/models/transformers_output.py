"""Keeps transformers from writing to the error output, which commands use for their own messages."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_output() -> Iterator[None]:
    """Let transformers draw no progress bars and log errors only."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()

"""Keeps transformers from writing to the error output, which commands use for their own messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def without_output() -> Iterator[None]:
    """Let transformers draw no progress bars and log errors only."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reading
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    bar = gguf_reading.tqdm  # its own, which no setting of transformers reaches
    gguf_reading.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        gguf_reading.tqdm = bar
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()

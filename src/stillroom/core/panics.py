"""Panics of native libraries as ordinary exceptions.

tantivy, tokenizers and llguidance are written in Rust. pyo3 raises a Rust panic as `PanicException`, which derives from
BaseException, so `except Exception` does not catch it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that end a process, a generator or a task on purpose. Every other exception is a failure."""


class NativePanicError(RuntimeError):
    """A native library panicked. Its own message is left out: it may quote the text that it was given."""


@contextmanager
def panics_as_errors(library: str) -> Iterator[None]:
    """Raise a panic inside the block, or inside a decorated function, as a NativePanicError."""
    try:
        yield
    except (Exception, *ENDINGS):
        raise
    except BaseException:
        raise NativePanicError(f"{library} panicked; its own message is on stderr") from None

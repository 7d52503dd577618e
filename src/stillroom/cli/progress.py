"""Progress of long work on stderr: a bar on a terminal, else a line every few seconds.

`stillroom add` measures progress in bytes, because one file may be a whole corpus.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stillroom.cli.console import count, duration, note

if TYPE_CHECKING:
    from rich.progress import Progress

    from stillroom.retrieval.ingest import AddProgress

SECONDS_BETWEEN_LINES = 5.0

Listener = Callable[["AddProgress"], None]
Now = Callable[[], float]


@contextlib.contextmanager
def showing_progress(*, is_shown: bool) -> Iterator[Listener | None]:
    """Yield a progress callback for `Stillroom.add`; None if nothing is shown."""
    if not is_shown:
        yield None
    elif sys.stderr.isatty():
        with _bar() as bar:
            yield BarListener(bar)
    else:
        yield LineListener()


@contextlib.contextmanager
def counting(what: str, *, is_shown: bool, now: Now = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback that takes the numbers done and in total."""
    if not is_shown:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield CountLines(what, now)


class CountLines:
    """Progress callback that prints `checking: 120 of 400, 41/s, about 7 s left` now and then."""

    def __init__(self, what: str, now: Now = time.monotonic) -> None:
        self._what, self._now = what, now
        self._last = now()
        self._start: int | None = None
        self._first: tuple[int, float] | None = None
        """First number that was done after the start, with its time: models load before it."""

    def __call__(self, done: int, total: int) -> None:
        at = self._now()
        if self._start is None:
            self._start = done
        elif self._first is None and done > self._start:
            self._first = done, at
        if at - self._last >= SECONDS_BETWEEN_LINES:
            self._last = at
            note(f"{self._what}: {done:,} of {total:,}{self._pace(done, total, at)}")

    def _pace(self, done: int, total: int, at: float) -> str:
        """Format as `, 41/s, about 7 s left`; empty while unknown."""
        if self._first is None or not self._first[0] < done < total:
            return ""
        rate = (done - self._first[0]) / max(at - self._first[1], 1e-9)
        return f", {rate:,.3g}/s, about {duration((total - done) / rate)} left"


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("indexing"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=Console(stderr=True),
        transient=True,
    )


class BarListener:
    """Progress callback that draws a bar, which disappears at the end."""

    def __init__(self, bar: "Progress", now: Now = time.monotonic) -> None:
        self._bar = bar
        self._pace = _AddRate(now)
        self._task = bar.add_task("indexing", total=None, counts="loading the embedder")

    def __call__(self, progress: "AddProgress") -> None:
        self._pace.take(progress)
        self._bar.update(
            self._task,
            completed=progress.num_bytes_done,
            total=progress.num_bytes_total,
            counts=_counts(progress) + self._pace.rate(progress),
        )


class LineListener:
    """Progress callback that prints `120 of 400 files, 3,100 chunks, 41 chunks/s, about 70 s left` now and then."""

    def __init__(self, now: Now = time.monotonic) -> None:
        self._now = now
        self._pace = _AddRate(now)
        self._last = now()

    def __call__(self, progress: "AddProgress") -> None:
        self._pace.take(progress)
        now = self._now()
        if now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        note(_counts(progress) + self._pace.rate(progress) + self._pace.time_left(progress))


class _AddRate:
    """Rate of indexing since the first chunks; before them the embedder was loading."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._first: AddProgress | None = None
        self._first_at = 0.0

    def take(self, progress: "AddProgress") -> None:
        if self._first is None and progress.num_chunks > 0:
            self._first, self._first_at = progress, self._now()

    def rate(self, progress: "AddProgress") -> str:
        """Format as `, 41 chunks/s`; empty while unknown."""
        elapsed = self._now() - self._first_at
        if self._first is None or elapsed <= 0 or progress.num_chunks == self._first.num_chunks:
            return ""
        return f", {(progress.num_chunks - self._first.num_chunks) / elapsed:,.0f} chunks/s"

    def time_left(self, progress: "AddProgress") -> str:
        """Format as `, about 70 s left`; empty while unknown, and at the end."""
        if self._first is None or not self._first.num_bytes_done < progress.num_bytes_done < progress.num_bytes_total:
            return ""
        pace = (progress.num_bytes_done - self._first.num_bytes_done) / (self._now() - self._first_at)
        return f", about {duration((progress.num_bytes_total - progress.num_bytes_done) / pace)} left"


def _counts(progress: "AddProgress") -> str:
    files = f"{progress.num_files_done:,} of {count(progress.num_files_total, 'file')}"
    return f"{files}, {count(progress.num_chunks, 'chunk')}"

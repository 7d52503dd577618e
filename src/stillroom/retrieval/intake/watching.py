"""Watches folders (`add --watch`): calls an update after changes, and again if the update failed.

Watching begins before the first update, so no change is lost between the two. An update looks at all files, so it does
not depend on the system reporting every change.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from threading import Event

from watchfiles import watch

from stillroom.core.clock import SystemClock
from stillroom.errors import UsageError
from stillroom.retrieval.intake.discovery import is_hidden

DEBOUNCE_MS = 1000
"""An update waits until nothing has changed for this time."""
_MAX_DEBOUNCES = 30
"""In a folder that changes all the time, an update runs after this multiple of `DEBOUNCE_MS`."""
_MAX_PAUSE = 32
"""Failed updates are retried after 1, 2, 4, ... and at most this multiple of `DEBOUNCE_MS`."""
_TICK_MS = 500
"""Interval of checks for `stop`, due updates and missing folders."""
_Identity = tuple[int, int]
_IGNORE_FILES = frozenset({".gitignore", ".stillroomignore"})


def watch_folders(
    folders: Sequence[Path],
    update: Callable[[], bool],
    stop: Event,
    *,
    ignored: Path,
    debounce_ms: int = DEBOUNCE_MS,
) -> None:
    """Call `update` now and after every change below the folders, until `stop`.

    Args:
        update: Indexes the folders; returns False to be called again soon.
        ignored: A folder whose changes are ignored: the knowledge base, which may be below one of the folders.

    Raises:
        UsageError: One of `folders` is not a folder.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is not a folder; --watch watches folders, give the folder of the file")
    watching = _FolderWatch(folders, update, _ChangeFilter(folders, ignored), debounce_ms)
    last: list[_Identity] | None = None
    while not stop.is_set():
        found = _identities(folders)
        if found is None or (last is not None and _is_unmounted(folders, last, found)):
            stop.wait(_TICK_MS / 1000)  # the documents are kept until the drive is back
        else:
            watching.run(found, stop)
            last = found


def _identities(folders: Sequence[Path]) -> list[_Identity] | None:
    """Return device and inode of each folder; None if a folder is missing."""
    with suppress(OSError):
        states = [folder.stat() for folder in folders]
        if all(S_ISDIR(state.st_mode) for state in states):
            return [(state.st_dev, state.st_ino) for state in states]
    return None


def _is_unmounted(folders: Sequence[Path], last: Sequence[_Identity], found: Sequence[_Identity]) -> bool:
    """Return whether a folder was replaced by an empty folder of another device, as after unmounting a drive."""
    moved = (folder for folder, (old, _), (new, _) in zip(folders, last, found, strict=True) if old != new)
    try:
        return any(not any(folder.iterdir()) for folder in moved)
    except OSError:
        return True


class _FolderWatch:
    """Calls `update` when it is due."""

    def __init__(
        self, folders: Sequence[Path], update: Callable[[], bool], is_relevant: "_ChangeFilter", debounce_ms: int
    ) -> None:
        self._folders = folders
        self._update = update
        self._is_relevant = is_relevant
        self._debounce_ms = debounce_ms

    def run(self, watched: Sequence[_Identity], stop: Event) -> None:
        """Watch until `stop`, or until a folder is removed or replaced."""
        schedule, clock = _UpdateSchedule(self._debounce_ms / 1000), SystemClock()
        for changes in watch(
            *self._folders,
            watch_filter=None,  # with a filter, `watch` does not yield while only irrelevant files change
            debounce=self._debounce_ms,
            rust_timeout=min(_TICK_MS, self._debounce_ms),
            yield_on_timeout=True,
            stop_event=stop,
            ignore_permission_denied=True,
        ):
            if _identities(self._folders) != watched:
                return
            if any(self._is_relevant(name) for _, name in changes):
                schedule.note_change(clock.monotonic())
            if schedule.is_due(clock.monotonic()):
                schedule.note_update(self._update(), clock.monotonic())


class _UpdateSchedule:
    """Decides when to update: after the last of several changes; after failures with growing pauses. Times in seconds,
    the first update is due at once."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._due: float | None = -math.inf
        self._changing_since: float | None = None
        self._pause_s = quiet_s

    def note_change(self, now: float) -> None:
        if self._changing_since is None:
            self._changing_since = now
        self._due = min(now + self._quiet_s, self._changing_since + _MAX_DEBOUNCES * self._quiet_s)

    def is_due(self, now: float) -> bool:
        return self._due is not None and now >= self._due

    def note_update(self, is_done: bool, now: float) -> None:
        self._changing_since = None
        self._due = None if is_done else now + self._pause_s
        self._pause_s = self._quiet_s if is_done else min(2 * self._pause_s, _MAX_PAUSE * self._quiet_s)


class _ChangeFilter:
    """Tells whether a change is relevant: changes of hidden files are not, except of ignore files."""

    def __init__(self, folders: Sequence[Path], ignored: Path) -> None:
        self._folders = folders
        self._ignored = ignored

    def __call__(self, name: str) -> bool:
        path = Path(name)
        if path.is_relative_to(self._ignored):
            return False
        for folder in self._folders:
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                return not any(map(is_hidden, parts[:-1])) and (not is_hidden(path.name) or path.name in _IGNORE_FILES)
        return False

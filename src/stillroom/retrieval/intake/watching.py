"""Keeping folders in step: who watches is told when something in them changes, and told again if it could not follow.

The watching begins before the first telling, so nothing falls between the two. What is told is that something changed,
not what: looking through all files costs little, and misses nothing that the system did not report.
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
"""Changes that follow each other more closely are one: a program that is still writing is waited for."""
_MAX_UNREST = 30
"""A folder in which something changes all the time is followed after so many times `DEBOUNCE_MS`."""
_MAX_PAUSE = 32
"""Where it could not be followed, it is tried again after once, twice, and at last so many times `DEBOUNCE_MS`."""
_TICK_MS = 500
"""How often it is looked whether to stop, to try again, and whether the folders are still there."""
_Identity = tuple[int, int]
_IGNORE_FILES = frozenset({".gitignore", ".stillroomignore"})


def keep_in_step(
    folders: Sequence[Path],
    follow: Callable[[], bool],
    stop: Event,
    *,
    apart_from: Path,
    debounce_ms: int = DEBOUNCE_MS,
) -> None:
    """Call `follow` now and after every change below the folders, until `stop`.

    Args:
        follow: takes over what changed; False where it could not now, and is to be called again soon.
        apart_from: a folder whose changes do not count: the knowledge base, which may lie in one of the folders.

    Raises:
        UsageError: one of `folders` is no folder.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is no folder; --watch keeps folders in step, give the one that holds the file")
    watching = _FolderWatch(folders, follow, _Filter(folders, apart_from), debounce_ms)
    last: list[_Identity] | None = None
    while not stop.is_set():
        found = _identities(folders)
        if found is None or (last is not None and _is_drive_out(folders, last, found)):
            stop.wait(_TICK_MS / 1000)  # a drive that was taken out comes back, and its documents are kept until then
        else:
            watching.run(found, stop)
            last = found


def _identities(folders: Sequence[Path]) -> list[_Identity] | None:
    """Which folders have these names now; None where one is missing."""
    with suppress(OSError):
        found = [folder.stat() for folder in folders]
        return [(one.st_dev, one.st_ino) for one in found] if all(S_ISDIR(one.st_mode) for one in found) else None
    return None


def _is_drive_out(folders: Sequence[Path], last: Sequence[_Identity], found: Sequence[_Identity]) -> bool:
    """Whether in the place of a folder there is an empty one of another device, as where a drive was mounted."""
    moved = (folder for folder, (old, _), (new, _) in zip(folders, last, found, strict=True) if old != new)
    try:
        return any(not any(folder.iterdir()) for folder in moved)
    except OSError:
        return True


class _FolderWatch:
    """Calls `follow` when it is time."""

    def __init__(
        self, folders: Sequence[Path], follow: Callable[[], bool], counts: "_Filter", debounce_ms: int
    ) -> None:
        self._folders = folders
        self._follow = follow
        self._counts = counts
        self._debounce_ms = debounce_ms

    def run(self, watched: Sequence[_Identity], stop: Event) -> None:
        """Until `stop`, or until a folder is gone or another one has its name: what is watched is the folder."""
        pace, clock = _FollowTimes(self._debounce_ms / 1000), SystemClock()
        for changes in watch(
            *self._folders,
            watch_filter=None,  # or nothing would be heard while only what does not count changes
            debounce=self._debounce_ms,
            rust_timeout=min(_TICK_MS, self._debounce_ms),
            yield_on_timeout=True,
            stop_event=stop,
            ignore_permission_denied=True,
        ):
            if _identities(self._folders) != watched:
                return
            if any(self._counts(name) for _, name in changes):
                pace.changed(clock.monotonic())
            if pace.is_due(clock.monotonic()):
                pace.followed(self._follow(), clock.monotonic())


class _FollowTimes:
    """When to follow: after the last of several changes, and after a failure later each time. Times are seconds."""

    def __init__(self, quiet_s: float) -> None:
        """`quiet_s`: how long nothing has to change. What is there already is due at once."""
        self._quiet_s = quiet_s
        self._due: float | None = -math.inf
        self._restless_since: float | None = None
        self._pause_s = quiet_s

    def changed(self, now: float) -> None:
        if self._restless_since is None:
            self._restless_since = now
        self._due = min(now + self._quiet_s, self._restless_since + _MAX_UNREST * self._quiet_s)

    def is_due(self, now: float) -> bool:
        return self._due is not None and now >= self._due

    def followed(self, is_done: bool, now: float) -> None:
        """It was done now, or could not be."""
        self._restless_since = None
        self._due = None if is_done else now + self._pause_s
        self._pause_s = self._quiet_s if is_done else min(2 * self._pause_s, _MAX_PAUSE * self._quiet_s)


class _Filter:
    """Whether a change counts: nothing hidden does, apart from the files that say what to ignore."""

    def __init__(self, folders: Sequence[Path], apart_from: Path) -> None:
        self._folders = folders
        self._apart_from = apart_from

    def __call__(self, name: str) -> bool:
        path = Path(name)
        if path.is_relative_to(self._apart_from):
            return False
        for folder in self._folders:
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                return not any(map(is_hidden, parts[:-1])) and (not is_hidden(path.name) or path.name in _IGNORE_FILES)
        return False

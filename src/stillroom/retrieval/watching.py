"""Keeping folders in step: who watches is told when something in them changes, and told again if it could not follow.

The watching begins before the first telling, so nothing falls between the two. What is told is that something changed,
not what: looking through all files costs little, and misses nothing that the system did not report.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from threading import Event

from watchfiles import Change, watch

from stillroom.errors import UsageError

DEBOUNCE_MS = 1000
"""Changes that follow each other more closely are one: a program that is still writing is waited for."""
_TICK_MS = 500
"""How often it is looked whether to stop, to try again, and whether the folders are still there."""
_Identities = list[tuple[int, int]]
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
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder; --watch keeps folders in step, give the one that holds the file")
    counts = _Filter(folders, apart_from)
    while not stop.is_set():
        watched = _identities(folders)
        if watched is not None:
            _watch(folders, watched, follow, stop, counts, debounce_ms)
        else:  # a drive that was taken out comes back, and its documents are kept until then
            stop.wait(_TICK_MS / 1000)


def _identities(folders: Sequence[Path]) -> "_Identities | None":
    """Which folders have these names now; None where one is missing."""
    with suppress(OSError):
        found = [folder.stat() for folder in folders]
        return [(one.st_dev, one.st_ino) for one in found] if all(S_ISDIR(one.st_mode) for one in found) else None
    return None


def _watch(
    folders: Sequence[Path],
    watched: "_Identities",
    follow: Callable[[], bool],
    stop: Event,
    counts: "_Filter",
    debounce_ms: int,
) -> None:
    """Until `stop`, or until a folder is gone or another one has its name: what is watched is the folder."""
    is_due = True
    for changes in watch(
        *folders,
        watch_filter=counts,
        debounce=debounce_ms,
        rust_timeout=_TICK_MS,
        yield_on_timeout=True,
        stop_event=stop,
        ignore_permission_denied=True,
    ):
        if _identities(folders) != watched:
            return
        if changes or is_due:
            is_due = not follow()


class _Filter:
    """Whether a change counts: nothing hidden does, apart from the files that say what to ignore."""

    def __init__(self, folders: Sequence[Path], apart_from: Path) -> None:
        self._folders = folders
        self._apart_from = apart_from

    def __call__(self, change: Change, name: str) -> bool:
        path = Path(name)
        if path.is_relative_to(self._apart_from):
            return False
        for folder in self._folders:
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                is_hidden = any(part.startswith(".") for part in parts)
                return not is_hidden or (path.name in _IGNORE_FILES and not any(p.startswith(".") for p in parts[:-1]))
        return False

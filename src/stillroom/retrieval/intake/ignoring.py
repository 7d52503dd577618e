"""What .gitignore, .stillroomignore and --exclude say of a file. The rules are git's, matched by pathspec."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.loaders.source import opened

_FILES = (".gitignore", ".stillroomignore")
"""In each folder; what a later one says wins."""
_MAX_BYTES = 1 << 20


class IgnoreRules:
    """The rules for one folder that is added. A deeper file wins over one above it, the last line that fits wins within
    a file, and in a git repository the files above the folder count too."""

    def __init__(self, root: Path, exclude: Sequence[str] = ()) -> None:
        """Args:
            root: the folder, absolute.
            exclude: further patterns, relative to the folder; nothing brings back what they exclude.

        Raises:
            UsageError: a pattern is none.
        """
        self.root = root
        try:
            self._exclude = GitIgnoreSpec.from_lines(exclude)
        except ValueError as error:
            raise UsageError(f"not a pattern as in .gitignore: {', '.join(exclude)}: {error}") from error
        self._top = _repository_of(root)
        self._specs: dict[Path, GitIgnoreSpec | None] = {}

    def is_excluded(self, path: Path, *, is_folder: bool) -> bool:
        """Whether the patterns that were given exclude an entry."""
        return bool(self._exclude.check_file(_relative(path, self.root, is_folder)).include)

    def is_ignored(self, path: Path, *, is_folder: bool) -> bool:
        """Whether an entry is passed over, given that the folder that holds it is not."""
        if self.is_excluded(path, is_folder=is_folder):
            return True
        folder = path.parent
        while True:
            spec = self._spec(folder)
            said = spec.check_file(_relative(path, folder, is_folder)).include if spec is not None else None
            if said is not None:
                return said
            if folder == self._top or folder == folder.parent:
                return False
            folder = folder.parent

    def ignores_within(self, path: Path) -> bool:
        """Whether a file somewhere under the folder is passed over, by itself or with a folder around it."""
        above = [parent for parent in path.parents if parent != self.root and parent.is_relative_to(self.root)]
        is_above = any(self.is_ignored(parent, is_folder=True) for parent in reversed(above))
        return is_above or self.is_ignored(path, is_folder=False)

    def _spec(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            lines = [line for name in _FILES for line in _lines(folder / name)]
            self._specs[folder] = _spec_of(lines) if lines else None
        return self._specs[folder]


def _repository_of(root: Path) -> Path:
    """The top of the git repository around a folder; the folder itself where there is none."""
    for folder in (root, *root.parents):
        if os.path.exists(folder / ".git"):  # false where the folder may not be entered
            return folder
    return root


def _relative(path: Path, folder: Path, is_folder: bool) -> str:
    return os.path.relpath(path, folder) + ("/" if is_folder else "")


def _lines(path: Path) -> list[str]:
    """Of an ignore file; none where there is no such file, or it cannot be read."""
    if not os.path.isfile(path):
        return []
    try:
        with opened(path) as (stream, _):
            return stream.read(_MAX_BYTES).decode("utf-8-sig", "replace").splitlines()
    except DocumentError:
        return []


def _spec_of(lines: Iterable[str]) -> GitIgnoreSpec:
    """The patterns among the lines; as for git, what is no pattern matches nothing."""
    kept = []
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        kept.append(line)
    return GitIgnoreSpec.from_lines(kept)

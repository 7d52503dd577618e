"""Ignore rules of .gitignore, .stillroomignore and --exclude, with git's semantics (pathspec)."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.loaders.source import opened

_FILES = (".gitignore", ".stillroomignore")
"""Ignore files of a folder; the last matching line of both wins."""
_MAX_BYTES = 1 << 20


class IgnoreRules:
    """Ignore rules for one folder of `add`. Deeper ignore files win, within a file the last matching line; in a git
    repository the ignore files above the folder count too."""

    def __init__(self, root: Path, exclude: Sequence[str] = ()) -> None:
        """Args:
            root: The folder, absolute.
            exclude: Further patterns, relative to the folder; ignore files cannot override them.

        Raises:
            UsageError: A pattern is invalid.
        """
        self.root = root
        try:
            self._exclude = GitIgnoreSpec.from_lines(exclude)
        except ValueError as error:
            raise UsageError(f"not patterns as in .gitignore: {', '.join(exclude)}: {error}") from error
        self._top = _repository_of(root)
        self._specs: dict[Path, GitIgnoreSpec | None] = {}

    def is_excluded(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether `exclude` matches a path."""
        return bool(self._exclude.check_file(_relative(path, self.root, is_folder)).include)

    def is_ignored(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether a path is ignored. Precondition: its folder is not ignored."""
        if self.is_excluded(path, is_folder=is_folder):
            return True
        folder = path.parent
        while True:
            spec = self._spec(folder)
            matched = spec.check_file(_relative(path, folder, is_folder)).include if spec is not None else None
            if matched is not None:
                return matched
            if folder == self._top or folder == folder.parent:
                return False
            folder = folder.parent

    def ignores_within(self, path: Path) -> bool:
        """Return whether a file anywhere below the folder is ignored, by itself or with an enclosing folder."""
        above = [parent for parent in path.parents if parent != self.root and parent.is_relative_to(self.root)]
        is_above = any(self.is_ignored(parent, is_folder=True) for parent in reversed(above))
        return is_above or self.is_ignored(path, is_folder=False)

    def _spec(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            lines = [line for name in _FILES for line in _lines(folder / name)]
            self._specs[folder] = _spec_of(lines) if lines else None
        return self._specs[folder]


def _repository_of(root: Path) -> Path:
    """Return the top folder of the git repository around `root`, or `root` outside repositories."""
    for folder in (root, *root.parents):
        if os.path.exists(folder / ".git"):  # false for folders that cannot be entered
            return folder
    return root


def _relative(path: Path, folder: Path, is_folder: bool) -> str:
    return os.path.relpath(path, folder) + ("/" if is_folder else "")


def _lines(path: Path) -> list[str]:
    """Return the lines of an ignore file; [] if it is missing or cannot be read."""
    if not os.path.isfile(path):
        return []
    try:
        with opened(path) as (stream, _):
            return stream.read(_MAX_BYTES).decode("utf-8-sig", "replace").splitlines()
    except DocumentError:
        return []


def _spec_of(lines: Iterable[str]) -> GitIgnoreSpec:
    """Compile the valid patterns; as in git, an invalid pattern matches nothing."""
    kept = []
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        kept.append(line)
    return GitIgnoreSpec.from_lines(kept)

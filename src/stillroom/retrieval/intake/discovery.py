"""Discovery of document files: walks folders and skips hidden, ignored and unknown files.

Symbolic links to folders are not followed, so a walk always ends. Rules: docs/documents.md
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.errors import UsageError
from stillroom.retrieval.intake.ignoring import IgnoreRules
from stillroom.retrieval.loaders.formats import UNSUPPORTED, format_of, is_image, is_jsonl
from stillroom.retrieval.loaders.jsonl import looks_like_corpus

_MAX_OTHERS = 10
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})


@dataclass(slots=True)
class Skipped:
    """Numbers of skipped files and folders; a skipped folder counts as one."""

    num_hidden: int = 0
    """See `is_hidden`."""
    num_ignored: int = 0
    """Skipped by .gitignore, .stillroomignore or --exclude, `node_modules`, `__pycache__` and knowledge bases."""
    num_other: int = 0
    """Files of folders without a loader; read as text if they are named."""
    others: list[Path] = field(default_factory=list)
    """The first ten of them."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """Files found for a list of paths."""

    files: tuple[Path, ...]
    """Absolute, without duplicates, in the order of the arguments and sorted within a folder."""
    folders: tuple[Path, ...]
    """The folders among the arguments, absolute."""
    failures: tuple[tuple[Path, str], ...] = ()
    """Folders that cannot be entered or listed, and why; their content is unknown."""
    skipped: Skipped = field(default_factory=Skipped)
    rules: tuple[IgnoreRules, ...] = ()
    """The ignore rules of each of `folders`."""

    def covers(self, path: str) -> bool:
        """Return whether a file is below one of the folders, and not below a folder in `failures`."""
        return _is_under(path, self.folders) and not _is_under(path, [folder for folder, _ in self.failures])

    def ignores(self, path: str) -> bool:
        """Return whether the rules of every folder around a file skip it."""
        around = [rules for rules in self.rules if path.startswith(os.path.join(rules.root, ""))]
        return bool(around) and all(rules.ignores_within(Path(path)) for rules in around)


def discover(
    paths: Sequence[str | Path],
    exclude: Sequence[str] = (),
    known: Collection[str] = (),
    *,
    reads_images: bool = False,
) -> Discovery:
    """Find the files to load. A file among `paths` is loaded whatever its name, unless `exclude` matches.

    Args:
        exclude: Patterns as in .gitignore, relative to each folder; for files among `paths` they match the name.
        known: Paths of indexed files: a JSONL file among them is loaded whatever its first record is now, and an image
            whether or not `reads_images`.
        reads_images: Whether image files of folders are loaded.

    Raises:
        UsageError: A path is empty or does not exist, or a pattern is invalid.
    """
    walk = _Walk(exclude, known, reads_images)
    for path in paths:
        walk.add(path)
    folders = tuple(rules.root for rules in walk.rules)
    return Discovery(tuple(walk.files), folders, tuple(walk.failures), walk.skipped, tuple(walk.rules))


class _Walk:
    def __init__(self, exclude: Sequence[str], known: Collection[str], reads_images: bool) -> None:
        self.files: dict[Path, None] = {}
        self.failures: list[tuple[Path, str]] = []
        self.skipped = Skipped()
        self.rules: list[IgnoreRules] = []
        self._exclude = exclude
        self._known = known
        self._reads_images = reads_images

    def add(self, path: str | Path) -> None:
        check_exists(path)
        absolute = Path(os.path.abspath(path))
        if os.path.isdir(absolute):
            rules = IgnoreRules(absolute, self._exclude)
            self.rules.append(rules)
            self.files.update(dict.fromkeys(self._files_below(absolute, rules)))
        elif IgnoreRules(absolute.parent, self._exclude).is_excluded(absolute, is_folder=False):
            self.skipped.num_ignored += 1
        else:
            self.files[absolute] = None

    def _files_below(self, root: Path, rules: IgnoreRules) -> Iterator[Path]:
        for parent, folders, names in os.walk(root, onerror=lambda error: self._fail(Path(error.filename), error)):
            folders[:] = sorted(name for name in folders if self._is_entered(Path(parent, name), rules))
            for name in sorted(names):
                path = Path(parent, name)
                if self._is_loaded(path, rules):
                    yield path

    def _fail(self, folder: Path, error: OSError) -> None:
        self.failures.append((folder, f"{folder}: cannot be listed: {error.strerror or error}"))

    def _is_entered(self, folder: Path, rules: IgnoreRules) -> bool:
        if is_hidden(folder.name):
            self.skipped.num_hidden += 1
            return False
        try:
            is_skipped = folder.name in _SKIPPED_FOLDERS or rules.is_ignored(folder, is_folder=True)
            if is_skipped or _is_knowledge_base(folder):
                self.skipped.num_ignored += 1
                return False
        except OSError as error:
            if not folder.is_symlink():  # links to folders are not followed, even broken ones
                self._fail(folder, error)
            return False
        return True

    def _is_loaded(self, path: Path, rules: IgnoreRules) -> bool:
        if is_hidden(path.name):
            self.skipped.num_hidden += 1
        elif rules.is_ignored(path, is_folder=False):
            self.skipped.num_ignored += 1
        elif not self._is_document(path):
            self.skipped.num_other += 1
            if len(self.skipped.others) < _MAX_OTHERS:
                self.skipped.others.append(path)
        else:
            return True
        return False

    def _is_document(self, path: Path) -> bool:
        if is_jsonl(path):
            is_queries = path.stem == "queries" and os.path.exists(path.with_stem("corpus"))
            return not is_queries and (str(path) in self._known or looks_like_corpus(path))
        if is_image(path):
            return self._reads_images or str(path) in self._known
        return format_of(path) is not None or path.suffix.lower() in UNSUPPORTED


def check_exists(path: str | Path) -> None:
    """Refuse a path that does not exist. A path that cannot be accessed passes; reading it reports the reason.

    Raises:
        UsageError: The path does not exist or is empty (as a path, "" would be the working folder).
    """
    if not os.fspath(path):
        raise UsageError("a path is empty; give files or folders, . for the current one")
    try:
        os.lstat(os.path.abspath(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: an impossible file name
        raise UsageError(f"{path} does not exist; give existing files or folders") from None
    except OSError:
        pass


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden: it begins with a dot, or with `~$` as Office's lock files."""
    return name.startswith((".", "~$"))


def _is_under(path: str, folders: Iterable[Path]) -> bool:
    return any(path.startswith(os.path.join(folder, "")) for folder in folders)


def _is_knowledge_base(folder: Path) -> bool:
    """Return whether a folder is a knowledge base, which may be below the folder that it indexes. Raises OSError if the
    folder cannot be entered."""
    return (folder / "manifest.json").exists() and (folder / "corpus.sqlite3").exists()

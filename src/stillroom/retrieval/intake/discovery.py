"""Which files are documents: folders are walked, and what is hidden, ignored or of no known format is passed over.

Symbolic links to folders are not followed, so no walk goes in circles. The rules: docs/documents.md
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.errors import UsageError
from stillroom.retrieval.intake.ignoring import IgnoreRules
from stillroom.retrieval.loaders.formats import UNREADABLE, format_of, is_jsonl
from stillroom.retrieval.loaders.jsonl import looks_like_corpus

_NO_DOCUMENTS = frozenset({"node_modules", "__pycache__"})
"""Folders of what programs fetch and make."""


@dataclass(slots=True)
class Skipped:
    """How many entries of folders were passed over; a folder that was not entered counts as one."""

    num_hidden: int = 0
    """See `is_hidden`."""
    num_ignored: int = 0
    """By .gitignore, .stillroomignore, --exclude, or because no documents are kept in such folders."""
    num_other: int = 0
    """Of formats that no loader reads."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a list of paths stands for."""

    files: tuple[Path, ...]
    """Absolute, without duplicates, in the order of the arguments and sorted within a folder."""
    folders: tuple[Path, ...]
    """The folders among the arguments, absolute."""
    failures: tuple[tuple[Path, str], ...] = ()
    """Folders that cannot be entered or listed; what lies in them is unknown."""
    skipped: Skipped = field(default_factory=Skipped)
    rules: tuple[IgnoreRules, ...] = ()
    """One for each of `folders`."""

    def covers(self, path: str) -> bool:
        """Whether a file lies in one of the folders, and in none of what could not be seen of them."""
        return _is_under(path, self.folders) and not _is_under(path, [folder for folder, _ in self.failures])

    def ignores(self, path: str) -> bool:
        """Whether the rules of every folder around a file pass it over."""
        around = [rules for rules in self.rules if path.startswith(os.path.join(rules.root, ""))]
        return bool(around) and all(rules.ignores_within(Path(path)) for rules in around)


def discover(paths: Sequence[str | Path], exclude: Sequence[str] = (), known: Collection[str] = ()) -> Discovery:
    """The files to load. A file that is named is taken whatever its name, unless `exclude` says otherwise.

    Args:
        exclude: patterns as in .gitignore, relative to each folder; of a named file they see the name.
        known: files that documents came from: a JSONL file among them is one whatever its first record is now.

    Raises:
        UsageError: a path is empty or does not exist, or a pattern is none.
    """
    walk = _Walk(exclude, known)
    for path in paths:
        walk.take(path)
    return Discovery(
        tuple(walk.files),
        tuple(rules.root for rules in walk.rules),
        tuple(walk.failures),
        walk.skipped,
        tuple(walk.rules),
    )


class _Walk:
    def __init__(self, exclude: Sequence[str], known: Collection[str]) -> None:
        self.files: dict[Path, None] = {}
        self.failures: list[tuple[Path, str]] = []
        self.skipped = Skipped()
        self.rules: list[IgnoreRules] = []
        self._exclude = exclude
        self._known = known

    def take(self, path: str | Path) -> None:
        check_is_there(path)
        absolute = Path(os.path.abspath(path))
        if os.path.isdir(absolute):
            rules = IgnoreRules(absolute, self._exclude)
            self.rules.append(rules)
            self.files.update(dict.fromkeys(self._under(absolute, rules)))
        elif IgnoreRules(absolute.parent, self._exclude).is_excluded(absolute, is_folder=False):
            self.skipped.num_ignored += 1
        else:
            self.files[absolute] = None

    def _under(self, root: Path, rules: IgnoreRules) -> Iterator[Path]:
        for parent, folders, names in os.walk(root, onerror=self._note):
            folders[:] = sorted(name for name in folders if self._is_entered(Path(parent, name), rules))
            for name in sorted(names):
                path = Path(parent, name)
                if self._is_taken(path, rules):
                    yield path

    def _note(self, error: OSError) -> None:
        self._fail(Path(error.filename), error)

    def _fail(self, folder: Path, error: OSError) -> None:
        self.failures.append((folder, f"{folder}: cannot be listed: {error.strerror or error}"))

    def _is_entered(self, folder: Path, rules: IgnoreRules) -> bool:
        if is_hidden(folder.name):
            self.skipped.num_hidden += 1
            return False
        try:
            if folder.name in _NO_DOCUMENTS or rules.is_ignored(folder, is_folder=True) or _is_knowledge_base(folder):
                self.skipped.num_ignored += 1
                return False
        except OSError as error:
            if not folder.is_symlink():  # no link to a folder is followed, wherever it leads
                self._fail(folder, error)
            return False
        return True

    def _is_taken(self, path: Path, rules: IgnoreRules) -> bool:
        if is_hidden(path.name):
            self.skipped.num_hidden += 1
        elif rules.is_ignored(path, is_folder=False):
            self.skipped.num_ignored += 1
        elif not self._is_document(path):
            self.skipped.num_other += 1
        else:
            return True
        return False

    def _is_document(self, path: Path) -> bool:
        if is_jsonl(path):
            is_queries = path.stem == "queries" and os.path.exists(path.with_stem("corpus"))
            return not is_queries and (str(path) in self._known or looks_like_corpus(path))
        return format_of(path) is not None or path.suffix.lower() in UNREADABLE


def check_is_there(path: str | Path) -> None:
    """Refuse a name that nothing has. What merely cannot be reached may be there; why not is said where it is read.

    Raises:
        UsageError: nothing has it, or it is empty, which as a path would be the working folder.
    """
    if not os.fspath(path):
        raise UsageError("an empty path stands for no file; give files or folders, . for the current one")
    try:
        os.lstat(os.path.abspath(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a ValueError: no file can have this name
        raise UsageError(f"{path} does not exist; give files or folders that do") from None
    except OSError:
        pass


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name is nobody's document: a dot hides it, and `~$` is how Office names the file
    that says who has a document open."""
    return name.startswith((".", "~$"))


def _is_under(path: str, folders: Iterable[Path]) -> bool:
    return any(path.startswith(os.path.join(folder, "")) for folder in folders)


def _is_knowledge_base(folder: Path) -> bool:
    """One may lie in the folder that it indexes. Raises OSError where the folder may not be entered."""
    return (folder / "manifest.json").exists() and (folder / "corpus.sqlite3").exists()

"""Folders and files that hold documents: readable by the owner of the process, whatever the umask says.

The rule, for everything below a knowledge base's folder:

- that folder is made with mode 0700. What is made in it has the rights of its owner, and of the group as far as the
  folder in which it is made grants them; never rights of others.
- a folder that others may read or enter (made by an earlier version, or under umask 022) is closed to group and others
  when its owner opens it, with all that is in it. One that is closed to others is as the operator wants it.
"""

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

_GROUP_FILE, _GROUP_FOLDER = stat.S_IRGRP | stat.S_IWGRP, stat.S_IRWXG


def file_mode(folder: Path) -> int:
    """The mode of a file that is made in a folder."""
    return 0o600 | (_group_rights(folder) & _GROUP_FILE)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it where they are missing; does nothing to those that are there."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        mode = 0o700 | (_group_rights(folder.parent) & _GROUP_FOLDER)
        os.mkdir(folder, 0o700)
        if mode != 0o700:  # as the folder above it, whatever the umask; the set-group-ID bit stays
            os.chmod(folder, stat.S_IMODE(folder.stat().st_mode) | mode)


def create_file(path: Path) -> None:
    """Make an empty file, unless there is one: for libraries that open files by their names."""
    with contextlib.suppress(FileExistsError):
        os.close(_opened(path, os.O_WRONLY | os.O_EXCL))


def open_file(path: Path) -> BinaryIO:
    """A new, empty file to write to; one that is there is emptied."""
    return os.fdopen(_opened(path, os.O_WRONLY | os.O_TRUNC), "wb")


def opened_file(path: Path) -> int:
    """The descriptor of `open_file`."""
    return _opened(path, os.O_WRONLY | os.O_TRUNC)


def close_to_others(folder: Path) -> None:
    """Close a folder that others may read or enter, and all that is in it, to group and others; one line in the log.

    Does nothing where it is closed already, belongs to another user, or may not be written. A file that cannot be
    changed stays as it is.
    """
    try:
        status = folder.stat()
        if not status.st_mode & stat.S_IRWXO or status.st_uid != os.geteuid() or not os.access(folder, os.W_OK):
            return
        for parent, folders, names in os.walk(folder):
            for name in (*folders, *names):
                _close(os.path.join(parent, name))
        os.chmod(folder, stat.S_IMODE(status.st_mode) & 0o7700)  # last: where this is interrupted, it is done again
    except OSError as error:
        logger.warning("%s is readable by other users, and that cannot be changed: %s", folder, error.strerror)
        return
    logger.warning(
        "%s was readable by other users; it is now closed to all but its owner. To let a group read it: "
        "chmod -R g+rX %s",
        folder,
        folder,
    )


def close_files(folder: Path) -> None:
    """Give the files of one folder the mode of `file_mode`: for those that a library has made."""
    mode = file_mode(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                if entry.is_file(follow_symlinks=False) and stat.S_IMODE(entry.stat().st_mode) != mode:
                    os.chmod(entry.path, mode)


def _close(path: str) -> None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o077:
            os.chmod(path, stat.S_IMODE(status.st_mode) & 0o7700)


def _opened(path: Path, flags: int) -> int:
    mode = file_mode(path.parent)
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if mode != 0o600:
        with contextlib.suppress(OSError):  # another user's file
            os.fchmod(descriptor, mode)
    return descriptor


def _group_rights(folder: Path) -> int:
    """The group's bits of a folder's mode, if the folder is closed to others; else none."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return 0
    return 0 if mode & stat.S_IRWXO else mode & stat.S_IRWXG

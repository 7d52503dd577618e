"""Creates folders and files that only the owner of the process can read, for any umask.

Rules for everything below a knowledge base's folder:

- The folder is created with mode 0700. Files and folders in it get the owner's rights, and the group's rights that
  their folder grants; never rights of others.
- A folder that others may read or enter (from an earlier version, or under umask 022) is closed to group and others,
  with its content, when its owner opens it. A folder that is closed to others keeps its mode.
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
    """Return the mode of a new file in this folder."""
    return 0o600 | (_group_rights(folder) & _GROUP_FILE)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; existing ones stay as they are."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        mode = 0o700 | (_group_rights(folder.parent) & _GROUP_FOLDER)
        os.mkdir(folder, 0o700)
        if mode != 0o700:  # as the folder above it, whatever the umask; the set-group-ID bit stays
            os.chmod(folder, stat.S_IMODE(folder.stat().st_mode) | mode)


def create_file(path: Path) -> None:
    """Create an empty file unless it exists, for libraries that open files by name."""
    with contextlib.suppress(FileExistsError):
        os.close(_opened(path, os.O_WRONLY | os.O_EXCL))


def open_file(path: Path) -> BinaryIO:
    """Open a new file, or an emptied existing one, for writing."""
    return os.fdopen(_opened(path, os.O_WRONLY | os.O_TRUNC), "wb")


def opened_file(path: Path) -> int:
    """Return a file descriptor, as `open_file`."""
    return _opened(path, os.O_WRONLY | os.O_TRUNC)


def appended_file(path: Path) -> int:
    """Return a file descriptor that writes at the end of a file, which is created if it is missing."""
    return _opened(path, os.O_WRONLY | os.O_APPEND)


def close_to_others(folder: Path) -> None:
    """Remove the rights of group and others from a folder that others may read or enter, and from its content.

    Logs one line. Does nothing if the folder is closed already, belongs to another user, or cannot be written. A file
    that cannot be changed stays as it is.
    """
    try:
        status = folder.stat()
        if not status.st_mode & stat.S_IRWXO or status.st_uid != os.geteuid() or not os.access(folder, os.W_OK):
            return
        for parent, folders, names in os.walk(folder):
            for name in (*folders, *names):
                _close(os.path.join(parent, name))
        os.chmod(folder, stat.S_IMODE(status.st_mode) & 0o7700)  # last, so that an interrupted run is repeated
    except OSError as error:
        logger.warning("%s is readable by other users, and its mode cannot be changed: %s", folder, error.strerror)
        return
    logger.warning(
        "%s was readable by other users; it is now closed to all but its owner. To let a group read it: "
        "chmod -R g+rX %s",
        folder,
        folder,
    )


def close_files(folder: Path) -> None:
    """Set the mode of `file_mode` on the files of one folder, for files that a library created."""
    mode = file_mode(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # removed meanwhile, or another user's
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
    """Return the group bits of a folder's mode if the folder is closed to others, else 0."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return 0
    return 0 if mode & stat.S_IRWXO else mode & stat.S_IRWXG

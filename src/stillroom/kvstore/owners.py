"""Owner notes in a folder of KV: the tenant of each owner tag, and where its knowledge base is.

`<root>/owners/<tag>.json` is written before the first record of that owner. A record names its owner by a tag only;
with the note, another process can tell whether the documents behind a record still exist.
"""

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.kv import OwnerTag
from stillroom.core.private_files import make_folder, open_file
from stillroom.kvstore.files import remove_file

logger = logging.getLogger(__name__)

_FOLDER = "owners"


@dataclass(frozen=True, slots=True)
class OwnerNote:
    """The tenant of an owner tag and the place of its documents."""

    tenant: str
    knowledge_base: Path
    """The folder."""


def note_owner(root: Path, owner: OwnerTag, note: OwnerNote) -> None:
    """Write the note of an owner if it is missing. Does nothing where no KV is kept on disk.

    If the note cannot be written, a warning is logged; the next sweep then removes the owner's records.
    """
    if not root.is_dir() or owner_note(root, owner) == note:
        return
    path = _path(root, owner)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        make_folder(path.parent)
        with open_file(temporary) as file:
            content = {"tenant": note.tenant, "knowledge_base": str(note.knowledge_base)}
            file.write(json.dumps(content).encode() + b"\n")
        os.replace(temporary, path)
    except OSError as error:
        remove_file(temporary)
        logger.warning("the owner of kept KV cannot be written to disk (%s); a restart removes that KV", error)


def owner_note(root: Path, owner: OwnerTag) -> OwnerNote | None:
    """Return the note of an owner; None if it is missing or unreadable."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_path(root, owner).read_text(encoding="utf-8"))
        return OwnerNote(str(content["tenant"]), Path(content["knowledge_base"]))
    return None


def noted_owners(root: Path) -> list[OwnerTag]:
    """Return every owner that has a note, unordered."""
    found = []
    for path in (root / _FOLDER).glob("*.json"):
        with contextlib.suppress(ValueError):
            found.append(OwnerTag(bytes.fromhex(path.stem)))
    return found


def remove_note(root: Path, owner: OwnerTag) -> None:
    """Remove the note of an owner whose documents no longer exist."""
    remove_file(_path(root, owner))


def _path(root: Path, owner: OwnerTag) -> Path:
    return root / _FOLDER / f"{owner.hex()}.json"

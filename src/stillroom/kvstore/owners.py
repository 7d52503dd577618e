"""Notes of whose KV lies in a folder: for each tenant, where the knowledge base is that its records are made of.

`<root>/owners/<tag>.json`, written before the first record of that owner. A record names its owner by a tag only, so
without the note no other process could tell whether the documents behind a record still exist.
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
    """Where an owner's documents are."""

    tenant: str
    knowledge_base: Path
    """The folder."""


def note_owner(root: Path, owner: OwnerTag, note: OwnerNote) -> None:
    """Write the note of an owner, unless it is there already. Does nothing where no KV is kept on disk.

    A note that cannot be written is logged: the next sweep then drops the owner's records.
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
        logger.warning("the owner of kept KV cannot be noted (%s); a restart drops that KV", error)


def owner_note(root: Path, owner: OwnerTag) -> OwnerNote | None:
    """The note of an owner; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_path(root, owner).read_text(encoding="utf-8"))
        return OwnerNote(str(content["tenant"]), Path(content["knowledge_base"]))
    return None


def noted_owners(root: Path) -> list[OwnerTag]:
    """Every owner that has a note, in no order."""
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

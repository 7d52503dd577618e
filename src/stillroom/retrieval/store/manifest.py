"""What a knowledge base was made with. Its manifest wins over the configuration when it is opened again.

Vectors of different models cannot be compared, so a configuration that names another embedder is refused.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.config.settings import ChunkerConfig, EmbedderConfig, IndexConfig, StillroomConfig
from stillroom.errors import (
    CorruptKnowledgeBaseError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseError,
    KnowledgeBaseNotFoundError,
    ModelNotFoundError,
)
from stillroom.retrieval.atomic_files import write_atomically
from stillroom.retrieval.embedder import Embedder

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""1 had no metadata and no pages. Opening a knowledge base of an earlier version makes it one of this version."""

_GOALS = ("ann_recall", "search_budget_s")
SEARCHING = ("ef_search", "nprobe", *_GOALS)
"""Settings of the index that do not change what is stored."""

SAME_MANIFEST = (
    "If the knowledge base was made with the default settings, the manifest.json of any other that was will do; else "
    "remove the folder and add the documents again"
)

HERE = ("hot_bytes", "device_bytes", "devices")
"""Settings of the index that are about this machine: the manifest has none of them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fixed settings of one knowledge base."""

    model: str
    """Name or absolute folder of the embedder."""
    fingerprint: str
    dimension: int
    chunker: ChunkerConfig
    index: IndexConfig
    format_version: int = FORMAT_VERSION
    """As it was read."""

    def save(self, path: Path) -> None:
        """Write the manifest, whole or not at all."""
        content = {
            "format_version": FORMAT_VERSION,
            "embedder": {"model": self.model, "fingerprint": self.fingerprint, "dimension": self.dimension},
            "chunker": dataclasses.asdict(self.chunker),
            "index": {name: value for name, value in dataclasses.asdict(self.index).items() if name not in HERE},
        }
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())

    def applied_to(self, config: StillroomConfig) -> StillroomConfig:
        """The configuration as it holds for this knowledge base. What only changes how a search or an embedding is
        computed (`ef_search`, `ann_recall`, `hot_bytes`, `batch_size`, `dtype`, ...) stays the user's.

        Raises:
            IncompatibleKnowledgeBaseError: the configuration names another embedder.
        """
        return dataclasses.replace(
            config,
            chunker=self.chunker,
            embedder=dataclasses.replace(config.embedder, model=self._agreed_model(config.embedder)),
            index=self._index_searched_as(config.index),
        )

    def warn_of_other_settings(self, config: StillroomConfig, path: Path) -> None:
        """Say which settings of the configuration do not hold for the knowledge base at `path`, as they were fixed when
        it was made. What is the default counts as not set."""
        sections = (("chunker", self.chunker, config.chunker), ("index", self.index, config.index))
        others = [one for name, made, asked in sections for one in _others(name, made, asked)]
        if others:
            logger.warning(
                "%s was made with settings that hold: %s; to change them, add the files to a new knowledge base",
                path,
                ", ".join(others),
            )

    def _index_searched_as(self, asked: IndexConfig) -> IndexConfig:
        """The index of this knowledge base with what the user says about searching it; one goal replaces the other."""
        default = IndexConfig()
        said = {name: getattr(asked, name) for name in SEARCHING if getattr(asked, name) != getattr(default, name)}
        if any(goal in said for goal in _GOALS):
            said = dict.fromkeys(_GOALS, 0.0) | said
        said |= {name: getattr(asked, name) for name in HERE}
        return dataclasses.replace(self.index, **said)

    def _agreed_model(self, asked: EmbedderConfig) -> str:
        if asked.model in (self.model, EmbedderConfig().model):
            return self.model
        try:
            if Embedder(asked).fingerprint == self.fingerprint:  # the same model in another place
                return asked.model
        except ModelNotFoundError:
            pass
        raise IncompatibleKnowledgeBaseError(
            f"this knowledge base was made with the embedder {self.model!r}, but embedder.model is {asked.model!r}; "
            "leave embedder.model out, or make a new knowledge base with the other model"
        )


def _others(section: str, made: Any, asked: Any) -> Iterator[str]:
    """The settings of a section that were set otherwise than it was made."""
    default = dataclasses.asdict(type(asked)())
    for name, value in dataclasses.asdict(asked).items():
        if name not in (*SEARCHING, *HERE) and value not in (default[name], getattr(made, name)):
            yield f"{section}.{name} is {getattr(made, name)!r}, not {value!r}"


def new_manifest(config: StillroomConfig, embedder: Embedder) -> Manifest:
    """For a new knowledge base.

    Raises:
        ModelNotFoundError: the embedder is not there.
    """
    folder = Path(config.embedder.model).expanduser()
    model = str(folder.absolute()) if folder.is_dir() else config.embedder.model
    return Manifest(model, embedder.fingerprint, embedder.dimension, config.chunker, config.index)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        KnowledgeBaseNotFoundError: there is none.
        IncompatibleKnowledgeBaseError: another version of Stillroom wrote it.
        CorruptKnowledgeBaseError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
        if version in range(1, FORMAT_VERSION + 1):
            return _from_json(content)
    except FileNotFoundError as error:
        raise KnowledgeBaseNotFoundError(f"there is no knowledge base in {path.parent}; add documents first") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptKnowledgeBaseError(
            f"{path} cannot be read ({type(error).__name__}: {error}); put it back from a backup. {SAME_MANIFEST}",
            part=path.name,
        ) from error
    raise IncompatibleKnowledgeBaseError(
        f"{path.parent} has format version {version}, this Stillroom reads up to {FORMAT_VERSION}; "
        "use the Stillroom that made it, or make the knowledge base again"
    )


def upgraded(path: Path, manifest: Manifest) -> Manifest:
    """Claim the folder for this version, so that no earlier one opens it. The corpus knows by itself how far it is.

    Raises:
        KnowledgeBaseError: it cannot be written.
    """
    try:
        manifest.save(path)
    except OSError as error:
        raise KnowledgeBaseError(
            f"{path.parent} was made by an earlier Stillroom and has to be written to once: {error.strerror or error}; "
            "open it where it can be written"
        ) from error
    return dataclasses.replace(manifest, format_version=FORMAT_VERSION)


def _from_json(content: dict[str, Any]) -> Manifest:
    embedder = content["embedder"]
    return Manifest(
        model=str(embedder["model"]),
        fingerprint=str(embedder["fingerprint"]),
        dimension=int(embedder["dimension"]),
        chunker=ChunkerConfig(**content["chunker"]),
        index=IndexConfig(**content["index"]),
        format_version=int(content["format_version"]),
    )

"""The manifest: the settings that a knowledge base was made with. They override the configuration.

The embedder is that of vector set 0; a later set has its own (`vector_sets.py`). Another embedder in the configuration
is not used before every document was embedded again: vectors of different models cannot be compared.
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
    ModelError,
)
from stillroom.retrieval.atomic_files import write_atomically
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.store.vector_sets import VectorSetRecord

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Version 1 had no metadata and no pages. Opening a knowledge base upgrades it to this version."""

_GOALS = ("ann_recall", "search_budget_s")
SEARCH_SETTINGS = ("ef_search", "nprobe", *_GOALS)
"""Settings of the index that do not change the stored data."""

MANIFEST_ADVICE = (
    "If the knowledge base had default settings, copy the manifest.json of another one with default settings; "
    "otherwise remove the folder and add the documents again"
)

MACHINE_SETTINGS = ("hot_bytes", "device_bytes", "devices")
"""Settings of the index that depend on the machine; the manifest does not contain them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fixed settings of one knowledge base."""

    model: str
    """Name, or absolute path, of the embedder."""
    fingerprint: str
    dimension: int
    chunker: ChunkerConfig
    index: IndexConfig
    format_version: int = FORMAT_VERSION
    """Version of the file that was read."""

    def save(self, path: Path) -> None:
        """Write the manifest atomically."""
        write_atomically(path, self.to_text().encode())

    def to_text(self) -> str:
        """Return the content of the file."""
        content = {
            "format_version": FORMAT_VERSION,
            "embedder": {"model": self.model, "fingerprint": self.fingerprint, "dimension": self.dimension},
            "chunker": dataclasses.asdict(self.chunker),
            "index": {
                name: value for name, value in dataclasses.asdict(self.index).items() if name not in MACHINE_SETTINGS
            },
        }
        return json.dumps(content, indent=2) + "\n"

    def applied_to(self, config: StillroomConfig) -> StillroomConfig:
        """Return the configuration with the settings of this knowledge base. Settings that only change how a search or
        an embedding is computed (`ef_search`, `ann_recall`, `hot_bytes`, `batch_size`, `dtype`) stay those of `config`.
        """
        return dataclasses.replace(
            config,
            chunker=self.chunker,
            embedder=dataclasses.replace(config.embedder, model=self._agreed_model(config.embedder)),
            index=self._merged_index(config.index),
        )

    def warn_of_ignored_settings(self, config: StillroomConfig, where: object) -> None:
        """Log the settings of `config` that are ignored because the knowledge base was made with others. A default
        value counts as not set.

        Args:
            where: Folder or URL, as the user knows it.
        """
        sections = (("chunker", self.chunker, config.chunker), ("index", self.index, config.index))
        ignored = [setting for name, made, asked in sections for setting in _ignored_settings(name, made, asked)]
        if ignored:
            logger.warning(
                "%s keeps the settings it was made with: %s; to change them, add the files to a new knowledge base",
                where,
                ", ".join(ignored),
            )

    def warn_of_other_model(self, config: StillroomConfig, where: object) -> None:
        """Log that the embedder in `config` is not used yet, if it is another one. `where` as above."""
        asked = config.embedder
        if self._agreed_model(asked) != asked.model and asked.model != EmbedderConfig().model:
            logger.warning(
                "%s is searched with the embedder %s, which made its vectors, and not with embedder.model = %s; to "
                "change it: stillroom reembed --model %s (a server does so by itself)",
                where,
                self.model,
                asked.model,
                asked.model,
            )

    def with_vectors(self, record: VectorSetRecord) -> "Manifest":
        """Return the settings with the embedder of another vector set."""
        return dataclasses.replace(self, model=record.model, fingerprint=record.fingerprint, dimension=record.dimension)

    @property
    def first_vectors(self) -> VectorSetRecord:
        """Vector set 0."""
        return VectorSetRecord(0, self.model, self.fingerprint, self.dimension)

    def _merged_index(self, asked: IndexConfig) -> IndexConfig:
        """Return the index settings with the search settings of the user; one goal replaces the other."""
        default = IndexConfig()
        changed = {
            name: getattr(asked, name) for name in SEARCH_SETTINGS if getattr(asked, name) != getattr(default, name)
        }
        if any(goal in changed for goal in _GOALS):
            changed = dict.fromkeys(_GOALS, 0.0) | changed
        changed |= {name: getattr(asked, name) for name in MACHINE_SETTINGS}
        return dataclasses.replace(self.index, **changed)

    def _agreed_model(self, asked: EmbedderConfig) -> str:
        """Return the asked model if it has the same files, maybe at another path, else the model of this."""
        if asked.model in (self.model, EmbedderConfig().model):
            return self.model
        try:
            if Embedder(asked).fingerprint == self.fingerprint:
                return asked.model
        except ModelError:
            pass
        return self.model


def _ignored_settings(section: str, made: Any, asked: Any) -> Iterator[str]:
    default = dataclasses.asdict(type(asked)())
    for name, value in dataclasses.asdict(asked).items():
        if name not in (*SEARCH_SETTINGS, *MACHINE_SETTINGS) and value not in (default[name], getattr(made, name)):
            yield f"{section}.{name} is {getattr(made, name)!r}, not {value!r}"


def new_manifest(config: StillroomConfig, embedder: Embedder) -> Manifest:
    """Make the manifest of a new knowledge base. Raises ModelError if the embedder is missing or no
    embedding model."""
    folder = Path(config.embedder.model).expanduser()
    model = str(folder.absolute()) if folder.is_dir() else config.embedder.model
    return Manifest(model, embedder.fingerprint, embedder.dimension, config.chunker, config.index)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        KnowledgeBaseNotFoundError: It does not exist.
        IncompatibleKnowledgeBaseError: A later version of Stillroom wrote it.
        CorruptKnowledgeBaseError: It cannot be read.
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
            f"{path} cannot be read ({type(error).__name__}: {error}); restore a backup. {MANIFEST_ADVICE}",
            part=path.name,
        ) from error
    raise IncompatibleKnowledgeBaseError(
        f"{path.parent} has format version {version}, this Stillroom reads up to {FORMAT_VERSION}; "
        "use the Stillroom that made it, or make the knowledge base again"
    )


def upgraded(path: Path, manifest: Manifest) -> Manifest:
    """Write a manifest of this version, so that no earlier Stillroom opens the folder. The corpus upgrades itself.

    Raises:
        KnowledgeBaseError: The folder cannot be written.
    """
    try:
        manifest.save(path)
    except OSError as error:
        raise KnowledgeBaseError(
            f"{path.parent} was made by an earlier Stillroom and must be upgraded: {error.strerror or error}; "
            "open it once where it can be written"
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

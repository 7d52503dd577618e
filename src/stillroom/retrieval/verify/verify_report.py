"""Findings and report of `stillroom verify`, and progress counting. No checks here."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stillroom.core.ids import ChunkId, format_chunk_id

Part = Literal["corpus", "vectors", "dense", "sparse", "uploads"]

OnProgress = Callable[[int, int], None]
"""Called with the numbers of done and of all steps."""

_MAX_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of damage."""

    part: Part
    problem: str
    meaning: str
    """Consequence for searches, effect of repairing, and what is left to do."""
    num: int = 1
    """Number of rows, chunks or files."""
    examples: tuple[str, ...] = ()
    is_repaired: bool = False
    is_repairable: bool = True

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "examples": list(self.examples)}


@dataclass(frozen=True, slots=True)
class UnfinishedReembedding:
    """A change of the embedder that was begun and is not complete; searches use the present vectors."""

    model: str
    num_done: int
    """Chunks that are embedded with the next model."""
    num_total: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `stillroom verify`."""

    num_documents: int
    num_chunks: int
    findings: tuple[Finding, ...]
    seconds: float
    reembedding: UnfinishedReembedding | None = None

    @property
    def is_clean(self) -> bool:
        """Whether SQLite, vectors, postings and uploaded files are undamaged and agree."""
        return not self.findings

    @property
    def needs_repair(self) -> bool:
        """Whether there are repairable findings that were not repaired."""
        return any(finding.is_repairable and not finding.is_repaired for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_documents": self.num_documents,
            "num_chunks": self.num_chunks,
            "num_findings": len(self.findings),
            "num_repaired": sum(finding.is_repaired for finding in self.findings),
            "findings": [finding.to_json() for finding in self.findings],
            "seconds": self.seconds,
            "reembedding": None if self.reembedding is None else asdict(self.reembedding),
        }


class StepCounter:
    """Counts steps and reports progress."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._done, self._total, self._on_progress = 0, max(1, total), on_progress

    def __call__(self, num: int) -> None:
        self._done = min(self._total, self._done + num)
        self._on_progress(self._done, self._total)


def finding(
    part: Part, problem: str, meaning: str, of: Sequence[object] = (), *, is_repairable: bool = True
) -> Finding:
    """Make a finding about the objects `of`, with the first of them as examples."""
    examples = tuple(str(example) for example in of[:_MAX_EXAMPLES])
    return Finding(part, problem, meaning, max(1, len(of)), examples, is_repairable=is_repairable)


def hex_ids(chunk_ids: Sequence[int]) -> list[str]:
    return [format_chunk_id(ChunkId(chunk_id)) for chunk_id in chunk_ids]

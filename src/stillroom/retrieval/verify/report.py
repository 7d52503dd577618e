"""What checking a knowledge base finds, and the pace it is told at. No checking here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["corpus", "vectors", "dense", "sparse", "uploads"]

Tell = Callable[[int, int], None]
"""Told how many of how many steps are done."""

_MAX_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of damage."""

    part: Part
    problem: str
    """What is wrong."""
    meaning: str
    """What it means for searches, what repairing does, and what is left to do."""
    num: int = 1
    """How many rows, chunks or files."""
    examples: tuple[str, ...] = ()
    """Some of them."""
    is_repaired: bool = False
    is_repairable: bool = True
    """Whether repairing can help."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "part": self.part,
            "problem": self.problem,
            "meaning": self.meaning,
            "num": self.num,
            "examples": list(self.examples),
            "is_repaired": self.is_repaired,
            "is_repairable": self.is_repairable,
        }


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked, and what was found."""

    num_documents: int
    num_chunks: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether SQLite, vectors, postings and uploaded files agree, and all of it is as it was written."""
        return not self.findings

    @property
    def needs_repair(self) -> bool:
        """Whether repairing can help against anything that was found and not repaired."""
        return any(finding.is_repairable and not finding.is_repaired for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "num_documents": self.num_documents,
            "num_chunks": self.num_chunks,
            "num_findings": len(self.findings),
            "num_repaired": sum(finding.is_repaired for finding in self.findings),
            "findings": [finding.to_json() for finding in self.findings],
            "seconds": self.seconds,
        }


class Steps:
    """Counts steps of several parts of the work, and tells."""

    def __init__(self, total: int, tell: Tell) -> None:
        self._done, self._total, self._tell = 0, max(1, total), tell

    def __call__(self, num: int) -> None:
        self._done = min(self._total, self._done + num)
        self._tell(self._done, self._total)


def finding(
    part: Part, problem: str, meaning: str, of: Sequence[object] = (), *, is_repairable: bool = True
) -> Finding:
    """One about these things; at least one where none is named."""
    examples = tuple(str(one) for one in of[:_MAX_EXAMPLES])
    return Finding(part, problem, meaning, max(1, len(of)), examples, is_repairable=is_repairable)

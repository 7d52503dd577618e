"""The FAISS index that `stillroom bench reuse --search` searches before each prompt."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss as _faiss

from stillroom_bench.experiments.experiment_options import TieredScope
from stillroom_bench.experiments.tiered_index import made_lists

faiss: Any = _faiss  # its type stubs lack names that are created at import

_SHARE_PROBED = 8
"""One in this many lists is probed."""


@dataclass(frozen=True, slots=True)
class Searchable:
    """An index file with its search effort."""

    file: str
    nprobe: int


def searchable(work_dir: Path, size: int, on_progress: Callable[[str], None]) -> Searchable:
    """Build an IVF-PQ index of `size` generated vectors, unless its file exists."""
    nlist = min(round(4 * size**0.5), size // 39)
    file = work_dir / f"vectors-{size}.ivf"
    if not file.exists():
        on_progress(f"indexing {size:,} vectors")
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        faiss.write_index(made_lists(TieredScope(size=size, nlist=nlist), on_progress), str(temporary))
        temporary.replace(file)
    return Searchable(str(file), max(1, nlist // _SHARE_PROBED))

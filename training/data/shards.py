"""Reads and writes rows as reproducible gzipped JSON lines in files of bounded size; verifies them by the manifest."""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
ROWS_PER_SHARD = 8192
_READ = ("*.jsonl.gz", "tokenizer/*", "eval/*.jsonl")


def write_shards(folder: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows to `NAME-0000.jsonl.gz` and so on; returns the number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    number = total = 0
    for row in rows:
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
        total += 1
        if len(lines) == ROWS_PER_SHARD:
            _write(folder / f"{name}-{number:04}.jsonl.gz", lines)
            number, lines = number + 1, []
    if lines or total == 0:
        _write(folder / f"{name}-{number:04}.jsonl.gz", lines)
    return total


def _write(path: Path, lines: list[str]) -> None:
    buffer = BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    path.write_bytes(buffer.getvalue())


def read_shards(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows in the order they were written.

    Raises:
        FileNotFoundError: there are no files of that name.
    """
    paths = sorted(folder.glob(f"{name}-*.jsonl.gz"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no {name}-*.jsonl.gz; make it with: python -m training data")
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def digest(folder: Path) -> str:
    """Return a hash of the files that training and evaluation read; it determines batches and questions."""
    hasher = hashlib.sha256()
    for path in sorted(path for pattern in _READ for path in folder.glob(pattern)):
        hasher.update(path.relative_to(folder).as_posix().encode() + b"\0")
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()


def verified_digest(folder: Path) -> str:
    """Return the digest of a folder after checking it against the manifest.

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: the files differ from those of the manifest.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}; make the data with: python -m training data")
    found = digest(folder)
    if found != json.loads(path.read_text(encoding="utf-8"))["digest"]:
        raise ValueError(f"the files in {folder} differ from its manifest; make them again: python -m training data")
    return found

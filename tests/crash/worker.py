"""A warm process that runs each job in a fork, so that killing one costs milliseconds.

Jobs arrive as JSON lines on stdin; reports and results leave as JSON lines on stdout. Nothing starts a thread before
the fork. A job that must end or fail at its n-th file operation needs `faults.c` preloaded.
"""

import ctypes
import dataclasses
import hashlib
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import EmbedderConfig, IndexConfig, QdrantConfig, StillroomConfig
from stillroom.errors import StillroomError
from stillroom.retrieval import ingest, knowledge_base
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.knowledge_base import KnowledgeBase

D = 16
MODES = {"count": 1, "kill": 2, "full": 3, "failing": 4}
IVF_PQ = IndexConfig(kind="ivf_pq", nbits=1, num_subquantizers=4, nprobe=2, refine=3, seed=3, nlist=8)
"""Needs 78 vectors to train."""
INDEXES = {
    "flat": IndexConfig(),
    "hnsw": IndexConfig(kind="hnsw", m=8, ef_construction=20),
    "ivf_pq": IVF_PQ,
    "tiered": dataclasses.replace(IVF_PQ, hot_bytes=1000),
    "qdrant": IndexConfig(kind="qdrant"),
}

Say = Callable[..., None]


OTHER_MODEL = "/other"
"""Another `SmallEmbedder`, with more dimensions."""


class SmallEmbedder(Embedder):
    """The real tokenizer, with deterministic vectors made from the words of a text and the name of the model."""

    dimension = D
    fingerprint = "small"

    def __init__(self, config: EmbedderConfig, weights_of: Embedder | None = None) -> None:
        super().__init__(EmbedderConfig())
        if config.model != EmbedderConfig().model:
            self.dimension, self.fingerprint = D + 8, hashlib.sha256(config.model.encode()).hexdigest()

    def _embed(self, texts: Sequence[str], kind: str, on_batch: Callable[[int], None] | None) -> NDArray[np.float32]:
        rows = [_text_vector(text, self.dimension) for text in texts]
        if on_batch is not None:
            on_batch(len(texts))
        return np.stack(rows) if rows else np.empty((0, self.dimension), dtype=np.float32)


def _text_vector(text: str, dimension: int) -> NDArray[np.float32]:
    words = [_word_vector(word, dimension) for word in re.findall(r"\w+", text.lower())]
    total = np.sum(words or [np.ones(dimension)], axis=0)
    unit: NDArray[np.float32] = (total / np.linalg.norm(total)).astype(np.float32)
    return unit


@lru_cache(None)
def _word_vector(word: str, dimension: int) -> NDArray[np.float64]:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(dimension)


def config(kind: str, **settings: Any) -> StillroomConfig:
    return StillroomConfig(index=INDEXES[kind], qdrant=QdrantConfig(url="embedded"), **settings)


def opened(job: dict[str, Any], *, create: bool = False) -> KnowledgeBase:
    real = EmbedderConfig()
    return KnowledgeBase.open(Path(job["kb"]), config(job["kind"], embedder=real), create=create)


# Jobs


def add(job: dict[str, Any], say: Say) -> None:
    """Report the number of finished files after each commit, and the result at the end."""
    with opened(job, create=True) as kb:
        report = kb.add([Path(job["docs"])], progress=lambda done: say(num_files=done.num_files_done))
        say(done=True, failures=report.failures, added=report.num_added, unchanged=report.num_unchanged)


def remove(job: dict[str, Any], say: Say) -> None:
    with opened(job) as kb:
        report = kb.remove([job["target"]])
        say(done=True, removed=report.num_documents)


def search(job: dict[str, Any], say: Say) -> None:
    """The first search after opening repairs the indexes."""
    with opened(job) as kb:
        for query in job["queries"]:
            say(found={mode: _found(kb, query, mode) for mode in ("sparse", "dense", "hybrid")})
        say(done=True)


def watch(job: dict[str, Any], say: Say) -> None:
    """Search repeatedly with one open knowledge base, until a file exists."""
    with opened(job) as kb:
        rounds = 0
        while not (is_last := Path(job["until"]).exists()) or rounds == 0:
            for query in job["queries"]:
                for mode in ("sparse", "dense", "hybrid"):
                    say(query=query, mode=mode, found=_found(kb, query, mode), is_last=is_last)
            rounds += 1
        for query in job["queries"]:
            say(query=query, mode="hybrid", found=_found(kb, query, "hybrid"), is_last=True)
        say(done=True)


def _found(kb: KnowledgeBase, query: str, mode: Any) -> list[tuple[str, str]]:
    return [(one.chunk.document_id, one.chunk.text) for one in kb.search(query, mode=mode, top_k=3).results]


def repair(job: dict[str, Any], say: Say) -> None:
    with opened(job) as kb:
        report = kb.verify(repair=True)
        assert all(one.is_repaired for one in report.findings), report
        say(done=True, findings=len(report.findings))


def reembed(job: dict[str, Any], say: Say) -> None:
    with opened(job) as kb:
        report = kb.reembed(OTHER_MODEL, num_together=40)
        say(done=True, num_chunks=report.num_chunks)


JOBS = {"repair": repair, "add": add, "remove": remove, "search": search, "watch": watch, "reembed": reembed}

# The process that forks


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a fork; kill it after `kill_after_s`, if given."""
    if job["kind"] == "qdrant":
        import qdrant_client  # noqa: F401

    reader, writer = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(job, writer)
    os.close(writer)
    kill_at = started + job["kill_after_s"] if "kill_after_s" in job else None
    heard = _heard(pid, reader, kill_at)
    status = os.waitpid(pid, 0)[1]
    said = [json.loads(line) for line in heard.splitlines() if line.endswith(b"}")]
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"said": said, "signal": signal_number, "seconds": time.monotonic() - started}


def _heard(pid: int, reader: int, kill_at: float | None) -> bytes:
    heard = b""
    while True:
        timeout = max(0.0, kill_at - time.monotonic()) if kill_at is not None else None
        if not select.select([reader], [], [], timeout)[0]:
            os.kill(pid, signal.SIGKILL)
            kill_at = None
            continue
        piece = os.read(reader, 65536)
        if not piece:
            os.close(reader)
            return heard
        heard += piece


def _child(job: dict[str, Any], writer: int) -> None:
    if "max_file_bytes" in job:  # a write beyond it fails with EFBIG, for Python ignores the signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_file_bytes"], job["max_file_bytes"]))

    def say(**what: Any) -> None:
        os.write(writer, json.dumps(what).encode() + b"\n")

    faults = _armed(job)
    try:
        JOBS[job["job"]](job, say)
    except StillroomError as error:
        say(error=type(error).__name__, message=str(error))
    except BaseException:
        say(error="unexpected", message=traceback.format_exc())
    finally:
        if faults is not None:
            count = faults.faults_count()
            faults.faults_arm(0, 0, b"")
            say(num_operations=count)
        os._exit(0)


def _armed(job: dict[str, Any]) -> Any:
    if "fault" not in job:
        return None
    faults = ctypes.CDLL(None)
    faults.faults_count.restype = ctypes.c_long
    faults.faults_arm.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_char_p)
    mode, at = job["fault"]
    faults.faults_arm(MODES[mode], at, os.fsencode(job["kb"]))
    return faults


def main() -> None:
    assert hasattr(ingest, "_COMMITTED_TOGETHER")
    ingest._COMMITTED_TOGETHER = 12  # many commits in a small corpus
    vars(knowledge_base)["Embedder"] = SmallEmbedder
    SmallEmbedder(EmbedderConfig()).tokenizer  # noqa: B018  # every fork would read its files
    _import_all()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def _import_all() -> None:
    """Import modules that jobs would import."""
    from stillroom.retrieval.loaders import jsonl, markdown, text  # noqa: F401


if __name__ == "__main__":
    main()
